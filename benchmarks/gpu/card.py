"""The card that is measured, its clocks, and time on it."""

from __future__ import annotations

import functools
import platform
import random
import shutil
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.row import Found, Place

Step = Callable[[], object]


def described(place: Place) -> Found:
    """What numbers depend on: machine, versions; and the clocks at the time."""
    name = f"rehearsal on {platform.machine()}" if place.device == "cpu" else torch.cuda.get_device_name()
    machine = f"{name}; torch {torch.__version__}, Triton {_version('triton')}, Python {platform.python_version()}"
    return {"machine": machine, "clocks": clocks() if place.device == "cuda" else ""}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def clocks() -> str:
    """Clocks, power and temperature as nvidia-smi has them; nothing is set."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    fields = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__


def timed(ways: Mapping[str, Step], place: Place, rounds: int = 7, seconds: float = 0.1) -> dict[str, list[float]]:
    """Microseconds of a call of each way, in `rounds`, in an order shuffled anew each round.

    A round makes as many calls as take `seconds`. On a card time is that of its events, waits for the host included; else it is
    that of the process.
    """
    calls, found, order = {}, {name: [] for name in ways}, random.Random(0)  # type: ignore[var-annotated]
    rounds = 2 if place.small else rounds
    for name, step in ways.items():
        for _ in range(2 if place.small else 3):  # the second compiles once more where scales follow from steps before
            step()
        calls[name] = 1 if place.small else max(1, min(200, int(seconds * 1e6 / max(_once(step, 1, place), 1.0))))
    for _ in range(rounds):
        for name in order.sample(list(ways), len(ways)):
            found[name].append(_once(ways[name], calls[name], place))
    return found


def _once(step: Step, calls: int, place: Place) -> float:
    if place.device == "cpu":
        begin = time.process_time()
        for _ in range(calls):
            step()
        return (time.process_time() - begin) / calls * 1e6
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(calls):
        step()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / calls * 1e3


def median(values: list[float]) -> float:
    return round(statistics.median(values), 1)


@functools.cache
def bandwidth(place: Place) -> float:
    """Bytes a second of a copy on the device, read and written."""
    size = 2**16 if place.small else 2**30
    one, other = (torch.empty(size, dtype=torch.uint8, device=place.device).random_() for _ in range(2))
    seconds = median(timed({"copy": lambda: other.copy_(one)}, place)["copy"]) / 1e6
    return 2 * size / max(seconds, 1e-9)


def launches(step: Step, place: Place) -> int | None:
    """How many kernels a call launches; None without a card."""
    if place.device == "cpu":
        return None
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = profile.key_averages()
    return sum(event.count for event in events if not event.key.startswith(("Memcpy", "Memset", "cuda")))


def waits(step: Step, place: Place) -> int | None:
    """How often a call waits for the device; None without a card."""
    if place.device == "cpu":
        return None
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) and "prototype" not in str(each.message) for each in said)
