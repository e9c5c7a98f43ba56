"""Forms of optimizer states on a device: float32, or packed as `booster/masters/quantized_state.py` tells.

open(codes, scales, offsets, mask) returns float32; close(codes, scales, first, offsets, mask, values, chances, TILE) writes
`values` back. `first` is that of `offsets`, a multiple of `TILE` elements, which are stretches of a state that begin at
multiples of 64. chances: points to 64 random numbers below 2**16.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from booster.kernels.arithmetic import bits_of, load_half, number_of, plain_bits, store_half


@dataclass(frozen=True)
class StateForm:
    """open, close: see the module. bytes_kept: for an element. stochastic: whether it draws random numbers."""

    open: Any
    close: Any
    bytes_kept: float
    stochastic: bool = True


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
    return (code * tl.abs(code)).to(tl.float32) * (_scale(scales, offsets, mask) * 6.200012400024800e-05)


@triton.jit
def _open_unsigned(codes, scales, offsets, mask):
    code = (tl.load(codes.to(tl.pointer_type(tl.int8)) + offsets, mask, 0).to(tl.int32) & 0xFF).to(tl.float32)
    root = (code * code) * (tl.sqrt_rn(_scale(scales, offsets, mask)) * 1.5378700499807766e-05)
    return root * root


@triton.jit
def _factors(scales, first, sizes, mask, random_bits, LEVELS: tl.constexpr, TILE: tl.constexpr):
    """Write the scales of groups of 32; returns what each element of `sizes`, all positive, is multiplied by."""
    # Bits of positive numbers are in the order of the numbers, NaN last.
    largest = number_of(tl.max(tl.reshape(bits_of(sizes), [TILE // 32, 32]), 1))
    least = tl.where(largest < 1.262177448353619e-29, 1.262177448353619e-29, largest)
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
    code = tl.sqrt_rn(sizes * _factors(scales, first, sizes, mask, random_bits, 16129.0, TILE)) + _fraction(
        random_bits, offsets
    )
    code = tl.where(bits_of(values) < 0, -(code.to(tl.int32)), code.to(tl.int32))
    tl.store(codes.to(tl.pointer_type(tl.int8)) + offsets, code.to(tl.int8), mask)


@triton.jit
def _close_unsigned(codes, scales, first, offsets, mask, values, random_bits, TILE: tl.constexpr):
    sizes = tl.where(mask, tl.abs(values), 0.0)
    share = sizes * _factors(scales, first, sizes, mask, random_bits, 4228250625.0, TILE)
    code = tl.sqrt_rn(tl.sqrt_rn(share)) + _fraction(random_bits, offsets)
    tl.store(codes.to(tl.pointer_type(tl.int8)) + offsets, tl.maximum(code.to(tl.int32), 1).to(tl.int8), mask)


@triton.jit
def _open_nothing(codes, scales, offsets, mask):
    return 0.0


@triton.jit
def _close_nothing(codes, scales, first, offsets, mask, values, random_bits, TILE: tl.constexpr):
    pass


FULL = StateForm(_open_full, _close_full, 4, stochastic=False)
ABSENT = StateForm(_open_nothing, _close_nothing, 0, stochastic=False)
ENCODINGS: dict[str, StateForm] = {
    "bf16": StateForm(_open_bf16, _close_bf16, 2),
    "signed": StateForm(_open_signed, _close_signed, 1 + 2 / 32),
    "unsigned": StateForm(_open_unsigned, _close_unsigned, 1 + 2 / 32),
}
"""By the way of a `QuantizedState`."""
