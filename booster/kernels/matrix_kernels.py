"""Matrices rounded to eight and to four bits: one launch finds the largest magnitudes, one writes codes and scales.

Eight bits: fp8 and int8 with a scale for a tensor, a row or a block; the second launch can write the transpose too. Four bits:
e2m1 in blocks of 16 with e4m3 scales and one scale of the whole, after a rotation and with stochastic rounding where asked.
The results are those of `number_formats.scale_to` to the bit. Elements are `row_stride` and `column_stride` apart, so that a
transpose is read as the view that it is. Magnitudes are compared as bits, of which those of inf and NaN are the largest.
"""

import triton
import triton.language as tl

from booster.kernels.arithmetic import bits_of, load_wide, number_of, plain_bits, whole

TENSOR, ROW, BLOCKS = 0, 1, 2  # what shares a scale
WHOLE = tl.constexpr(TENSOR)
ROWS = tl.constexpr(ROW)
FOURS_ACROSS = tl.constexpr(16)  # numbers of a block in four bits, and of what is rotated together


@triton.jit
def _tile(x, row, column, rows, columns, row_stride, column_stride, DTYPE: tl.constexpr):
    """Numbers of a tile in float32, zeros beyond the matrix."""
    offsets = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return load_wide(x, offsets, (row[:, None] < rows) & (column[None, :] < columns), DTYPE)


@triton.jit
def _scale(largest, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """Scales of numbers, of which the largest magnitude has the bits `largest`; NaN where it is not finite."""
    share = tl.div_rn(number_of(largest), tl.full(largest.shape, LARGEST, tl.float32))
    if POWER:
        bits = bits_of(share)
        # Rounded up, so that no number is too large for the format; an exact power of two stays.
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        # Neither zero nor inf: numbers are divided by it.
        made = number_of(tl.minimum(tl.maximum(exponent, 1), 254) << 23)
    else:
        # The smallest normal float32, for a block of zeros.
        made = tl.maximum(share, 1.1754943508222875e-38)
    return tl.where(share < float("inf"), made, float("nan"))


@triton.jit
def _largest(partials, count, BLOCK: tl.constexpr):
    """The largest of `count` bits of magnitudes, as one number of shape (1,)."""
    largest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(partials + offsets, offsets < count, 0))
    return tl.zeros([1], tl.int32) + tl.max(largest, 0)


@triton.jit
def _codes(x, MANTISSA: tl.constexpr, OFFSET: tl.constexpr, SUBNORMAL: tl.constexpr, NORMAL: tl.constexpr,
           LARGEST: tl.constexpr):  # fmt: skip
    """Bytes of the numbers of a float8 format nearest to `x`, ties to even; those too large are cut off."""
    bits = bits_of(x)
    size = bits & 0x7FFFFFFF
    # A NaN would win no comparison; it gets its code at the end.
    near = tl.minimum(number_of(tl.minimum(size, 0x7F800000)), LARGEST)
    # Added to a number with the smallest subnormal as its last bit, they are rounded to it.
    low = bits_of(near + SUBNORMAL) - bits_of(tl.full(near.shape, SUBNORMAL, tl.float32))
    wide = bits_of(near)
    # OFFSET moves the bias of the exponent and adds half of the last place less one; the bit above decides ties.
    high = (wide + OFFSET + ((wide >> (23 - MANTISSA)) & 1)) >> (23 - MANTISSA)
    codes = tl.where(near < NORMAL, low, high)
    # Above the bits of inf are NaN alone; the sign is bit 31 here and bit 7 there.
    return tl.where(size > 0x7F800000, 0x7F, codes) | ((bits >> 24) & 0x80)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["given"])
