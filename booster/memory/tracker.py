"""Following the storages that operations make, so that their highest sum is known without an allocator's record."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from booster import trees
from booster.memory.kernels import own_memory
from booster.torch_internals import TorchDispatchMode


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of the storages that operations inside it make and that still live, fake ones too.

    now, highest: bytes, of what was made inside. Storages of `known` tensors do not count. What a kernel takes for itself
    while it runs is not seen, but for what `kernels` knows.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.highest = 0
        self._seen: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._watch(tensor, counts=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.now
        out = func(*args, **(kwargs or {}))
        self.highest = max(self.highest, before + own_memory(func, args, out))
        for tensor in trees.tensors(out):
            self._watch(tensor, counts=True)
        return out

    def _watch(self, tensor: torch.Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen and self._seen[key]() is storage:
            return
        size = storage.nbytes() if counts else 0

        def gone(_: Any) -> None:
            self.now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.highest = max(self.highest, self.now)
