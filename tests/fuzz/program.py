"""Random training programs: a setting and a list of operations, which print as what they are and can be made smaller."""

import pprint
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

Operation = tuple[Any, ...]  # a name and its arguments, all of them literals


class Disagreement(AssertionError):
    """What a program computes differs from what the oracle computes."""


class Invalid(Exception):
    """A program that makes no sense, as a smaller one can be."""


@dataclass(frozen=True)
class Program:
    """placement: "one device" or a column of the matrix of parallelisms. setting: model, optimizer, precision and their
    options. operations: what is called, in order."""

    placement: str
    setting: dict[str, Any]
    operations: list[Operation] = field(default_factory=list)

    def __str__(self) -> str:
        operations = "".join(f"        {operation!r},\n" for operation in self.operations)
        setting = pprint.pformat(self.setting, width=110, sort_dicts=False).replace("\n", "\n    ")
        return f"Program(\n    {self.placement!r},\n    {setting},\n    [\n{operations}    ],\n)"


class Outcome(NamedTuple):
    """valid: whether the program makes sense. failure: what goes wrong in it, in one line; None if nothing does."""

    valid: bool
    failure: str | None


def outcome_of(run: Callable[[Program], None], program: Program) -> Outcome:
    try:
        run(program)
    except Invalid:
        return Outcome(False, None)
    except Exception as error:
        text = str(error).strip()
        return Outcome(True, f"{type(error).__name__}: {text.splitlines()[0] if text else ''}")
    return Outcome(True, None)


def failure_of(run: Callable[[Program], None], program: Program) -> str | None:
    """Return what goes wrong in `program`, in one line; None if nothing does."""
    return outcome_of(run, program).failure


def shrink(run: Callable[[Program], None], program: Program, defaults: dict[str, Any], limit: int = 200) -> Program:
    """Return a smaller program that still fails: without operations, and with options of `defaults`, where that goes.

    limit: how many programs to try at most. A program that fails in another way counts: it is a defect as well.
    """
    tried = 0

    def fails(smaller: Program) -> bool:
        nonlocal tried
        tried += 1
        return tried <= limit and failure_of(run, smaller) is not None

    size = max(1, len(program.operations) // 2)
    while size:
        start = 0
        while start < len(program.operations):
            rest = program.operations[:start] + program.operations[start + size :]
            if fails(smaller := replace(program, operations=rest)):
                program = smaller
            else:
                start += size
        size //= 2
    for name, value in defaults.items():
        if name in program.setting:
            without = {key: kept for key, kept in program.setting.items() if key != name}
            smaller = replace(program, setting=without)
            if program.setting[name] == value or fails(smaller):
                program = smaller
    return program
