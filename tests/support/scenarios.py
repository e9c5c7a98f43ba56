"""Scenarios: tests of our own that hold the library to a property which another project's test checks.

A test under `tests/scenarios` says by `scenario` whose property it is; `held_to_table.py` makes the page of them. The facts
are theirs (file, test, what holds), the tests are ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "scenarios"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Scenario:
    """One test of another project. differs: why this library behaves otherwise, which the test then pins; or empty."""

    project: str
    file: str
    test: str
    says: str
    differs: str = ""


def scenario(project: str, file: str, test: str, says: str, *, differs: str = "") -> Callable[[F], F]:
    """Mark a test as the one that holds us to `test` in `file` of `project`; says: what the test of ours shows."""
    return pytest.mark.scenario(Scenario(project, file, test, says, differs))


def collected() -> Iterator[tuple[Scenario, int]]:
    """Yield every scenario with its number of cases, in the order of files and lines.

    Raises ValueError for a test under `tests/scenarios` that says no origin: it would be missing from the page.
    """
    for path in sorted(FOLDER.glob("test_*.py")):
        for name, function in vars(import_module(path.stem)).items():
            if not (name.startswith("test") and inspect.isfunction(function)):
                continue
            marks = getattr(function, "pytestmark", [])
            found = [mark.args[0] for mark in marks if mark.name == "scenario"]
            if not found:
                raise ValueError(
                    f"{path.name}: {name} names no scenario; put @scenario(...) on it, or move it elsewhere"
                )
            cases = 1
            for mark in marks:
                if mark.name == "parametrize":
                    cases *= len(list(mark.args[1]))
            for each in reversed(found):
                yield each, cases
