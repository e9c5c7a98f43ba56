"""Collectives of a pass that one rank may leave: the others leave it too, instead of waiting for that rank."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from booster.common.torch_internals.tensor_internals import TorchDispatchMode, process_group_of

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

    def leave(self) -> None:
        """This rank comes to no other collective of the pass."""
        self._store.set(f"{self._name}/left", "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ not in _WAITS:
            groups = map(process_group_of, (*args, *(kwargs or {}).values()))
            group = next((each for each in groups if each is not None), None)
            if group is not None and dist.get_world_size(group) > 1:
                number = self._counts[group.group_name] = self._counts.get(group.group_name, 0) + 1
                key = f"{self._name}/{group.group_name}/{number}"
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
