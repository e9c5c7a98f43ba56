"""Numbers as bytes to be sent or kept: blocks of e4m3, each with a scale of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from booster.number_formats.formats import E4M3
from booster.number_formats.scaling import largest_under, power_of_two_above

BLOCK = 128
"""Numbers that share a scale."""
BLOCK_BYTES = BLOCK + 1


def encode_blocks(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as uint8 of shape (blocks, 129): 128 numbers in e4m3, and the exponent of the power of two that scales them.

    x: 1-dim, of any length and floating dtype; the last block is filled up with zeros. A number is off by at most 1/16 of
    itself, or 2**-17 of the largest finite one of its block where that is more. inf and NaN become NaN, which says nothing of
    their neighbours: their block is scaled by its finite numbers.
    """
    blocks = F.pad(x.float(), (0, -len(x) % BLOCK)).view(-1, BLOCK)
    finite = torch.isfinite(blocks)
    scale = power_of_two_above(largest_under(blocks.where(finite, 0.0), "row") / E4M3.largest)
    packed = torch.empty(len(blocks), BLOCK_BYTES, dtype=torch.uint8, device=x.device)
    # inf by way of NaN, because torch casts it to the largest number since some version, and to NaN before.
    packed[:, :BLOCK] = (blocks / scale).where(finite, torch.nan).to(torch.float8_e4m3fn).view(torch.uint8)
    packed[:, BLOCK:] = (scale.view(torch.int32) >> 23).to(torch.uint8)
    return packed


def decode_blocks(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers, float32 and 1-dim, that `encode_blocks` made `packed` of; zeros filled up are among them."""
    scale = (packed[:, BLOCK:].to(torch.int32) << 23).view(torch.float32)
    return (packed[:, :BLOCK].contiguous().view(torch.float8_e4m3fn).float() * scale).view(-1)
