"""Bad arguments to everything public: all raise an error that names the argument. Made from signatures: a new
function, class or parameter is tried without a new test, and where its annotation leaves open what is legal, fails this
one until `tests/support/legal_arguments.py` says so."""

import argparse
import gc
import inspect
import logging
import os
import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy
import pytest
import torch
import torch.distributed as dist
from bad_arguments import Call, Outcomes, public_callables, public_methods, signature_of, try_call
from legal_arguments import (
    CALLED_BY_US,
    COMMAND_OPTIONS,
    ENVIRONMENTS,
    EXAMPLES,
    EXEMPT,
    HOST_LINES,
    MODULES,
    OBJECTS,
    OPTIONS,
    OTHER_ERRORS,
    PORT,
    RANGES,
    SCRIPT_OPTIONS,
    TEXTS,
    World,
)

import booster
from booster import cli, mixed_precision
from booster.cli import main
from booster.cli import run_command as options
from booster.cli import run_command as run
from booster.cli.hosts import read_hostfile
from booster.facade import foreign_names as config
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
            if hasattr(torch.nn.Module, method) and name not in EXAMPLES:
                continue  # what it has of nn.Module calls the user's own, which judges the arguments
            signature, hints = signature_of(getattr(cls, method))
            bind = lambda make=make, method=method: getattr(make(world[0]), method)  # noqa: E731
            yield Call(name, bind, signature, hints, examples(name, world))


def examples(name, world):
    return [lambda make=make: make(world[0]) for make in EXAMPLES.get(name, [lambda w: {}])]


@pytest.fixture(autouse=True)
def clean_process(monkeypatch, tmp_path):
    """Its own directory, no launcher's variables, no waiting for names; nothing of the process is left changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mixed_precision, "_REGISTRY", dict(mixed_precision._REGISTRY))
    monkeypatch.setattr(import_module("booster.launch"), "_RESOLVE_SECONDS", 0)
    for variables in ENVIRONMENTS.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    leave_group()
    apex_amp.shutdown()
    for handler in logging.getLogger("tests.bad_arguments").handlers[:]:
        handler.close()
        logging.getLogger("tests.bad_arguments").removeHandler(handler)
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


def leave_group():
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def judge(outcomes):
    print(outcomes.report())
    assert not outcomes.misses, outcomes.report()


def outcomes_of(every_call, world, after=lambda: None):
    outcomes, incomplete = Outcomes(), []

    def renew(accepted):
        if accepted:
            world[0] = World()
        after()

    for call in every_call:
        if f"{call.name}()" in EXEMPT:
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


def test_bad_arguments_of_everything_public_raise_errors_that_name_them():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = [World()]
    outcomes = outcomes_of((call for call in calls(world) if not launches(call)), world)
    assert outcomes.tried >= 1500
    judge(outcomes)


def test_what_is_exempt_is_there():
    every = list(calls([World()]))
    names = {f"{call.name}()" for call in every}
    for call in every:
        for parameter in call.signature.parameters:
            names |= {f"({parameter})", f"{call.name}({parameter})"}
    assert sorted(EXEMPT.keys() - names) == []


def test_bad_arguments_of_launch_functions_raise_errors_that_name_them(monkeypatch):
    for variables in ENVIRONMENTS.values():
        for name, (value, _) in variables.items():
            monkeypatch.setenv(name, value)
    world = [World()]
    judge(outcomes_of((call for call in calls(world) if launches(call)), world, after=leave_group))


def test_bad_fields_of_an_fp16_dict_raise_errors_that_name_them():
    def fields():
        for mode, fields_of_mode in config._FIELDS.items():
            signature, hints = signature_of(config._BUILD[mode])
            parameters = [p for name, p in signature.parameters.items() if name in fields_of_mode]
            assert len(parameters) == len(fields_of_mode)
            bind = lambda mode=mode: lambda **given: booster.Booster.from_config(fp16={"mode": mode, **given})  # noqa: E731
            quiet = {"verbosity": 0} if mode == booster.AMP_TYPE.APEX else {}
            example = [lambda quiet=quiet: quiet]
            yield Call(f"fp16[{mode.value}]", bind, signature.replace(parameters=parameters), hints, example)

    judge(outcomes_of(fields(), [World()]))
    for name, wrong in (("mode", 3), ("mode", "half"), ("enabled", "no"), ("clip_grad", "1"), ("clip_grad_norm", True)):
        with pytest.raises((ValueError, TypeError), match=name):
            booster.Booster.from_config(fp16={"mode": "torch", name: wrong})


# ---- what is text: options, files, variables ----


def refused(arguments, capsys, call):
    """Call with what must be a usage error; return what it said, or None if it went through."""
    try:
        status = call(arguments)
    except SystemExit as error:
        status = error.code
    said = capsys.readouterr().err
    return said if status == 2 else None


def test_bad_options_of_booster_run_are_usage_errors_that_name_them(monkeypatch, capsys):
    Path("train.py").touch()
    Path("hosts").write_text("node1\nnode2 slots=2\n")
    monkeypatch.setattr(run, "run_attempt", lambda attempt: 0)
    monkeypatch.setattr(run, "run_nodes", lambda commands, grace_seconds: 0)
    monkeypatch.setattr(run, "_port_is_free", lambda port: True)
    outcomes = Outcomes()
    for action in options._parser()._actions:
        if action.dest == "help":
            continue
        name = action.dest if action.option_strings else action.metavar
        assert name in OPTIONS, f"say what is legal for {name} in OPTIONS of tests/support/legal_arguments.py"
        legal, context = OPTIONS[name]
        for text in TEXTS:
            if legal(text):
                continue
            option = [f"{action.option_strings[-1]}={text}", "train.py"] if action.option_strings else [text]
            said = refused(["run", *context, *option], capsys, main)
            named = said is not None and name in said.replace("-", "_")
            kind = "clear" if named else "accepted" if said is None else "unclear"
            outcomes.note(kind, f"booster run {' '.join(option)!r}", (said or "")[-150:])
    judge(outcomes)


def parser_of(command, monkeypatch):
    """The parser that `booster COMMAND` makes."""
    made = []

    def give(self, *arguments, **options):
        made.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", give)
        main([command])
    return made[0]


def options_of(parser, words=()):
    """Every option of a parser and of its actions: the words before it, and it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options_of(inner, (*words, name))
        elif action.dest != "help":
            yield words, action


