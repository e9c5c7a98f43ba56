"""Part 7: the tests of tests/gpu, a file a row."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.row import Found, Place, Row
from benchmarks.gpu.worker import die_with_parent

ROOT = Path(__file__).parents[2]
_COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed)")


def rows(part: int, place: Place) -> list[Row]:
    """The rows of this part; of a rehearsal, where all are skipped, one file."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))[: 1 if place.small else None]
    return [Row(file.stem, partial(_tested, file), 100 if "kernels" in file.name else 60) for file in files]


def _tested(file: Path, place: Place) -> Found:
    if find_spec("pytest") is None:
        return {"skipped": "pytest is not installed"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", str(file)]
    dies = partial(die_with_parent, os.getpid())
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=dies)
    lines = [line for line in ran.stdout.splitlines() if line.strip()]
    counts = {word: int(number) for number, word in _COUNTS.findall(lines[-1] if lines else "")}
    note = ", ".join(f"{number} {word}" for word, number in counts.items())
    if ran.returncode not in (0, 1, 5) or not counts:
        return {
            "error": f"pytest ended with {ran.returncode}: {' / '.join([*lines, *ran.stderr.splitlines()][-3:])[-300:]}"
        }
    failed = [line.removeprefix("FAILED ").partition("::")[2] for line in lines if line.startswith(("FAILED", "ERROR"))]
    if counts.get("skipped") and not counts.get("passed") and not failed:
        return {"note": note}
    return {"right": not failed, "note": note, **({"why": "; ".join(failed)[:400]} if failed else {})}
