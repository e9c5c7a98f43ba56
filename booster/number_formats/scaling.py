"""Scales: one for a matrix, a row or a block, so that its largest number fits the format that it is rounded to.

Two forms of e4m3 bytes for sending numbers between ranks: blocks of 128 with a scale each (`encode_blocks`), and one scale
for a whole tensor, from which the receiver makes the same bytes again (`encode_tensorwise`). And a rotation by a Hadamard
matrix, which spreads an outlier over its block before it is scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from booster.common import arguments
from booster.number_formats.number_format import CARRIERS, E4M3, NumberFormat, round_to, rounded_within

ScaleKind = Literal["float32", "power_of_two", "e4m3"]

_E4M3_IN_BFLOAT16 = 0x87F0 - 0x10000  # where sign, exponent and mantissa are, as int16
_VECTOR = 32  # what torch reduces shorter rows of on a CPU, it takes number by number
DIVIDES_ON: tuple[str, ...] = ("cpu",)
"""Types of devices on which torch divides float32 numbers by a Python number as IEEE says."""
_TINY = 2.0**-126  # a scale below it is subnormal, and many devices take that for zero


@dataclass(frozen=True)
class Scaling:
    """What shares a scale, and what kind of number the scale is.

    Attributes:
        over: "tensor", "row", or a block of (rows, columns), such as (1, 32) or (16, 16). Blocks at the end of a matrix that
            they do not divide are smaller.
        scale: "float32" is the largest magnitude over the largest number of the format. "power_of_two" rounds that up, so
            that nothing is cut off (Mishra et al. 2025, arXiv 2506.08027). "e4m3", of blocks only, rounds it to an e4m3 number
            times one float32 scale of the whole matrix, which makes the largest block scale the largest e4m3 number (arXiv
            2509.25149).
    """

    over: Literal["tensor", "row"] | tuple[int, int]
    scale: ScaleKind = "float32"

    def __post_init__(self) -> None:
        over = self.over
        blocks = (
            isinstance(over, tuple) and len(over) == 2 and all(arguments.is_whole(each) and each > 0 for each in over)
        )
        if not (blocks or over in ("tensor", "row")):
            raise ValueError(
                arguments.refusal("over", over, "'tensor', 'row' or a block such as (1, 32), of rows and columns")
            )
        arguments.choice("scale", self.scale, ("float32", "power_of_two", "e4m3"))
        if self.scale == "e4m3" and not blocks:
            raise ValueError(f"scale='e4m3' is for blocks, got over={self.over!r}; pass a block such as (1, 16)")


@dataclass(frozen=True)
class ScaledTensor:
    """A matrix of m x n numbers in a format, and what to multiply them with.

    Attributes:
        values: in the torch dtype of the format, where it has one, else float32, or bfloat16 from a kernel.
        scale: float32, of shape () for a tensor, (m, 1) for rows, (blocks down, blocks across) for blocks.
        outer: of shape (), one more factor for all of it, or None.
        scaling: how they were made.
    """

    values: torch.Tensor
    scale: torch.Tensor
    outer: torch.Tensor | None
    scaling: Scaling

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of a block; None where there are none."""
        return self.scaling.over if isinstance(self.scaling.over, tuple) else None

    def scale_of_each(self) -> torch.Tensor:
        """`scale` for every number of a block, m x n; for a tensor or rows as it is, to be broadcast."""
        if self.block is None:
            return self.scale
        down, across = self.block
        return _in_rows(_of_each(self.scale, self.block).expand(-1, down, -1, across), self.values.shape)

    def values_in(self, dtype: torch.dtype) -> torch.Tensor:
        """`values` in `dtype`, float32 or bfloat16, which hold them exactly; any finite number where their scale is NaN."""
        if self.values.dtype != torch.float8_e4m3fn or self.values.device.type != "cpu":
            return self.values.to(dtype)
        # A cast that takes e4m3 numbers one by one on CPUs: there bits are moved to where bfloat16 has them, 4 times as fast.
        bits = self.values.view(torch.int8).to(torch.int16)  # the sign in all upper ones
        numbers = bits.bitwise_left_shift_(4).bitwise_and_(_E4M3_IN_BFLOAT16).view(torch.bfloat16)
        # The exponent of e4m3 was read with the bias of bfloat16.
        return numbers.mul_(2.0 ** (127 - E4M3.bias)).to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values times scales, without `outer`. bfloat16 holds them exactly for scales of blocks and powers of two."""
        over = self.scaling.over
        # bfloat16 holds powers of two, and a product of two of its numbers is rounded once.
        factors = dtype if self.scaling.scale == "power_of_two" else torch.float32
        values = self.values_in(factors)
        parts = _in_blocks(values, over) if isinstance(over, tuple) else values
        parts = parts * _of_each(self.scale, over).to(factors)
        return _in_rows(parts, self.values.shape).to(dtype)


def scale_to(
    x: torch.Tensor,
    target: NumberFormat,
    scaling: Scaling,
    *,
    noise: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> ScaledTensor:
    """Round the matrix `x` to `target` under the scales of `scaling`.

    scale: one for all of a float8 matrix, float32 of shape (), to take in place of the computed one; numbers too large are cut
    off.
    noise: as for `round_to`. A scale of zeros is the smallest one.
    """
    if x.dim() != 2:
        raise ValueError(
            f"scales are for matrices, got a tensor of shape {tuple(x.shape)}; flatten all but the last dimension"
        )
    if x.dtype not in CARRIERS:
        raise ValueError(f"numbers are rounded to {target} from float32, bfloat16 or float16, got {x.dtype}")
    over = scaling.over
    # Where there is an inf or NaN under a scale, it and all numbers under it become NaN.
    if scale is not None and target.dtype is not None:
        values = (x.float() / scale).clamp_(target.lowest, target.largest).to(target.dtype)
        return ScaledTensor(values, scale, None, scaling)
    parts = _in_blocks(x.contiguous().float(), over) if isinstance(over, tuple) else x.float()
    size = _sizes(parts, over)
    largest = share_of(size, target)
    outer = None
    # Two levels: a float32 scale of the matrix puts the block scales into the range of e4m3.
    if scaling.scale == "e4m3":
        outer = share_of(share_of(_sizes(size, "tensor"), target), E4M3).clamp(min=_TINY)
        scale = round_to(largest / outer, E4M3).clamp(min=E4M3.smallest)
    elif scaling.scale == "power_of_two":
        scale = power_of_two_above(largest)
    else:
        scale = scale_of(largest)
    values = parts / _of_each(scale if outer is None else scale * outer, over)
    # torch's casts to float8 round to nearest even, as `rounded_within` does, in one operation.
    low = target.dtype if target.exponent_bits else None
    if low is None or noise is not None or outer is not None:
        if noise is not None and isinstance(over, tuple):
            noise = _in_blocks(noise, over)
        values = rounded_within(values.clamp_(target.lowest, target.largest), target, noise)
    if low is not None:
        values = values.to(low)  # what scales are not rounded down for does not round beyond the largest number
    return ScaledTensor(_in_rows(values, x.shape), scale, outer, scaling)


def share_of(largest: torch.Tensor, target: NumberFormat) -> torch.Tensor:
    """Return `largest` / `target.largest`, float32, rounded once on any device."""
    # CUDA divides by a Python number by multiplying with its reciprocal, and so does Inductor there: often an ulp off.
    if largest.device.type in DIVIDES_ON:
        return largest / target.largest
    # In float64 that is near enough, as no float32 number over one of these is so close to the middle of two.
    return (largest.double() / target.largest).float()


def scale_of(x: torch.Tensor) -> torch.Tensor:
    """Return the float32 scales that are `x`, or the smallest one where that is below it; NaN for inf and NaN."""
    return torch.where(torch.isfinite(x), x.clamp(min=_TINY), torch.nan)


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two, from 2**-126 to 2**127, that is at least `x`; of inf and NaN, NaN.

    x: float32 and not negative.
    """
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0).int()  # rounded up; exact powers of two stay
    # The exponents 0 and 255 are of subnormal numbers and of inf.
    return torch.where(torch.isfinite(x), (exponent.clamp(1, 254) << 23).view(torch.float32), torch.nan)


