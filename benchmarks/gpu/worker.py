"""The process that makes rows: `python -m benchmarks.gpu.worker`, which `supervisor.py` starts."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import gc
import importlib
import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.row import PARTS, Found, Place, Row, RowFile, order, stamp
from benchmarks.gpu.supervisor import LOST, NO_SPACE, REFUSED

SLACK = 60.0  # seconds, and three times what a row takes as a rule, until it is killed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    for name in ("parts", "folder", "seconds", "since", "share", "parent"):
        parser.add_argument(name)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--only", default="")
    given = parser.parse_args(arguments)
    die_with_parent(int(given.parent))
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
    warnings.simplefilter("ignore")
    logging.getLogger("booster").setLevel(logging.ERROR)
    place, file = Place("cpu" if given.rehearse else "cuda", given.rehearse), RowFile(Path(given.folder))
    machine = prepared(place)
    if isinstance(machine, str):
        print(machine)
        return REFUSED
    index, count = map(int, given.share.split("/"))
    try:
        for part in map(int, given.parts.split(",")):
            try:
                rows = importlib.import_module(PARTS[part][0]).rows(part, place)
            except Exception as error:  # as where a package is missing that all of the part needs
                own = {**machine, "part": part, "worker": index, "row": "all", "begun": time.time(), "ended": stamp()}
                file.write({**own, "error": words(error)})
                continue
            rows = [row for row in rows if re.search(given.only, row.name)]
            code = _part(part, rows, place, file, machine, given, index, count)
            if code:
                return code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ENOENT):
            raise
        print(f"cannot write to {file.path}: {error.strerror}")
        return NO_SPACE
    return 0


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends; end now if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def prepared(place: Place) -> Found | str:
    """Import torch, and return what describes this machine, or why nothing can be made on it."""
    import torch

    from benchmarks.gpu import card

    if place.device == "cuda" and not torch.cuda.is_available():
        return f"benchmarks.gpu needs a GPU, and torch {torch.__version__} sees none; --rehearse runs it small on a CPU"
    if place.small and find_spec("triton") is not None and find_spec("numpy") is None:
        return "--rehearse runs kernels by Triton's interpreter, which needs numpy: install that, or rehearse without Triton"
    if place.small:
        from quick_interpreter import quicken

        quicken()
        torch.set_num_threads(1)
    return card.described(place)


def _part(
    part: int, rows: list[Row], place: Place, file: RowFile, machine: Found, given: Any, index: int, count: int
) -> int:
    since, names = float(given.since), [row.name for row in rows]
    until = max(since, time.time() if place.small else since) + float(given.seconds)
    own = {**machine, "part": part, "worker": index}
    if index == 0 and not given.only:
        file.write({**own, "rows": names, "wrote": time.time()})
    lines = file.lines()
    if given.again:
        lines = [line for line in lines if line.get("begun", line.get("wrote", 0.0)) >= since]
    mine = set(names[index::count])
    for row in order(rows, part, lines, machine, since):
        if row.name not in mine or time.time() + row.seconds > until:
            continue
        limit = (10 if place.small else 3) * row.seconds + SLACK
        started = {**own, "row": row.name, "begun": time.time(), "limit": limit, "judges": row.judges}
        file.write(started)
        found = _made(row, place)
        file.write({**started, **found, "seconds": round(time.time() - started["begun"], 1), "ended": stamp()})
        if "error" in found and not is_alive(place):
            return LOST
    return 0


def _made(row: Row, place: Place) -> Found:
    if place.device == "cuda":
        import torch

        free = torch.cuda.mem_get_info()[0] / 2**30
        if row.gib > free:
            return {"skipped": f"it needs {row.gib:g} GiB, and {free:.1f} are free"}
    try:
        return row.make(place)
    except Exception as error:
        return {"error": words(error)}
    finally:
        gc.collect()
        if place.device == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


def words(error: BaseException) -> str:
    """The first lines of an error, with the last line of this project that raised it."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    said = " ".join(str(error).split())[:300]
    at = f" at {Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line}"[:160] if own else ""
    return f"{type(error).__name__}: {said}{at}"


def is_alive(place: Place) -> bool:
    """Whether the device can still do anything in this process: after some faults of kernels it cannot."""
    import torch

    try:
        torch.zeros(1, device=place.device).add_(1).item()
    except Exception:
        return False
    return True


if __name__ == "__main__":
    ended_with = main()
    sys.stdout.flush()
    os._exit(ended_with)  # and not wait for threads and compilers that a peer has left
