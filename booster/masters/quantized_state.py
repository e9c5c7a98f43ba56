"""Optimizer state in 16 or 8 bits an element, and how it becomes float32 and comes back.

Between steps a state of a flat bucket is a `QuantizedState`. While its bucket is stepped it is float32, in scratch that the
next bucket uses again; see `quantizer.py`. There are three encodings:

========  =====================================================  ==================
way       an element                                             bytes an element
========  =====================================================  ==================
bf16      the upper half of the float32 number                   2
signed    sign and square root of its share of the largest       1 + 2/32
unsigned  fourth root of its share of the largest                1 + 2/32
========  =====================================================  ==================

Groups
------
"The largest" is that of 32 neighbours. It is kept beside them in 16 bits, the scale: a float32 number without its sign and its
last 15 bits, which has the range of float32 (half precision proper would lose gradients below 6e-8) and errors below 0.4 %.
With s the scale::

    signed     code = +-127 (|x| / s) ** 1/2        x = +-s (code / 127) ** 2
    unsigned   code =   255 ( x  / s) ** 1/4        x =   s (code / 255) ** 4

Companding
----------
One outlier makes s large, and with equal steps all its neighbours would become zero. Roots give small numbers small steps. A
state that is never negative is a square as a rule, as Adam's second moment is, so that its root has the unit of a gradient, and
the same companding is applied to that. Next to an outlier 10,000 times as large::

                           smallest number but zero    error of a neighbour, gradient units
    equal steps            s / 127                     100 %
    softsign               s / 254                     100 %
    roots, signed          s / 16129                   about 60 %
    roots, unsigned        sqrt(x) = sqrt(s) / 65025   about 25 %

Nothing but zero in a whole group becomes zero where a state is unsigned: the update divides by it.

Rounding
--------
Up or down by chance, the nearer the likelier. Of a second moment 0.1 % changes in a step, and steps of 8 bits are 1 % or more:
rounded to nearest it would stay what it is for ever. The random numbers are those of `RoundingRNG`.

Exact again
-----------
What was unpacked packs into the same bits, whatever the random numbers: the largest of a group becomes the scale itself, the
others lie closer to their code than the smallest random number, 2**-13. So state dicts hold float32, and a run that is
resumed from one goes on bit for bit.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from booster.masters.rounding import RoundingBits, canonical_nan_

Encoding = Literal["bf16", "signed", "unsigned"]

GROUP = 32
SMALLEST = 2.0**-96  # of a scale: the smallest code of its group is still a normal number
LEVELS = {"signed": 127.0, "unsigned": 255.0}


class QuantizedState:
    """A state of a bucket of `size` elements, a multiple of 64.

    codes: bfloat16, int8 or uint8. scales: int16, one for 32 elements, None with "bf16".
    """

    __slots__ = ("codes", "scales", "encoding")

    def __init__(self, encoding: Encoding, size: int, device: torch.device) -> None:
        self.encoding = encoding
        dtype = {"bf16": torch.bfloat16, "signed": torch.int8, "unsigned": torch.uint8}[encoding]
        self.codes = torch.zeros(size, dtype=dtype, device=device)
        self.scales = None if encoding == "bf16" else torch.zeros(size // GROUP, dtype=torch.int16, device=device)

    @classmethod
    def of(cls, encoding: Encoding, codes: torch.Tensor, scales: torch.Tensor | None = None) -> QuantizedState:
        """Return that of these tensors, which are not copied."""
        made = cls.__new__(cls)
        made.encoding, made.codes, made.scales = encoding, codes, scales
        return made

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.codes] if self.scales is None else [self.codes, self.scales]

    def factors(self) -> torch.Tensor | None:
        """Return new float32 numbers, one for a group, that `dequantize` multiplies by; None with "bf16".

        The levels are in them; of unsigned numbers their root, so that nothing becomes denormal.
        """
        if self.scales is None:
            return None
        wide = self.scales.to(torch.int32).bitwise_and_(0xFFFF).bitwise_left_shift_(15).view(torch.float32)
        return (wide if self.encoding == "signed" else wide.sqrt_()).mul_(LEVELS[self.encoding] ** -2)

    def dequantize(self, values: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Write the numbers into float32 `values`, and return it. scratch: float32, of its size, made if there is none."""
        factors = self.factors()
        if factors is None:
            return values.copy_(self.codes)
        if self.encoding == "unsigned":
            values.copy_(self.codes)
            values.mul_(values)
        else:  # at most 127 * 127, in half as many bytes as float32 takes
            scratch = torch.empty_like(values) if scratch is None else scratch
            codes, sizes = scratch.view(torch.int16).split(len(values))
            codes.copy_(self.codes)
            values.copy_(codes.mul_(torch.abs(codes, out=sizes)))
        values.view(-1, GROUP).mul_(factors[:, None])
        return values.mul_(values) if self.encoding == "unsigned" else values

    def quantize(self, values: torch.Tensor, random_bits: RoundingBits, scratch: torch.Tensor | None = None) -> None:
        """Keep float32 `values`, which are overwritten. scratch: as of `dequantize`."""
        if self.scales is None:
            canonical_nan_(values)  # any other could round to infinity, or to zero
            bits = values.view(torch.int32)
            bits.view(-1, 64).add_(random_bits.lanes)
            self.codes.view(torch.int16).copy_(bits.bitwise_right_shift_(16))
            return
        if scratch is None:
            scratch = torch.empty(len(values), dtype=torch.float32, device=values.device)
        signed = self.encoding == "signed"
        sizes = torch.abs(values, out=scratch) if signed else values.abs_()  # no NaN is negative then
        groups = sizes.view(-1, GROUP)
        # Bits of positive numbers are in the order of the numbers, NaN last; for integers torch's CPU kernel is faster.
        largest = torch.amax(groups.view(torch.int32), 1).view(torch.float32)
        least = largest.clamp(min=SMALLEST)
        # Zero stays zero; a comparison would take longer than the sign.
        self.scales.copy_(narrow_scales(least * largest.sign(), random_bits.of_scales(len(least))))
        # The levels go into the factor of a group, under the root: a pass less over the elements.
        groups.mul_(least.reciprocal_().mul_(LEVELS[self.encoding] ** (2 if signed else 4))[:, None])
        sizes = sizes.sqrt_() if signed else sizes.sqrt_().sqrt_()
        sizes.view(-1, 64).add_(random_bits.fractions)
        if signed:
            self.codes.copy_(sizes.copysign_(values))
        else:
            whole = scratch.view(torch.int16)[: len(sizes)].copy_(sizes)
            self.codes.view(torch.int8).copy_(whole)  # the lower eight bits
            self.codes.clamp_(min=1)


def narrow_scales(found: torch.Tensor, random_bits: torch.Tensor) -> torch.Tensor:
    """Return the bits 15 to 30 of the scales `found`, float32 and not negative, rounded by chance, as int32.

    chances: those of `scale_random_bits`, in a shape like that of `found`.
    """
    if not found.is_cpu:  # see `rounding.canonical_nan_`
        found = torch.where(found != found, math.nan, found)
    return (found.view(torch.int32) + random_bits).bitwise_right_shift_(15)
