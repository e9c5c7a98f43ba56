"""Weights that somebody else wrote between two steps: a master is believed only where it rounds to its weight.

Only the weights themselves can tell: writes through `.data` leave no other trace.
"""

from __future__ import annotations

import math

import torch

from booster.masters.rounding import CHUNK, Views, high_bits, pieces_like


def take_zeros(working: Views, values: torch.Tensor, spare: torch.Tensor) -> None:
    """Of joined bfloat16 masters: take over zeros that somebody else wrote. Overwrites `spare`.

    With the remainder of another weight they can read as a NaN. On the CPU the sum tells whether there may be any; elsewhere
    reading it would wait for the device.
    """
    if not values.is_cpu or math.isnan(values.sum()):
        torch._foreach_copy_(pieces_like(spare, working), list(working))
        torch.where(values.isnan().logical_and_(spare == 0), spare, values, out=values)


def take_foreign(working: Views, values: torch.Tensor, spare: torch.Tensor) -> None:
    """Put weights in the place of masters that do not round to them. Overwrites `spare`.

    On the CPU an answer costs nothing to wait for, and a call as much as some thousand elements: where pieces are large they
    are looked at one by one, in place, and written to only where something differs.
    """
    if values.is_cpu and len(working) <= 1 + len(values) // 2**14:
        for weights, masters in zip(working, pieces_like(values, working), strict=True):
            for weight, master in zip(weights.split(CHUNK), masters.split(CHUNK), strict=True):
                _take_differing(weight, master, spare)
        return
    dtype, size = working[0].dtype, len(values)
    rounded, found = spare.view(dtype).split(size)
    if dtype == torch.bfloat16:
        for chunk, master in zip(rounded.view(torch.int16).split(CHUNK), values.split(CHUNK), strict=True):
            chunk.copy_(high_bits(master))
    else:
        rounded.copy_(values)
    found.copy_(rounded)  # also between the pieces, where there are no weights
    torch._foreach_copy_(pieces_like(found, working), list(working))
    if not (values.is_cpu and _same_bits(rounded, found)):
        torch.where(rounded.view(torch.int16) == found.view(torch.int16), values, found, out=values)


def _take_differing(weights: torch.Tensor, masters: torch.Tensor, spare: torch.Tensor) -> None:
    """Do the same for one stretch of weights on the CPU; most often there is nothing to do.

    Nothing is compared element by element, which takes longer than all the rest: the smallest and the largest difference of
    the bits tell.
    """
    scratch = spare[: len(masters)]
    if weights.dtype == torch.bfloat16:
        # Those from the weight's bits less half of its last place round to it, up to those below plus half.
        differences = torch.sub(
            masters.view(torch.int32), scratch.copy_(weights).view(torch.int32), out=scratch.view(torch.int32)
        )
        smallest, largest = -0x8000, 0x7FFF
    else:
        rounded = scratch.view(weights.dtype)[: len(masters)].copy_(masters).view(torch.int16)
        differences = rounded.bitwise_xor_(weights.view(torch.int16))
        smallest, largest = 0, 0
    low, high = torch.aminmax(differences)
    if low < smallest or high > largest:
        same = differences.ge(smallest).logical_and_(differences.le(largest))
        torch.where(same, masters, weights.float(), out=masters)


def _same_bits(halves: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether two flat tensors are equal to the bit; waits for the device."""
    size = len(halves) // 4 * 4
    if halves.storage_offset() % 4 or others.storage_offset() % 4:
        return torch.equal(halves.view(torch.int16), others.view(torch.int16))
    same = torch.equal(halves[:size].view(torch.int64), others[:size].view(torch.int64))
    return same and torch.equal(halves[size:].view(torch.int16), others[size:].view(torch.int16))
