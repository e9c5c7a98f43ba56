"""What a step of an optimizer holds and takes for each element, seen at steps of a copy of it on a thousand elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from booster.common.torch_internals.optimizer_internals import unhooked
from booster.masters.offload import can_offload
from booster.masters.options import MasterOptions
from booster.masters.quantized_state import GROUP, StateQuantizer
from booster.masters.rounding import RoundingRNG
from booster.memory.tracker import StorageTracker
from booster.model.optimizer_kinds import kind_of
from booster.model.optimizer_states import probe_of, restored_afterwards
from booster.tensors.flat import SMALLEST_BUCKET, aligned, bucket_size
from booster.update.fused_kernel import switch_to_fused
from booster.update.gradual import most_at_once

_ELEMENTS = 2**10
_CPU = torch.device("cpu")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Stepped:
    """Bytes: states and masters that are held, and what a step takes beside them and the gradients. part: elements whose
    gradients wait at most for each other, where they are released. host: those of states and masters in the host's memory.
    Scratch that a small model keeps between steps on a CPU counts as masters."""

    states: int
    masters: int
    temporaries: int
    part: int
    host: int = 0


def stepped(
    optimizer: Optimizer,
    sizes: tuple[tuple[torch.dtype, int], ...],
    options: MasterOptions | None,
    *,
    fused: bool,
    released: bool = False,
    device: torch.device = _CPU,
    shapes: tuple[tuple[int, ...], ...] = (),
    idle: tuple[bool, ...] = (),
) -> Stepped:
    """Return what steps of `optimizer` hold and take for parameters of these dtypes and sizes. It is not touched.

    options: of masters; None where parameters are stepped as they are. released: within backward, in parts. device: of the
    parameters. shapes: of the parameters, in the order of `sizes`; empty where a rank steps flat parts of them. idle: which of
    them get no gradient: they have masters, and states only where the optimizer makes them when it is made. Raises
    ValueError for an optimizer that cannot be stepped so, or not on a few random numbers.
    """
    shapes = shapes or tuple((n,) for _, n in sizes)
    kind = kind_of(optimizer)
    elementwise = kind == "elementwise"
    probes = {
        dims: _observed(optimizer, fused, dims) for dims in {1 if elementwise else len(shape) for shape in shapes}
    }
    probe_of = [probes[1 if elementwise else len(shape)] for shape in shapes]
    made = [bool(optimizer.state) or not without for without in idle or (False,) * len(sizes)]  # whether it has states
    quantizer = None if options is None else options.make_quantizer(optimizer, RoundingRNG())
    if options is not None:
        options.check(optimizer)
    away = options is not None and options.offload and can_offload(device)
    packs = quantizer is not None or away
    halves = _HALF + ((torch.float32,) if packs else ())
    in_buckets = [options is not None and n > 0 and dtype in halves for dtype, n in sizes]
    bucketed = [entry for entry, inside in zip(sizes, in_buckets, strict=True) if inside]
    states, temporaries = 0.0, 0.0
    for (_, n), shape, probe, inside, has in zip(sizes, shapes, probe_of, in_buckets, made, strict=True):
        if inside:
            continue
        temporaries = max(temporaries, n * probe.at_once)
        states += has * (n * sum(probe.names.values()) + probe.beside(shape))
    parts = most_at_once(sum(n for _, n in sizes))
    masters = host = scratch = largest_of_all = 0
    total = sum(n for _, n in bucketed)
    for dtype in {dtype for dtype, _ in bucketed}:
        here = [i for i, inside in enumerate(in_buckets) if inside and sizes[i][0] == dtype]
        probe = probe_of[max(here, key=lambda i: sizes[i][1])]
        own = sum(aligned(sizes[i][1]) for i in here)
        stepped_on = sum(aligned(sizes[i][1]) for i in here if made[i])
        size = most = bucket_size(total, device if away else _CPU, packed=packs, released=released)
        if not elementwise:
            size = max(sizes[i][1] for i in here)
            most = total if kind == "whole" else max(most, size)
        largest = min(size, own)
        format = options.make_format(optimizer, dtype, RoundingRNG())  # type: ignore[union-attr]
        rest = format.allocate(64, dtype, torch.device("cpu"))
        beside = 0 if rest is None else rest.nbytes / 64
        kept = {name: _kept(quantizer, name, size) for name, size in probe.names.items()}
        if elementwise:
            states += probe.beside(()) * -(-stepped_on // size)
            held = sum(kept.values()) * stepped_on
        else:  # each parameter is a bucket, and what it has depends on its shape
            states += sum(probe_of[i].beside(shapes[i]) for i in here if made[i])
            held = sum(
                sizes[i][1] * sum(_kept(quantizer, *state) for state in probe_of[i].names.items())
                for i in here
                if made[i]
            )
        if away:
            host += int(held + own * beside)
        else:
            states += int(held)
            masters += int(own * beside)
        widened = sum(probe.names[name] for name in probe.names if kept[name] != probe.names[name])
        parts = min(parts, size)
        # Of what lies on the host two buckets are on the device at a time; a master that is kept whole is stepped there.
        near = min(2, -(-own // size)) * (sum(kept.values()) + beside) if away else 0
        buffers = 4 + 4 * format.needs_values
        temporaries = max(temporaries, largest * (buffers + widened + probe.at_once + near))
        trained = [aligned(sizes[i][1]) for i in here if not (idle and idle[i])]
        kept_size = min(most, sum(trained))
        scratch, largest_of_all = max(scratch, kept_size * buffers), max(largest_of_all, kept_size)
    if not (packs or released) and device.type == "cpu" and largest_of_all <= SMALLEST_BUCKET:
        masters, temporaries = masters + scratch, max(temporaries - scratch, 0)
    return Stepped(int(states), masters, int(temporaries), parts, host)


def _kept(quantizer: StateQuantizer | None, name: str, size: float) -> float:
    if quantizer is None:
        return size
    encoding = quantizer.encoding_of(name, torch.empty(64, dtype=torch.float32), _NoBucket())
    return {None: size, "bf16": 2.0}.get(encoding, 1 + 2 / GROUP)


class _NoBucket:
    size = 64
    handles: list[object] = []

    def clear_padding(self, values: torch.Tensor) -> None:
        pass


@dataclass(frozen=True)
class _Probe:
    """What a few steps on a small parameter showed. names: bytes an element of each state of the parameter's shape. rest: of
    each other state, the bytes of a number, and for each of its dimensions which one of the parameter it is as long as, or
    its own length. at_once: bytes an element that a step takes for a while."""

    names: dict[str, float]
    rest: tuple[tuple[int, tuple[tuple[int | None, int], ...]], ...]
    at_once: float

    def beside(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of states that do not have the parameter's shape, for a parameter of `shape`."""
        return sum(
            itemsize * math.prod(length if like is None else shape[like] for like, length in dims)
            for itemsize, dims in self.rest
        )


def _observed(optimizer: Optimizer, fused: bool, num_dims: int) -> _Probe:
    """Return what a copy of `optimizer` keeps and takes for a parameter of so many dimensions, each of another length."""
    shape = _lengths(num_dims)
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
    rest = tuple(
        (value.itemsize, tuple((shape.index(length) if length in shape else None, length) for length in value.shape))
        for name, value in tensors.items()
        if name not in shaped
    )
    return _Probe(shaped, rest, tracker.highest / weights.numel())


def _lengths(num_dims: int) -> tuple[int, ...]:
    """Return lengths of dimensions that tell each other apart, of about a thousand elements where there are few of them."""
    return {0: (), 1: (_ELEMENTS,), 2: (29, 37), 3: (7, 11, 13)}.get(num_dims, (2, 3, 5, 7, 11, 13, 17)[:num_dims])
