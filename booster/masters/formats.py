"""What is kept of a master beside the half weight, and how the two become one float32 number and come apart again.

Why masters
-----------
Next to 1.0, bfloat16 has the numbers 0.99609375 and 1.0078125. An update of 0.0001 ends nearer to 1.0 than to either, so
1.0 + 0.0001 is 1.0 again, however often it is added. Training therefore adds updates to a float32 number, the master, and
forward and backward read what the master rounds to, the half weight.

The bits
--------
A bfloat16 number is the upper half of a float32 number; a float16 number has exponents of its own::

    float32    s eeeeeeee mmmmmmm mmmmmmmmmmmmmmmm
    bfloat16   s eeeeeeee mmmmmmm
    float16    s eeeee mmmmmmmmmm

Beside a bfloat16 weight a master thus needs 16 bits only, the remainder. Two masters, taken apart and joined again::

    3.1415927 = 0x4049 0FDB   the lower half is small:  weight 0x4049 = 3.140625, remainder +0x0FDB =  4059
    2.7182817 = 0x402D F854   the lower half is large:  weight 0x402E = 2.71875,  remainder  0xF854 = -1964 as int16

    (0x402E << 16) + -1964 = 0x402DF854

Ties
----
A lower half of 0x8000 is a tie: as far from the weight below as from the one above. Rounded up, the remainder is -32768;
rounded down it would be +32768, which int16 does not hold. So the formats add 0x8000 to the bits and drop the lower half.
As the sign is a bit of its own, that is away from zero on both sides. Torch rounds ties to even, which differs for one number
in about 65536. Every format that says "nearest" rounds bfloat16 as the split one does, so all train alike.

Float16
-------
The remainder counts the distance from weight to master in 2**-14 of the weight's ulp, the distance to the next weight::

    master = weight + remainder * ulp(weight) * 2**-14,    |remainder| <= 2**13, which is half an ulp

A master has 24 binary digits and the weight 11 of them, so nothing is lost from 2**-14 on, the smallest number with all 11.
Below, the ulp is 2**-24 whatever the number, and the error less than 2**-38.

===================  =========================  =============  =====================================================
format               kept beside the weight     bytes a weight lost
===================  =========================  =============  =====================================================
`Separate`           the master                 4              nothing
`SplitBFloat16`      its lower half             2              nothing
`SplitFloat16`       the distance, counted      2              below 2**-14 less than 2**-38; past 65504 it is infinite
`Split24BFloat16`    its third byte             1              what lies below 2**-16 of it, on average nothing
`Split24Float16`     the distance, counted      1              what lies below 2**-19 of it, on average nothing
`Kahan`              the rounding error         2              what a half number of that error loses
`Nearest`            nothing                    0              updates of less than half an ulp
`Stochastic`         nothing                    0              nothing on average
`Same`               nothing; float32 weights   0              nothing
===================  =========================  =============  =====================================================

Somebody else may write a weight between two steps: load it, clip it, set it to zero. A master is believed only where it
rounds to its weight; elsewhere the weight is taken. Only the weights themselves can tell: writes through `.data` leave no
other trace.

All work on flat tensors of equal length: `working`, views of the half weights, piece by piece; `rest`, what the bucket keeps
(or None); `values` and `spare`, float32 scratch. `Separate` gives `rest` itself as the values.
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
    """A way to keep masters; the module docstring says what is read and written. needs_values: `rest` is not float32, so that
    `values` must be scratch."""

    needs_values = True

    @abstractmethod
    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return a `rest` for `size` elements whose working weights are of `dtype`."""

    @abstractmethod
    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        """Fill `values` with the masters; overwrites `spare`. A weight that its master does not round to was written by
        somebody else, and is its own master."""

    @abstractmethod
    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        """Make `values` the masters: update `working` and `rest`. Overwrites `spare`, and `values` unless it is `rest`."""


class Separate(Format):
    """Keeps the master itself. 4 bytes an element."""

    needs_values = False

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float32, device=device)

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        if rest is not values:
            values.copy_(rest)  # type: ignore[arg-type]
        take_foreign(working, values, spare)

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        if rest is not values:
            rest.copy_(values)  # type: ignore[union-attr]
        round_nearest(working, values, spare)


class Same(Format):
    """Of float32 weights, which are their own masters; they are stepped in scratch. 0 bytes."""

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        return None

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        torch._foreach_copy_(pieces_like(values, working), list(working))

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        torch._foreach_copy_(list(working), pieces_like(values, working))


class SplitBFloat16(Format):
    """Keeps the lower half of the master, as a signed number; the weight is the upper half. 2 bytes an element, exact."""

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int16, device=device)

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        bits, low = values.view(torch.int32), spare.view(torch.int32)
        torch._foreach_copy_(pieces_like(bits, working), [w.view(torch.int16) for w in working])
        bits.bitwise_left_shift_(16).add_(low.copy_(rest))
        take_zeros(working, values, spare)

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        plain_nan_(values)
        bits = values.view(torch.int32)
        rest.copy_(bits)  # the low 16 bits
        _high_half(bits, working, out=bits)


class SplitFloat16(Format):
    """Keeps the distance from weight to master, counted in 2**-14 of the weight's ulp. 2 bytes an element.

    Exact for values of at least 2**-14 in magnitude, float16's smallest normal number; below, the error is below
    2**-38. Masters beyond float16's largest number become infinite, as their weights do.
    """

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int16, device=device)

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        torch._foreach_copy_(pieces_like(values, working), list(working))
        for chunk, left, step in zip(*(t.split(_CHUNK) for t in (values, rest, spare)), strict=True):
            chunk.add_(to_step(step.copy_(chunk)).mul_(left))
        take_foreign(working, values, spare)

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        torch._foreach_copy_(list(working), pieces_like(values, working))
        torch._foreach_copy_(pieces_like(spare, working), list(working))
        # The difference to an overflown weight is not a number; nothing is left over then.
        values.sub_(spare).div_(to_step(spare)).nan_to_num_(0.0, 0.0, 0.0)
        for chunk, left in zip(values.split(_CHUNK), rest.split(_CHUNK), strict=True):
            left.copy_(whole_steps(chunk))


