"""Interleaved timing of alternatives on one core, in process CPU time, so that ratios survive a busy machine."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them


def pin_to_one_core() -> None:
    """Run this process on one core with one thread."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def keep_freed_memory() -> None:
    """Have glibc keep what is freed. By default it gives the top of the heap back to the system now and then, and whichever
    variant comes next pays for its pages anew: up to a millisecond of a step of seven, at random."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_MMAP_THRESHOLD, 2**25)


def clock() -> float:
    """Seconds of CPU time of this process; wall time once the device has finished, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def interleave(variants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds per call of each variant, `rounds` times, in an order shuffled anew each round.

    Shuffled, not rotated: in a rotation each variant always follows the same one, whose caches it inherits, and a second
    copy of the first variant runs measurably faster than the first.
    """
    names = list(variants)
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(warmup + rounds):
        for name in order.sample(names, len(names)):
            start = clock()
            variants[name]()
            if index >= warmup:
                seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of the ratio within a round, where both met the same disturbance."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def difference(seconds: Mapping[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of the difference within a round, in seconds."""
    return statistics.median(a - b for a, b in zip(seconds[name], seconds[base], strict=True))


def describe_machine() -> str:
    """One line: processor or GPU, torch and Python versions."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            cpu = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), cpu)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return f"{device}; torch {torch.__version__}, Python {platform.python_version()}"
