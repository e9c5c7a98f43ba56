"""Rows of `benchmarks.gpu` with a fault in each, and the process that makes them: `python -m planted_rows`."""

import os
import signal
import sys
import time

from benchmarks.gpu import row, worker
from benchmarks.gpu.row import Row

PART = 10


def title():
    """Have the planted part be one of those."""
    row.PARTS[PART] = ("planted_rows", "planted")


def _raises(place):
    raise ValueError("it is\nso")


def _faults(place):
    os.environ["PLANTED_FAULT"] = "1"  # from here on this process can do nothing more
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _timed(place):
    return {"ways": {"torch": 10.0, "ours": 30.0}, "goals": [["ours", "torch", 1.5]]}


def rows(part, place):
    if "PLANTED_WITHOUT" in os.environ:
        raise ModuleNotFoundError("No module named 'pytest'")
    if "PLANTED_DEATH" in os.environ:
        os._exit(1)
    judged = {"rule AdamW": None}
    return [
        Row("right", lambda place: {"right": True}, judges=judged),
        Row("raises", _raises, judges={"rule SGD": None}),
        Row("kills its process", lambda place: os.kill(os.getpid(), signal.SIGKILL), judges=judged),
        Row("never ends", lambda place: time.sleep(1000), seconds=0.01),
        Row("faults", _faults),
        Row("wrong", lambda place: {"right": False, "why": "so"}, judges={"states 8bit": None}),
        Row("slow", _timed, judges={"release": ["ours", "torch"]}),
        Row("large", lambda place: {"skipped": "it needs 9 GiB, and 1.0 are free"}, gib=9),
        Row("long", lambda place: {"right": True}, seconds=1e6),
    ]


if __name__ == "__main__":
    title()
    worker.SLACK = 1.0
    worker.prepared = lambda place: {"machine": "a card; torch 9", "clocks": "1 MHz"}
    worker.is_alive = lambda place: "PLANTED_FAULT" not in os.environ
    ended_with = worker.main()
    sys.stdout.flush()
    os._exit(ended_with)
