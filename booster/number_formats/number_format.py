"""Number formats of 4 to 19 bits: what they hold, and rounding float32 numbers to them, on any device.

Sources: OCP 8-bit Floating Point Specification 1.0 (e4m3, e5m2), OCP Microscaling Formats 1.0 (e2m1, int8), NVIDIA's A100
whitepaper (tf32), Dettmers et al. 2023, "QLoRA" (arXiv 2305.14314), appendix E (nf4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_MANTISSA = 23  # bits, of float32
_EXPONENT = 0x7F800000  # its bits
CARRIERS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class NumberFormat:
    """A number format. A number is (-1)^sign * 2^(exponent - bias) * 1.mantissa, or subnormal where the exponent is 0.

    Attributes:
        exponent_bits: 0 means whole numbers in two's complement.
        mantissa_bits: without the hidden one.
        largest: the largest finite number.
        has_inf: whether the largest exponent means inf and NaN, as in IEEE 754.
        has_nan: whether there is a NaN.
        dtype: the torch dtype of one number in a byte, if any.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    has_inf: bool = False
    has_nan: bool = False
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits + 1

    @property
    def lowest(self) -> float:
        """The finite number furthest below zero."""
        return -self.largest - (self.exponent_bits == 0)

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias) if self.exponent_bits else self.smallest

    @property
    def smallest(self) -> float:
        """The smallest number above zero, subnormal where the format has subnormals."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits) if self.exponent_bits else 1.0

    def __str__(self) -> str:
        return self.name


E4M3 = NumberFormat("e4m3fn", 4, 3, 7, 448.0, has_nan=True, dtype=torch.float8_e4m3fn)
E5M2 = NumberFormat("e5m2", 5, 2, 15, 57344.0, has_inf=True, has_nan=True, dtype=torch.float8_e5m2)
E2M1 = NumberFormat("e2m1", 2, 1, 1, 6.0)
INT8 = NumberFormat("int8", 0, 7, 0, 127.0, dtype=torch.int8)
TF32 = NumberFormat("tf32", 8, 10, 127, (2 - 2.0**-10) * 2.0**127, has_inf=True, has_nan=True)


def round_to(x: torch.Tensor, target: NumberFormat, *, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x` with every number replaced by one of `target`, in the dtype of `x`, which holds them exactly but for tf32.

    To the nearest, ties to the even one; what is beyond the largest number, inf included, becomes the largest. NaN stays NaN,
    also where the format has none, so that it is seen. Zeros keep their sign. In TF32 inf stays, and what rounds beyond the
    largest becomes inf.

    noise: numbers from [0, 1) of the shape of `x`, which make the rounding stochastic: up, away from zero, with the chance
    that makes the expected value `x`. `torch.rand(x.shape, generator=g)`, or `noise_of(x)`.
    Raises ValueError for a dtype wider than float32, which would be rounded twice.
    """
    if x.dtype not in CARRIERS:
        raise ValueError(f"numbers are rounded to {target} from float32, bfloat16 or float16, got {x.dtype}")
    # The cast alone gives inf or NaN beyond the largest number, by version and format; so it is clamped before.
    if noise is None and target.dtype is not None and target.exponent_bits:
        return x.clamp(target.lowest, target.largest).to(target.dtype).to(x.dtype)
    wide = x.float()
    if target is TF32:
        rounded = _to_upper_bits(wide, target.mantissa_bits, noise)
    else:
        rounded = rounded_within(wide.clamp(target.lowest, target.largest), target, noise)
    return rounded.to(x.dtype)


def rounded_within(x: torch.Tensor, target: NumberFormat, noise: torch.Tensor | None) -> torch.Tensor:
    """Return what `round_to` does of float32 numbers that lie within `target`, not TF32; `x` is overwritten."""
    if target.exponent_bits:
        powers = (x.view(torch.int32) & _EXPONENT).view(torch.float32)
        spacing = powers.clamp_(min=target.smallest_normal).mul_(2.0**-target.mantissa_bits)
        if noise is None:
            return x.div_(spacing).round_().mul_(spacing)
    elif noise is None:
        return x.round_()
    else:
        spacing = torch.ones((), dtype=torch.float32, device=x.device)
    # Magnitudes, as `floor` of a negative number rounds away from zero.
    size = (x / spacing).abs_()
    below = size.floor()
    up = size.sub_(below).sub_(noise).ceil_()  # 1 where the noise is below what is left, else 0
    below.add_(up).mul_(spacing)
    return below.copysign_(x)


