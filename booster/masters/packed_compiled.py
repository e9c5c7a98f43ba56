"""Packed states as arithmetic without side effects, which a compiler can fuse with an optimizer's step.

`packed.py` says what the bits are, and works in place. Two functions suffice here::

    unpack(way, codes, factors)       -> values           float32, from what is kept
    pack(way, values, lanes, present) -> codes, scales    to be kept

Both agree bit for bit with `Packed`, but for what stands in a group that has a NaN. Torch's compiler for CPUs does not
vectorise int16: what is one number for 32 elements comes in as `Packed.factors`, and goes out as int32.
"""

from __future__ import annotations

import math

import torch

from booster.masters.packed import GROUP, LEVELS, SMALLEST, Way, fractions, narrow_scales, scale_chances


def unpack(way: Way, codes: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Return new float32 numbers. factors: None with "bf16"."""
    values = codes.float()
    if factors is None:
        return values
    values = values * (values.abs() if way == "signed" else values)
    values = (values.view(-1, GROUP) * factors[:, None]).view(-1)
    return values if way == "signed" else values * values


def pack(
    way: Way, values: torch.Tensor, lanes: torch.Tensor, present: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return new codes, and scales as int32, None with "bf16".

    lanes: 64 random numbers below 2**16, int32. present: where the bucket has elements; zeros are kept elsewhere.
    """
    if present is not None:
        values = torch.where(present, values, 0.0)
    if way == "bf16":
        values = torch.where(values != values, math.nan, values)  # isnan is not vectorised
        bits = (values.view(torch.int32).view(-1, 64) + lanes).view(-1) & -0x10000
        return bits.view(torch.float32), None
    noise = fractions(lanes).view(1, -1, GROUP)
    grouped = values.view(-1, 64 // GROUP, GROUP)
    sizes = grouped.abs() if way == "signed" else grouped
    largest = sizes.amax(2, keepdim=True)
    least = largest.clamp(min=SMALLEST)
    factors = least.reciprocal() * LEVELS[way] ** (2 if way == "signed" else 4)
    if way == "signed":
        codes = torch.copysign((sizes * factors).sqrt() + noise, grouped).to(torch.int8)
    else:
        codes = ((sizes * factors).sqrt().sqrt() + noise).clamp(min=1.0).to(torch.int32).to(torch.uint8)
    scales = narrow_scales((least * (largest != 0)).view(-1, 2), scale_chances(lanes))
    return codes.view(-1), scales.view(-1)
