"""Memory as it is: what a boosted model and its optimizer hold, the highest point of a stretch of operations, a step.

What a step of an optimizer holds and takes for each element is seen at steps of a copy of it on a thousand elements.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common.torch_internals.optimizer_internals import unhooked
from booster.common.torch_internals.tensor_internals import TorchDispatchMode, dense_parts, storage_key
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.masters.formats import MasterOptions
from booster.masters.offload import can_offload
from booster.masters.quantized_state import GROUP, QuantizedState, StateQuantizer
from booster.masters.rounding import RoundingRNG
from booster.model.optimizers import granularity_of, lies_flat, probe_of, restored_afterwards
from booster.model.params import local_shard
from booster.tensors import trees
from booster.tensors.flat import SMALLEST_BUCKET, aligned, bucket_size
from booster.update.choice import switch_to_fused
from booster.update.in_backward_pass import most_at_once


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
    weights = storage_bytes([*params, *model.buffers()], seen)
    gradients = storage_bytes([param.grad for param in params if param.grad is not None], seen)
    update = update_of(optimizer)
    # Inside, the groups hold the shards, with gradients of their own memory.
    with update.shards.local():
        own = [param.grad for param in update.gradients.params() if param.grad is not None]
        gradients += storage_bytes(own, seen)
    device = next((param.device for param in params), torch.device("cpu"))
    masters, of_optimizer = kept_tensors(optimizer)
    # Counters of no dimensions are on the host by torch's own choice, and are not what was offloaded.
    away = [t for t in (*masters, *of_optimizer) if t.dim() and t.device.type != device.type]
    # First, so that the two below count what is left.
    host = storage_bytes(away, seen)
    kept, states = storage_bytes(masters, seen), storage_bytes(of_optimizer, seen)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Measured(weights, kept, gradients, states, peak, host)


def kept_tensors(optimizer: OptimizerWrapper) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what a boosted optimizer keeps from step to step: masters with scratch, and states."""
    kept = update_of(optimizer).optimizer_state
    of_each = optimizer.unwrap().state.values()
    states = [tensor for own in of_each for tensor in trees.tensors(own)]
    states += [tensor for own in of_each for v in own.values() if isinstance(v, QuantizedState) for tensor in v.tensors]
    return [*kept.master_tensors(), *kept.scratch_tensors()], states


def storage_bytes(tensors: Iterable[Any], seen: set[int] | None = None) -> int:
    """Return the bytes of the storages of `tensors`, fake ones too, each counted once. seen: those that were counted before,
    to which these are added."""
    seen, total = set() if seen is None else seen, 0
    for tensor in tensors:
        for part in dense_parts(local_shard(tensor.detach())):
            key = storage_key(part)
            if key not in seen:
                seen.add(key)
                total += part.untyped_storage().nbytes()
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


_CPU = torch.device("cpu")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class StepMemory:
    """Bytes, but for `at_once`.

    Attributes:
        states, masters: that are held. Scratch that a small model keeps between steps on a CPU counts as masters.
        temporaries: what a step takes above these and the gradients.
        at_once: elements of which gradients wait at most for each other, where the optimizer steps in backward.
        host: states and masters in the host's memory, which are in none of the others.
    """

    states: int
    masters: int
    temporaries: int
    at_once: int
    host: int = 0