def largest_of(x, partials, given, rows, columns, row_stride, column_stride, splits, KIND: tl.constexpr,
               DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Write the largest magnitude of each part: BM rows, or one, and a share of the columns. given: a scale; if above 0,
    nothing is read."""
    program = tl.program_id(0)
    row = (program // splits) * BM + tl.arange(0, BM)
    tiles = tl.cdiv(columns, BN)
    each = tl.cdiv(tiles, splits)
    first = (program % splits) * each
    last = tl.minimum(first + each, tiles)
    if given is not None:
        last = tl.where(tl.load(given) > 0, first, last)
    # Magnitudes are compared as whole numbers: bits without the sign are in their order, and NaN is above inf.
    largest = tl.zeros([BM], tl.int32)
    for number in range(first, last):
        column = number * BN + tl.arange(0, BN)
        tile = _tile(x, row, column, rows, columns, row_stride, column_stride, DTYPE)
        largest = tl.maximum(largest, tl.max(bits_of(tile) & 0x7FFFFFFF, 1))
    if KIND == WHOLE:
        tl.store(partials + program, tl.max(largest, 0))
    else:
        tl.store(partials + (program % splits) * rows + row, largest, row < rows)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["given"])
def write(x, values, transposed, scales, partials, given, seen, rows, columns, filled, transposed_filled, row_stride,
          column_stride, splits, KIND: tl.constexpr, POWER: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
          MANTISSA: tl.constexpr, OFFSET: tl.constexpr, SUBNORMAL: tl.constexpr, NORMAL: tl.constexpr,
          LARGEST: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Write a matrix as bytes, `filled` columns of them, and their scales.

    transposed: where its transpose is written as well, with `transposed_filled` columns. partials: what `largest_of` found, of
    so many `splits` of a row, or parts of the whole. given: a scale that is taken where it is known; then `seen` has the
    largest magnitude of each tile. MANTISSA: of the format; 0 writes whole numbers.
    """
    program = tl.program_id(0)
    across = tl.cdiv(filled, BN)
    row = (program // across) * BM + tl.arange(0, BM)
    column = (program % across) * BN + tl.arange(0, BN)
    tile = _tile(x, row, column, rows, columns, row_stride, column_stride, DTYPE)
    # Bits without the sign are in the order of magnitudes.
    size = bits_of(tile) & 0x7FFFFFFF
    if KIND == WHOLE:
        scale = _scale(_largest(partials, splits, BLOCK), LARGEST, POWER)
        if given is not None:
            known = tl.load(given + tl.arange(0, 1))
            scale = tl.where(known > 0, known, scale)
            tl.store(seen + program, tl.max(tl.max(size, 1), 0))
        else:
            tl.store(scales + program + tl.arange(0, 1), scale, tl.arange(0, 1) + program < 1)
        # A division as torch makes it: the approximate one of GPUs would round some numbers the other way.
        shares = tl.div_rn(tile, tl.broadcast_to(scale[:, None], [BM, BN]))
    elif KIND == ROWS:
        largest = tl.zeros([BM], tl.int32)
        for split in range(splits):
            largest = tl.maximum(largest, tl.load(partials + split * rows + row, row < rows, 0))
        scale = _scale(largest, LARGEST, POWER)
        tl.store(scales + row, scale, row + (program % across) * rows < rows)
        shares = tl.div_rn(tile, tl.broadcast_to(scale[:, None], [BM, BN]))
    elif DOWN == 1:
        parts = tl.reshape(size, [BM, BN // ACROSS, ACROSS])
        scale = _scale(tl.max(parts, 2), LARGEST, POWER)
        blocks = tl.cdiv(filled, ACROSS)
        block = (program % across) * (BN // ACROSS) + tl.arange(0, BN // ACROSS)
        places = row.to(tl.int64)[:, None] * blocks + block[None, :]
        tl.store(scales + places, scale, (row[:, None] < rows) & (block[None, :] < blocks))
        each = tl.broadcast_to(scale[:, :, None], [BM, BN // ACROSS, ACROSS])
        shares = tl.div_rn(tile, tl.reshape(each, [BM, BN]))
    else:  # a tile is a block
        scale = _scale(tl.zeros([1], tl.int32) + tl.max(tl.max(size, 1), 0), LARGEST, POWER)
        tl.store(scales + program + tl.arange(0, 1), scale)
        shares = tl.div_rn(tile, tl.broadcast_to(scale[:, None], [BM, BN]))
    if MANTISSA == 0:
        codes = whole(tl.where(shares == shares, shares, 0.0)).to(tl.int32)
    else:
        codes = _codes(shares, MANTISSA, OFFSET, SUBNORMAL, NORMAL, LARGEST)
    codes = codes.to(tl.int8)
    places = row.to(tl.int64)[:, None] * filled + column[None, :]
    tl.store(values + places, codes, (row[:, None] < rows) & (column[None, :] < filled))
    if transposed is not None:
        places = column.to(tl.int64)[None, :] * transposed_filled + row[:, None]
        tl.store(transposed + places, codes, (row[:, None] < transposed_filled) & (column[None, :] < columns))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["given", "largest"])
def track_largest(seen, count, given, largest, scale, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Raise `largest`, if it is there, to what `write` has seen, unless that is not finite; write the scale that was used."""
    block_max = _largest(seen, count, BLOCK)
    finite = number_of(block_max) < float("inf")
    one = tl.arange(0, 1)
    known = tl.load(given + one)
    if largest is not None:
        before = tl.load(largest + one)
        tl.store(largest + one, tl.where(finite, tl.maximum(before, number_of(block_max)), before))
    own = _scale(block_max, LARGEST, False)
    tl.store(scale + one, tl.where(finite & (known > 0), known, own))


# ---------------------------------------------------------------------- four bits


@triton.jit
def _rotated_tile(x, row, first, rows, columns, row_stride, column_stride, SIGNS: tl.constexpr,
                  DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Numbers of a tile from column `first` on, rotated where bits of SIGNS say which rows of the transform are turned."""
    if SIGNS < 0:
        return _tile(x, row, first + tl.arange(0, BN), rows, columns, row_stride, column_stride, DTYPE)
    block = first + tl.arange(0, BN // FOURS_ACROSS) * FOURS_ACROSS
    inner = tl.arange(0, FOURS_ACROSS)
    total = tl.zeros([BM, BN // FOURS_ACROSS, FOURS_ACROSS], tl.float32)
    for place in tl.static_range(FOURS_ACROSS):
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
    # The mask makes a logical shift of the arithmetic one; the factors are 0x85EBCA6B and 0xC2B2AE35 as int32.
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _power(x, LEAST: tl.constexpr):
    """The power of two below the magnitudes `x`, at least LEAST; NaN and inf give inf."""
    # Without the bits of the mantissa a number is the power of two below it.
    return tl.maximum(number_of(bits_of(x) & 0x7F800000), LEAST)


@triton.jit(do_not_specialize=["splits"])
def largest_of_rotated(x, partials, sums, rows, columns, row_stride, column_stride, splits, SIGNS: tl.constexpr,
                       DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Write the largest magnitude of each part of a matrix, as bits, and into `sums`, if it is there, the sum of all bits."""
    program = tl.program_id(0)
    row = (program // splits) * BM + tl.arange(0, BM)
    tiles = tl.cdiv(columns, BN)
    each = tl.cdiv(tiles, splits)
    first = (program % splits) * each
    largest = tl.zeros([BM], tl.int32)
    sum_ = tl.zeros([BM], tl.int32)
    for number in range(first, tl.minimum(first + each, tiles)):
        tile = _rotated_tile(x, row, number * BN, rows, columns, row_stride, column_stride, SIGNS, DTYPE, BM, BN)
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

    partials, sums: what `largest_of_rotated` found, of so many `parts`. DOWN: rows of a block.
    """
    program = tl.program_id(0)
    across = tl.cdiv(filled, BN)
    row = (program // across) * BM + tl.arange(0, BM)
    first = (program % across) * BN
    column = first + tl.arange(0, BN)
    tile = _rotated_tile(x, row, first, rows, columns, row_stride, column_stride, SIGNS, DTYPE, BM, BN)
    # 6 is the largest number of e2m1, 448 that of e4m3, in which block scales are kept.
    share = tl.div_rn(number_of(_largest(partials, parts, BLOCK)), tl.full([1], 6.0, tl.float32))
    share = tl.div_rn(share, tl.full([1], 448.0, tl.float32))
    # The smallest normal float32: a subnormal scale is flushed to zero on some devices.
    whole_scale = tl.where(share < 1.1754943508222875e-38, 1.1754943508222875e-38, share)
    tl.store(outer + program + tl.arange(0, 1), whole_scale, tl.arange(0, 1) + program < 1)
    # Scales of blocks.
    size = tl.reshape(bits_of(tile) & 0x7FFFFFFF, [BM // DOWN, DOWN, BN // FOURS_ACROSS, FOURS_ACROSS])
    size = number_of(tl.max(tl.max(size, 3), 1))
    wanted = tl.div_rn(size, tl.full(size.shape, 6.0, tl.float32))
    wanted = tl.div_rn(wanted, tl.broadcast_to(whole_scale[:, None], size.shape))
    wanted = tl.where(wanted > 448.0, 448.0, wanted)
    spacing = _power(wanted, 0.015625) * 0.125
    scale = whole(tl.div_rn(wanted, spacing)) * spacing
    # 2 ** -9, the smallest e4m3 number: a block of zeros must not divide by zero.
    scale = tl.where(scale < 0.001953125, 0.001953125, scale)
    blocks = tl.cdiv(filled, FOURS_ACROSS)
    down = (program // across) * (BM // DOWN) + tl.arange(0, BM // DOWN)
    block = (program % across) * (BN // FOURS_ACROSS) + tl.arange(0, BN // FOURS_ACROSS)
    places = down.to(tl.int64)[:, None] * blocks + block[None, :]
    tl.store(scales + places, scale, (down[:, None] * DOWN < rows) & (block[None, :] < blocks))
    # Numbers.
    each = scale * tl.broadcast_to(whole_scale[:, None], size.shape)
    each = tl.broadcast_to(each[:, None, :, None], [BM // DOWN, DOWN, BN // FOURS_ACROSS, FOURS_ACROSS])
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
        # 24 random bits times 2 ** -24: uniform in [0, 1).
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
