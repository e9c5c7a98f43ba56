"""Optimizer states in 16 or 8 bits an element between steps, and in float32 while their bucket is stepped.

`StateSigns` says which states of an optimizer are never negative, `StateQuantizer` which are quantized and when, and a
`QuantizedState` takes the place of a state's tensor. Dequantized states are in scratch that the next bucket uses again.

==========  ====================================================  ==================
encoding    an element                                            bytes an element
==========  ====================================================  ==================
bf16        the upper half of the float32 number                  2
signed      sign and square root of its share of the largest      1 + 2/32
unsigned    a share of the largest, from 1 down to 2**-48         1 + 2/32
root_ratio  ratio to the root of an unsigned state, equal steps   1 + 2/32
ratio       ratio to an unsigned state, equal steps               1 + 2/32
==========  ====================================================  ==================

Groups
------
"The largest" is that of 32 neighbours. It is kept with them in 16 bits, the scale: a float32 number without its sign and its
last 15 bits, which has the range of float32 (half precision proper would lose gradients below 6e-8) and errors below 0.4 %.
With s the scale, and 127 * 2**23 the bits of 1.0::

    signed    code = +-127 (|x| / s) ** 1/2                       x = +-s (code / 127) ** 2
    unsigned  bits of x / s = 127 * 2**23 - 5826 code (code + 16)

Bits of a float32 number are nearly its logarithm: steps of unsigned codes are 2 to 4 % near the largest, 15 % at 1e-4 of it
and 30 % at the least, 4e-15. Nothing but zero in a whole group becomes zero, since the update divides by it.

Ratios
------
First moments in codes of one scale are too coarse where gradients of neighbours differ by 100 and more: a small one, divided by
its own small second moment, makes a step of many learning rates. So what Adam and its kin divide is kept as the ratio to what
it is divided by, about 1 whatever gradients are. The divisor follows from codes alone: a scale would be one factor for all.
Mean error of 30 updates where every second gradient is smaller, in brackets the largest in learning rates (float32: 1.0)::

    smaller by      1             100           10,000        1,000,000
    ratios          2.4 % (1.0)   4.2 % (1.1)   5.3 % (1.1)   5.9 % (1.1)
    moments apart   2.0 % (1.0)    11 % (2.4)   135 % (30)    244 % (33)

Rounding
--------
Stochastic. Of a second moment 0.1 % changes in a step, and steps of 8 bits are 1 % or more: rounded to nearest it would never
change. The random bits are those of `RoundingRNG`.

Exact again
-----------
What was unpacked packs into the same bits, whatever the random numbers: the largest of a group becomes the scale itself, the
others are closer to their code than the smallest random number, 2**-13; ratios are to what was rounded. So state dicts hold
float32, and a run that is resumed from one goes on bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol, cast

import torch
from torch.optim import Optimizer

from booster.common.torch_internals.optimizer_internals import unhooked
from booster.masters.rounding import RoundingBits, RoundingRNG, canonical_nan_
from booster.model.optimizers import OPTIMIZERS, Sign, declared_states, info_of, probe_of, restored_afterwards
from booster.shards.base import State

States = Literal["fp32", "bf16", "8bit"]
Encoding = Literal["bf16", "signed", "unsigned", "root_ratio", "ratio"]

GROUP = 32
# Of a scale: the smallest code of its group is still a normal number.
SMALLEST = {"signed": 2.0**-96, "unsigned": 2.0**-78, "root_ratio": 2.0**-71, "ratio": 2.0**-71}
_STEPS, _ELEMENTS = 8, 64  # of a trial of an optimizer that nothing was declared of
LEVELS = {"signed": 127.0**2, "unsigned": 1.0, "root_ratio": 127.0, "ratio": 127.0}
BEND = 8
STEEPNESS = {"unsigned": 5826, "ratio": 5826, "root_ratio": 2913}
DIVISOR: Mapping[str, str] = {"root_ratio": "exp_avg_sq", "ratio": "exp_inf"}  # that "exp_avg" is a ratio to


def bits_at_zero(steepness: int) -> int:
    """Return the bits of 1.0, and what is taken away again where the code is 0."""
    return (127 << 23) + steepness * BEND**2


class QuantizedState:
    """A state of a bucket of `size` elements, a multiple of 64.

    codes: bfloat16, int8 or uint8. scales: int16, one for 32 elements, None with "bf16".
    """

    __slots__ = ("codes", "scales", "encoding")

    def __init__(self, encoding: Encoding, size: int, device: torch.device) -> None:
        self.encoding = encoding
        dtype = {"bf16": torch.bfloat16, "unsigned": torch.uint8}.get(encoding, torch.int8)
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
        """Return new float32 numbers, one for a group, that `dequantize` multiplies by; None with "bf16"."""
        if self.scales is None:
            return None
        wide = self.scales.to(torch.int32).bitwise_and_(0xFFFF).bitwise_left_shift_(15).view(torch.float32)
        return wide.mul_(1 / LEVELS[self.encoding])

    def shares(self, values: torch.Tensor, encoding: Encoding = "unsigned") -> torch.Tensor:
        """Write the shares of unsigned codes into float32 `values`, or what ratios of `encoding` are ratios to; returns it."""
        bits, steepness = values.view(torch.int32), STEEPNESS[encoding]
        bits.copy_(self.codes).add_(BEND)
        torch.addcmul(bits.new_full((), bits_at_zero(steepness)), bits, bits, value=-steepness, out=bits)
        return values

    def dequantize(
        self, values: torch.Tensor, scratch: torch.Tensor | None = None, divisor: QuantizedState | None = None
    ) -> torch.Tensor:
        """Write the numbers into float32 `values`, and return it. scratch: float32, of its size, made if there is none.
        divisor: the state that ratios are ratios to."""
        factors = self.factors()
        if factors is None:
            return values.copy_(self.codes)
        if self.encoding == "unsigned":
            self.shares(values)
        elif self.encoding == "signed":  # at most 127 * 127, in half as many bytes as float32 takes
            scratch = torch.empty_like(values) if scratch is None else scratch
            # Codes are signed squares: small numbers get most of them.
            codes, sizes = scratch.view(torch.int16).split(len(values))
            codes.copy_(self.codes)
            values.copy_(codes.mul_(torch.abs(codes, out=sizes)))
        else:
            values.copy_(self.codes)
        values.view(-1, GROUP).mul_(factors[:, None])
        if divisor is not None:
            values.mul_(divisor.shares(torch.empty_like(values) if scratch is None else scratch, self.encoding))
        return values

    def quantize(
        self,
        values: torch.Tensor,
        random_bits: RoundingBits,
        scratch: torch.Tensor | None = None,
        divisor: QuantizedState | None = None,
    ) -> None:
        """Keep float32 `values`, which are overwritten. scratch, divisor: as of `dequantize`."""
        if self.scales is None:
            canonical_nan_(values)  # any other could round to infinity, or to zero
            bits = values.view(torch.int32)
            bits.view(-1, 64).add_(random_bits.lanes)
            self.codes.view(torch.int16).copy_(bits.bitwise_right_shift_(16))
            return
        if scratch is None:
            scratch = torch.empty(len(values), dtype=torch.float32, device=values.device)
        if divisor is not None:
            values.div_(divisor.shares(scratch, self.encoding))
        unsigned = self.encoding == "unsigned"
        sizes = values.abs_() if unsigned else torch.abs(values, out=scratch)  # no NaN is negative then
        groups = sizes.view(-1, GROUP)
        # Bits of positive numbers are in the order of the numbers, NaN last; for integers torch's CPU kernel is faster.
        largest = torch.amax(groups.view(torch.int32), 1).view(torch.float32)
        least = largest.clamp(min=SMALLEST[self.encoding])
        # Zero stays zero; a comparison would take longer than the sign.
        self.scales.copy_(narrow_scales(least * largest.sign(), random_bits.of_scales(len(least))))
        groups.mul_(least.reciprocal_().mul_(LEVELS[self.encoding])[:, None])
        if unsigned:
            steepness = STEEPNESS["unsigned"]
            codes = scratch.copy_(values.view(torch.int32).sub_(bits_at_zero(steepness))).mul_(-1 / steepness).sqrt_()
            codes.view(-1, 64).add_(random_bits.bent)
            whole = values.view(torch.int16)[: len(values)].copy_(codes).clamp_(max=255)
            self.codes.view(torch.int8).copy_(whole)  # the lower eight bits
        else:
            sizes = sizes.sqrt_() if self.encoding == "signed" else sizes
            sizes.view(-1, 64).add_(random_bits.fractions)
            self.codes.copy_(sizes.copysign_(values))


def narrow_scales(scales: torch.Tensor, random_bits: torch.Tensor) -> torch.Tensor:
    """Return bits 15 to 30 of `scales`, float32, not negative, rounded by `random_bits`, as int32."""
    if not scales.is_cpu:  # see `rounding.canonical_nan_`
        scales = torch.where(scales != scales, math.nan, scales)
    # Bits added below the place that is kept, as in stochastic rounding of bfloat16.
    return (scales.view(torch.int32) + random_bits).bitwise_right_shift_(15)


class StateSigns:
    """The sign of each state of `optimizer`: from its class, from what was declared of it, else from steps that are tried.

    measured: names of the states with a sign that trial steps showed. Raises ValueError for an optimizer that cannot
    step on rounded states, or on a tensor of a few numbers.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if type(optimizer) is torch.optim.RMSprop and any(group["centered"] for group in optimizer.param_groups):
            raise ValueError(
                "RMSprop(centered=True) takes the root of a difference of two of its states, which rounding makes negative; "
                "use states='fp32', or centered=False"
            )
        declared = declared_states(type(optimizer))
        self.measured: set[str] = set()
        if type(optimizer) in OPTIMIZERS:
            self._signs = dict(info_of(optimizer).states)
        else:
            tried: dict[str, Sign] = {}
            for group in optimizer.param_groups:
                with restored_afterwards(optimizer, group):
                    _try(optimizer, group, tried)
            self._signs = {**tried, **declared}
            self.measured = set(tried) - set(declared)

    @property
    def unsigned_in_trials(self) -> set[str]:
        """Names of the states that trial steps never made negative, which says nothing of the steps to come."""
        return {name for name in self.measured if self._signs[name] == "unsigned"}

    def __getitem__(self, name: str) -> Sign:
        """Return the sign of the state `name`; an unknown state stays float32."""
        return self._signs.get(name, "fp32")


