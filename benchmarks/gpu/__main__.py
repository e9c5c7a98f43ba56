"""What a GPU says of kernels, low precision, graphs and memory, a part at a time.

    python -m benchmarks.gpu --part N --out DIR [--seconds 480]
    python -m benchmarks.gpu --part all --out DIR --rehearse

Each row is written to DIR/rows.jsonl and printed as it comes, and DIR/report.md has the tables. A part ends with a line that
says what is right, what is slower than its goal and what to switch off, and with lines for booster/kernels/switches.py. Rows
that were made on this machine are not made again, but for those that failed; --again makes all. --rehearse runs small sizes on
the CPU, with Triton's interpreter where that is installed, and its times say nothing. --report only prints what DIR has.

Exit codes: 0, nothing is wrong; 1, a row is wrong or failed; 2, there is no GPU; 3, DIR cannot be written.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.gpu.row import PARTS, TOGETHER, RowFile, ended
from benchmarks.gpu.supervisor import NO_SPACE, Job, left, supervise
from benchmarks.gpu.verdict import is_bad, last_line, report, switch_lines


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*map(str, PARTS), "all"]
    parser.add_argument(
        "--part", required=True, choices=names, help="; ".join(f"{n}: {t}" for n, (_, t) in PARTS.items())
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="made where it is missing")
    parser.add_argument("--seconds", type=float, default=480.0, help="that each part may take; default 480")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU")
    parser.add_argument("--again", action="store_true", help="make rows that are there, too")
    parser.add_argument("--only", default="", metavar="PATTERN", help="rows whose name has this in it")
    parser.add_argument("--report", action="store_true", help="make nothing")
    given = parser.parse_args(arguments)
    try:
        re.compile(given.only)
    except re.error as error:
        parser.error(f"--only {given.only!r} is no pattern: {error}")
    if not given.seconds > 0:
        parser.error(f"--seconds is {given.seconds:g}, and must be above 0")
    parts = tuple(PARTS) if given.part == "all" else (int(given.part),)
    file = RowFile(given.out.absolute())
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        for job in () if given.report else _jobs(parts, given):
            code = supervise(job, file, _say)
            if code:
                return code
        return _end(file, parts)
    except OSError as error:
        _say(f"cannot write to {given.out}: {error.strerror}; what was found until then is printed above")
        return NO_SPACE


def _say(text: str) -> None:
    print(text, flush=True)


def _jobs(parts: tuple[int, ...], given: argparse.Namespace) -> list[Job]:
    """Jobs of parts; a rehearsal is one, which imports once."""
    options = {"seconds": given.seconds, "rehearse": given.rehearse, "again": given.again, "only": given.only}
    if given.rehearse:
        return [Job(parts, **options)]
    return [Job((part,), **options, together=TOGETHER.get(part, 1)) for part in parts]


def _end(file: RowFile, parts: tuple[int, ...]) -> int:
    """Write the report, print the last lines, and return the exit code."""
    lines = file.lines()
    rows = list(ended(lines).values())
    missing = {part: left(lines, part) for part in PARTS}
    there = sorted({row["part"] for row in rows} | set(parts))
    (file.folder / "report.md").write_text(report(lines, there, missing))
    print("\nfor DECIDED in booster/kernels/switches.py:", *switch_lines(rows), sep="\n")
    for part in parts:
        print(last_line(part, rows, missing[part]))
    return int(is_bad(row for row in rows if row["part"] in parts))


if __name__ == "__main__":
    sys.exit(main())
