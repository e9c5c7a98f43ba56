"""Matrices rounded to e2m1 in blocks with e4m3 scales: one launch for the largest magnitude, one that writes numbers.

Rotated, and stochastic by the hash of `number_formats.noise_of`, as they are loaded. Same numbers as `number_formats.scale_to`
of what `number_formats.rotation.rotated` gives. The numbers of a matrix lie `row_stride` and `column_stride` apart.
"""

import triton
import triton.language as tl

from booster.kernels.arithmetic import bits_of, number_of, plain_bits, whole
from booster.kernels.rounding import _largest, _tile

ACROSS = tl.constexpr(16)  # numbers of a block, and of what is rotated


@triton.jit
def _numbers(x, row, first, rows, columns, row_stride, column_stride, SIGNS: tl.constexpr, DTYPE: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Numbers of a tile from column `first` on, rotated where bits of SIGNS say which rows of the transform are turned."""
    if SIGNS < 0:
        return _tile(x, row, first + tl.arange(0, BN), rows, columns, row_stride, column_stride, DTYPE)
    block = first + tl.arange(0, BN // ACROSS) * ACROSS
    inner = tl.arange(0, ACROSS)
    total = tl.zeros([BM, BN // ACROSS, ACROSS], tl.float32)
    for place in tl.static_range(ACROSS):
        quarter = _tile(x, row, block + place, rows, columns, row_stride, column_stride, DTYPE) * 0.25
        odd = inner & place
        odd = odd ^ (odd >> 2)
        odd = (odd ^ (odd >> 1)) & 1
        sign = (1 - 2 * (odd ^ ((SIGNS >> place) & 1))).to(tl.float32)
        total = total + quarter[:, :, None] * sign[None, None, :]
    return tl.reshape(total, [BM, BN])


@triton.jit
def _mix(x):
    """MurmurHash3's finaliser of int32 numbers; products wrap."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _power(x, LEAST: tl.constexpr):
    """The power of two below the magnitudes `x`, at least LEAST; NaN and inf give inf."""
    return tl.maximum(number_of(bits_of(x) & 0x7F800000), LEAST)


@triton.jit(do_not_specialize=["splits"])
def look(x, partials, sums, rows, columns, row_stride, column_stride, splits, SIGNS: tl.constexpr, DTYPE: tl.constexpr,
         BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Write the largest magnitude of each part of a matrix, as bits, and into `sums`, if it is there, the sum of all bits."""
    program = tl.program_id(0)
    row = (program // splits) * BM + tl.arange(0, BM)
    tiles = tl.cdiv(columns, BN)
    each = tl.cdiv(tiles, splits)
    first = (program % splits) * each
    largest = tl.zeros([BM], tl.int32)
    sum_ = tl.zeros([BM], tl.int32)
    for number in range(first, tl.minimum(first + each, tiles)):
        tile = _numbers(x, row, number * BN, rows, columns, row_stride, column_stride, SIGNS, DTYPE, BM, BN)
        bits = bits_of(tile)
        largest = tl.maximum(largest, tl.max(bits & 0x7FFFFFFF, 1))
        if sums is not None:
            sum_ += tl.sum(bits, 1)
    tl.store(partials + program, tl.max(largest, 0))
    if sums is not None:
        tl.store(sums + program, tl.sum(sum_, 0))


@triton.jit(do_not_specialize=["parts"])
def write_fours(x, values, scales, outer, partials, sums, rows, columns, filled, row_stride, column_stride, parts,
                SIGNS: tl.constexpr, DOWN: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Write a matrix in e2m1, as bfloat16 numbers in `filled` columns, its block scales and the one of the whole.

    partials, sums: what `look` found, of so many `parts`. DOWN: rows of a block.
    """
    program = tl.program_id(0)
    across = tl.cdiv(filled, BN)
    row = (program // across) * BM + tl.arange(0, BM)
    first = (program % across) * BN
    column = first + tl.arange(0, BN)
    tile = _numbers(x, row, first, rows, columns, row_stride, column_stride, SIGNS, DTYPE, BM, BN)
    share = tl.div_rn(number_of(_largest(partials, parts, BLOCK)), tl.full([1], 6.0, tl.float32))
    share = tl.div_rn(share, tl.full([1], 448.0, tl.float32))
    whole_scale = tl.where(share < 1.1754943508222875e-38, 1.1754943508222875e-38, share)
    tl.store(outer + program + tl.arange(0, 1), whole_scale, tl.arange(0, 1) + program < 1)
    # Scales of blocks.
    size = tl.reshape(bits_of(tile) & 0x7FFFFFFF, [BM // DOWN, DOWN, BN // ACROSS, ACROSS])
    size = number_of(tl.max(tl.max(size, 3), 1))
    wanted = tl.div_rn(size, tl.full(size.shape, 6.0, tl.float32))
    wanted = tl.div_rn(wanted, tl.broadcast_to(whole_scale[:, None], size.shape))
    wanted = tl.where(wanted > 448.0, 448.0, wanted)
    spacing = _power(wanted, 0.015625) * 0.125
    scale = whole(tl.div_rn(wanted, spacing)) * spacing
    scale = tl.where(scale < 0.001953125, 0.001953125, scale)
    blocks = tl.cdiv(filled, ACROSS)
    down = (program // across) * (BM // DOWN) + tl.arange(0, BM // DOWN)
    block = (program % across) * (BN // ACROSS) + tl.arange(0, BN // ACROSS)
    places = down.to(tl.int64)[:, None] * blocks + block[None, :]
    tl.store(scales + places, scale, (down[:, None] * DOWN < rows) & (block[None, :] < blocks))
    # Numbers.
    each = scale * tl.broadcast_to(whole_scale[:, None], size.shape)
    each = tl.broadcast_to(each[:, None, :, None], [BM // DOWN, DOWN, BN // ACROSS, ACROSS])
    near = tl.div_rn(tile, tl.reshape(each, [BM, BN]))
    near = tl.where(near > 6.0, 6.0, tl.where(near < -6.0, -6.0, near))
    spacing = _power(near, 1.0) * 0.5
    steps = tl.abs(tl.div_rn(near, spacing))
    if sums is not None:
        hashed = tl.zeros([BLOCK], tl.int32)
        for part in range(0, parts, BLOCK):
            offsets = part + tl.arange(0, BLOCK)
            hashed += tl.load(sums + offsets, offsets < parts, 0)
        start = _mix((tl.zeros([1], tl.int32) + tl.sum(hashed, 0)) & 0x7FFFFFFF)
        place = row[:, None] * filled + column[None, :] + tl.broadcast_to(start[:, None], [BM, BN])
        noise = (_mix(_mix(place) ^ bits_of(tile)) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
        below = tl.floor(steps)
        steps = below + tl.where(steps - below > noise, 1.0, 0.0)
    else:
        steps = whole(steps)
    made = steps * spacing
    made = number_of((bits_of(made) & 0x7FFFFFFF) | (bits_of(near) & -2147483648))
    places = row.to(tl.int64)[:, None] * filled + column[None, :]
    halves = ((plain_bits(made) >> 16) & 0xFFFF).to(tl.int16)
    pointer = values.to(tl.pointer_type(tl.int16))
    tl.store(pointer + places, halves, (row[:, None] < rows) & (column[None, :] < filled))
