"""Rounding of float32 masters to half-precision weights, to nearest and stochastically; and foreign writes to weights.

`RoundingRNG` gives the random bits, the same on every rank and after every checkpoint. `accept_foreign_writes` compares weights
with what their masters round to, which is the only trace that a write through `.data` leaves. All of it works in place, in
chunks that fit into a core's cache: `formats_compiled.py` has the same arithmetic as pure functions.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import methodcaller

import torch

from booster.tensors.flat import ALIGNMENT

Views = Sequence[torch.Tensor]

CHUNK = 2**17  # elements that fit into a core's cache together with as many of each other tensor
SEED = 1024  # of all random numbers that round
_BITS = methodcaller("view", torch.int16)
_MARGIN = 16  # last bits of a float32 number that widening a scale may change
_HALF_ULP = 2.0**13  # in 2**-14 of it
_BELOW_HALF_ULP = _HALF_ULP - 2.0**-11  # the largest float32 number below


def round_nearest(working: Views, values: torch.Tensor, scratch: torch.Tensor) -> None:
    """Write `values` to the weights; bfloat16 ties go away from zero, see "Ties" in formats.py. Overwrites `scratch`."""
    if working[0].dtype == torch.bfloat16:
        canonical_nan_(values)
        high_half(values.view(torch.int32), working, out=scratch.view(torch.int32))
    else:
        torch._foreach_copy_(list(working), pieces_like(values, working))


def round_and_keep(working: Views, values: torch.Tensor, scratch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `round_nearest`, and return what was written, flat as `values`, and float32 scratch for chunks of `in_chunks`;
    each is one half of `scratch`."""
    canonical_nan_(values)
    size = len(values)
    weights, some = scratch.view(working[0].dtype)[-size:], scratch[: len(scratch) - (size + 1) // 2]
    for chunk, weight in in_chunks(values, weights):
        round_into(weight, chunk, some[: len(chunk)])
    # One call for all pieces: a call takes as long as some thousand elements.
    torch._foreach_copy_(list(working), pieces_like(weights, working))
    return weights, some


def round_into(halves: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Write float32 `values` to `halves`, rounded to nearest, and return them; `scratch` may be `values`."""
    if halves.dtype != torch.bfloat16:
        return halves.copy_(values)
    halves.view(torch.int16).copy_(high_bits(values, scratch.view(torch.int32)))
    return halves


def high_half(bits: torch.Tensor, working: Views, out: torch.Tensor) -> None:
    torch.add(bits, 0x8000, out=out).bitwise_right_shift_(16)
    torch._foreach_copy_(list(map(_BITS, working)), pieces_like(out, working))


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 or float64 `values` as the half weights that a step would make of such masters; NaN stays NaN."""
    values = values.float()
    nearest = round_into(torch.empty_like(values, dtype=dtype), values, torch.empty_like(values))
    return torch.where(values.isnan(), values.to(dtype), nearest)


def high_bits(values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the bits of float32 `values` rounded to bfloat16, as int32."""
    # Half of the last place that stays, added in whole numbers; ties go away from zero.
    return torch.add(values.view(torch.int32), 0x8000, out=out).bitwise_right_shift_(16)


def canonical_nan_(values: torch.Tensor) -> None:
    """Turn every NaN into the plain one where others come up: CUDA's, 0x7fffffff, would round up to minus zero."""
    # On the CPU arithmetic makes none with all upper bits set, nor do any come in from outside.
    if not values.is_cpu:
        values.nan_to_num_(math.nan, math.inf, -math.inf)


def whole_steps(distance: torch.Tensor) -> torch.Tensor:
    """Round the distance of masters to their float16 weights, in 2**-14 ulp.

    Weight plus distance must round to the weight again, so what is less than half an ulp is never rounded up to half an ulp.
    """
    # Shrinking leaves only what is half an ulp, exactly, and makes the others zero; comparing would take longer.
    halves = torch.hardshrink(distance, _BELOW_HALF_ULP)
    return distance.round().clamp_(1 - _HALF_ULP, _HALF_ULP - 1).add_(halves, alpha=1 / _HALF_ULP)


def to_step(weights: torch.Tensor) -> torch.Tensor:
    return to_ulp(weights, 2.0**-14)


def to_ulp(weights: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    """Replace float32 `weights` by the distance between float16 numbers of their magnitude, times `share`."""
    # The exponent alone: the power of two below the number.
    weights.view(torch.int32).bitwise_and_(0x7F800000)
    return weights.mul_(2.0**-10 * share).clamp_(2.0**-24 * share, 2.0**5 * share)


def in_chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return chunks of flat tensors of one length, those of one place together."""
    # On the CPU they fit into a core's cache.
    # Half of a tensor always holds one more of them.
    size = max(1, len(tensors[0]) // 2)
    yield from zip(*(tensor.split(min(size, CHUNK) if tensor.is_cpu else size) for tensor in tensors), strict=True)


def pieces_like(values: torch.Tensor, working: Views) -> list[torch.Tensor]:
    """Return views of `values` for those in `working`, in the places that a bucket gives them."""
    offset, pieces = 0, []
    for view in working:
        stop = offset + view.numel()
        pieces.append(values[offset:stop])
        offset = -(-stop // ALIGNMENT) * ALIGNMENT  # as `flat.aligned`, without a call for each
    return pieces


def accept_foreign_zeros(working: Views, values: torch.Tensor, scratch: torch.Tensor) -> None:
    """Of joined bfloat16 masters: take over zeros that somebody else wrote. Overwrites `scratch`."""
    # On the CPU the sum shows whether there may be any.
    if not values.is_cpu or math.isnan(values.sum()):
        torch._foreach_copy_(pieces_like(scratch, working), list(working))
        # With the remainder of another weight they can read as a NaN.
        torch.where(values.isnan().logical_and_(scratch == 0), scratch, values, out=values)


def accept_foreign_writes(working: Views, values: torch.Tensor, scratch: torch.Tensor) -> None:
    """Put weights in the place of masters that do not round to them. Overwrites `scratch`."""
    # On the CPU an answer costs nothing to wait for, and a call as much as some thousand elements: where pieces are large they
    # are looked at one by one, in place, and written to only where something differs.
    if values.is_cpu and len(working) <= 1 + len(values) // 2**14:
        for weights, masters in zip(working, pieces_like(values, working), strict=True):
            for weight, master in zip(weights.split(CHUNK), masters.split(CHUNK), strict=True):
                _accept_foreign_stretch(weight, master, scratch)
        return
    dtype, size = working[0].dtype, len(values)
    rounded, written = scratch.view(dtype).split(size)
    if dtype == torch.bfloat16:
        for chunk, master in zip(rounded.view(torch.int16).split(CHUNK), values.split(CHUNK), strict=True):
            chunk.copy_(high_bits(master))
    else:
        rounded.copy_(values)
    written.copy_(rounded)  # also between the pieces, where there are no weights
    torch._foreach_copy_(pieces_like(written, working), list(working))
    if not (values.is_cpu and _same_bits(rounded, written)):
        torch.where(rounded.view(torch.int16) == written.view(torch.int16), values, written, out=values)


def _accept_foreign_stretch(weights: torch.Tensor, masters: torch.Tensor, scratch: torch.Tensor) -> None:
    """Do the same for one stretch of weights on the CPU; most often there is nothing to do."""
    scratch = scratch[: len(masters)]
    if weights.dtype == torch.bfloat16:
        # Those from the weight's bits less half of its last place round to it, up to those below plus half.
        differences = torch.sub(
            masters.view(torch.int32), scratch.copy_(weights).view(torch.int32), out=scratch.view(torch.int32)
        )
        smallest, largest = -0x8000, 0x7FFF
    else:
        rounded = scratch.view(weights.dtype)[: len(masters)].copy_(masters).view(torch.int16)
        differences = rounded.bitwise_xor_(weights.view(torch.int16))
        smallest, largest = 0, 0
    # Nothing is compared element by element, which takes longer than all the rest: the smallest and the largest difference of
    # the bits suffice.
    low, high = torch.aminmax(differences)
    if low < smallest or high > largest:
        same = differences.ge(smallest).logical_and_(differences.le(largest))
        torch.where(same, masters, weights.float(), out=masters)


def _same_bits(halves: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether two flat tensors are equal to the bit; waits for the device."""
    # Four at a time: comparing 64 bits takes a quarter of the reads.
    size = len(halves) // 4 * 4
    if halves.storage_offset() % 4 or others.storage_offset() % 4:
        return torch.equal(halves.view(torch.int16), others.view(torch.int16))
    same = torch.equal(halves[:size].view(torch.int64), others[:size].view(torch.int64))
    return same and torch.equal(halves[size:].view(torch.int16), others[size:].view(torch.int16))


def fractions(lanes: torch.Tensor) -> torch.Tensor:
    """Return random numbers from 2**-13 to 1 - 2**-13, so that what is a whole number, but for errors of float32, stays."""
    # 12 of 16 bits, at the middle of their step: never 0, never 1.
    return (lanes.bitwise_right_shift(4).float() + 0.5) * 2.0**-12


def scale_random_bits(lanes: torch.Tensor) -> torch.Tensor:
    """Return what is added to the bits of every first and every second scale, int32."""
    # What was unpacked is off by some of its last bits; no random number may carry that further.
    return lanes[:2].bitwise_right_shift(1).clamp_(_MARGIN, 2**15 - 1 - _MARGIN)


class RoundingBits:
    """The random numbers of one state in one step, and what is made of them, once for all buckets.

    lanes: 64 random numbers below 2**16, int32, for elements 64 apart.
    """

    def __init__(self, lanes: torch.Tensor) -> None:
        self.lanes = lanes
        self._repeated = lanes[:0]

    @cached_property
    def fractions(self) -> torch.Tensor:
        return fractions(self.lanes)

    @cached_property
    def bent(self) -> torch.Tensor:
        """`fractions` for codes of unsigned states, which begin at `quantized_state.BEND`."""
        return fractions(self.lanes) - 8.0

    @cached_property
    def upper(self) -> torch.Tensor:
        """Their upper eight bits."""
        return self.lanes.bitwise_right_shift(8)

    @cached_property
    def _pair(self) -> torch.Tensor:
        return scale_random_bits(self.lanes)

    def of_scales(self, groups: int) -> torch.Tensor:
        """Return `scale_random_bits` of so many groups, an even number."""
        if groups > len(self._repeated):
            self._repeated = self._pair.repeat(groups // 2)
        return self._repeated[:groups]


class RoundingRNG:
    """Sixteen random bits for each lane of a bucket, new in every step, for each name that asks.

    Elements 64 apart share them. What an element is rounded with then depends on the step, the name and the element's place
    in its own parameter, as pieces begin at multiples of 64, and not on how parameters were packed or cut. Each element is
    rounded right on average over steps; neighbours are rounded independently within 64 elements.

    count: steps so far, which is all that a checkpoint needs. The user's random state is neither read nor changed.
    drawn: what was asked for in this step. Cleared, it is drawn again, the same, when it is asked for again. asked: all that
    ever was. fixed: memory that is read in place of a draw, into which somebody else brings it, as for a graph.
    """

    def __init__(self) -> None:
        self.count = 0
        self.drawn: dict[tuple[str, torch.device], RoundingBits] = {}
        self.asked: set[tuple[str, torch.device]] = set()
        self.fixed: Mapping[tuple[str, torch.device], torch.Tensor] = {}

    def next(self) -> None:
        """Go on to the next step."""
        self.count += 1
        self.drawn.clear()

    def resume(self, count: int) -> None:
        """Continue after `count` steps."""
        self.count = count
        self.drawn.clear()

    def lanes(self, name: str, device: torch.device) -> torch.Tensor:
        """Return 64 numbers from 0 to 65535, int32."""
        return self.random_bits(name, device).lanes

    def random_bits(self, name: str, device: torch.device) -> RoundingBits:
        """Return the same, with what is made of them."""
        key = (name, device)
        if key not in self.drawn:
            self.asked.add(key)
            fixed = self.fixed.get(key)
            self.drawn[key] = RoundingBits(
                self.draw(name, device).to(device, non_blocking=True) if fixed is None else fixed
            )
        return self.drawn[key]

    def draw(self, name: str, device: torch.device) -> torch.Tensor:
        """Return the lanes of this step on the host, for a copy to `device` without a wait."""
        # Torch's generator for CPUs takes 32 bits of a seed.
        # The golden ratio in 32 bits spreads the seeds of neighbouring steps.
        seed = (SEED + self.count * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**32
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, 2**16, (ALIGNMENT,), dtype=torch.int32, generator=generator)
        return drawn.pin_memory() if device.type == "cuda" else drawn  # a copy from pinned memory does not wait
