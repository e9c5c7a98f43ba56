"""Matrices rounded to 8-bit formats: one launch for the largest magnitudes, one that writes bytes, by rows and turned.

The numbers of a matrix lie `row_stride` and `column_stride` apart, so that a transpose is rounded as what it is a view of.
Magnitudes are compared as bits, of which those of inf and NaN are the largest. Same numbers as `number_formats.scale_to`.
"""

import triton
import triton.language as tl

from booster.kernels.arithmetic import bits_of, load_wide, number_of, whole

TENSOR, ROW, BLOCKS = 0, 1, 2  # what shares a scale
WHOLE = tl.constexpr(TENSOR)
ROWS = tl.constexpr(ROW)


@triton.jit
def _tile(x, row, column, rows, columns, row_stride, column_stride, DTYPE: tl.constexpr):
    """Numbers of a tile in float32, zeros beyond the matrix."""
    offsets = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return load_wide(x, offsets, (row[:, None] < rows) & (column[None, :] < columns), DTYPE)


@triton.jit
def _scale(largest, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """Scales of numbers whose largest magnitude has the bits `largest`; NaN where it is not finite."""
    share = tl.div_rn(number_of(largest), tl.full(largest.shape, LARGEST, tl.float32))
    if POWER:
        bits = bits_of(share)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        made = number_of(tl.minimum(tl.maximum(exponent, 1), 254) << 23)
    else:
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
    near = tl.minimum(number_of(tl.minimum(size, 0x7F800000)), LARGEST)
    # Added to a number whose last bit is the smallest subnormal, they are rounded to it.
    low = bits_of(near + SUBNORMAL) - bits_of(tl.full(near.shape, SUBNORMAL, tl.float32))
    wide = bits_of(near)
    high = (wide + OFFSET + ((wide >> (23 - MANTISSA)) & 1)) >> (23 - MANTISSA)
    codes = tl.where(near < NORMAL, low, high)
    return tl.where(size > 0x7F800000, 0x7F, codes) | ((bits >> 24) & 0x80)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["given"])
def largest_of(x, partials, given, rows, columns, row_stride, column_stride, splits, KIND: tl.constexpr,
               DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Write the largest magnitude of each part of a matrix: a part has BM rows, or one, and a share of the columns.

    given: a scale; where it is known, above 0, nothing is read.
    """
    program = tl.program_id(0)
    row = (program // splits) * BM + tl.arange(0, BM)
    tiles = tl.cdiv(columns, BN)
    each = tl.cdiv(tiles, splits)
    first = (program % splits) * each
    last = tl.minimum(first + each, tiles)
    if given is not None:
        last = tl.where(tl.load(given) > 0, first, last)
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
def write(x, values, turned, scales, partials, given, seen, rows, columns, filled, turned_filled, row_stride,
          column_stride, splits, KIND: tl.constexpr, POWER: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
          MANTISSA: tl.constexpr, OFFSET: tl.constexpr, SUBNORMAL: tl.constexpr, NORMAL: tl.constexpr,
          LARGEST: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Write a matrix as bytes, `filled` columns of them, and their scales.

    turned: where its transpose is written as well, with `turned_filled` columns. partials: what `largest_of` found, of so many
    `splits` of a row, or parts of the whole. given: a scale that is taken where it is known; then `seen` has the largest
    magnitude of each tile. MANTISSA: of the format; 0 writes whole numbers.
    """
    program = tl.program_id(0)
    across = tl.cdiv(filled, BN)
    row = (program // across) * BM + tl.arange(0, BM)
    column = (program % across) * BN + tl.arange(0, BN)
    tile = _tile(x, row, column, rows, columns, row_stride, column_stride, DTYPE)
    size = bits_of(tile) & 0x7FFFFFFF
    if KIND == WHOLE:
        scale = _scale(_largest(partials, splits, BLOCK), LARGEST, POWER)
        if given is not None:
            known = tl.load(given + tl.arange(0, 1))
            scale = tl.where(known > 0, known, scale)
            tl.store(seen + program, tl.max(tl.max(size, 1), 0))
        else:
            tl.store(scales + program + tl.arange(0, 1), scale, tl.arange(0, 1) + program < 1)
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
    if turned is not None:
        places = column.to(tl.int64)[None, :] * turned_filled + row[:, None]
        tl.store(turned + places, codes, (row[:, None] < turned_filled) & (column[None, :] < columns))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["given", "largest"])
def note(seen, count, given, largest, scale, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Note in `largest`, if anywhere, what `write` has seen, unless it is not finite, and write the scale that it took."""
    here = _largest(seen, count, BLOCK)
    finite = number_of(here) < float("inf")
    one = tl.arange(0, 1)
    known = tl.load(given + one)
    if largest is not None:
        before = tl.load(largest + one)
        tl.store(largest + one, tl.where(finite, tl.maximum(before, number_of(here)), before))
    own = _scale(here, LARGEST, False)
    tl.store(scale + one, tl.where(finite & (known > 0), known, own))