def noise_of(x: torch.Tensor) -> torch.Tensor:
    """Return numbers from [0, 1) for stochastic rounding of `x`, a hash of all its bits, and of each number and its place.

    The same tensor gets the same noise on every rank, in every recomputation and after a resume, and no generator moves. Cost.
    """
    bits = x.contiguous().float().view(torch.int32).flatten()
    place = torch.arange(bits.numel(), dtype=torch.int32, device=x.device)
    # A tensor that differs in a bit gets other noise everywhere.
    whole = _mix_((bits.sum() & 0x7FFFFFFF).to(torch.int32))
    # About 15 elementwise integer operations.
    mixed = _mix_(_mix_(place.add_(whole)).bitwise_xor_(bits))
    return mixed.bitwise_and_(0xFFFFFF).float().mul_(2.0**-24).view(x.shape)


def encode(x: torch.Tensor, target: NumberFormat) -> torch.Tensor:
    """Return the bit patterns of `x`, numbers of `target`, one in the low bits of each byte; uint8.

    For formats of fewer than 8 bits, which have no NaN. Where torch has a dtype, `x.to(target.dtype)` has the patterns.
    """
    bits = x.float().abs().view(torch.int32)
    exponent = (bits >> _MANTISSA) - 127 + target.bias
    # The upper bits of the mantissa behind the exponent, as in every IEEE format; a subnormal is a multiple of the smallest.
    normal = (exponent << target.mantissa_bits) + ((bits & 0x7FFFFF) >> (_MANTISSA - target.mantissa_bits))
    code = torch.where(exponent > 0, normal, (x.float().abs() / target.smallest).to(torch.int32))
    return (code + (torch.signbit(x).to(torch.int32) << (target.bits - 1))).to(torch.uint8)


# ---------------------------------------------------------------------- inside


def _to_upper_bits(x: torch.Tensor, mantissa_bits: int, noise: torch.Tensor | None) -> torch.Tensor:
    """Keep the sign, the exponent and so many bits of the mantissa of float32 numbers; a carry runs into the exponent."""
    dropped = _MANTISSA - mantissa_bits
    bits = x.contiguous().view(torch.int32)
    if noise is None:
        more = ((bits >> dropped) & 1) + ((1 << (dropped - 1)) - 1)
    else:
        more = (noise * (1 << dropped)).to(torch.int32)
    rounded = ((bits + more) >> dropped << dropped).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """Hash int32 numbers in place, by MurmurHash3's finaliser, and return them; products wrap."""
    # The mask makes a logical shift of torch's arithmetic one.
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= -2048144789
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= -1028477387
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


# Sixteen numbers from -1 to 1, denser around zero, as normally distributed weights are. Zero and both ends are among them.
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_BETWEEN = [(low + high) / 2 for low, high in zip(NF4_LEVELS, NF4_LEVELS[1:], strict=False)]
_PAIRS = [[NF4_LEVELS[byte & 15], NF4_LEVELS[byte >> 4]] for byte in range(256)]


def encode_nf4(x: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest levels, two in a byte, the first in the low half: uint8 of shape (m, half of n, up).

    x: float32 of shape (m, n), numbers from -1 to 1; numbers beyond an end get that end. NaN is not legal.
    """
    codes = torch.bucketize(x, torch.tensor(_BETWEEN, dtype=torch.float32, device=x.device)).to(torch.uint8)
    # A row of odd length is filled up with a zero.
    codes = F.pad(codes, (0, x.shape[1] % 2), value=NF4_LEVELS.index(0.0))
    return codes[:, ::2] | codes[:, 1::2] << 4


def decode_nf4(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the numbers, float32 of shape (m, columns), of the codes that `encode_nf4` made."""
    pairs = F.embedding(codes.int(), torch.tensor(_PAIRS, dtype=torch.float32, device=codes.device))
    return pairs.flatten(1)[:, :columns]
