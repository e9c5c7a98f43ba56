"""Which cases of the tests `make test` leaves to `make slow`: those that the others repeat."""

from pathlib import Path

import pytest

# Of tests/unit and tests/fuzz the files of which a case takes most, so that what repeats another one is worth leaving out.
DEAR = (
    "adapters", "capturable", "capture", "checkpoint", "checkpoint_faults", "checkpoint_masters",
    "checkpoint_transaction", "examples", "float_buffers", "fuzz", "gradients_by_hand", "linear", "load_memory",
    "low_precision", "masters", "masters_compiled", "masters_foreign", "masters_layouts", "masters_resume",
    "models_in_half", "offload", "optimizers_as_written", "packed_states", "packed_states_wide", "parametrized",
    "pretended_cuda", "reading_changes_nothing", "release", "replays_change_nothing", "rounded_once",
    "rounded_weights", "state_dict_hooks", "state_identity", "switch", "unusual_parameters", "update_parity",
)  # fmt: skip


def tries_values_once(path: Path) -> bool:
    """Whether `make_repeats_slow` is for this file.

    It is for tests of ranks, which cost most and try the same precisions and placements again and again, and for those named.
    """
    return path.parent.name == "distributed" or path.stem.removeprefix("test_") in DEAR


def make_named_cases_slow(items: list[pytest.Function], *, check: bool) -> None:
    """Mark the cases as slow that `slow_cases` names. check: raise if no case has a name, as after it was renamed."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        names = {name for mark in item.iter_markers("slow_cases") for name in mark.args}
        found = {name for name in names if f"-{name}-" in f"-{item.callspec.id}-"}
        if found:
            item.add_marker(pytest.mark.slow)
        test = item.nodeid.partition("[")[0]
        unknown[test] = unknown.get(test, names) - found
    if check and (wrong := {test: names for test, names in unknown.items() if names}):
        raise pytest.UsageError(f"slow_cases names what no case has: {wrong}")


def _make_slow_but_for_each_value(cases: dict[pytest.Function, set[tuple[str, str]]]) -> None:
    had: set[tuple[str, str]] = set()
    kept = set()
    for wanted in range(max(map(len, cases.values())), 0, -1):
        for item, values in cases.items():
            if len(values - had) >= wanted:
                kept.add(item)
                had |= values
    for item in cases.keys() - kept:
        item.add_marker(pytest.mark.slow)


def make_crossed_slow(crossed: list[pytest.Function]) -> None:
    """Mark cases as slow until the others have each value of each parameter once: a pair is tried, by its two halves.

    Those with most new values stay, so that of two parameters with five values each five cases do and not nine; and before
    those with one value twice, as from a precision to itself, those without.
    """
    tests: dict[str, dict[pytest.Function, set[tuple[str, str]]]] = {}
    for item in crossed:
        if not item.get_closest_marker("slow"):
            values = {(name, repr(value)) for name, value in item.callspec.params.items()}
            tests.setdefault(item.nodeid.partition("[")[0], {})[item] = values
    for found in tests.values():
        _make_slow_but_for_each_value(
            dict(sorted(found.items(), key=lambda case: len(case[1]) - len({value for _, value in case[1]})))
        )


def make_repeats_slow(items: list[pytest.Function]) -> None:
    """Of a file, mark cases as slow until the others have each value once, in whichever test, and of each test there is one.

    A value that is no text is told apart by the name of its parameter too.
    """
    files: dict[Path, dict[pytest.Function, set[tuple[str, str]]]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            values = {
                ("" if isinstance(value, str) else name, repr(value)) for name, value in item.callspec.params.items()
            }
            files.setdefault(item.path, {})[item] = {*values, ("test", item.nodeid.partition("[")[0])}
    for cases in files.values():
        _make_slow_but_for_each_value(cases)
