"""What `make test` leaves to `make slow` is tried by what it keeps, one value at a time, and nothing else is left out."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from selection import DEAR, make_crossed_slow, make_named_cases_slow, make_repeats_slow, tries_values_once

TESTS = Path(__file__).parents[1]


class Case:
    """What pytest knows of one case."""

    def __init__(self, file, test, params):
        self.path = TESTS / file
        self.callspec = SimpleNamespace(params=params, id="-".join(map(str, params.values())))
        self.nodeid = f"{file}::{test}[{self.callspec.id}]"
        self.marks = []

    def add_marker(self, mark):
        self.marks.append(mark.mark)

    def iter_markers(self, name):
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)


def crossed(file, test, **values):
    return [Case(file, test, dict(zip(values, each, strict=True))) for each in itertools.product(*values.values())]


def kept(cases):
    return [case.nodeid.partition("::")[2] for case in cases if not case.get_closest_marker("slow")]


def test_of_a_file_each_value_is_tried_once_in_whichever_test_and_each_test():
    first = crossed("distributed/test_a.py", "test_x", precision=("fp16", "bf16"), kind=("DDP", "FSDP"))
    second = crossed("distributed/test_a.py", "test_y", how=("bf16", "fp16", "TP"))
    third = crossed("distributed/test_a.py", "test_z", name=("fp16", "bf16"))
    other = crossed("distributed/test_b.py", "test_x", precision=("fp16",))
    make_repeats_slow([*first, *second, *third, *other])
    assert kept(first) == ["test_x[fp16-DDP]", "test_x[bf16-FSDP]"]
    assert kept(second) == ["test_y[TP]"]
    assert kept(third) == ["test_z[fp16]"]
    assert kept(other) == ["test_x[fp16]"]


def test_numbers_of_two_parameters_are_two_values_and_what_is_slow_already_covers_nothing():
    cases = [
        *crossed("distributed/test_a.py", "test_x", ranks=(2, 4)),
        *crossed("distributed/test_a.py", "test_x", stage=(2, 4)),
    ]
    cases[0].add_marker(pytest.mark.slow)
    cases[1].nodeid, cases[2].nodeid = cases[2].nodeid, cases[1].nodeid
    make_repeats_slow(cases)
    assert len(kept(cases)) == 3


def test_of_a_crossed_test_each_value_of_each_parameter_is_tried_once():
    cases = crossed("unit/test_a.py", "test_x", before=("a", "b", "c"), after=("a", "b", "c"))
    make_crossed_slow(cases)
    left = [case for case in cases if not case.get_closest_marker("slow")]
    assert {value for case in left for value in case.callspec.params.items()} == {
        (name, value) for name in ("before", "after") for value in "abc"
    }
    assert len(left) < 6
    assert left[0].callspec.id == "a-b"  # and not from a value to itself


def test_cases_are_slow_by_a_part_of_their_ids_and_a_name_of_none_is_an_error():
    cases = crossed("unit/test_a.py", "test_x", precision=("fp16", "fp16_naive"))
    for case in cases:
        case.add_marker(pytest.mark.slow_cases("fp16"))
    make_named_cases_slow(cases, check=True)
    assert kept(cases) == ["test_x[fp16_naive]"]
    for case in cases:
        case.add_marker(pytest.mark.slow_cases("bf16"))
    with pytest.raises(pytest.UsageError, match="bf16"):
        make_named_cases_slow(cases, check=True)


def test_files_of_ranks_and_those_named_try_values_once_and_each_that_is_named_is_there():
    files = sorted(TESTS.rglob("test_*.py"))
    chosen = {file.stem.removeprefix("test_") for file in files if tries_values_once(file)}
    assert chosen >= {*DEAR, "fsdp", "zero"}
    assert "half_products" not in chosen
