"""The largest batch that memory holds, found by trying."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from booster import arguments

__all__ = ["find_batch_size"]

_logger = logging.getLogger(__name__)
# What allocators say on devices that raise a plain RuntimeError.
_REFUSALS = ("not enough memory", "can't allocate memory", "out of memory")


def find_batch_size(trial: Callable[[int], Any], start: int, least: int = 1) -> int:
    """Call `trial(size)` with `start`, and with half of it after each call that runs out of memory; return what fits.

    trial: a forward and a backward pass, better two steps, on a batch of `size` that it makes. What it leaves behind, such
    as gradients and states, is not undone: clear them, or make model and optimizer in it. Between trials the memory that
    is no longer used is given back. Without trials, `booster estimate` says what fits.

    On several ranks all call it alike, and the size is one that fits on each: one MAX all-reduce of a number after every
    trial. A trial must then exchange nothing with other ranks, as inside `Booster.no_sync`: a rank without memory leaves
    a collective to the others. Raises MemoryError where not even `least` fits; any other error of `trial` as it is.
    """
    arguments.function("trial", trial, "a function of the batch size")
    arguments.count("start", start)
    arguments.count("least", least, most=start, what="the smallest batch size to try")
    size = start
    while True:
        reason = _tried(trial, size)
        if not _on_any_rank(reason is not None):
            return size
        if size == least:
            raise MemoryError(f"find_batch_size: not even least={least} fits ({reason or 'on another rank'})")
        smaller = max(size // 2, least)
        _logger.info("a batch of %d does not fit (%s); trying %d", size, reason or "on another rank", smaller)
        size = smaller


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


def _on_any_rank(failed: bool) -> bool:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return failed
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    flag = torch.tensor([float(failed)], dtype=torch.float32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
