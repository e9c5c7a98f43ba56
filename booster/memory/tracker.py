"""Following the storages that operations make, so that their highest sum is known without an allocator's record.

What kernels for CPUs take for themselves while they run: convolutions, which copy what they read and write, and batch norms.

Seen in the allocator's record of single operations in torch 2.13, with sizes of input x, weight w and output o, and of their
copies in the layout that oneDNN computes in, which are as large. In all of an operation, its results included:

=============================  ============================  ===========================
of a convolution               forward                       backward
=============================  ============================  ===========================
float32                        max(x + w + o, 2o)            max(3x, 2x + o + w, x + 2w)
bfloat16                       max(x + w + o, 3o)            max(3x, 2x + o + 3w)
float16                        max(x + w + o, 3o)            max(3x, x + o + w, x + 2w)
channel by channel             x + w + o                     2x + w, float16 3x
channels_last                  o + 2w, 1 x 1: o + w          x + 4w, 1 x 1: x + 3w
=============================  ============================  ===========================

Backward here means of all of input, weight and bias. Channel by channel in channels_last takes more than these say: of
models such as ConvNeXt the peak is too low by up to a third.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from booster.common.torch_internals.tensor_internals import TorchDispatchMode, dense_parts
from booster.tensors import trees


def own_memory(func: Any, args: Any, out: Any) -> int:
    """Return the bytes at the highest point of one operation on CPU, results included; 0 where the results are all."""
    aten = torch.ops.aten
    if func is aten.convolution.default and args[0].device.type == "cpu":
        return _forward(args[0], args[1], _nbytes(out))
    if func is aten.convolution_backward.default and args[0].device.type == "cpu":
        return _backward(_nbytes(args[0]), args[1], args[2], needs_input=bool(args[-1][0]))
    if func is aten.native_batch_norm_backward.default and args[0].device.type == "cpu":
        return 2 * _nbytes(out[0])
    return 0


def _forward(x: torch.Tensor, weight: torch.Tensor, o: int) -> int:
    w = weight.nbytes
    if _is_last(x):
        return o + (1 if _is_pointwise(weight) else 2) * w
    if _is_by_channel(weight):
        return x.nbytes + w + o
    return max(x.nbytes + w + o, (2 if x.dtype == torch.float32 else 3) * o)


def _backward(o: int, x: torch.Tensor, weight: torch.Tensor, *, needs_input: bool) -> int:
    size, w = x.nbytes, weight.nbytes
    if _is_last(x):
        return (size if needs_input else 0) + (3 if _is_pointwise(weight) else 4) * w
    if not needs_input:
        return size + o + 2 * w
    if _is_by_channel(weight):
        return 3 * size if x.dtype == torch.float16 else 2 * size + w
    if x.dtype == torch.float32:
        return max(3 * size, 2 * size + o + w, size + 2 * w)
    if x.dtype == torch.bfloat16:
        return max(3 * size, 2 * size + o + 3 * w)
    return max(3 * size, size + o + w, size + 2 * w)


def _is_last(x: torch.Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _is_pointwise(weight: torch.Tensor) -> bool:
    return all(size == 1 for size in weight.shape[2:])


def _is_by_channel(weight: torch.Tensor) -> bool:
    return weight.shape[1] == 1 and weight.shape[0] > 1


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


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
        for part in dense_parts(tensor):
            self._watch_storage(part.untyped_storage(), counts=counts)

    def _watch_storage(self, storage: torch.UntypedStorage, *, counts: bool) -> None:
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
