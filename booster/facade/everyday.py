"""Steps under torch's profiler, one trace for each rank.

A bar of progress on one rank.

The largest batch that memory holds, found by trying.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.common.torch_internals.tensor_internals import default_store
from booster.data.epoch_iterator import EpochIterator
from booster.ranks.abortable_pass import AbortablePass, LeftByOtherRank
from booster.ranks.agreement import any_rank
from booster.ranks.coordinator import is_main, world

if TYPE_CHECKING:
    from torch.profiler import profile

_logger = logging.getLogger(__name__)


@contextmanager
def profiled(
    folder: str | os.PathLike[str],
    device: torch.device,
    *,
    skip: int,
    steps: int,
    shapes: bool,
    memory: bool,
    stacks: bool,
) -> Iterator[profile]:
    """`Booster.profile`, which says what this does."""
    target = arguments.path("folder", folder)
    arguments.count("skip", skip, least=1)
    arguments.count("steps", steps)
    for name, value in (("shapes", shapes), ("memory", memory), ("stacks", stacks)):
        arguments.flag(name, value)
    from torch import profiler

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"rank_{rank}.json"
    written = False

    def write(finished: Any) -> None:
        nonlocal written
        finished.export_chrome_trace(str(path))
        written = True
        _logger.info("wrote %s; drop it on https://ui.perfetto.dev, or open it in chrome://tracing", path)

    activities = [profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(profiler.ProfilerActivity.CUDA)
    with profiler.profile(
        activities=activities,
        # The last step that is skipped warms the profiler up.
        schedule=profiler.schedule(wait=skip - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=write,
        record_shapes=shapes,
        profile_memory=memory,
        with_stack=stacks,
        # There is one cycle; torch 2.12 warns, whatever their number, that all but the last would be lost.
        acc_events=True,
    ) as running:
        yield running
    if not written:
        raise RuntimeError(
            f"profile: no step was recorded; call .step() of what `with` gave after each of the {skip + steps} steps that "
            f"skip={skip} and steps={steps} need"
        )


T = TypeVar("T")


class ShownLoss:
    """The loss beside a bar of progress: that of the last backward pass, which is read once a second.

    Reading waits for the device.
    """

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._read = -math.inf
        self.words = ""

    def note(self, loss: torch.Tensor) -> None:
        """Keep `loss`, of one element, without its graph, until another one is noted."""
        loss = loss.detach()
        self._loss = loss.to_local() if hasattr(loss, "to_local") else loss  # of a DTensor: who reads it reads it alone

    def look(self, *, now: bool = False) -> str:
        """Return the loss in words, as it was when it was last read; `now` reads it."""
        if self._loss is not None and (now or time.monotonic() - self._read >= 1.0):
            self.words = f"loss {self._loss.item():.4g}"
            self._read = time.monotonic()
        return self.words


def progress(items: Iterable[T], description: str, total: int | None, loss: ShownLoss) -> Iterator[T]:
    """`Booster.progress`, which says what this does."""
    arguments.instance("items", items, Iterable, "a loader, or anything that a `for` goes through")
    arguments.instance("description", description, str, "a string")
    if total is not None:
        arguments.count("total", total, least=0, also="None")
    if not is_main():
        return iter(items)
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise ImportError("the bar is drawn by rich: pip install rich") from error

    words = TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
    bar = Progress(*words, TextColumn("{task.fields[loss]}"), TimeRemainingColumn(), expand=True)

    def drawn() -> Iterator[T]:
        began, each, seen = time.monotonic(), iter(items), 0
        known = _known_length(items) if total is None else total
        if isinstance(each, EpochIterator) and total is None:  # of an epoch that may go on where it was left
            known, seen = each.num_batches, each.progress.num_batches
        with bar:
            task = bar.add_task(description, total=known, completed=seen, rate="", loss="")
            for count, item in enumerate(each, 1):
                yield item
                rate = _pace(count / (time.monotonic() - began))
                bar.update(task, completed=seen + count, rate=rate, loss=loss.look())
            bar.update(task, loss=loss.look(now=True))

    return drawn()


def _known_length(items: Iterable[Any]) -> int | None:
    """How many there are; None where nobody knows, as of a loader of a stream, which has a `__len__` all the same."""
    try:
        return len(items) if isinstance(items, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def _pace(rate: float) -> str:
    """So many a second, or how many seconds one takes."""
    return f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each"


# What allocators say on devices that raise a plain RuntimeError.
_REFUSALS = ("not enough memory", "can't allocate memory", "out of memory")


def find_batch_size(trial: Callable[[int], Any], start: int, least: int = 1) -> int:
    """Call `trial(size)` with `start`, and with half of it after each call that runs out of memory; return what fits.

    trial: a forward and a backward pass, better two steps, on a batch of `size` that it makes. What it leaves behind, such
    as gradients and states, is not undone: clear them, or make model and optimizer in it. Between trials the memory that
    is no longer used is given back. Without trials, `booster estimate` says what fits.

    On several ranks all call it alike, and the size is one that fits on each: one MAX all-reduce of a number after every
    trial. Before each collective of a trial ranks wait until all have come to it, and where one has run out of memory all
    leave the trial. `DistributedDataParallel`, of `TorchDDPPlugin` and the first stage of ZeRO, cannot go on after a pass that
    raised: there a trial goes inside `Booster.no_sync`. Messages of pipelines are not waited for. Raises MemoryError where not
    even `least` fits; any other error of `trial` as it is.
    """
    arguments.function("trial", trial, "a function of the batch size")
    arguments.count("start", start)
    arguments.count("least", least, most=start, what="the smallest batch size to try")
    size = start
    while True:
        reason = _tried(_together(trial), size)
        if not any_rank(reason is not None, world()):
            return size
        if size == least:
            raise MemoryError(f"find_batch_size: not even least={least} fits ({reason or 'on another rank'})")
        smaller = max(size // 2, least)
        _logger.info("a batch of %d does not fit (%s); trying %d", size, reason or "on another rank", smaller)
        size = smaller


def _together(trial: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return `trial`, which all ranks leave where one of them runs out of memory in it."""
    if world() is None or dist.get_world_size() == 1:
        return trial
    store = default_store()
    number = store.add("booster/trial/come", 1)

    def together(size: int) -> None:
        own = AbortablePass(store, f"booster/trial/{(number - 1) // dist.get_world_size()}")
        try:
            with own:
                trial(size)
        except LeftByOtherRank:
            raise MemoryError("on another rank") from None
        except BaseException:
            own.leave()
            raise

    return together


def _tried(trial: Callable[[int], Any], size: int) -> str | None:
    """Call it; return why memory did not suffice, or None. The error, whose frames hold tensors, is gone then."""
    reason = None
    try:
        trial(size)
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not any(r in text for r in _REFUSALS):
            raise
        reason = text.splitlines()[0] if text else type(error).__name__
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return reason
