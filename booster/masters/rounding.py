"""How float32 numbers become half ones, and how far from them they were."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import methodcaller

import torch

from booster.flat import ALIGNMENT

Views = Sequence[torch.Tensor]

CHUNK = 2**17  # elements that, with those beside them, fit into a core's cache
_BITS = methodcaller("view", torch.int16)
_HALF_ULP = 2.0**13  # in 2**-14 of it
_BELOW_HALF_ULP = _HALF_ULP - 2.0**-11  # the largest float32 number below


def round_nearest(working: Views, values: torch.Tensor, spare: torch.Tensor) -> None:
    """Write `values` to the weights; bfloat16 ties go away from zero, see the module docstring. Overwrites `spare`."""
    if working[0].dtype == torch.bfloat16:
        plain_nan_(values)
        high_half(values.view(torch.int32), working, out=spare.view(torch.int32))
    else:
        torch._foreach_copy_(list(working), pieces_like(values, working))


def round_and_keep(working: Views, values: torch.Tensor, spare: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `round_nearest`, and return what was written, flat as `values`, and float32 scratch for chunks of `in_chunks`;
    each is one half of `spare`."""
    plain_nan_(values)
    size = len(values)
    weights, some = spare.view(working[0].dtype)[-size:], spare[: len(spare) - (size + 1) // 2]
    for chunk, weight in in_chunks(values, weights):
        round_into(weight, chunk, some[: len(chunk)])
    torch._foreach_copy_(list(working), pieces_like(weights, working))
    return weights, some


def round_into(halves: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Write float32 `values` to `halves`, rounded to nearest, and return them; `scratch` may be `values`."""
    if halves.dtype != torch.bfloat16:
        return halves.copy_(values)
    bits = scratch.view(torch.int32)
    torch.add(values.view(torch.int32), 0x8000, out=bits).bitwise_right_shift_(16)
    halves.view(torch.int16).copy_(bits)
    return halves


def high_half(bits: torch.Tensor, working: Views, out: torch.Tensor) -> None:
    torch.add(bits, 0x8000, out=out).bitwise_right_shift_(16)
    torch._foreach_copy_(list(map(_BITS, working)), pieces_like(out, working))


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 or float64 `values` as the half weights that a step would make of such masters; NaN stays NaN."""
    values = values.float()
    return torch.where(values.isnan(), values.to(dtype), _round(values, dtype))


def _round(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return new half numbers, rounded to nearest."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    return high_bits(values).to(torch.int16).view(dtype)


def high_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of float32 `values` rounded to bfloat16, as int32."""
    return torch.add(values.view(torch.int32), 0x8000).bitwise_right_shift_(16)


def plain_nan_(values: torch.Tensor) -> None:
    """Turn every NaN into the plain one where others come up: CUDA's, 0x7fffffff, would round up to minus zero.

    On the CPU arithmetic makes none whose upper bits are all ones, nor are any let in from outside.
    """
    if not values.is_cpu:
        values.masked_fill_(values.isnan(), math.nan)


def whole_steps(distance: torch.Tensor) -> torch.Tensor:
    """Round the distance of masters to their float16 weights, in 2**-14 ulp, such that their sum rounds to the weight again:
    what is not half an ulp must not become it."""
    # Shrinking leaves only what is half an ulp, exactly, and makes the others zero; comparing would take longer.
    halves = torch.hardshrink(distance, _BELOW_HALF_ULP)
    return distance.round().clamp_(1 - _HALF_ULP, _HALF_ULP - 1).add_(halves, alpha=1 / _HALF_ULP)


def to_step(weights: torch.Tensor) -> torch.Tensor:
    return to_ulp(weights, 2.0**-14)


def to_ulp(weights: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    """Replace float32 `weights` by the distance between float16 numbers of their magnitude, times `share`."""
    weights.view(torch.int32).bitwise_and_(0x7F800000)
    return weights.mul_(2.0**-10 * share).clamp_(2.0**-24 * share, 2.0**5 * share)


def in_chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return stretches of flat tensors of one length, which lie beside each other. On the CPU they fit into a core's cache
    together; there and elsewhere half of the tensors can hold one more of them."""
    size = max(1, len(tensors[0]) // 2)
    yield from zip(*(tensor.split(min(size, CHUNK) if tensor.is_cpu else size) for tensor in tensors), strict=True)


def pieces_like(values: torch.Tensor, working: Views) -> list[torch.Tensor]:
    """Return views of `values` for those in `working`, which lie in it one after another as in a bucket."""
    offset, found = 0, []
    for view in working:
        stop = offset + view.numel()
        found.append(values[offset:stop])
        offset = -(-stop // ALIGNMENT) * ALIGNMENT  # as `flat.aligned`, without a call for each
    return found
