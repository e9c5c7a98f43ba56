"""`find_batch_size`, by trials that ranks can leave together."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.common.torch_internals.tensor_internals import TorchDispatchMode, default_store, process_group_of
from booster.ranks.agreement import any_rank, world

_WAITS = frozenset({"wait_tensor", "_wrap_tensor_autograd"})


class LeftByOtherRank(Exception):
    """A rank has left the pass that this one is in."""


class AbortablePass(TorchDispatchMode):
    """Before each collective inside, ranks of its group wait in `store` until all have come to it, or one of the job has left.

    Then none of them begins it: LeftByOtherRank is raised. Each collective is decided once, by who writes first, so that all of
    its ranks do the same. Messages between two ranks, as of pipelines, are not waited for. name: the same on all ranks, and no
    other's in `store`.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        super().__init__()
        self._store, self._name = store, name
        self._counts: dict[str, int] = {}

    def withdraw(self) -> None:
        """This rank comes to no other collective of the pass."""
        self._store.set(f"{self._name}/left", "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ not in _WAITS:
            groups = map(process_group_of, (*args, *(kwargs or {}).values()))
            group = next((each for each in groups if each is not None), None)
            if group is not None and dist.get_world_size(group) > 1:
                number = self._counts[group.group_name] = self._counts.get(group.group_name, 0) + 1
                key = f"{self._name}/{group.group_name}/{number}"
                # The last that comes writes first that all are here, unless somebody wrote that a rank has left.
                if self._store.add(f"{key}/come", 1) == dist.get_world_size(group):
                    self._store.compare_set(key, "", "all")
                pause = 1e-4
                while not self._store.check([key]):
                    if self._store.check([f"{self._name}/left"]):
                        self._store.compare_set(key, "", "left")
                    time.sleep(pause)
                    pause = min(2 * pause, 0.02)
                if self._store.get(key) == b"left":
                    raise LeftByOtherRank
                if number > 1:  # all have left the collective before this one
                    for gone in (f"{self._name}/{group.group_name}/{number - 1}{end}" for end in ("", "/come")):
                        self._store.delete_key(gone)
        return func(*args, **(kwargs or {}))


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
    if world() is None:
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
            own.withdraw()
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
