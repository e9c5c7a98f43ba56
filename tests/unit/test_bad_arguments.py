"""Bad arguments to everything public: nearly all raise an error that names the argument. Made from signatures: a new
function, class or parameter is tried without a new test, and where its annotation leaves open what is legal, fails this
one until `tests/support/legal_arguments.py` says so."""

import gc
import logging

import pytest
import torch.distributed as dist
from bad_arguments import Call, Outcomes, public_callables, public_methods, signature_of, try_call
from legal_arguments import CALLED_BY_US, EXAMPLES, EXEMPT, MODULES, OBJECTS, OTHER_ERRORS, RANGES, World

from booster import mixed_precision
from booster.mixed_precision import apex_amp


def calls(world):
    """Every public function and constructor, and every method of what users hold. world: has the present `World`."""
    for name, value in public_callables(MODULES):
        signature, hints = signature_of(value)
        yield Call(name, lambda value=value: value, signature, hints, examples(name, world))
        if isinstance(value, type) and value not in OBJECTS:
            known = any(base in CALLED_BY_US for base in value.__mro__)
            assert known, f"{name}: add it to OBJECTS or CALLED_BY_US of legal_arguments.py"
    for cls, make in OBJECTS.items():
        for method in public_methods(cls):
            name = f"{cls.__name__}.{method}"
            signature, hints = signature_of(getattr(cls, method))
            bind = lambda make=make, method=method: getattr(make(world[0]), method)  # noqa: E731
            yield Call(name, bind, signature, hints, examples(name, world))


def examples(name, world):
    return [lambda make=make: make(world[0]) for make in EXAMPLES.get(name, [lambda w: {}])]


@pytest.fixture
def lonely(monkeypatch, tmp_path):
    """A world of one with a process group, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mixed_precision, "_REGISTRY", dict(mixed_precision._REGISTRY))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
    apex_amp.shutdown()
    for handler in logging.getLogger("tests.bad_arguments").handlers[:]:
        handler.close()
        logging.getLogger("tests.bad_arguments").removeHandler(handler)


def outcomes_of(keep):
    world, outcomes = [World()], Outcomes()

    def renew(accepted):
        if accepted:
            world[0] = World()

    incomplete = []
    for call in calls(world):
        if not keep(call) or f"{call.name}()" in EXEMPT:
            continue
        needed = [
            p.name
            for p in call.signature.parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        given = call.examples[0]() if needed else {}
        missing = [f"{call.name}({name})" for name in needed if name not in given]
        if missing:
            incomplete += missing
            continue
        try_call(call, RANGES, EXEMPT, OTHER_ERRORS, outcomes, renew)
    assert not incomplete, f"give a legal value of {incomplete} in EXAMPLES of tests/support/legal_arguments.py"
    assert not outcomes.unknown, (
        f"say what is legal for {outcomes.unknown} in RANGES of tests/support/legal_arguments.py"
    )
    return outcomes


def launches(call):
    return call.name.startswith("launch")


def test_bad_arguments_of_everything_public_raise_errors_that_name_them(lonely):
    outcomes = outcomes_of(lambda call: not launches(call))
    print(outcomes.report())
    assert outcomes.tried >= 1500
    assert outcomes.rate >= 0.99, outcomes.report()
