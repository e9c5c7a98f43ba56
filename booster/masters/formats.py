"""What is kept of a master beside the half weight, and how the two become one float32 number and come apart again.

A format reads float32 values of one bucket and writes them back. All work on flat tensors of equal length: `working`,
views of the half weights; `rest`, what the bucket keeps (or None); `values` and `spare`, float32 scratch. A format that
keeps float32 gives `rest` itself as the values.

bfloat16 is rounded to nearest with ties away from zero, in every format that says "nearest". Torch rounds ties to even,
which differs for values exactly half way between two bfloat16 numbers only, about one in 65536; but what is left after
rounding to even takes 17 bits, and the formats would then train differently.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from booster.flat import starts

Views = Sequence[torch.Tensor]

_CHUNK = 2**16  # elements of a temporary that only some formats need


class Format(ABC):
    """See the module docstring. needs_values: whether `values` must be scratch, as `rest` is not float32."""

    needs_values = True

    @abstractmethod
    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """A `rest` for `size` elements whose working weights are of `dtype`."""

    @abstractmethod
    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        """Fill `values` with the masters; overwrites `spare`. A weight that its master does not round to was written by
        somebody else, and is its own master."""

    @abstractmethod
    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        """Take `values` as the masters: updates `working` and `rest`; overwrites `values`, unless it is `rest`, and `spare`."""


class Separate(Format):
    """A float32 copy. 4 bytes an element."""

    needs_values = False

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float32, device=device)

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        if rest is not values:
            values.copy_(rest)  # type: ignore[arg-type]
        _take_foreign(working, values, spare)

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        if rest is not values:
            rest.copy_(values)  # type: ignore[union-attr]
        round_nearest(working, values, spare)


class SplitBFloat16(Format):
    """The weight is the high half of the float32 number, `rest` the signed low half. 2 bytes an element, exact."""

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int16, device=device)

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        bits, low = values.view(torch.int32), spare.view(torch.int32)
        torch._foreach_copy_(split_like(bits, working), [w.view(torch.int16) for w in working])
        bits.bitwise_left_shift_(16).add_(low.copy_(rest))
        # Zeros that somebody else wrote: with the remainder of another weight they can read as a NaN. On the CPU one number
        # tells whether there is any; elsewhere reading it would wait for the device.
        if not values.is_cpu or math.isnan(values.max()):
            torch._foreach_copy_(split_like(spare, working), list(working))
            torch.where(values.isnan().logical_and_(spare == 0), spare, values, out=values)

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        plain_nan_(values)
        bits = values.view(torch.int32)
        rest.copy_(bits)  # the low 16 bits
        _high_half(bits, working, out=bits)


class SplitFloat16(Format):
    """`rest` counts the distance to the float16 weight in 2**-14 of the weight's ulp. 2 bytes an element.

    Exact for values of at least 2**-14 in magnitude, float16's smallest normal number; below, the error is below
    2**-38. Masters beyond float16's largest number become infinite, as their weights do.
    """

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int16, device=device)

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        torch._foreach_copy_(split_like(values, working), list(working))
        for part, left, step in zip(*(t.split(_CHUNK) for t in (values, rest, spare)), strict=True):
            part.add_(_to_step(step.copy_(part)).mul_(left))
        _take_foreign(working, values, spare)

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        torch._foreach_copy_(list(working), split_like(values, working))
        torch._foreach_copy_(split_like(spare, working), list(working))
        # The difference to an overflown weight is not a number; nothing is left over then.
        values.sub_(spare).div_(_to_step(spare)).nan_to_num_(0.0, 0.0, 0.0)
        for part, left in zip(values.split(_CHUNK), rest.split(_CHUNK), strict=True):
            left.copy_(whole_steps(part))


class Nearest(Format):
    """No master: the update is added to the weight in float32, and rounded. 0 bytes; updates below half an ulp are lost."""

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        return None

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        torch._foreach_copy_(split_like(values, working), list(working))

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        round_nearest(working, values, spare)


class Stochastic(Nearest):
    """No master: rounded up or down by chance, so that the mean of many updates is right. 0 bytes.

    The random numbers are those of a generator of its own with a fixed seed: ranks that step alike round alike, and the
    user's random state is not consumed.
    """

    def __init__(self, seed: int = 1024) -> None:
        self._seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self.generators[device]

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        generator = self.generator(values.device)
        if working[0].dtype == torch.bfloat16:
            bits, noise = values.view(torch.int32), spare.view(torch.int32)
            bits.add_(noise.random_(0, 2**16, generator=generator)).bitwise_right_shift_(16)
            torch._foreach_copy_([w.view(torch.int16) for w in working], split_like(bits, working))
            return
        for part, ulp in zip(values.split(_CHUNK), spare.split(_CHUNK), strict=True):
            part.div_(_to_ulp(ulp.copy_(part)).copysign_(part))  # a positive number of them
            below = part.floor()
            # The sum of a number and a chance is rounded, and would reach the next one too often.
            up = torch.rand(part.shape, generator=generator, device=part.device) < part.sub_(below)
            torch.mul(below.add_(up), ulp, out=part)
        torch._foreach_copy_(list(working), split_like(values, working))


class Kahan(Format):
    """The rounding error is kept in the weight's dtype and added before the next update. 2 bytes; about 16 bits (22 with
    float16) of mantissa."""

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        torch._foreach_copy_(split_like(values, working), list(working))
        values.add_(spare.copy_(rest))  # type: ignore[arg-type]
        _take_foreign(working, values, spare)

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        round_nearest(working, values, spare)
        torch._foreach_copy_(split_like(spare, working), list(working))
        rest.copy_(values.sub_(spare).nan_to_num_(0.0, 0.0, 0.0))
        # An error of nearly half an ulp can be rounded up to half an ulp, and with it the sum to the next weight.
        for weights, left, sums in zip(*(t.split(_CHUNK) for t in (spare, rest, values)), strict=True):
            moves = _round(torch.add(weights, left, out=sums), rest.dtype).ne(weights).logical_and_(left != 0)
            left.view(torch.int16).sub_(moves.to(torch.int16))


def round_nearest(working: Views, values: torch.Tensor, spare: torch.Tensor) -> None:
    """Write `values` to the weights; bfloat16 ties go away from zero, see the module docstring. Overwrites `spare`."""
    if working[0].dtype == torch.bfloat16:
        plain_nan_(values)
        _high_half(values.view(torch.int32), working, out=spare.view(torch.int32))
    else:
        torch._foreach_copy_(list(working), split_like(values, working))


def plain_nan_(values: torch.Tensor) -> None:
    """Turn every NaN into the plain one where others come up: CUDA's, 0x7fffffff, would round up to minus zero.

    On the CPU arithmetic makes none whose upper bits are all ones, nor are any let in from outside.
    """
    if not values.is_cpu:
        values.masked_fill_(values.isnan(), math.nan)


def whole_steps(distance: torch.Tensor) -> torch.Tensor:
    """Round the distance of masters to their float16 weights, in 2**-14 ulp, such that their sum rounds to the weight again:
    what is not half an ulp must not become it."""
    half_ulp = 2.0**13
    limit = torch.where(distance.abs() < half_ulp, half_ulp - 1, half_ulp)
    return distance.round().minimum(limit).maximum(-limit)


def split_like(values: torch.Tensor, working: Views) -> list[torch.Tensor]:
    """Views of `values` for those in `working`, which lie in it one after another as in a bucket."""
    offsets = starts(w.numel() for w in working)
    return [values[offset : offset + w.numel()] for offset, w in zip(offsets, working, strict=True)]


def _high_half(bits: torch.Tensor, working: Views, out: torch.Tensor) -> None:
    torch.add(bits, 0x8000, out=out).bitwise_right_shift_(16)
    torch._foreach_copy_([w.view(torch.int16) for w in working], split_like(out, working))


def _take_foreign(working: Views, values: torch.Tensor, spare: torch.Tensor) -> None:
    """Put weights in the place of masters that do not round to them. Overwrites `spare`."""
    dtype, size = working[0].dtype, len(values)
    rounded, found = spare.view(dtype).split(size)
    if dtype == torch.bfloat16:
        for part, master in zip(rounded.view(torch.int16).split(_CHUNK), values.split(_CHUNK), strict=True):
            part.copy_(_high_bits(master))
    else:
        rounded.copy_(values)
    # On the CPU an answer costs nothing to wait for; a call costs as much as some thousand elements.
    few = values.is_cpu and len(working) <= 1 + size // 2**14
    if few and all(map(_same_bits, split_like(rounded, working), working)):
        return
    found.copy_(rounded)  # also between the pieces, where there are no weights
    torch._foreach_copy_(split_like(found, working), list(working))
    if few or not (values.is_cpu and _same_bits(rounded, found)):
        torch.where(rounded.view(torch.int16) == found.view(torch.int16), values, found, out=values)


def _round(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """New half numbers, rounded to nearest."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    return _high_bits(values).to(torch.int16).view(dtype)


def _high_bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of float32 `values` rounded to bfloat16, as int32."""
    return torch.add(values.view(torch.int32), 0x8000).bitwise_right_shift_(16)


def _same_bits(halves: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether two flat tensors are equal to the bit; waits for the device."""
    size = len(halves) // 4 * 4
    if halves.storage_offset() % 4 or others.storage_offset() % 4:
        return torch.equal(halves.view(torch.int16), others.view(torch.int16))
    same = torch.equal(halves[:size].view(torch.int64), others[:size].view(torch.int64))
    return same and torch.equal(halves[size:].view(torch.int16), others[size:].view(torch.int16))


def _to_ulp(weights: torch.Tensor) -> torch.Tensor:
    """Replace float32 `weights` by the distance between float16 numbers of their magnitude."""
    weights.view(torch.int32).bitwise_and_(0x7F800000)
    return weights.mul_(2.0**-10).clamp_(2.0**-24, 2.0**5)


def _to_step(weights: torch.Tensor) -> torch.Tensor:
    return _to_ulp(weights).mul_(2.0**-14)