def _try(optimizer: Optimizer, group: dict[str, Any], signs: dict[str, Sign]) -> None:
    """Step a copy of `optimizer` with the options of `group` on random numbers: `signs` has which states become negative, and
    which stay near the weights, before or after: copies and averages of these."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(_ELEMENTS, generator=generator, dtype=torch.float32))
    first = weights.detach().clone()
    probe = probe_of(optimizer, group, weights)
    for _ in range(_STEPS):
        weights.grad = torch.randn(_ELEMENTS, generator=generator, dtype=torch.float32)
        try:
            with torch.no_grad():
                unhooked(type(probe).step)(probe)
        except Exception as error:
            raise ValueError(
                f"which states of {type(optimizer).__name__} are never negative could not be tried out ({error}); declare "
                f"them: register_elementwise({type(optimizer).__name__}, states={{'exp_avg': 'signed', ...}})"
            ) from error
        for name, value in probe.state[weights].items():
            if isinstance(value, torch.Tensor) and value.shape == weights.shape and value.dtype == torch.float32:
                # A copy or average of weights would lose in 8 bits what weights have in 32.
                distance = min(float((value - each).norm()) for each in (first, weights.detach()))
                if distance < 0.5 * float(first.norm()) or signs.get(name) == "fp32":
                    signs[name] = "fp32"
                else:
                    negative = bool((value < 0).any()) or signs.get(name) == "signed"
                    signs[name] = "signed" if negative else "unsigned"


class FlatBucket(Protocol):
    """The members of a bucket with one flat handle that quantization reads."""

    size: int
    handles: list[Any]

    def clear_padding(self, values: torch.Tensor) -> None: ...


class StateQuantizer:
    """How the states of one optimizer are kept; `states` is "bf16" or "8bit".

    In the optimizer's state a `QuantizedState` takes the place of a tensor of the bucket's size. Parameters without dimensions,
    states that are no float32 tensors, and averages of weights (ASGD's) stay as they are.
    """

    def __init__(self, optimizer: Optimizer, states: States, rng: RoundingRNG) -> None:
        self._states = states
        self._signs = StateSigns(optimizer)
        self._rng = rng
        self._name = type(optimizer).__name__

    def encoding_of(self, name: str, value: Any, size: int, state: State) -> Encoding | None:
        """Return how `value`, the entry `name` of the `state` of a bucket of `size` elements, is packed; None: it stays."""
        flat = isinstance(value, torch.Tensor) and value.shape == (size,) and value.dtype == torch.float32
        sign = self._signs[name] if flat and size else "fp32"  # a rank may hold nothing of a matrix
        if sign == "fp32":
            return None
        if self._states == "bf16":
            return "bf16"
        if name == "exp_avg" and sign == "signed":
            # A first moment is kept as its ratio to the root of the second, so that small steps stay small.
            for encoding, other in DIVISOR.items():
                # What "exp_avg" is divided by must be packed already.
                if getattr(state.get(other), "encoding", None) == "unsigned":
                    return cast(Encoding, encoding)
        return sign

    def quantize(
        self,
        bucket: FlatBucket,
        state: State,
        packed: dict[str, QuantizedState] | None = None,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """Pack the entries of `state`, of the handle of `bucket`, in place; float32 ones are overwritten.

        packed: memory to use again, by name. scratch: scratch, as of `QuantizedState.quantize`.
        Raises RuntimeError for a negative number where there was none in trials.
        """
        # A ratio needs the rounded divisor that will be read back.
        for name in ratios_last(state):
            value = state[name]
            encoding = self.encoding_of(name, value, bucket.size, state)
            if encoding is None:
                continue
            bucket.clear_padding(value)
            if encoding == "unsigned" and name in self._signs.unsigned_in_trials and float(value.amin()) < 0:
                raise RuntimeError(
                    f"the state {name!r} of {self._name} was never negative in trial steps, and is now; declare it before "
                    f"boost(): register_elementwise({self._name}, states={{{name!r}: 'signed'}})"
                )
            kept = (packed or {}).get(name)
            if kept is None or kept.encoding != encoding:
                kept = QuantizedState(encoding, bucket.size, value.device)
            random_bits = self._rng.random_bits(name, value.device)
            kept.quantize(value, random_bits, scratch, state.get(DIVISOR.get(encoding, "")))
            state[name] = kept

    @contextmanager
    def opened(
        self,
        bucket: FlatBucket,
        states: MutableMapping[Any, State],
        memory_of: Callable[[str], torch.Tensor],
        scratch: torch.Tensor | None = None,
    ) -> Iterator[None]:
        """For its length, have the packed entries of the state of `bucket`, in `states`, in float32.

        memory_of: gives memory of the bucket's size, by name of a state. scratch: overwritten on entering and leaving. New
        entries are packed afterwards. Where it is left by an exception, what was packed is what it was.
        """
        handle = bucket.handles[0]
        state = states.get(handle, {})
        before = {name: value for name, value in state.items() if isinstance(value, QuantizedState)}
        for name, value in before.items():
            state[name] = value.dequantize(memory_of(name), scratch, before.get(DIVISOR.get(value.encoding, "")))
        try:
            yield
        except BaseException:
            # A step that raises leaves the codes as they were.
            state.update(before)
            raise
        # An optimizer may have dropped the state, as one that was reset has.
        if handle in states:
            self.quantize(bucket, states[handle], before, scratch)


def ratios_last(names: Iterable[str]) -> list[str]:
    """Return `names` of states in an order in which what one is divided by comes before it."""
    return sorted(names, key="exp_avg".__eq__)


def dequantized(state: State) -> State:
    """Return `state` with new float32 tensors in the place of what is packed."""
    return {
        name: value.dequantize(
            torch.empty(value.codes.numel(), dtype=torch.float32, device=value.codes.device),
            divisor=state.get(DIVISOR.get(value.encoding, "")),
        )
        if isinstance(value, QuantizedState)
        else value
        for name, value in state.items()
    }
