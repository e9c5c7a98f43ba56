"""Optimizer states in 16 or 8 bits an element between steps, and in float32 while their bucket is stepped.

`StateSigns` says which states of an optimizer are never negative, `StateQuantizer` which are quantized and when, and a
`QuantizedState` takes the place of a state's tensor. Dequantized states are in scratch that the next bucket uses again.

========  =====================================================  ==================
encoding  an element                                             bytes an element
========  =====================================================  ==================
bf16      the upper half of the float32 number                   2
signed    sign and square root of its share of the largest       1 + 2/32
unsigned  fourth root of its share of the largest                1 + 2/32
========  =====================================================  ==================

Groups
------
"The largest" is that of 32 neighbours. It is kept with them in 16 bits, the scale: a float32 number without its sign and its
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
Stochastic. Of a second moment 0.1 % changes in a step, and steps of 8 bits are 1 % or more:
rounded to nearest it would never change. The random bits are those of `RoundingRNG`.

Exact again
-----------
What was unpacked packs into the same bits, whatever the random numbers: the largest of a group becomes the scale itself, the
others are closer to their code than the smallest random number, 2**-13. So state dicts hold float32, and a run that is
resumed from one goes on bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch.optim import Optimizer

from booster.common.torch_internals.optimizer_internals import unhooked
from booster.masters.rounding import RoundingBits, RoundingRNG, canonical_nan_
from booster.model.optimizer_kinds import KNOWN, Sign, declared_states, known
from booster.model.optimizer_states import probe_of, restored_afterwards
from booster.shards.base import State

States = Literal["fp32", "bf16", "8bit"]
Encoding = Literal["bf16", "signed", "unsigned"]

GROUP = 32
SMALLEST = 2.0**-96  # of a scale: the smallest code of its group is still a normal number
_STEPS, _ELEMENTS = 8, 64  # of a trial of an optimizer that nothing was declared of
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
    """Return the bits 15 to 30 of the scales `found`, float32 and not negative, rounded stochastically, as int32.

    random_bits: those of `scale_random_bits`, in a shape like that of `found`.
    """
    if not found.is_cpu:  # see `rounding.canonical_nan_`
        found = torch.where(found != found, math.nan, found)
    return (found.view(torch.int32) + random_bits).bitwise_right_shift_(15)


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
        if type(optimizer) in KNOWN:
            self._signs = dict(known(optimizer).states)
        else:
            tried: dict[str, Sign] = {}
            for group in optimizer.param_groups:
                with restored_afterwards(optimizer, group):
                    _try(optimizer, group, tried)
            self._signs = {**tried, **declared}
            self.measured = set(tried) - set(declared)

    @property
    def watched(self) -> set[str]:
        """Names of the states that trial steps never made negative, which says nothing of the steps to come."""
        return {name for name in self.measured if self._signs[name] == "unsigned"}

    def __getitem__(self, name: str) -> Sign:
        """Return the sign of the state `name`; an unknown state stays float32."""
        return self._signs.get(name, "fp32")


def _try(optimizer: Optimizer, group: dict[str, Any], signs: dict[str, Sign]) -> None:
    """Step a copy of `optimizer` with the options of `group` on random numbers: `signs` has which states become negative."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(_ELEMENTS, generator=generator, dtype=torch.float32))
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

    def encoding_of(self, name: str, value: Any, bucket: FlatBucket) -> Encoding | None:
        """Return how `value`, the entry `name` of the state of `bucket`, is packed; None: it stays as it is."""
        flat = isinstance(value, torch.Tensor) and value.shape == (bucket.size,) and value.dtype == torch.float32
        sign = self._signs[name] if flat else "fp32"
        if sign == "fp32":
            return None
        return "bf16" if self._states == "bf16" else sign

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
        for name, value in state.items():
            encoding = self.encoding_of(name, value, bucket)
            if encoding is None:
                continue
            bucket.clear_padding(value)
            if encoding == "unsigned" and name in self._signs.watched and float(value.amin()) < 0:
                raise RuntimeError(
                    f"the state {name!r} of {self._name} was never negative in trial steps, and is now; declare it before "
                    f"boost(): register_elementwise({self._name}, states={{{name!r}: 'signed'}})"
                )
            kept = (packed or {}).get(name)
            kept = QuantizedState(encoding, bucket.size, value.device) if kept is None else kept
            kept.quantize(value, self._rng.random_bits(name, value.device), scratch)
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
            state[name] = value.dequantize(memory_of(name), scratch)
        try:
            yield
        except BaseException:
            state.update(before)
            raise
        # An optimizer may have dropped the state, as one that was reset has.
        if handle in states:
            self.quantize(bucket, states[handle], before, scratch)


def dequantized(state: State) -> State:
    """Return `state` with new float32 tensors in the place of what is packed."""
    return {
        name: value.dequantize(torch.empty(value.codes.numel(), dtype=torch.float32, device=value.codes.device))
        if isinstance(value, QuantizedState)
        else value
        for name, value in state.items()
    }
