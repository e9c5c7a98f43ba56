"""The launches of a step: what gradients are, what is decided, and the update of every tensor.

What is stepped is in a table on the device, a row of `COLUMNS` int64 for each segment of a parameter: addresses of weights,
of their residual bits, of gradients, of three states and of the scales of each; the number of elements; which of
the step counts counts it; the dtype of its gradient; how many ranks hold it. A program does one tile of `TILE`
elements of a row.
"""

import triton
import triton.language as tl

from booster.kernels.arithmetic import load_half, load_wide, number_of
from booster.kernels.weights import load_unsigned, shares

TILE = 2048  # elements of a program; a multiple of 64, so that groups of 32 and lanes of 64 lie in one
COLUMNS = 13
SCALARS = 8  # that `prepare` of a rule makes for each count_
BLOCK = 128  # step_counts that the deciding program counts at once
AT_ONCE = tl.constexpr(4096)  # numbers that one program adds at once: each round waits for memory
WARPS = 16  # of a program of `update`: by 4 elements a thread, which need no more registers than there are
MAYBE = ["partials", "zeros", "found_in", "current_scale", "pending", "scale", "growth", "hysteresis", "seed"]
"""Of `decide`: None where a step has none, and at any address."""
OUT = 8  # 64-bit words of what was decided: see `decide`


@triton.jit
def _partial(values):
    """The sum of squares in float64, summed in float32; not finite where a value is not."""
    largest = tl.max(tl.abs(values))
    # 2 ** -75 and 2 ** 75: the squares of a tile neither overflow float32 nor vanish. Sums in float64 are slow on most GPUs.
    share = tl.where(largest > 1.1e15, 2.6469779601696886e-23, tl.where(largest < 8.8e-16, 3.777893186295716e22, 1.0))
    scaled = values * share
    wide = share.to(tl.float64)
    return tl.sum(scaled * scaled).to(tl.float64) / (wide * wide)


