"""Masters of 24 bits: a half weight and one byte.

Of the 16 bits that `SplitBFloat16` keeps beside a weight, these keep the upper eight::

    float32    s eeeeeeee mmmmmmm mmmmmmmm mmmmmmmm
    kept       s eeeeeeee mmmmmmm mmmmmmmm
    bfloat16   s eeeeeeee mmmmmmm

The lower eight are rounded by chance, the nearer the likelier: an update of a thousandth of the last step kept moves a master
once in a thousand times, and so does what it should on average. Rounded to nearest, it never would. What is on the grid
already stays, whatever the random numbers, so masters come back from a checkpoint exactly. The weight is what the 24 bits
round to, ties away from zero as in other formats: it differs from theirs where chance carries a master over the middle between
two weights.

With float16 the byte counts the distance from weight to master in 2**-8 of the weight's ulp, from -127 to 127.
"""

from __future__ import annotations

import math

import torch

from booster.masters.dither import Dither
from booster.masters.foreign import take_foreign, take_zeros
from booster.masters.formats import Format
from booster.masters.packed import Chances
from booster.masters.rounding import Views, pieces_like, plain_nan_, to_ulp

WEIGHTS = "weights"  # what `Dither` gives them random numbers by
_CHUNK = 2**15  # elements of a temporary
LARGEST = 127.0
STEP = 2.0**-8  # ulp of the weight


class Split24(Format):
    """Keeps one int8 an element."""

    def __init__(self, dither: Dither) -> None:
        self._dither = dither

    def chances(self, device: torch.device) -> Chances:
        """Return the random numbers of this step."""
        return self._dither.chances(WEIGHTS, device)

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int8, device=device)


class Split24BFloat16(Split24):
    """Keeps the third byte of the master, as a signed number. 1 byte an element."""

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        torch._foreach_copy_(pieces_like(values, working), list(working))  # a weight's bits, and 16 zeros
        values.view(torch.int32).add_(spare.view(torch.int32).copy_(rest), alpha=2**8)
        take_zeros(working, values, spare)

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        plain_nan_(values)
        # Pairs are shifted together, which is faster: what one takes over from the other lies above the bits that are read.
        bits, pairs = values.view(torch.int32), values.view(torch.int64)
        bits.view(-1, 64).add_(self.chances(values.device).upper)
        pairs.bitwise_right_shift_(8)
        rest.copy_(bits)  # the lower eight of 24 bits
        bits.add_(0x80)
        pairs.bitwise_right_shift_(8)
        torch._foreach_copy_([w.view(torch.int16) for w in working], pieces_like(bits, working))


class Split24Float16(Split24):
    """Keeps the distance from weight to master, counted in 2**-8 of the weight's ulp. 1 byte an element."""

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        torch._foreach_copy_(pieces_like(values, working), list(working))
        wide = torch.empty(min(_CHUNK, len(values)), dtype=torch.float32, device=values.device)
        for chunk, left, step in zip(*(t.split(_CHUNK) for t in (values, rest, spare)), strict=True):
            chunk.add_(to_ulp(step.copy_(chunk), STEP).mul_(wide[: len(chunk)].copy_(left)))
        take_foreign(working, values, spare)

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        torch._foreach_copy_(list(working), pieces_like(values, working))
        torch._foreach_copy_(pieces_like(spare, working), list(working))
        values.sub_(spare).div_(to_ulp(spare, STEP))
        # The difference to an overflown weight is not a number; nothing is left over then. Two numbers tell whether there is.
        if not values.is_cpu or not all(map(math.isfinite, torch.aminmax(values))):
            values.nan_to_num_(0.0, 0.0, 0.0)
        values.view(-1, 64).add_(self.chances(values.device).fractions)
        rest.copy_(values.floor_().clamp_(-LARGEST, LARGEST))