class Nearest(Format):
    """Keeps nothing: the update is added to the weight in float32, and rounded. Updates below half an ulp are lost."""

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        return None

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        torch._foreach_copy_(pieces_like(values, working), list(working))

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        round_nearest(working, values, spare)


class Stochastic(Nearest):
    """Keeps nothing, and rounds up or down by chance, the nearer the likelier, so that the mean of many updates is right.

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
            torch._foreach_copy_([w.view(torch.int16) for w in working], pieces_like(bits, working))
            return
        for chunk, ulp in zip(values.split(_CHUNK), spare.split(_CHUNK), strict=True):
            chunk.div_(_to_ulp(ulp.copy_(chunk)).copysign_(chunk))  # a positive number of them
            below = chunk.floor()
            # The sum of a number and a chance is rounded, and would reach the next one too often.
            up = torch.rand(chunk.shape, generator=generator, device=chunk.device) < chunk.sub_(below)
            torch.mul(below.add_(up), ulp, out=chunk)
        torch._foreach_copy_(list(working), pieces_like(values, working))


class Kahan(Format):
    """Keeps the rounding error, in the weight's dtype, and adds it before the next update. 2 bytes; about 16 bits (22 with
    float16) of mantissa."""

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def read(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        torch._foreach_copy_(pieces_like(values, working), list(working))
        values.add_(spare.copy_(rest))  # type: ignore[arg-type]
        take_foreign(working, values, spare)

    def write(self, working: Views, rest: torch.Tensor | None, values: torch.Tensor, spare: torch.Tensor) -> None:
        assert rest is not None
        round_nearest(working, values, spare)
        torch._foreach_copy_(pieces_like(spare, working), list(working))
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
        torch._foreach_copy_(list(working), pieces_like(values, working))


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 or float64 `values` as the half weights that a step would make of such masters; NaN stays NaN."""
    values = values.float()
    return torch.where(values.isnan(), values.to(dtype), _round(values, dtype))


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


def pieces_like(values: torch.Tensor, working: Views) -> list[torch.Tensor]:
    """Return views of `values` for those in `working`, which lie in it one after another as in a bucket."""
    offsets = starts(map(torch.Tensor.numel, working))
    return [values[offset : offset + w.numel()] for offset, w in zip(offsets, working, strict=True)]


def _high_half(bits: torch.Tensor, working: Views, out: torch.Tensor) -> None:
    torch.add(bits, 0x8000, out=out).bitwise_right_shift_(16)
    torch._foreach_copy_([w.view(torch.int16) for w in working], pieces_like(out, working))


def take_zeros(working: Views, values: torch.Tensor, spare: torch.Tensor) -> None:
    """Of joined bfloat16 masters: take over zeros that somebody else wrote. Overwrites `spare`.

    With the remainder of another weight they can read as a NaN. On the CPU one number tells whether there is any; elsewhere
    reading it would wait for the device.
    """
    if not values.is_cpu or math.isnan(values.max()):
        torch._foreach_copy_(pieces_like(spare, working), list(working))
        torch.where(values.isnan().logical_and_(spare == 0), spare, values, out=values)


def take_foreign(working: Views, values: torch.Tensor, spare: torch.Tensor) -> None:
    """Put weights in the place of masters that do not round to them. Overwrites `spare`."""
    dtype, size = working[0].dtype, len(values)
    rounded, found = spare.view(dtype).split(size)
    if dtype == torch.bfloat16:
        for chunk, master in zip(rounded.view(torch.int16).split(_CHUNK), values.split(_CHUNK), strict=True):
            chunk.copy_(_high_bits(master))
    else:
        rounded.copy_(values)
    # On the CPU an answer costs nothing to wait for; a call costs as much as some thousand elements.
    few = values.is_cpu and len(working) <= 1 + size // 2**14
    if few and all(map(_same_bits, pieces_like(rounded, working), working)):
        return
    found.copy_(rounded)  # also between the pieces, where there are no weights
    torch._foreach_copy_(pieces_like(found, working), list(working))
    if few or not (values.is_cpu and _same_bits(rounded, found)):
        torch.where(rounded.view(torch.int16) == found.view(torch.int16), values, found, out=values)


def _round(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return new half numbers, rounded to nearest."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    return _high_bits(values).to(torch.int16).view(dtype)


def _high_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of float32 `values` rounded to bfloat16, as int32."""
    return torch.add(values.view(torch.int32), 0x8000).bitwise_right_shift_(16)


def _same_bits(halves: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether two flat tensors are equal to the bit; waits for the device."""
    size = len(halves) // 4 * 4
    if halves.storage_offset() % 4 or others.storage_offset() % 4:
        return torch.equal(halves.view(torch.int16), others.view(torch.int16))
    same = torch.equal(halves[:size].view(torch.int64), others[:size].view(torch.int64))
    return same and torch.equal(halves[size:].view(torch.int16), others[size:].view(torch.int16))


def _to_ulp(weights: torch.Tensor) -> torch.Tensor:
    """Replace float32 `weights` by the distance between float16 numbers of their magnitude."""
    weights.view(torch.int32).bitwise_and_(0x7F800000)
    return weights.mul_(2.0**-10).clamp_(2.0**-24, 2.0**5)


def to_step(weights: torch.Tensor) -> torch.Tensor:
    return _to_ulp(weights).mul_(2.0**-14)
