"""Memory as it is: what a boosted model and its optimizer hold now, and the highest point of a stretch of operations."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.common.torch_internals.tensor_internals import TorchDispatchMode, dense_parts
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.masters.quantized_state import QuantizedState
from booster.model.dtensors import local_shard
from booster.tensors import trees


@dataclass(frozen=True)
class Measured:
    """Bytes on this rank.

    weights: with buffers.
    masters: float32 copies of half weights, or what is kept of them; for a small model on a CPU also the scratch of a step.
    gradients: that are there now.
    states: of the optimizer.
    peak: of the CUDA device since its statistics were reset; None on CPU.
    host: states and masters in the host's memory, of parameters on a device; they are in none of the others.
    """

    weights: int
    masters: int
    gradients: int
    states: int
    peak: int | None
    host: int = 0

    @property
    def held(self) -> int:
        return self.weights + self.masters + self.gradients + self.states

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {**dataclasses.asdict(self), "held": self.held}


def measure(model: nn.Module, optimizer: OptimizerWrapper) -> Measured:
    """Count the storages of a boosted model and its optimizer, each once; no collective, no copy.

    model, optimizer: boosted.

    After a step, with gradients there, it compares with what `estimate` said."""
    params = list(model.parameters())
    seen: set[int] = set()
    weights = _bytes([*params, *model.buffers()], seen)
    gradients = _bytes([param.grad for param in params if param.grad is not None], seen)
    update = update_of(optimizer)
    # Inside, the groups hold the shards, with gradients of their own memory.
    with update.shards.local():
        gradients += _bytes([param.grad for param in update.gradients.params() if param.grad is not None], seen)
    device = next((param.device for param in params), torch.device("cpu"))
    masters, of_optimizer = kept_tensors(optimizer)
    # Counters of no dimensions are on the host by torch's own choice, and are not what was offloaded.
    away = [t for t in (*masters, *of_optimizer) if t.dim() and t.device.type != device.type]
    # First, so that the two below count what is left.
    host = _bytes(away, seen)
    kept, states = _bytes(masters, seen), _bytes(of_optimizer, seen)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Measured(weights, kept, gradients, states, peak, host)


def kept_tensors(optimizer: OptimizerWrapper) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what a boosted optimizer keeps from step to step: masters with scratch, and states."""
    kept = update_of(optimizer).optimizer_state
    of_each = optimizer.unwrap().state.values()
    states = [tensor for own in of_each for tensor in trees.tensors(own)]
    states += [tensor for own in of_each for v in own.values() if isinstance(v, QuantizedState) for tensor in v.tensors]
    return [*kept.master_tensors(), *kept.scratch_tensors()], states


def _bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        for part in dense_parts(local_shard(tensor.detach())):
            storage = part.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of the storages that operations inside it make and that still live, fake ones too.

    Attributes:
        now, highest: bytes, of what was made inside. Storages of the tensors `known` do not count. What a kernel takes for
            itself while it runs is not seen, but for what `kernel_memory` knows.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.highest = 0
        self._seen: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._track(tensor, counts=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.now
        out = func(*args, **(kwargs or {}))
        # What a kernel takes beyond its results is freed before anybody could look at it.
        self.highest = max(self.highest, before + kernel_memory(func, args, out))
        for tensor in trees.tensors(out):
            self._track(tensor, counts=True)
        return out

    def _track(self, tensor: torch.Tensor, *, counts: bool) -> None:
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            # Fake tensors have no address; an id is good until the storage is freed, when it is dropped.
            key = id(storage)
            if key in self._seen and self._seen[key]() is storage:
                continue
            size = storage.nbytes() if counts else 0

            def freed(_: Any, key: int = key, size: int = size) -> None:
                self.now -= size
                self._seen.pop(key, None)

            self._seen[key] = weakref.ref(storage, freed)
            self.now += size
            self.highest = max(self.highest, self.now)


def kernel_memory(func: Any, args: Any, out: Any) -> int:
    """Return the bytes at the highest point of one operation on a CPU, results included; 0 where the results are all.

    These kernels take memory for themselves while they run: convolutions, which copy what they read and write, and batch
    norms. Seen in the allocator's record of single operations in torch 2.13, with sizes of input x, weight w and output o, and
    of their copies in the layout that oneDNN computes in, which are as large. In all of an operation, its results included:

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
    aten = torch.ops.aten
    if not isinstance(args[0] if args else None, torch.Tensor) or args[0].device.type != "cpu":
        return 0
    if func is aten.native_batch_norm_backward.default:
        return 2 * (0 if out[0] is None else out[0].nbytes)
    if func is aten.convolution.default:
        x, weight = args[0], args[1]
        i, w, o = x.nbytes, weight.nbytes, out.nbytes
        if _is_channels_last(x):
            return o + (1 if _is_pointwise(weight) else 2) * w
        return i + w + o if _is_by_channel(weight) else max(i + w + o, (2 if x.dtype == torch.float32 else 3) * o)
    if func is not aten.convolution_backward.default:
        return 0
    x, weight, needs_input = args[1], args[2], bool(args[-1][0])
    i, w, o = x.nbytes, weight.nbytes, args[0].nbytes
    if _is_channels_last(x):
        return i * needs_input + (3 if _is_pointwise(weight) else 4) * w
    if not needs_input:
        return i + o + 2 * w
    if _is_by_channel(weight):
        return 3 * i if x.dtype == torch.float16 else 2 * i + w
    if x.dtype == torch.float32:
        return max(3 * i, 2 * i + o + w, i + 2 * w)
    return max(3 * i, 2 * i + o + 3 * w) if x.dtype == torch.bfloat16 else max(3 * i, i + o + w, i + 2 * w)


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _is_pointwise(weight: torch.Tensor) -> bool:
    return all(size == 1 for size in weight.shape[2:])


def _is_by_channel(weight: torch.Tensor) -> bool:
    return weight.shape[1] == 1 and weight.shape[0] > 1
