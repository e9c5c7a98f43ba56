"""What rules, weights and states have in common on a device: bits of float32 numbers, halves, powers.

Kernels divide and take roots as IEEE says, and are launched without fused multiply-adds, so that numbers are those of a CPU.
"""

import triton
import triton.language as tl

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # what a kernel calls the dtypes of weights and gradients
BF16 = tl.constexpr(BFLOAT16)
F32 = tl.constexpr(FLOAT32)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def number_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def plain_bits(x):
    """Bits of float32 numbers, every NaN the plain one: others could round to infinity, or to zero."""
    # Only a NaN differs from itself.
    return tl.where(x != x, 0x7FC00000, bits_of(x))


@triton.jit
def half_bits(x, HALF: tl.constexpr):
    """Bits of the half numbers that `x` rounds to, 0 to 65535; bfloat16 ties go away from zero."""
    if HALF == BF16:
        # Half of the last place that stays, added below it, rounds; the upper 16 bits are the bfloat16 number.
        return ((plain_bits(x) + 0x8000) >> 16) & 0xFFFF
    else:
        # The cast rounds ties to even.
        return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def even_bits(x, HALF: tl.constexpr):
    """As `half_bits`, with ties to even, as torch casts."""
    if HALF == BF16:
        bits = plain_bits(x)
        # One less than half, and the bit above: a tie goes up just from an odd number.
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    else:
        return half_bits(x, HALF)


@triton.jit
def half_number(bits, HALF: tl.constexpr):
    """Float32 numbers of the bits of halves."""
    if HALF == BF16:
        return number_of(bits << 16)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_half(pointer, offsets, mask):
    """Bits of half numbers, 0 to 65535."""
    return tl.load(pointer.to(tl.pointer_type(tl.int16)) + offsets, mask, 0).to(tl.int32) & 0xFFFF


@triton.jit
def store_half(pointer, offsets, mask, bits):
    tl.store(pointer.to(tl.pointer_type(tl.int16)) + offsets, bits.to(tl.int16), mask)


@triton.jit
def load_wide(pointer, offsets, mask, DTYPE: tl.constexpr):
    """Numbers of any of the three dtypes, in float32."""
    if DTYPE == F32:
        return tl.load(pointer.to(tl.pointer_type(tl.float32)) + offsets, mask, 0.0)
    else:
        return half_number(load_half(pointer, offsets, mask), DTYPE)


@triton.jit
def ulp16(x, SHARE: tl.constexpr):
    """The distance between float16 numbers of the magnitude of `x`, times a share of it."""
    # The exponent alone is the power of two below; float16 has 10 bits behind it, so times 2 ** -10.
    wide = number_of(bits_of(x) & 0x7F800000) * (0.0009765625 * SHARE)
    # 2 ** -24 is the ulp of subnormal numbers, 32 that of the largest.
    return tl.minimum(tl.maximum(wide, 5.9604644775390625e-08 * SHARE), 32.0 * SHARE)


@triton.jit
def whole(x):
    """Rounded to whole numbers, ties to even; of at most 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def finite_or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def power(base, exponent):
    """`base` to a whole power of at least 0, both in float64, by squaring."""
    result = base * 0.0 + 1.0
    left = exponent.to(tl.int64)
    for _ in range(32):
        result = tl.where((left & 1) != 0, result * base, result)
        base = base * base
        left = left >> 1
    return result