@pytest.mark.parametrize("command", [name for name in cli._COMMANDS if name != "run"])
def test_bad_options_of_other_commands_are_errors_that_name_them(command, monkeypatch, capsys):
    Path("job.py").write_text("def job():\n    raise ValueError('the job ran')\n")
    outcomes = Outcomes()
    for words, action in options_of(parser_of(command, monkeypatch)):
        where = " ".join([command, *words, action.option_strings[0] if action.option_strings else action.metavar])
        assert where in COMMAND_OPTIONS, f"say what is legal for {where!r} in COMMAND_OPTIONS of legal_arguments.py"
        legal, others = COMMAND_OPTIONS[where]
        for text in TEXTS:
            if legal(text):
                continue
            given = [f"{action.option_strings[0]}={text}" if action.option_strings else text]
            try:
                status = main([command, *words, *given, *others])
            except SystemExit as error:
                status = error.code
            said = capsys.readouterr().err
            names = action.option_strings or (action.metavar, repr(text), *([text] if text.strip() else []))
            named = any(name in said for name in names)
            kind = "accepted" if not status else "clear" if named and "Traceback" not in said else "unclear"
            outcomes.note(kind, f"booster {where} {text!r}", said[-150:])
    judge(outcomes)


def test_bad_options_of_the_default_parser_are_usage_errors_that_name_them(capsys):
    outcomes = Outcomes()
    for action in booster.get_default_parser()._actions:
        if action.dest == "help":
            continue
        assert action.dest in SCRIPT_OPTIONS, (
            f"say what is legal for --{action.dest} in SCRIPT_OPTIONS of legal_arguments.py"
        )
        for text in TEXTS:
            if not SCRIPT_OPTIONS[action.dest](text):
                said = refused([f"--{action.dest}={text}"], capsys, booster.get_default_parser().parse_args)
                kind = "accepted" if said is None else "clear" if f"--{action.dest}" in said else "unclear"
                outcomes.note(kind, f"--{action.dest}={text!r}", said or "")
    judge(outcomes)