def largest_under(x: torch.Tensor, over: Literal["tensor", "row"] | tuple[int, int]) -> torch.Tensor:
    """Return the largest magnitude of the matrix `x` under each scale: of shape (), (m, 1) or (blocks down, blocks across)."""
    return _sizes(_in_blocks(x, over) if isinstance(over, tuple) else x, over)


def _sizes(parts: torch.Tensor, over: Literal["tensor", "row"] | tuple[int, int]) -> torch.Tensor:
    """The same of a matrix that is in blocks already."""
    if isinstance(over, tuple):
        sizes = parts.abs()
        sizes = sizes.amax(1) if over[0] > 1 else sizes[:, 0]
        if over[1] < _VECTOR and over[1] % 2 == 0:
            sizes = torch.maximum(*sizes.chunk(2, -1))
        return sizes.amax(-1)
    if not parts.numel():
        return parts.new_zeros(() if over == "tensor" else (parts.shape[0], 1))
    return parts.abs().amax() if over == "tensor" else parts.abs().amax(1, keepdim=True)


def _in_blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the matrix `x`, filled up with zeros, as blocks down x rows x blocks across x columns."""
    (rows, columns), (down, across) = x.shape, block
    if rows % down or columns % across:
        x = F.pad(x, (0, -columns % across, 0, -rows % down))
    return x.reshape(-(-rows // down), down, -(-columns // across), across)


def _in_rows(parts: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the matrix of `shape` of which `_in_blocks` made `parts`; what is no blocks as it is."""
    if parts.dim() != 4:
        return parts
    rows, columns = shape
    return parts.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()


