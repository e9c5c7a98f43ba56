"""Parts of kernels with a fault in each. Needs Triton."""

import triton
import triton.language as tl

from booster.kernels.arithmetic import half_bits, plain_bits, store_half
from booster.kernels.rules import _adam, _prepare_adam


@triton.jit
def slow_body(w, g, m, v, most, decay, rise, beta2, rise2, size, root, eps, lr, FLAGS: tl.constexpr):
    """Updates that are a thousandth too small."""
    return _adam(w, g, m, v, most, decay, rise, beta2, rise2, size * 0.999, root, eps, lr, FLAGS)


@triton.jit
def no_corrections(row, step):
    """Of Adam, with every step taken for the first."""
    return _prepare_adam(row, step * 0.0 + 1.0)


@triton.jit
def raises(w, g, m, v, most, decay, rise, beta2, rise2, size, root, eps, lr, FLAGS: tl.constexpr):
    return w + tl.full([3], 0.0, tl.float32), m, v, most


@triton.jit
def stores_no_rest(weights, residual, offsets, mask, values, random_bits, HALF: tl.constexpr):
    store_half(weights, offsets, mask, half_bits(values, HALF))


@triton.jit
def closes_twice(codes, scales, first, offsets, mask, values, random_bits, TILE: tl.constexpr):
    """Twice the number."""
    store_half(codes, offsets, mask, plain_bits(values * 2.0) >> 16)


@triton.jit
def stores_beyond(weights, residual, offsets, mask, values, random_bits, HALF: tl.constexpr):
    """At addresses outside all tensors."""
    tl.store((weights + (1 << 60)).to(tl.pointer_type(tl.float32)) + offsets, values, mask)
