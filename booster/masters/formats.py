"""Formats of masters: which residual bits are kept besides a half-precision weight, and how both become one float32 number.

Which of them a user asked for is `MasterOptions`.

Why masters
-----------
Next to 1.0, bfloat16 has the numbers 0.99609375 and 1.0078125. An update of 0.0001 ends nearer to 1.0 than to either, so
1.0 + 0.0001 is 1.0 again, however often it is added. Training therefore adds updates to a float32 number, the master, and
forward and backward read what the master rounds to, the half weight.

The bits
--------
A bfloat16 number is the upper half of a float32 number; a float16 number has other exponents::

    float32    s eeeeeeee mmmmmmm mmmmmmmmmmmmmmmm
    bfloat16   s eeeeeeee mmmmmmm
    float16    s eeeee mmmmmmmmmm

So a bfloat16 weight lacks 16 bits to be a master: the residual bits. Two masters, taken apart and joined again::

    3.1415927 = 0x4049 0FDB   the lower half is small:  weight 0x4049 = 3.140625, remainder +0x0FDB =  4059
    2.7182817 = 0x402D F854   the lower half is large:  weight 0x402E = 2.71875,  remainder  0xF854 = -1964 as int16

    (0x402E << 16) + -1964 = 0x402DF854

Ties
----
A lower half of 0x8000 is a tie: as far from the weight below as from the one above. Rounded up, the remainder is -32768;
rounded down it would be +32768, which int16 does not hold. So the formats add 0x8000 to the bits and drop the lower half.
As the sign is a separate bit, that is away from zero on both sides. Torch rounds ties to even, which differs for one number
in about 65536. Every format that says "nearest" rounds bfloat16 as the split one does, so all train alike.

Float16
-------
The remainder counts the distance from weight to master in 2**-14 of the weight's ulp, the distance to the next weight::

    master = weight + remainder * ulp(weight) * 2**-14,    |remainder| <= 2**13, which is half an ulp

A master has 24 binary digits and the weight 11 of them, so nothing is lost from 2**-14 on, the smallest number with all 11.
Below, the ulp is 2**-24 whatever the number, and the error less than 2**-38.

===================  =========================  =============  =====================================================
format               residual bits              bytes a weight lost
===================  =========================  =============  =====================================================
`Float32Master`           the master                 4              nothing
`SplitBFloat16`      its lower half             2              nothing
`SplitFloat16`       the distance, counted      2              below 2**-14 less than 2**-38; past 65504 it is infinite
`Split24BFloat16`    its third byte             1              what is below 2**-16 of it, on average nothing
`Split24Float16`     the distance, counted      1              what is below 2**-19 of it, on average nothing
`Kahan`              the rounding error         2              what a half number of that error loses
`Nearest`            nothing                    0              updates of less than half an ulp
`Stochastic`         nothing                    0              nothing on average
`Same`               nothing; float32 weights   0              nothing
===================  =========================  =============  =====================================================

Foreign writes
--------------
Other code may write a weight between two steps: load it, clip it, set it to zero. A master is believed only where it rounds
to its weight; elsewhere the weight is its own master. Writes through `.data` leave no other trace.

Tensors
-------
All work on flat tensors of equal length: `working`, views of the half weights, piece by piece; `residual`, what the bucket
keeps (or None); `values` and `scratch`, float32 scratch. `Float32Master` gives `residual` itself as the values.

24 bits: a weight and one byte
------------------------------
Of the 16 residual bits of `SplitBFloat16`, these keep the upper eight::

    float32    s eeeeeeee mmmmmmm mmmmmmmm mmmmmmmm
    kept       s eeeeeeee mmmmmmm mmmmmmmm
    bfloat16   s eeeeeeee mmmmmmm

The lower eight are rounded stochastically: an update of a thousandth of the last bit kept moves a master once in a thousand
times, which is right on average. Rounded to nearest, it never would. What is on the grid already stays, whatever the random
bits, so masters come back from a checkpoint exactly. The weight is what the 24 bits round to, ties away from zero as in other
formats: it differs from theirs where rounding carries a master over the middle between two weights.

With float16 the byte counts the distance from weight to master in 2**-8 of the weight's ulp, from -127 to 127.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer

from booster.common import arguments
from booster.masters.quantized_state import StateQuantizer, States, StateSigns
from booster.masters.rounding import (
    CHUNK,
    SEED,
    RoundingBits,
    RoundingRNG,
    Views,
    accept_foreign_writes,
    accept_foreign_zeros,
    canonical_nan_,
    high_half,
    in_chunks,
    pieces_like,
    round_and_keep,
    round_into,
    round_nearest,
    to_step,
    to_ulp,
    whole_steps,
)
from booster.model.optimizers import granularity_of, lies_flat, not_elementwise


class Format(ABC):
    """A way to keep masters; the module docstring says what is read and written.

    Attributes:
        residual_dtype: of `residual`, a number for each element; None: nothing is kept.
        needs_values: `residual` is not float32, so that `values` must be scratch.
    """

    residual_dtype: torch.dtype | None = None
    needs_values = True

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return a `residual` for `size` elements with working weights of `dtype`."""
        kept = self.residual_dtype
        return None if kept is None else torch.zeros(size, dtype=kept, device=device)

    @abstractmethod
    def read(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Fill `values` with the masters; overwrites `scratch`. A weight that its master does not round to was written by
        somebody else, and is its own master."""

    @abstractmethod
    def write(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Make `values` the masters: update `working` and `residual`.

        Overwrites `scratch`, and `values` unless it is `residual`.
        """


class Float32Master(Format):
    """Keeps the master itself. 4 bytes an element."""

    residual_dtype = torch.float32
    needs_values = False

    def read(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        if residual is not values:
            values.copy_(residual)  # type: ignore[arg-type]
        accept_foreign_writes(working, values, scratch)

    def write(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        if residual is not values:
            residual.copy_(values)  # type: ignore[union-attr]
        round_nearest(working, values, scratch)


class SplitBFloat16(Format):
    """Keeps the lower half of the master, as a signed number; the weight is the upper half. 2 bytes an element, exact."""

    residual_dtype = torch.int16

    def read(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        assert residual is not None
        torch._foreach_copy_(pieces_like(values, working), list(working))  # a weight's bits, and 16 zeros
        # On a CPU torch would widen the remainders into a tensor of their own.
        values.view(torch.int32).add_(scratch.view(torch.int32).copy_(residual) if values.is_cpu else residual)
        accept_foreign_zeros(working, values, scratch)

    def write(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        assert residual is not None
        canonical_nan_(values)
        bits = values.view(torch.int32)
        residual.copy_(bits)  # the low 16 bits
        high_half(bits, working, out=bits)


class SplitFloat16(Format):
    """Keeps the distance from weight to master, counted in 2**-14 of the weight's ulp. 2 bytes an element.

    Exact for values of at least 2**-14 in magnitude, float16's smallest normal number; below, the error is below
    2**-38. Masters beyond float16's largest number become infinite, as their weights do.
    """

    residual_dtype = torch.int16

    def read(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        _read_distances(working, residual, values, scratch, 2.0**-14)

    def write(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        assert residual is not None
        weights, some = round_and_keep(working, values, scratch)
        for chunk, weight, left in in_chunks(values, weights, residual):
            scratch = some[: len(chunk)]
            # The difference to an overflown weight is not a number; nothing is left over then.
            chunk.sub_(scratch.copy_(weight)).div_(to_step(scratch)).nan_to_num_(0.0, 0.0, 0.0)
            left.copy_(whole_steps(chunk))


def _read_distances(
    working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor, share: float
) -> None:
    """Fill `values` with the masters of float16 weights, of which `residual` counts the distance in `share` of their ulp."""
    assert residual is not None
    torch._foreach_copy_(pieces_like(values, working), list(working))
    for chunk, left in in_chunks(values, residual):
        chunk.add_(to_ulp(scratch[: len(chunk)].copy_(chunk), share).mul_(left))
    accept_foreign_writes(working, values, scratch)


class Nearest(Format):
    """Keeps nothing: the update is added to the weight in float32, and rounded. Updates below half an ulp are lost."""

    def read(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        torch._foreach_copy_(pieces_like(values, working), list(working))

    def write(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        round_nearest(working, values, scratch)


class Same(Nearest):
    """Of float32 weights, which are their own masters and need no rounding; they are stepped in scratch. 0 bytes."""


class Stochastic(Nearest):
    """Keeps nothing and rounds stochastically, so that the mean of many updates is right.

    A generator with a fixed seed draws: ranks that step alike round alike, and the user's random state is not consumed.
    """

    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(SEED)
        return self.generators[device]

    def noise(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the random numbers that the next `write` of so many weights would take, and take them: float32 from [0, 1) for
        float16."""
        generator = self.generator(device)
        # A bfloat16 weight is the upper half of its master: 16 random bits are added to the lower half.
        if dtype == torch.bfloat16:
            return torch.empty(size, dtype=torch.int16, device=device).random_(-(2**15), 2**15, generator=generator)
        return torch.rand(size, generator=generator, dtype=torch.float32, device=device)

    def write(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        generator = self.generator(values.device)
        if working[0].dtype == torch.bfloat16:
            canonical_nan_(values)
            bits, noise = values.view(torch.int32), scratch.view(torch.int32)
            bits.add_(noise.random_(0, 2**16, generator=generator)).bitwise_right_shift_(16)
            torch._foreach_copy_([w.view(torch.int16) for w in working], pieces_like(bits, working))
            return
        size = CHUNK if values.is_cpu else len(values)  # elsewhere numbers depend on how many are drawn at once
        for chunk, ulp in zip(values.split(size), scratch.split(size), strict=True):
            chunk.div_(to_ulp(ulp.copy_(chunk)).copysign_(chunk))  # a positive number of them
            below = chunk.floor()
            # The sum of a number and a chance is rounded, and would reach the next one too often. What is left of the
            # share, less a chance, is above zero where it goes up; to say so by `<` takes six times as long. Of infinity
            # nothing is left.
            chance = torch.rand(chunk.shape, generator=generator, dtype=chunk.dtype, device=chunk.device)
            up = chunk.sub_(below).sub_(chance).ceil_().nan_to_num_(0.0)
            torch.mul(below.add_(up), ulp, out=chunk)
        torch._foreach_copy_(list(working), pieces_like(values, working))


class Kahan(Format):
    """Keeps the rounding error, in the weight's dtype, and adds it before the next update. 2 bytes; about 16 bits (22 with
    float16) of mantissa."""

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def read(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        assert residual is not None
        torch._foreach_copy_(pieces_like(values, working), list(working))
        for chunk, left in in_chunks(values, residual):
            chunk.add_(left)
        accept_foreign_writes(working, values, scratch)

    def write(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        assert residual is not None
        weights, some = round_and_keep(working, values, scratch)
        for chunk, weight, left in in_chunks(values, weights, residual):
            sums = some[: len(chunk)].copy_(weight)
            left.copy_(chunk.sub_(sums).nan_to_num_(0.0, 0.0, 0.0))
            # An error of nearly half an ulp can be rounded up to half an ulp, and with it the sum to the next weight: its
            # bits differ by one. Whole numbers are subtracted sixteen times as fast as half ones are compared.
            again = round_into(chunk.view(residual.dtype)[: len(chunk)], sums.add_(left), sums)
            moves = again.view(torch.int16).sub_(weight.view(torch.int16)).bitwise_and_(1)
            left.view(torch.int16).sub_(moves)


WEIGHTS = "weights"  # what `RoundingRNG` gives them random numbers by
LARGEST = 127.0
STEP = 2.0**-8  # ulp of the weight


class Split24(Format):
    """Keeps one int8 an element."""

    residual_dtype = torch.int8

    def __init__(self, rng: RoundingRNG) -> None:
        self._rng = rng

    def random_bits(self, device: torch.device) -> RoundingBits:
        """Return the random numbers of this step."""
        return self._rng.random_bits(WEIGHTS, device)


class Split24BFloat16(Split24):
    """Keeps the third byte of the master, as a signed number. 1 byte an element."""

    def read(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        assert residual is not None
        torch._foreach_copy_(pieces_like(values, working), list(working))  # a weight's bits, and 16 zeros
        values.view(torch.int32).add_(scratch.view(torch.int32).copy_(residual), alpha=2**8)
        accept_foreign_zeros(working, values, scratch)

    def write(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        assert residual is not None
        canonical_nan_(values)
        # Pairs are shifted together, which is faster: what one takes over from the other is above the bits that are read.
        bits, pairs = values.view(torch.int32), values.view(torch.int64)
        bits.view(-1, 64).add_(self.random_bits(values.device).upper)
        pairs.bitwise_right_shift_(8)
        residual.copy_(bits)  # the lower eight of 24 bits
        bits.add_(0x80)
        pairs.bitwise_right_shift_(8)
        torch._foreach_copy_([w.view(torch.int16) for w in working], pieces_like(bits, working))


class Split24Float16(Split24):
    """Keeps the distance from weight to master, counted in 2**-8 of the weight's ulp. 1 byte an element."""

    def read(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        _read_distances(working, residual, values, scratch, STEP)

    def write(self, working: Views, residual: torch.Tensor | None, values: torch.Tensor, scratch: torch.Tensor) -> None:
        assert residual is not None
        torch._foreach_copy_(list(working), pieces_like(values, working))
        torch._foreach_copy_(pieces_like(scratch, working), list(working))
        values.sub_(scratch).div_(to_ulp(scratch, STEP))
        # The difference to an overflown weight is not a number; nothing is left over then. Extremes show it.
        if not values.is_cpu or not all(map(math.isfinite, torch.aminmax(values))):
            values.nan_to_num_(0.0, 0.0, 0.0)
        values.view(-1, 64).add_(self.random_bits(values.device).fractions)
        residual.copy_(values.floor_().clamp_(-LARGEST, LARGEST))


MasterWeights = Literal["auto", "fp32", "split", "split24", "none"]
Rounding = Literal["nearest", "stochastic", "kahan"]
_FORMS = ("auto", "fp32", "split", "split24", "none")
STATES = ("fp32", "bf16", "8bit")
_ROUNDINGS: dict[str, type[Format]] = {"nearest": Nearest, "stochastic": Stochastic, "kahan": Kahan}


@dataclass(frozen=True, kw_only=True)
class MasterOptions:
    """How masters and states of an optimizer are kept. All but "fp32" and "auto" are for elementwise optimizers, and Muon.

    Attributes:
        master_weights: "fp32" keeps a separate float32 copy. "split" keeps only the bits that the weight lacks, to the same
            result (for float16: for magnitudes of at least 2**-14). "split24" keeps the upper 8 of those 16 bits and rounds
            stochastically, so that a master has 16 binary digits (19 with float16). "none" keeps nothing and rounds every
            update to the weight. "auto" is "split" for bfloat16 where the optimizer is one of these, else "fp32".
        rounding: with "none": "nearest", "stochastic", or "kahan", which keeps the rounding error in half precision.
        states: "fp32" keeps states as they are, "bf16" in 2 bytes an element and "8bit" in 1.0625; see `quantized_state.py`.
        offload: states and residual bits are in the host's memory between steps; see `offload.py`.
    """

    master_weights: MasterWeights = "auto"
    rounding: Rounding = "nearest"
    states: States = "fp32"
    offload: bool = False

    def __post_init__(self) -> None:
        arguments.choice("master_weights", self.master_weights, _FORMS)
        arguments.choice("rounding", self.rounding, list(_ROUNDINGS))
        arguments.choice("states", self.states, STATES)
        arguments.flag("offload", self.offload)
        if self.rounding != "nearest" and self.master_weights != "none":
            raise ValueError(
                f"rounding={self.rounding!r} is for master_weights='none'; with {self.master_weights!r} masters keep "
                "float32 and nothing is lost to rounding"
            )

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError if `optimizer` cannot be stepped on masters of this form, or its states cannot be kept so."""
        kind, name = granularity_of(optimizer), type(optimizer).__name__
        if lies_flat(optimizer) and not (self.offload and kind != "elementwise"):
            if self.states != "fp32":
                StateSigns(optimizer)
            return
        if self.offload:
            given, fix = "offload_states=True", "leave it False"
        elif self.states != "fp32":  # under a precision on float32 weights no user chose `master_weights`
            given, fix = f"states={self.states!r}", "use states='fp32'"
        elif self.master_weights not in ("auto", "fp32"):
            given, fix = f"master_weights={self.master_weights!r}", "use master_weights='fp32' or 'auto'"
        else:
            return
        if kind == "per tensor":
            raise ValueError(f"{given} steps flat buckets, but {name} needs whole tensors; {fix}")
        raise ValueError(not_elementwise(optimizer, f"would be stepped on flat buckets by {given}", fix))

    def make_quantizer(self, optimizer: Optimizer, rng: RoundingRNG) -> StateQuantizer | None:
        """Return how states are kept, None for as they are. Raises ValueError where those of `optimizer` cannot be packed."""
        return None if self.states == "fp32" else StateQuantizer(optimizer, self.states, rng)

    def make_format(self, optimizer: Optimizer, dtype: torch.dtype, rng: RoundingRNG) -> Format:
        """Return the format for working weights of `dtype`."""
        form = self.master_weights
        if dtype == torch.float32:
            return Same()
        if form == "auto":
            # Split needs flat buckets; float16 masters lose bits below 2**-14 by it, so that is the user's choice.
            form = "split" if dtype == torch.bfloat16 and lies_flat(optimizer) else "fp32"
        if form == "none":
            return _ROUNDINGS[self.rounding]()
        if form == "split":
            return SplitBFloat16() if dtype == torch.bfloat16 else SplitFloat16()
        if form == "split24":
            return Split24BFloat16(rng) if dtype == torch.bfloat16 else Split24Float16(rng)
        return Float32Master()