@triton.jit
def measure(table, tiles, partials, zeros, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Write a partial sum of squares of this rank's share of the gradients for each tile. zeros: int32 counts of zeros, or
    None."""
    program = tl.program_id(0)
    row = table + tl.load(tiles + 2 * program).to(tl.int64) * COLUMNS
    start = tl.load(tiles + 2 * program + 1).to(tl.int64) * TILE
    gradient = tl.load(row + 2)
    offsets = start + tl.arange(0, TILE)
    # Column 9 is the number of elements of this rank, 11 the kind of dtype, 12 by how many ranks a replica is counted.
    mask = offsets < tl.load(row + 9)
    dtype = tl.load(row + 11)
    if dtype == 0:
        values = load_wide(gradient, offsets, mask, 0)
    else:
        bits = load_half(gradient, offsets, mask)
        if dtype == 1:
            # bfloat16 is the upper half of a float32.
            values = number_of(bits << 16)
        else:
            values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    tl.store(partials + program, _partial(values) / tl.load(row + 12).to(tl.float64))
    if zeros is not None:
        tl.store(zeros + program, tl.sum((mask & (values == 0.0)).to(tl.int32)))


@triton.jit
def _sum(partials, count):
    total = tl.zeros([AT_ONCE], tl.float64)
    for first in range(0, count, AT_ONCE):
        offsets = first + tl.arange(0, AT_ONCE)
        total += tl.load(partials + offsets, offsets < count, 0.0)
    return tl.sum(total)


@triton.jit(do_not_specialize=["count"])
def add_up(partials, count, total):
    """Write the sum of partial sums to `total`, float64."""
    tl.store(total, _sum(partials, count))


@triton.jit
def _float64(pointer):
    if pointer is None:
        return tl.full([], 1.0, tl.float64)
    else:
        return tl.load(pointer).to(tl.float64)


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["sums", "current_scale", "pending", "norm", "previous"]
)
def norm_of(sums, count, current_scale, pending, norm, previous):
    """Write the norm of true gradients, float64, clips that wait applied; `current_scale` and `pending` as of `decide`.
    previous: the norm that the next step is clipped by goes next to it; None: nothing."""
    found = tl.sqrt(_sum(sums, count)) * _float64(pending) / _float64(current_scale)
    tl.store(norm, found)
    if previous is not None:
        # A norm that is not finite would clip every later step to zero.
        tl.store(norm + 1, tl.where(found < float("inf"), found, tl.load(previous)))


@triton.jit(do_not_specialize_on_alignment=["norm", "bound", "pending", "factor"])
def clip_by(norm, bound, pending, factor):
    """Write what `pending` becomes by a clip to `bound`: nothing else where the norm is not finite."""
    found = tl.load(norm)
    clip = tl.minimum(tl.load(bound) / (found + 1e-6), 1.0)
    tl.store(factor, _float64(pending) * tl.where(found < float("inf"), clip, 1.0))


@triton.jit
def _next_scale(scale, growth, hysteresis, found, options, out, words):
    """The rule of `DynamicScale`; writes the scale, float32, and its two trackers."""
    before = tl.load(scale).to(tl.float64)
    found = found.to(tl.int64)
    overflows = tl.load(options + 4).to(tl.int64)
    passed = tl.where(overflows > 1, tl.load(hysteresis) + found, 0)
    clean = tl.where(found != 0, 0, tl.load(growth) + 1)
    grows = clean >= tl.load(options + 3).to(tl.int64)
    backed_off = (before * tl.load(options + 2)).to(tl.float32).to(tl.float64)
    backed_off = tl.minimum(tl.maximum(backed_off, tl.load(options + 5)), before)
    grown = (before * tl.load(options + 1)).to(tl.float32).to(tl.float64)
    grown = tl.maximum(tl.minimum(grown, tl.load(options + 6)), before)
    grown = tl.where(grown < float("inf"), grown, before)
    after = tl.where((found != 0) & ((overflows == 1) | (passed >= overflows)), backed_off, before)
    tl.store(out + 6, tl.where(grows, grown, after).to(tl.float32))
    tl.store(words + 4, tl.where(grows, 0, clean))
    tl.store(words + 5, tl.where(grows, 0, passed))


@triton.jit(do_not_specialize=["count", "num_zeros", "num_step_counts"], do_not_specialize_on_alignment=MAYBE)
def decide(partials, count, zeros, num_zeros, found_in, current_scale, pending, options, scale, growth, hysteresis, seed,
           numbers, out, words, step_counts, num_step_counts, rows, scalars, CLIP: tl.constexpr, PREPARE: tl.constexpr,
           NUMBERS: tl.constexpr, SCALARS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program: whether the step is made, by what gradients are divided, the next loss scale, step counts and what rules
    make of them.

    partials: sums of squares, float64; None where they are not read. zeros: counts of them, int32, likewise. found_in: float32,
    not 0 where the step is skipped anyway. current_scale, pending: what gradients are multiplied by, and the factor of
    clips that wait; None is 1. options: float64, the norm to clip to, growth factor, backoff factor, growth interval,
    hysteresis, floor and largest scale. scale, growth, hysteresis: of a `DeviceScale`, or None. seed: the scale of this step's
    loss, or None.

    numbers, out, words: one piece of memory as float64, float32 and int64. Numbers 0 and 1 are the norm of true gradients, and
    what gradients are divided by; out 4 and 5 the latter and found_inf; out 6 the next scale, 7 that of this step; words
    4 and 5 its trackers, 6 how many elements of gradients are zero.

    step_counts: int64, (address of a float32 count, row of numbers) for each; address 0 is no count.
    """
    found = tl.full([], 0, tl.int32)
    factor = _float64(pending)
    known = _float64(current_scale)
    if partials is not None:
        norm = tl.sqrt(_sum(partials, count)) * factor / known
        finite = norm < float("inf")
        found = tl.where(finite, 0, 1)
        if CLIP:
            clip = tl.minimum(tl.load(options) / (norm + 1e-6), 1.0)
            factor = factor * tl.where(finite, clip, 1.0)
        tl.store(numbers, norm)
    if zeros is not None:
        total = tl.zeros([AT_ONCE], tl.int64)
        for first in range(0, num_zeros, AT_ONCE):
            offsets = first + tl.arange(0, AT_ONCE)
            total += tl.load(zeros + offsets, offsets < num_zeros, 0).to(tl.int64)
        tl.store(words + 6, tl.sum(total))
    if found_in is not None:
        found = tl.where(tl.load(found_in) != 0.0, 1, found)
    grad_scale = known / factor
    tl.store(numbers + 1, grad_scale)
    tl.store(out + 4, grad_scale.to(tl.float32))
    tl.store(out + 5, found.to(tl.float32))
    if seed is not None:
        tl.store(out + 7, tl.load(seed).to(tl.float32))
    if scale is not None:
        _next_scale(scale, growth, hysteresis, found, options, out, words)
    if found == 0:
        for first in range(0, num_step_counts, BLOCK):
            count_ = first + tl.arange(0, BLOCK)
            mask = count_ < num_step_counts
            address = tl.load(step_counts + 2 * count_, mask, 0)
            counter = address.to(tl.pointer_type(tl.float32))
            step = tl.load(counter, mask & (address != 0), 0.0) + 1.0
            tl.store(counter, step, mask & (address != 0))
            row = rows + tl.load(step_counts + 2 * count_ + 1, mask, 0) * NUMBERS
            h0, h1, h2, h3, h4, h5, h6, h7 = PREPARE(row, step.to(tl.float64))
            to = scalars + count_ * SCALARS
            tl.store(to, h0.to(tl.float32), mask)
            tl.store(to + 1, h1.to(tl.float32), mask)
            tl.store(to + 2, h2.to(tl.float32), mask)
            tl.store(to + 3, h3.to(tl.float32), mask)
            tl.store(to + 4, h4.to(tl.float32), mask)
            tl.store(to + 5, h5.to(tl.float32), mask)
            tl.store(to + 6, h6.to(tl.float32), mask)
            tl.store(to + 7, h7.to(tl.float32), mask)


@triton.jit(do_not_specialize=["first_tile"])
def update(table, tiles, first_tile, scalars, out, random_bits, RULE: tl.constexpr, FLAGS: tl.constexpr, LOAD: tl.constexpr,
           STORE: tl.constexpr, OPEN0: tl.constexpr, CLOSE0: tl.constexpr, OPEN1: tl.constexpr, CLOSE1: tl.constexpr,
           OPEN2: tl.constexpr, CLOSE2: tl.constexpr, RATIO: tl.constexpr, HALF: tl.constexpr, GRADIENT: tl.constexpr,
           CHECKED: tl.constexpr, DIVIDE: tl.constexpr, COLUMNS: tl.constexpr, SCALARS: tl.constexpr,
           TILE: tl.constexpr):  # fmt: skip
    """Step one tile as `decide` says: read weights, gradients and states, apply the rule, write all but the gradients.

    random_bits: 64 random numbers below 2**16 for weights and for each state. RATIO: the first state is kept
    as the ratio to `shares` of the second with this steepness; 0: it is not. CHECKED: whether the step may be skipped. DIVIDE:
    whether gradients are divided by a number other than 1.
    """
    if CHECKED:
        if tl.load(out + 5) != 0.0:
            return
    program = tl.program_id(0) + first_tile
    row = table + tl.load(tiles + 2 * program).to(tl.int64) * COLUMNS
    start = tl.load(tiles + 2 * program + 1).to(tl.int64) * TILE
    weights = tl.load(row)
    residual = tl.load(row + 1)
    p0 = tl.load(row + 3)
    p1 = tl.load(row + 4)
    p2 = tl.load(row + 5)
    q0 = tl.load(row + 6)
    q1 = tl.load(row + 7)
    q2 = tl.load(row + 8)
    h = scalars + tl.load(row + 10) * SCALARS
    offsets = start + tl.arange(0, TILE)
    mask = offsets < tl.load(row + 9)
    g = load_wide(tl.load(row + 2), offsets, mask, GRADIENT)
    if DIVIDE:
        g = tl.div_rn(g, tl.load(out + 4))
    w = LOAD(weights, residual, offsets, mask, HALF)
    s0 = OPEN0(p0, q0, offsets, mask)
    s1 = OPEN1(p1, q1, offsets, mask)
    s2 = OPEN2(p2, q2, offsets, mask)
    if RATIO > 0:
        s0 = s0 * shares(load_unsigned(p1, offsets, mask), RATIO)
    h0 = tl.load(h)
    h1 = tl.load(h + 1)
    h2 = tl.load(h + 2)
    h3 = tl.load(h + 3)
    h4 = tl.load(h + 4)
    h5 = tl.load(h + 5)
    h6 = tl.load(h + 6)
    h7 = tl.load(h + 7)
    w, s0, s1, s2 = RULE(w, g, s0, s1, s2, h0, h1, h2, h3, h4, h5, h6, h7, FLAGS)
    STORE(weights, residual, offsets, mask, w, random_bits, HALF)
    code = CLOSE1(p1, q1, start, offsets, mask, s1, random_bits + 128, TILE)
    if RATIO > 0:
        s0 = tl.div_rn(s0, shares(code, RATIO))
    CLOSE0(p0, q0, start, offsets, mask, s0, random_bits + 64, TILE)
    CLOSE2(p2, q2, start, offsets, mask, s2, random_bits + 192, TILE)


# Triton takes TRITON_INTERPRET into account where a kernel is defined: then these run on CPU tensors.
IS_INTERPRETED = not isinstance(decide, triton.runtime.JITFunction)
