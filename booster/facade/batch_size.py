"""The largest batch that memory holds, found by trying."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.common.torch_internals.tensor_internals import default_store
from booster.ranks.abortable_pass import AbortablePass, LeftByOtherRank
from booster.ranks.agreement import any_rank
from booster.ranks.coordinator import world

_logger = logging.getLogger(__name__)

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
    """Call it; return why memory did not suffice, or None. The error is gone then, and the tensors that its frames held."""
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
