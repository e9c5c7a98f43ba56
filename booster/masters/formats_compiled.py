"""Master formats as arithmetic without side effects, which a compiler can fuse with an optimizer's step.

`formats.py` says what the bits are, and works in place, a pass over memory for each operation. A compiler makes one pass of
the whole update, but only of functions that return new tensors. Two suffice::

    join(format, weights, residual)  -> masters            float32, from weights and residual bits
    split(format, masters, dtype)    -> weights, residual  the weights still in float32, though exact in `dtype`

Both agree bit for bit with the formats that work in place. Writing both on one definition was tried, and 5 to 7 times slower
without a compiler.

Planes
------
Torch's compiler for CPUs does not vectorise int16. A remainder is therefore made positive and kept as two bytes, in two rows
of uint8, the lower bytes first::

    4059 + 32768 = 36827 = 0x8FDB   ->   rest[0] = 0xDB, rest[1] = 0x8F

A NaN is what differs from itself: the compiler does not vectorise `isnan`.

Rounding inside float32
-----------------------
The compiler drops a cast to half that is followed by one to float32, and with it the rounding. So values are rounded
as float32 numbers: their last digits become zero. bfloat16 keeps 16 of the 32 bits, ties away from zero::

    (bits + 0x8000) & 0xFFFF0000

float16 drops the last 13, ties to even: 0xFFF lifts what is above half way, and the last bit that stays decides about ties::

    (bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000

Below 2**-14 float16 has only multiples of 2**-24. Those are also the steps of float32 from 0.5 to 1, so adding 0.5 and
taking it away again rounds to them.

Quantized states
----------------
Likewise `quantized_state.py` works in place, and here are::

    unpack(way, codes, factors)       -> values           float32, from what is kept
    pack(way, values, lanes, present) -> codes, scales    to be kept

Both agree bit for bit with `QuantizedState`, but for groups that have a NaN. Torch's compiler for CPUs does not
vectorise int16: what is one number for 32 elements comes in as `QuantizedState.factors`, and goes out as int32.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch

from booster.masters.formats import (
    LARGEST,
    STEP,
    Float32Master,
    Format,
    Kahan,
    Nearest,
    Same,
    Split24,
    Split24BFloat16,
    SplitBFloat16,
    SplitFloat16,
)
from booster.masters.quantized_state import (
    BEND,
    GROUP,
    LEVELS,
    SMALLEST,
    STEEPNESS,
    Encoding,
    bits_at_zero,
    narrow_scales,
)
from booster.masters.rounding import Views, fractions, in_chunks, pieces_like, scale_random_bits, whole_steps

_OFFSET = 2**15  # what makes a signed remainder a positive number


class Planes(Format):
    """A split master with a remainder of the shape (2, size), uint8."""

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        residual = torch.zeros(2, size, dtype=torch.uint8, device=device)
        residual[1].fill_(_OFFSET >> 8)
        return residual

    def read(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        assert residual is not None
        torch._foreach_copy_(pieces_like(values, working), list(working))
        for value, low, high in in_chunks(values, *residual):
            value.copy_(self.join(value, _counted(low, high)))

    def write(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        assert residual is not None
        for value, low, high in in_chunks(values, *residual):
            rounded, left = self.split(value)
            for plane, new in zip((low, high), _planes(left), strict=True):
                plane.copy_(new)
            value.copy_(rounded)
        torch._foreach_copy_(list(working), pieces_like(values, working))

    @abstractmethod
    def join(self, weights: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Return the masters of float32 `weights` and the int32 remainder."""

    @abstractmethod
    def split(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rounded weights in float32, and the int32 remainder."""


class BFloat16Planes(Planes):
    """Keeps what `SplitBFloat16` does."""

    def join(self, weights: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        joined = (weights.view(torch.int32) + left).view(torch.float32)
        return torch.where((joined != joined) & (weights == 0), weights, joined)

    def split(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = round_bfloat16(values)
        return rounded, values.view(torch.int32) - rounded.view(torch.int32)


class Float16Planes(Planes):
    """Keeps what `SplitFloat16` does."""

    def join(self, weights: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        joined = weights + _step(weights) * left.float()
        return _accepted(joined, round_float16(joined), weights)

    def split(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = round_float16(values)
        left = (values - rounded) / _step(rounded)
        return rounded, whole_steps(torch.where(left.isfinite(), left, 0.0)).to(torch.int32)


def compiled_format(format: Format) -> Format:
    """Return the format for a compiled step that keeps what `format` keeps."""
    if isinstance(format, SplitBFloat16):
        return BFloat16Planes()
    return Float16Planes() if isinstance(format, SplitFloat16) else format


def fuses(format: Format) -> bool:
    """Return whether `join` and `split` know `format`."""
    # `Stochastic` draws from a generator, which is not traced.
    return isinstance(format, (Planes, Split24)) or type(format) in (Float32Master, Same, Nearest, Kahan)


def rows(residual: torch.Tensor | None) -> list[torch.Tensor]:
    """Return what a bucket keeps, as tensors of its size."""
    if residual is None:
        return []
    return [residual] if residual.dim() == 1 else list(residual)


def join(format: Format, weights: torch.Tensor, residual: list[torch.Tensor]) -> torch.Tensor:
    """Return new float32 masters from `weights` and `rows` of what is kept."""
    if isinstance(format, Same):
        return weights.clone()
    wide = weights.float()
    if isinstance(format, Planes):
        return format.join(wide, _counted(*residual))
    if isinstance(format, Split24BFloat16):
        joined = (wide.view(torch.int32) + (residual[0].to(torch.int32) << 8)).view(torch.float32)
        return torch.where((joined != joined) & (wide == 0), wide, joined)
    if isinstance(format, Split24):
        joined = wide + _ulp(wide) * STEP * residual[0].float()
        return _accepted(joined, round_float16(joined), wide)
    if not residual:
        return wide
    joined = residual[0] if isinstance(format, Float32Master) else wide + residual[0].float()
    return _accepted(joined, _rounded(joined, weights.dtype), wide)


def split(
    format: Format, values: torch.Tensor, dtype: torch.dtype, lanes: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the weights that `values` round to, in float32 but exact in `dtype`, and new `rows` of what is kept.

    lanes: the random numbers of this step, for masters of 24 bits."""
    if isinstance(format, Same):
        return values, []
    if isinstance(format, Split24):
        assert lanes is not None
        return _split_24(format, values, lanes)
    if isinstance(format, Planes):
        rounded, left = format.split(values)
        return rounded, list(_planes(left))
    rounded = _rounded(values, dtype)
    if isinstance(format, Float32Master):
        return rounded, [values]
    if not isinstance(format, Kahan):
        return rounded, []
    error = values - rounded
    left = _nearest(torch.where(error.isfinite(), error, 0.0), dtype)
    # A remainder that rounds the weight up would count it twice.
    moves = (_rounded(rounded + left, dtype) != rounded) & (left != 0)
    return rounded, [torch.where(moves, _towards_zero(left, dtype), left)]


def _split_24(format: Split24, values: torch.Tensor, lanes: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    if isinstance(format, Split24BFloat16):
        bits = torch.where(values != values, math.nan, values).view(torch.int32)
        master = (bits.view(-1, 64) + (lanes >> 8)).view(-1) >> 8
        high = (master + 0x80) >> 8
        return (high << 16).view(torch.float32), [(master - (high << 8)).to(torch.int8)]
    rounded = round_float16(values)
    left = (values - rounded) / (_ulp(rounded) * STEP)
    left = torch.where(left.isfinite(), left, 0.0).view(-1, 64) + fractions(lanes)
    return rounded, [left.floor().clamp(-LARGEST, LARGEST).view(-1).to(torch.int8)]


def round_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Return `values` rounded to bfloat16, ties away from zero."""
    rounded = ((values.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return torch.where(values != values, values, rounded)  # the carry of a NaN can reach its sign


def round_float16(values: torch.Tensor) -> torch.Tensor:
    """Return `values` rounded to float16 as torch does, ties to even, but never in float16."""
    # The compiler drops a cast down that is followed by a cast up, and with it the rounding.
    bits = values.view(torch.int32)
    # Adds half of the last place, less one where the place above is even, and cuts off.
    normal = ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).view(torch.float32)
    size = values.abs()
    tiny = torch.copysign((size + 0.5) - 0.5, values)  # multiples of 2**-24
    rounded = torch.where(size < 2.0**-14, tiny, normal)
    # Halfway beyond the largest float16, from where torch rounds to inf.
    return torch.where(size >= 65520.0, values * float("inf"), rounded)


def _accepted(joined: torch.Tensor, rounded: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the masters, or the weights where a master does not round to its weight to the bit."""
    return torch.where(rounded.view(torch.int32) == weights.view(torch.int32), joined, weights)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return round_bfloat16(values) if dtype == torch.bfloat16 else round_float16(values)


def _nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return finite `values` rounded as torch does, ties to even."""
    if dtype != torch.bfloat16:
        return round_float16(values)
    bits = values.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def _towards_zero(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the next number of `dtype` that is smaller in magnitude than `values`, powers of two."""
    # Binary digits of a number, and the smallest one.
    digits, smallest = (8, 2.0**-133) if dtype == torch.bfloat16 else (11, 2.0**-24)
    return values - torch.copysign((values.abs() * 2.0**-digits).clamp(min=smallest), values)


def _counted(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return (high.to(torch.int32) << 8) + low.to(torch.int32) - _OFFSET


def _planes(left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counted = left + _OFFSET
    return (counted & 255).to(torch.uint8), ((counted >> 8) & 255).to(torch.uint8)


def _step(weights: torch.Tensor) -> torch.Tensor:
    return _ulp(weights) * 2.0**-14


def _ulp(weights: torch.Tensor) -> torch.Tensor:
    exponents = (weights.view(torch.int32) & 0x7F800000).view(torch.float32)
    return (exponents * 2.0**-10).clamp(2.0**-24, 2.0**5)


def dequantize(
    encoding: Encoding, codes: torch.Tensor, factors: torch.Tensor | None, divisor: torch.Tensor | None = None
) -> torch.Tensor:
    """Return new float32 numbers. factors: None with "bf16". divisor: codes of what ratios are ratios to."""
    if factors is None:
        return codes.float()
    values = _shares(codes, encoding) if encoding == "unsigned" else codes.float()
    values = values * values.abs() if encoding == "signed" else values
    values = (values.view(-1, GROUP) * factors[:, None]).view(-1)
    return values if divisor is None else values * _shares(divisor, encoding)


def _shares(codes: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    bent, steepness = codes.to(torch.int32) + BEND, STEEPNESS[encoding]
    return (bits_at_zero(steepness) - steepness * bent * bent).view(torch.float32)


def quantize(
    encoding: Encoding,
    values: torch.Tensor,
    lanes: torch.Tensor,
    present: torch.Tensor | None,
    divisor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return new codes, and scales as int32, None with "bf16".

    lanes: 64 random numbers below 2**16, int32. present: where the bucket has elements; zeros are kept elsewhere. divisor: as
    of `dequantize`.
    """
    if present is not None:
        values = torch.where(present, values, 0.0)
    if encoding == "bf16":
        values = torch.where(values != values, math.nan, values)  # isnan is not vectorised
        # Random bits added below the place that is kept: stochastic rounding.
        bits = (values.view(torch.int32).view(-1, 64) + lanes).view(-1) & -0x10000
        return bits.view(torch.float32), None
    if divisor is not None:
        values = values / _shares(divisor, encoding)
    noise = fractions(lanes).view(1, -1, GROUP)
    grouped = values.view(-1, 64 // GROUP, GROUP)
    sizes = grouped if encoding == "unsigned" else grouped.abs()
    largest = sizes.amax(2, keepdim=True)
    least = largest.clamp(min=SMALLEST[encoding])
    shares = sizes * (least.reciprocal() * LEVELS[encoding])
    if encoding == "unsigned":
        steepness = STEEPNESS[encoding]
        bits = shares.view(torch.int32) - bits_at_zero(steepness)
        wide = (bits.float() * (-1 / steepness)).sqrt() + (noise - float(BEND))
        codes = wide.to(torch.int32).clamp(max=255).to(torch.uint8)
    else:
        codes = torch.copysign((shares.sqrt() if encoding == "signed" else shares) + noise, grouped).to(torch.int8)
    scales = narrow_scales((least * (largest != 0)).view(-1, 2), scale_random_bits(lanes))
    return codes.view(-1), scales.view(-1)
