"""A form of half weights that the library has not, in one file: what does not fit is cut off. Needs Triton."""

import torch
import triton
import triton.language as tl

from booster.kernels.arithmetic import plain_bits, store_half
from booster.kernels.weights import WeightForm, _load_nearest
from booster.masters.formats import Nearest
from booster.masters.rounding import pieces_like


class Cut(Nearest):
    """As torch steps it; for bfloat16."""

    def write(self, working, residual, values, scratch):
        bits = values.view(torch.int32).bitwise_right_shift_(16)
        torch._foreach_copy_([w.view(torch.int16) for w in working], pieces_like(bits, working))


@triton.jit
def _store_cut(weights, residual, offsets, mask, values, random_bits, HALF: tl.constexpr):
    store_half(weights, offsets, mask, plain_bits(values) >> 16)


CUT = WeightForm(_load_nearest, _store_cut)