def _of_each(scale: torch.Tensor, over: Literal["tensor", "row"] | tuple[int, int]) -> torch.Tensor:
    """Return scales in the shape in which they are broadcast over what they are for."""
    return scale[:, None, :, None] if isinstance(over, tuple) else scale


BLOCK = 128
"""Numbers that share a scale."""
BLOCK_BYTES = BLOCK + 1


def encode_blocks(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as uint8 of shape (blocks, 129): 128 numbers in e4m3, and the exponent of the power of two that scales them.

    x: 1-dim, of any length and floating dtype; the last block is filled up with zeros. A number is off by at most 1/16 of
    itself, or 2**-17 of the largest finite one of its block where that is more.
    """
    blocks = F.pad(x.float(), (0, -len(x) % BLOCK)).view(-1, BLOCK)
    finite = torch.isfinite(blocks)
    # Inf and NaN become NaN, which says nothing of their neighbours: their block is scaled by its finite numbers.
    scale = power_of_two_above(share_of(largest_under(blocks.where(finite, 0.0), "row"), E4M3))
    packed = torch.empty(len(blocks), BLOCK_BYTES, dtype=torch.uint8, device=x.device)
    # inf by way of NaN, because torch casts it to the largest number since some version, and to NaN before.
    packed[:, :BLOCK] = (blocks / scale).where(finite, torch.nan).to(torch.float8_e4m3fn).view(torch.uint8)
    packed[:, BLOCK:] = (scale.view(torch.int32) >> 23).to(torch.uint8)
    return packed


def decode_blocks(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers, float32 and 1-dim, that `encode_blocks` made `packed` of; zeros filled up are among them."""
    scale = (packed[:, BLOCK:].to(torch.int32) << 23).view(torch.float32)
    return (packed[:, :BLOCK].contiguous().view(torch.float8_e4m3fn).float() * scale).view(-1)


def encode_tensorwise(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return `x` in e4m3, as `scale_to(..., E4M3, Scaling("tensor"))` rounds a tensor of the largest magnitude `largest`.

    x: any shape, maybe a part of that tensor. largest: float32, of shape (); where it is inf or NaN all becomes NaN.
    """
    return (x.float() / scale_of(share_of(largest, E4M3))).clamp(E4M3.lowest, E4M3.largest).to(torch.float8_e4m3fn)


def decode_tensorwise(values: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return in `dtype` the numbers that `encode_tensorwise` made `values` of; of these it makes the same again.

    That is: `scale_to` of the result has the scale and the bytes of `scale_to` of the original, bit for bit.
    dtype: float32, or bfloat16 where it holds `largest`; `largest` above 2**-110, below which products with a scale underflow.
    """
    # For a number a and its scale s, a / 448 rounded, 448 s rounded and divided gives s again: it would not where 7 s is
    # half-way between two numbers, but such an s is no quotient by 448.
    return values.float().mul_(scale_of(share_of(largest, E4M3))).to(dtype)


ROTATION = 16
# Signs of a random Hadamard transform, drawn once, as in the paper (arXiv 2509.25149): all layers and steps rotate alike,
# and both operands must.
SIGNS = (1, 1, -1, 1, -1, -1, 1, -1, 1, 1, 1, -1, -1, 1, -1, -1)
_HADAMARD = [
    [float(sign * (-1) ** (row & column).bit_count()) for column in range(ROTATION)] for row, sign in enumerate(SIGNS)
]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return the float32 matrix `x` with every 16 neighbours of a row, some of their signs turned, through a Hadamard matrix.

    The rotation is orthogonal, so it leaves `a @ b.t()` as it is. The number of columns must be a multiple of 16.
    """
    signs = torch.tensor(_HADAMARD, dtype=torch.float32, device=x.device)
    quarters = x.reshape(-1, ROTATION) * ROTATION**-0.5
    if x.device.type == "cpu" and len(quarters) > 1:
        # On CPUs it sums in this order, but for a single row.
        return (quarters @ signs).view(x.shape)
    # A quarter of each number is added or taken away, one after the other, on every device: a product of float32 matrices would
    # sum in another order on a GPU, and in TF32 where that is allowed.
    total = torch.zeros_like(quarters)
    for place in range(ROTATION):
        total = total + quarters[:, place : place + 1] * signs[place]
    return total.view(x.shape)
