"""What a step of an optimizer holds and takes for each element, seen at steps of a copy of it on a thousand elements."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from booster.flat import aligned, bucket_size
from booster.masters.dither import Dither
from booster.masters.offload import moves
from booster.masters.options import MasterOptions
from booster.masters.packed import GROUP
from booster.masters.packing import Packing
from booster.memory.tracker import StorageTracker
from booster.optimizer_kinds import kind_of
from booster.torch_internals import unhooked
from booster.update.fused import switch_to_fused
from booster.update.parts import largest_part

_ELEMENTS = 2**10
_CPU = torch.device("cpu")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Stepped:
    """Bytes: states and masters that are held, and what a step takes beside them and the gradients. part: elements whose
    gradients wait at most for each other, where they are released. host: those of states and masters in the host's memory."""

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
) -> Stepped:
    """Return what steps of `optimizer` hold and take for parameters of these dtypes and sizes. It is not touched.

    options: of masters; None where parameters are stepped as they are. released: within backward, in parts. device: of the
    parameters. Raises ValueError for one that cannot be stepped so, or not on a few random numbers.
    """
    names, scalars, at_once = _observed(optimizer, fused)
    packing = None if options is None else options.make_packing(optimizer, Dither())
    if options is not None:
        options.check(optimizer)
    away = options is not None and options.offload and moves(device)
    packs = packing is not None or away
    bucketed = [
        (d, n) for d, n in sizes if options is not None and n and (d in _HALF or (packs and d == torch.float32))
    ]
    plain = [entry for entry in sizes if entry not in bucketed]
    states = sum(n * sum(names.values()) + scalars for _, n in plain)
    temporaries = max((n * at_once for _, n in plain), default=0)
    parts = largest_part(sum(n for _, n in sizes))
    masters = host = 0
    total = sum(n for _, n in bucketed)
    for dtype in {dtype for dtype, _ in bucketed}:
        own = sum(aligned(n) for d, n in bucketed if d == dtype)
        size = bucket_size(total, device if away else _CPU, packed=packs, released=released)
        if kind_of(optimizer) != "elementwise":
            size = max(n for d, n in bucketed if d == dtype)
        largest = min(size, own)
        format = options.make_format(optimizer, dtype, Dither())  # type: ignore[union-attr]
        rest = format.allocate(64, dtype, torch.device("cpu"))
        beside = 0 if rest is None else rest.nbytes / 64
        kept = {name: _kept(packing, name, size) for name, size in names.items()}
        states += scalars * max(1, -(-own // size))
        if away:
            host += int(own * (sum(kept.values()) + beside))
        else:
            states += int(own * sum(kept.values()))
            masters += int(own * beside)
        widened = sum(names[name] for name in names if kept[name] != names[name])
        parts = min(parts, size)
        # Of what lies on the host two buckets are on the device at a time; a master that is kept whole is stepped there.
        near = min(2, -(-own // size)) * (sum(kept.values()) + beside) if away else 0
        temporaries = max(temporaries, int(largest * (4 + 4 * format.needs_values + widened + at_once + near)))
    return Stepped(int(states), masters, int(temporaries), parts, host)


def _kept(packing: Packing | None, name: str, size: float) -> float:
    if packing is None:
        return size
    way = packing.way_of(name, torch.empty(64, dtype=torch.float32), _Bucket())
    return {None: size, "bf16": 2.0}.get(way, 1 + 2 / GROUP)


class _Bucket:
    size = 64
    handles: list[object] = []

    def clear_padding(self, values: torch.Tensor) -> None:
        pass


def _observed(optimizer: Optimizer, fused: bool) -> tuple[dict[str, float], int, float]:
    """Return bytes an element of each state, bytes of single numbers, and bytes an element that a step takes for a while."""
    drawn = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    weights = torch.nn.Parameter(drawn)
    probe = object.__new__(type(optimizer))
    vars(probe).update({name: copy.copy(value) for name, value in vars(optimizer).items()})
    probe.state = defaultdict(dict)
    probe.param_groups = [{**optimizer.param_groups[0], "params": [weights]}]
    if fused:
        switch_to_fused(probe)
    weights.grad = torch.ones(_ELEMENTS, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(2):
            unhooked(type(probe).step)(probe)
        state = probe.state[weights]
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        tracker = StorageTracker([weights, weights.grad, *tensors.values()])
        with tracker:
            unhooked(type(probe).step)(probe)
    shaped = {name: value.nbytes / _ELEMENTS for name, value in tensors.items() if value.shape == weights.shape}
    scalars = sum(value.nbytes for name, value in tensors.items() if name not in shaped)
    return shaped, scalars, tracker.highest // _ELEMENTS