def step_memory(
    optimizer: Optimizer,
    sizes: tuple[tuple[torch.dtype, int], ...],
    options: MasterOptions | None,
    *,
    fused: bool,
    in_backward: bool = False,
    device: torch.device = _CPU,
    shapes: tuple[tuple[int, ...], ...] = (),
    idle: tuple[bool, ...] = (),
) -> StepMemory:
    """Return what steps of `optimizer` hold and take for parameters of these dtypes and sizes. It is not touched.

    options: of masters; None where parameters are stepped as they are.
    in_backward: some parameters are stepped at a time, within backward.
    device: of the parameters.
    shapes: of the parameters, in the order of `sizes`; empty where a rank steps flat shards of them.
    idle: which of them get no gradient: they have masters, and states only where the optimizer's constructor makes them.

    Raises ValueError for an optimizer that cannot be stepped so, or not on a few random numbers.
    """
    kind = granularity_of(optimizer)
    elementwise = kind == "elementwise"
    shapes = shapes or tuple((n,) for _, n in sizes)
    dims = [1 if elementwise else len(shape) for shape in shapes]
    probes = {num_dims: _observed(optimizer, fused, num_dims) for num_dims in set(dims)}
    quantizer = None if options is None else options.make_quantizer(optimizer, RoundingRNG())
    if options is not None:
        options.check(optimizer)
    kept = {
        num_dims: {name: _kept_bytes(quantizer, name, size) for name, size in probe.shaped.items()}
        for num_dims, probe in probes.items()
    }
    params = [
        _SteppedParam(dtype, n, shape, probes[num], kept[num], is_idle, bool(optimizer.state) or not is_idle)
        for (dtype, n), shape, num, is_idle in zip(sizes, shapes, dims, idle or (False,) * len(sizes), strict=True)
    ]
    offloaded = options is not None and options.offload and can_offload(device)
    is_packed = quantizer is not None or offloaded
    with_masters = _HALF + ((torch.float32,) if is_packed else ())
    by_dtype: dict[torch.dtype, list[_SteppedParam]] = {}  # those that are stepped in buckets
    states, temporaries = 0.0, 0.0
    for param in params:
        if options is not None and param.size > 0 and param.dtype in with_masters:
            by_dtype.setdefault(param.dtype, []).append(param)
            continue
        temporaries = max(temporaries, param.size * param.probe.at_once)
        if param.has_states:
            states += param.size * sum(param.probe.shaped.values()) + param.probe.other_bytes(param.shape)
    at_once = most_at_once(sum(n for _, n in sizes))
    masters = host = scratch = largest_of_all = 0
    total = sum(param.size for own in by_dtype.values() for param in own)
    for dtype, own in by_dtype.items():
        largest = max(own, key=lambda param: param.size)
        elements = sum(param.padded for param in own)
        stepped = [param for param in own if param.has_states]
        bucket = most = bucket_size(total, device if offloaded else _CPU, packed=is_packed, released=in_backward)
        if not elementwise:
            bucket = max(*(param.size for param in own), bucket if lies_flat(optimizer) else 0)
            most = total if kind == "whole" else max(most, bucket)
        format = options.make_format(optimizer, dtype, RoundingRNG())  # type: ignore[union-attr]
        residual = format.allocate(64, dtype, _CPU)
        residual_bytes = 0 if residual is None else residual.nbytes / 64
        padded = lies_flat(optimizer)
        held = sum((param.padded if padded else param.size) * sum(param.kept.values()) for param in stepped)
        if elementwise:
            num_buckets = -(-sum(param.padded for param in stepped) // bucket)
            states += largest.probe.other_bytes(()) * num_buckets
        else:  # each parameter is a bucket, and what it has depends on its shape
            states += sum(param.probe.other_bytes(param.shape) for param in stepped)
        if offloaded:
            host += int(held + elements * residual_bytes)
        else:
            states += int(held)
            masters += int(elements * residual_bytes)
        dequantized = sum(size for name, size in largest.probe.shaped.items() if largest.kept[name] != size)
        at_once = min(at_once, bucket)
        # Two buckets of what is offloaded are on the device at a time; a whole master is stepped where it is.
        on_device = min(2, -(-elements // bucket)) * (sum(largest.kept.values()) + residual_bytes) if offloaded else 0
        buffers = 4 + 4 * format.needs_values  # float32 gradients, and weights where the format gives no view of them
        temporaries = max(
            temporaries, min(bucket, elements) * (buffers + dequantized + largest.probe.at_once + on_device)
        )
        trained = sum(param.padded for param in own if not param.idle)
        scratch, largest_of_all = max(scratch, min(most, trained) * buffers), max(largest_of_all, min(most, trained))
    if not (is_packed or in_backward) and device.type == "cpu" and largest_of_all <= SMALLEST_BUCKET:
        # A small model keeps its scratch, so that a step allocates nothing.
        masters, temporaries = masters + scratch, max(temporaries - scratch, 0)
    return StepMemory(int(states), masters, int(temporaries), at_once, host)


def _kept_bytes(quantizer: StateQuantizer | None, name: str, size: float) -> float:
    """Return bytes an element of the state `name`, of which the optimizer makes `size`, as it is kept between steps."""
    if quantizer is None:
        return size
    encoding = quantizer.encoding_of(name, torch.empty(GROUP, dtype=torch.float32), GROUP, {})
    return {None: size, "bf16": 2.0}.get(encoding, 1 + 2 / GROUP)


@dataclass(frozen=True)
class _Probe:
    """What a few steps on a small parameter showed.

    Attributes:
        shaped: bytes an element of each state of the parameter's shape.
        other: of each other state, the bytes of a number, and for each of its dimensions which one of the parameter it is as
            long as, or else its own length.
        at_once: bytes an element that a step takes for a while.
    """

    shaped: dict[str, float]
    other: tuple[tuple[int, tuple[tuple[int | None, int], ...]], ...]
    at_once: float

    def other_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of states that do not have the parameter's shape, for a parameter of `shape`."""
        return sum(
            itemsize * math.prod(length if like is None else shape[like] for like, length in dims)
            for itemsize, dims in self.other
        )


@dataclass(frozen=True)
class _SteppedParam:
    """A parameter of `size` elements. probe: what steps of one with as many dimensions showed. kept: bytes an element of each
    state of its shape, as it is kept between steps. idle: it gets no gradient."""

    dtype: torch.dtype
    size: int
    shape: tuple[int, ...]
    probe: _Probe
    kept: dict[str, float]
    idle: bool
    has_states: bool

    @property
    def padded(self) -> int:
        """Its elements in a bucket, where the next one begins at a multiple."""
        return aligned(self.size)


def _observed(optimizer: Optimizer, fused: bool, num_dims: int) -> _Probe:
    """Return what a copy of `optimizer` keeps and takes for a parameter of so many dimensions."""
    # Lengths differ, so that a state's shape says which dimension it follows; about a thousand elements.
    shape = {0: (), 1: (2**10,), 2: (29, 37), 3: (7, 11, 13)}.get(num_dims, (2, 3, 5, 7, 11, 13, 17)[:num_dims])
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    weights = torch.nn.Parameter(drawn)
    probe = probe_of(optimizer, optimizer.param_groups[0], weights)
    if fused:
        switch_to_fused(probe)
    weights.grad = torch.ones(shape, dtype=torch.float32)
    with torch.no_grad(), restored_afterwards(optimizer, optimizer.param_groups[0]):
        for _ in range(2):
            unhooked(type(probe).step)(probe)
        state = probe.state[weights]
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        tracker = StorageTracker([weights, weights.grad, *tensors.values()])
        with tracker:
            unhooked(type(probe).step)(probe)
    shaped = {name: value.nbytes / value.numel() for name, value in tensors.items() if value.shape == weights.shape}
    other = tuple(
        (value.itemsize, tuple((shape.index(length) if length in shape else None, length) for length in value.shape))
        for name, value in tensors.items()
        if name not in shaped
    )
    return _Probe(shaped, other, tracker.highest / weights.numel())
