"""A row: one thing that is tried on a card; and the file that keeps what was found."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Found = dict[str, Any]
PARTS: dict[int, tuple[str, str]] = {
    1: ("benchmarks.gpu.right_rows", "kernels are right: next to torch and float64"),
    2: ("benchmarks.gpu.timed_rows", "update of GPT-2 124M, 148 tensors, AdamW, clip at 1, gradients given"),
    3: ("benchmarks.gpu.timed_rows", "step of 4 x Linear(64), batch 8, AdamW, clip at 1: the host's time"),
    4: ("benchmarks.gpu.low_rows", "low precision: products, a whole GPT"),
    5: ("benchmarks.gpu.timed_rows", "steps in one CUDA graph"),
    6: ("benchmarks.gpu.memory_rows", "memory beside its estimate"),
    7: ("benchmarks.gpu.suite_rows", "the tests of tests/gpu"),
    8: ("benchmarks.gpu.rank_rows", "two ranks of gloo on one card"),
    9: ("benchmarks.gpu.low_rows", "low precision: layers"),
}
"""The module that has the rows of each part, and the title; the most valuable first."""
MOST_TRIES = 3
TOGETHER = {1: 8, 6: 3}
"""How many processes make the rows of a part at once, where nothing is timed."""


@dataclass(frozen=True)
class Place:
    """Where rows are made. small: sizes to see that they run, on a CPU."""

    device: str = "cuda"
    small: bool = False


@dataclass(frozen=True)
class Row:
    """make: what finds it out. seconds: that it takes on a card, as a rule. gib: of the card's memory that it needs.

    Found are any of: right (bool) and why; ways (microseconds by name), and of them launches, waits, peak (GiB) and goals
    ([way, beside, at most so many times as long]); judges (switches that it decides, each with [way, beside] or None);
    floor (microseconds); left (why a way is missing); note, skipped, error (texts)."""

    name: str
    make: Callable[[Place], Found]
    seconds: float = 10.0
    gib: float = 0.0
    judges: dict[str, Any] = field(default_factory=dict)


class RowFile:
    """`rows.jsonl` in a folder: a line when a row begins and one when it ends. Each is written whole, and at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "rows.jsonl"

    def write(self, line: Found) -> None:
        """Raises OSError where there is no space."""
        text = json.dumps(line, default=str)
        cut = self.path.is_file() and self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n")
        there = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            whole = f"{chr(10) * bool(cut)}{text}\n".encode()  # behind a line that was cut off
            if os.write(there, whole) < len(whole):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(there)

    def lines(self) -> list[Found]:
        """All lines that are whole."""
        found = []
        for line in self.path.read_text().splitlines() if self.path.is_file() else ():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:  # of a process that was killed while it wrote
                continue
        return [line for line in found if isinstance(line, dict) and "part" in line]


def ended(lines: Iterable[Found]) -> dict[tuple[int, str], Found]:
    """The last of what was found, by part and row."""
    return {(line["part"], line["row"]): line for line in lines if "ended" in line}


def begun(lines: Iterable[Found]) -> dict[tuple[int, str], Found]:
    """Rows that began and did not end since, by part and row."""
    found: dict[tuple[int, str], Found] = {}
    for line in lines:
        if "row" in line:
            found.pop((line["part"], line["row"]), None)
            if "begun" in line and "ended" not in line:
                found[line["part"], line["row"]] = line
    return found


def is_good(line: Found) -> bool:
    """Whether a row need not be made again."""
    return "ended" in line and "error" not in line and line.get("right") is not False


def order(rows: list[Row], part: int, lines: list[Found], machine: Found, since: float) -> list[Row]:
    """Rows to make: those that never began, then those that failed, were wrong or cut off before `since`.

    What was found on another machine, as `machine` describes it, counts for nothing.
    """
    mine = [
        line for line in lines if line["part"] == part and "row" in line and line.get("machine") == machine["machine"]
    ]
    first, again = [], []
    for row in rows:
        own = [line for line in mine if line["row"] == row.name]
        last = own[-1] if own else None
        if last is None:
            first.append(row)
        elif max(line["begun"] for line in own) < since and not is_good(last) and _tries(own) < MOST_TRIES:
            again.append(row)
    return first + again


def _tries(lines: list[Found]) -> int:
    return sum("ended" not in line for line in lines)


def stamp() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
