"""How kernels read and write what is stepped: forms of weights, and forms of optimizer states.

A form is a pair of jit functions. `masters/formats.py` and `masters/quantized_state.py` define the bits. Here is the same
arithmetic once more, for a GPU; tests hold the two together to the bit.

    weights   load(weights, residual, offsets, mask, HALF) -> float32
              store(weights, residual, offsets, mask, values, random_bits, HALF)
    states    open(codes, scales, offsets, mask) -> float32
              close(codes, scales, first, offsets, mask, values, random_bits, TILE) -> codes

`first` is the first of `offsets`, a multiple of `TILE` elements; a state begins at a multiple of 64. `random_bits` points to 64
random numbers below 2**16. A half-precision weight that somebody else wrote since the last step is its own master weight: each
element is compared with what its master rounds to.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from booster.kernels.arithmetic import (
    BF16,
    bits_of,
    even_bits,
    finite_or_zero,
    half_bits,
    half_number,
    load_half,
    number_of,
    plain_bits,
    store_half,
    ulp16,
    whole,
)
from booster.masters.formats import (
    Float32Master,
    Kahan,
    Nearest,
    Same,
    Split24BFloat16,
    Split24Float16,
    SplitBFloat16,
    SplitFloat16,
    Stochastic,
)


@dataclass(frozen=True)
class WeightForm:
    """load, store: see the module. bytes_kept: of the residual, for an element. stochastic: whether it draws random numbers.
    noise: whether `residual` points to a random number for each element, made for this step by the format's `noise`.
    """

    load: Any
    store: Any
    bytes_kept: int = 0
    stochastic: bool = False
    noise: bool = False


@triton.jit
def _lane(random_bits, offsets):
    return tl.load(random_bits + (offsets & 63))


@triton.jit
def _own(master, bits, HALF: tl.constexpr):
    """Masters where they round to their weights, elsewhere the weights."""
    return tl.where(half_bits(master, HALF) == bits, master, half_number(bits, HALF))


@triton.jit
def _not_a_zero(master, bits):
    """A zero that somebody wrote, with the residual bits of another weight, reads as NaN: take the zero."""
    # Bits 0x7FFF without sign: of a zero none is set.
    return tl.where((master != master) & ((bits & 0x7FFF) == 0), half_number(bits, BF16), master)


@triton.jit
def _load_full(weights, residual, offsets, mask, HALF: tl.constexpr):
    return tl.load(weights.to(tl.pointer_type(tl.float32)) + offsets, mask, 0.0)


@triton.jit
def _store_full(weights, residual, offsets, mask, values, random_bits, HALF: tl.constexpr):
    tl.store(weights.to(tl.pointer_type(tl.float32)) + offsets, values, mask)


@triton.jit
def _load_float32_master(weights, residual, offsets, mask, HALF: tl.constexpr):
    master = tl.load(residual.to(tl.pointer_type(tl.float32)) + offsets, mask, 0.0)
    return _own(master, load_half(weights, offsets, mask), HALF)


@triton.jit
def _store_float32_master(weights, residual, offsets, mask, values, random_bits, HALF: tl.constexpr):
    tl.store(residual.to(tl.pointer_type(tl.float32)) + offsets, values, mask)
    store_half(weights, offsets, mask, half_bits(values, HALF))


@triton.jit
def _load_split(weights, residual, offsets, mask, HALF: tl.constexpr):
    bits = load_half(weights, offsets, mask)
    left = tl.load(residual.to(tl.pointer_type(tl.int16)) + offsets, mask, 0)
    if HALF == BF16:
        return _not_a_zero(((bits << 16) + left.to(tl.int32)).to(tl.float32, bitcast=True), bits)
    else:
        weight = half_number(bits, HALF)
        # 2 ** -14 of an ulp is what the remainder counts in.
        return _own(weight + ulp16(weight, 6.103515625e-05) * left.to(tl.float32), bits, HALF)


@triton.jit
def _store_split(weights, residual, offsets, mask, values, random_bits, HALF: tl.constexpr):
    bits = half_bits(values, HALF)
    if HALF == BF16:
        left = plain_bits(values)
    else:
        weight = half_number(bits, HALF)
        # Of an infinite weight there is no distance; its master is as infinite.
        distance = finite_or_zero(tl.div_rn(values - weight, ulp16(weight, 6.103515625e-05)))
        # What is not half an ulp must not become it.
        # 8192 steps are half an ulp, at which the sum would round to the next weight.
        halves = tl.where(tl.abs(distance) > 8191.99951171875, distance, 0.0)
        steps = tl.minimum(tl.maximum(whole(distance), -8191.0), 8191.0) + halves * 0.0001220703125
        left = steps.to(tl.int32)
    tl.store(residual.to(tl.pointer_type(tl.int16)) + offsets, left.to(tl.int16), mask)
    store_half(weights, offsets, mask, bits)


@triton.jit
def _load_split24(weights, residual, offsets, mask, HALF: tl.constexpr):
    bits = load_half(weights, offsets, mask)
    left = tl.load(residual.to(tl.pointer_type(tl.int8)) + offsets, mask, 0)
    if HALF == BF16:
        return _not_a_zero(((bits << 16) + (left.to(tl.int32) << 8)).to(tl.float32, bitcast=True), bits)
    else:
        weight = half_number(bits, HALF)
        return _own(weight + ulp16(weight, 0.00390625) * left.to(tl.float32), bits, HALF)


@triton.jit
def _store_split24(weights, residual, offsets, mask, values, random_bits, HALF: tl.constexpr):
    lanes = _lane(random_bits, offsets)
    if HALF == BF16:
        left = (plain_bits(values) + (lanes >> 8)) >> 8
        bits = ((left + 0x80) >> 8) & 0xFFFF
    else:
        bits = half_bits(values, HALF)
        weight = half_number(bits, HALF)
        distance = finite_or_zero(tl.div_rn(values - weight, ulp16(weight, 0.00390625)))
        chance = ((lanes >> 4).to(tl.float32) + 0.5) * 0.000244140625
        left = tl.minimum(tl.maximum(tl.floor(distance + chance), -127.0), 127.0).to(tl.int32)
    tl.store(residual.to(tl.pointer_type(tl.int8)) + offsets, left.to(tl.int8), mask)
    store_half(weights, offsets, mask, bits)


@triton.jit
def _load_nearest(weights, residual, offsets, mask, HALF: tl.constexpr):
    return half_number(load_half(weights, offsets, mask), HALF)


@triton.jit
def _store_nearest(weights, residual, offsets, mask, values, random_bits, HALF: tl.constexpr):
    store_half(weights, offsets, mask, half_bits(values, HALF))


@triton.jit
def _store_stochastic(weights, noise, offsets, mask, values, random_bits, HALF: tl.constexpr):
    if HALF == BF16:
        drawn = tl.load(noise.to(tl.pointer_type(tl.int16)) + offsets, mask, 0).to(tl.int32) + 0x8000
        bits = (plain_bits(values) + drawn) >> 16
    else:
        ulp = ulp16(values, 1.0)
        share = tl.div_rn(tl.abs(values), ulp)
        # A GPU's floor and ceil take subnormal numbers for 0. A share of at least 2.3e-38 and the difference of it and a number
        # of 24 bits are none, nor is the sum in `_store_split24`.
        below = tl.floor(share)
        up = tl.ceil((share - below) - tl.load(noise.to(tl.pointer_type(tl.float32)) + offsets, mask, 0.0))
        size = (below + tl.where(up == up, up, 0.0)) * ulp
        # Triton before 3.7 negates by a difference from 0, which loses the sign of zero.
        bits = half_bits(number_of(bits_of(size) | (bits_of(values) & -2147483648)), HALF)
    store_half(weights, offsets, mask, bits)


@triton.jit
def _load_kahan(weights, residual, offsets, mask, HALF: tl.constexpr):
    bits = load_half(weights, offsets, mask)
    left = half_number(load_half(residual, offsets, mask), HALF)
    return _own(half_number(bits, HALF) + left, bits, HALF)


@triton.jit
def _store_kahan(weights, residual, offsets, mask, values, random_bits, HALF: tl.constexpr):
    bits = half_bits(values, HALF)
    weight = half_number(bits, HALF)
    left = even_bits(finite_or_zero(values - weight), HALF)
    # An error of nearly half an ulp can be rounded up to half an ulp, and with it the sum to the next weight.
    again = half_bits(weight + half_number(left, HALF), HALF)
    store_half(residual, offsets, mask, left - ((again - bits) & 1))
    store_half(weights, offsets, mask, bits)


FULL = WeightForm(_load_full, _store_full)
FORMS: dict[type, WeightForm] = {
    Same: FULL,
    Float32Master: WeightForm(_load_float32_master, _store_float32_master, 4),
    SplitBFloat16: WeightForm(_load_split, _store_split, 2),
    SplitFloat16: WeightForm(_load_split, _store_split, 2),
    Split24BFloat16: WeightForm(_load_split24, _store_split24, 1, stochastic=True),
    Split24Float16: WeightForm(_load_split24, _store_split24, 1, stochastic=True),
    Nearest: WeightForm(_load_nearest, _store_nearest),
    Stochastic: WeightForm(_load_nearest, _store_stochastic, noise=True),
    Kahan: WeightForm(_load_kahan, _store_kahan, 2),
}
"""By class of `Format`; a new form is one entry."""


# ---------------------------------------------------------------------- states


@dataclass(frozen=True)
class StateForm:
    """open, close: see the module. bytes_kept: for an element. stochastic: whether it draws random numbers. ratio: not
    0 where numbers are ratios to `shares` with this steepness, of the second state of a rule; it is of the first."""

    open: Any
    close: Any
    bytes_kept: float
    stochastic: bool = True
    ratio: int = 0


@triton.jit
def _open_full(codes, scales, offsets, mask):
    return tl.load(codes.to(tl.pointer_type(tl.float32)) + offsets, mask, 0.0)


@triton.jit
def _close_full(codes, scales, first, offsets, mask, values, random_bits, TILE: tl.constexpr):
    tl.store(codes.to(tl.pointer_type(tl.float32)) + offsets, values, mask)


@triton.jit
def _open_bf16(codes, scales, offsets, mask):
    return number_of(load_half(codes, offsets, mask) << 16)


@triton.jit
def _close_bf16(codes, scales, first, offsets, mask, values, random_bits, TILE: tl.constexpr):
    store_half(codes, offsets, mask, (plain_bits(values) + tl.load(random_bits + (offsets & 63))) >> 16)


@triton.jit
def _scale(scales, offsets, mask):
    return number_of(
        (tl.load(scales.to(tl.pointer_type(tl.int16)) + offsets // 32, mask, 0).to(tl.int32) & 0xFFFF) << 15
    )


@triton.jit
def _open_signed(codes, scales, offsets, mask):
    code = tl.load(codes.to(tl.pointer_type(tl.int8)) + offsets, mask, 0).to(tl.int32)
    # 1 / 127 ** 2: a code of 127 is the largest number of its group.
    return (code * tl.abs(code)).to(tl.float32) * (_scale(scales, offsets, mask) * 6.200012400024800e-05)


@triton.jit
def _open_ratio(codes, scales, offsets, mask):
    code = tl.load(codes.to(tl.pointer_type(tl.int8)) + offsets, mask, 0)
    return code.to(tl.float32) * (_scale(scales, offsets, mask) * 0.007874015748031496)


@triton.jit
def load_unsigned(codes, offsets, mask):
    """Codes of an unsigned state, int32."""
    return tl.load(codes.to(tl.pointer_type(tl.int8)) + offsets, mask, 0).to(tl.int32) & 0xFF


@triton.jit
def shares(code, STEEPNESS: tl.constexpr):
    """What unsigned codes are shares of their scale, or what ratios are ratios to; see `quantized_state.py`."""
    bent = code + 8
    return number_of(1065353216 + STEEPNESS * 64 - STEEPNESS * (bent * bent))


@triton.jit
def _open_unsigned(codes, scales, offsets, mask):
    return shares(load_unsigned(codes, offsets, mask), 5826) * _scale(scales, offsets, mask)


@triton.jit
def _factors(scales, first, sizes, mask, random_bits, LEVELS: tl.constexpr, SMALLEST: tl.constexpr, TILE: tl.constexpr):
    """Write the scales of groups of 32; returns what each element of `sizes`, all positive, is multiplied by."""
    # Bits of positive numbers are in the order of the numbers, NaN last.
    largest = number_of(tl.max(tl.reshape(bits_of(sizes), [TILE // 32, 32]), 1))
    least = tl.where(largest < SMALLEST, SMALLEST, largest)
    groups = first // 32 + tl.arange(0, TILE // 32)
    lanes = tl.load(random_bits + (groups & 1)) >> 1
    bits = (plain_bits(tl.where(largest == 0.0, 0.0, least)) + tl.minimum(tl.maximum(lanes, 16), 32751)) >> 15
    there = tl.max(tl.reshape(mask.to(tl.int32), [TILE // 32, 32]), 1) != 0
    tl.store(scales.to(tl.pointer_type(tl.int16)) + groups, bits.to(tl.int16), there)
    factor = tl.div_rn(tl.full([TILE // 32], 1.0, tl.float32), least) * LEVELS
    return tl.reshape(tl.broadcast_to(factor[:, None], [TILE // 32, 32]), [TILE])


@triton.jit
def _fraction(random_bits, offsets):
    return ((tl.load(random_bits + (offsets & 63)) >> 4).to(tl.float32) + 0.5) * 0.000244140625


@triton.jit
def _close_signed(codes, scales, first, offsets, mask, values, random_bits, TILE: tl.constexpr):
    sizes = tl.where(mask, tl.abs(values), 0.0)
    # Codes are signed roots, so that small numbers get more of them; the fraction rounds stochastically.
    code = tl.sqrt_rn(sizes * _factors(scales, first, sizes, mask, random_bits, 16129.0, 2.0**-96, TILE)) + _fraction(
        random_bits, offsets
    )
    code = tl.where(bits_of(values) < 0, -(code.to(tl.int32)), code.to(tl.int32))
    tl.store(codes.to(tl.pointer_type(tl.int8)) + offsets, code.to(tl.int8), mask)


@triton.jit
def _close_ratio(codes, scales, first, offsets, mask, values, random_bits, TILE: tl.constexpr):
    sizes = tl.where(mask, tl.abs(values), 0.0)
    code = sizes * _factors(scales, first, sizes, mask, random_bits, 127.0, 2.0**-71, TILE) + _fraction(
        random_bits, offsets
    )
    code = tl.where(bits_of(values) < 0, -(code.to(tl.int32)), code.to(tl.int32))
    tl.store(codes.to(tl.pointer_type(tl.int8)) + offsets, code.to(tl.int8), mask)


@triton.jit
def _close_unsigned(codes, scales, first, offsets, mask, values, random_bits, TILE: tl.constexpr):
    sizes = tl.where(mask, tl.abs(values), 0.0)
    share = sizes * _factors(scales, first, sizes, mask, random_bits, 1.0, 2.0**-78, TILE)
    # Bits of a number are nearly its logarithm; a root of them makes steps finer near the largest.
    bent = tl.sqrt_rn((bits_of(share) - 1065726080).to(tl.float32) * -0.00017164435290078956)
    # Completing the square of `code (code + 16)` takes 8 away.
    code = tl.minimum((bent + (_fraction(random_bits, offsets) - 8.0)).to(tl.int32), 255)
    tl.store(codes.to(tl.pointer_type(tl.int8)) + offsets, code.to(tl.int8), mask)
    return code


@triton.jit
def _open_nothing(codes, scales, offsets, mask):
    return 0.0


@triton.jit
def _close_nothing(codes, scales, first, offsets, mask, values, random_bits, TILE: tl.constexpr):
    pass


FULL_STATE = StateForm(_open_full, _close_full, 4, stochastic=False)
NO_STATE = StateForm(_open_nothing, _close_nothing, 0, stochastic=False)
ENCODINGS: dict[str, StateForm] = {
    "bf16": StateForm(_open_bf16, _close_bf16, 2),
    "signed": StateForm(_open_signed, _close_signed, 1 + 2 / 32),
    "unsigned": StateForm(_open_unsigned, _close_unsigned, 1 + 2 / 32),
    "root_ratio": StateForm(_open_ratio, _close_ratio, 1 + 2 / 32, ratio=2913),
    "ratio": StateForm(_open_ratio, _close_ratio, 1 + 2 / 32, ratio=5826),
}
"""By the way of a `QuantizedState`."""