@pytest.mark.parametrize("line", HOST_LINES)
def test_a_bad_line_of_a_hostfile_is_named_by_its_number(line):
    Path("hosts").write_text(f"# machines\ngood slots=2\n{line}\n")
    with pytest.raises(ValueError, match="hostfile 'hosts', line 3"):
        read_hostfile("hosts")


class Recorded(dict):
    """An environment that notes what `booster.launch` reads of it."""

    def __init__(self, *given):
        super().__init__(*given)
        self.read = set()

    def _note(self, name):
        if sys._getframe(2).f_globals["__name__"] == "booster.launch":
            self.read.add(name)

    def __getitem__(self, name):
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name):
        self._note(name)
        return super().__contains__(name)


@pytest.mark.parametrize("setting", ENVIRONMENTS)
def test_bad_variables_of_a_launcher_raise_errors_that_name_them(monkeypatch, setting):
    function, arguments = getattr(booster, setting.split()[0]), ()
    arguments = ("127.0.0.1", PORT) if "host" in inspect.signature(function).parameters else ()
    good = {name: value for name, (value, _) in ENVIRONMENTS[setting].items()}
    recorded = Recorded({**os.environ, **good})
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", recorded)
        function(*arguments, backend="gloo")
        leave_group()
    known = {name for variables in ENVIRONMENTS.values() for name in variables}
    assert recorded.read <= known, "say what is legal for them in ENVIRONMENTS of tests/support/legal_arguments.py"
    assert set(good) <= recorded.read
    outcomes = Outcomes()
    for name, (_, legal) in ENVIRONMENTS[setting].items():
        for text in TEXTS:
            if legal(text):
                continue
            with monkeypatch.context() as patch:
                for each, value in {**good, name: text}.items():
                    patch.setenv(each, value)
                try:
                    function(*arguments, backend="gloo")
                except (ValueError, RuntimeError) as error:
                    outcomes.note("clear" if name in str(error) else "unclear", f"{name}={text!r}", str(error)[:150])
                else:
                    outcomes.note("accepted", f"{name}={text!r}")
                    leave_group()
    judge(outcomes)


# ---- the method itself ----


def careless(count: int, fast: bool = False, *, kind: Literal["a", "b"] = "a") -> None:
    if count < 1:
        raise ValueError(f"count={count} is not legal")
    if kind == "x":
        raise ValueError("that is wrong")


def test_arguments_that_are_accepted_or_refused_without_a_name_are_found():
    signature, hints = signature_of(careless)
    call = Call("careless", lambda: careless, signature, hints, [lambda: {"count": 1}])
    outcomes = Outcomes()
    try_call(call, {"count": lambda value: type(value) is int and value > 0}, {}, {}, outcomes, lambda accepted: None)
    assert not outcomes.unknown
    found = {tuple(miss.split(":")[0].split()) for miss in outcomes.misses}
    assert ("unclear", "careless(count)", "=", "'1'") in found  # '<' not supported between ...
    assert ("accepted", "careless(count)", "=", "True") in found
    assert ("accepted", "careless(fast)", "=", "'no'") in found
    assert ("accepted", "careless(kind)", "=", "'auto'") in found
    assert 0.01 < outcomes.rate < 0.2


def test_a_parameter_of_which_nothing_is_known_is_reported():
    signature, hints = signature_of(careless)
    call = Call("careless", lambda: careless, signature, hints, [lambda: {"count": 1}])
    outcomes = Outcomes()
    try_call(call, {}, {}, {}, outcomes, lambda accepted: None)
    assert outcomes.unknown == ["careless(count)"]
    with pytest.raises(AssertionError, match=r"give a legal value of \['careless\(count\)'\] in EXAMPLES"):
        outcomes_of([Call("careless", lambda: careless, signature, hints, [dict])], [None])
    with pytest.raises(AssertionError, match=r"say what is legal for \['careless\(count\)'\] in RANGES"):
        outcomes_of([call], [None])
