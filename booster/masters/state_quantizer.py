"""The states of an optimizer's buckets in few bits between steps, and in float32 while a bucket is stepped.

Which states of an optimizer are never negative, and which are to stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch.optim import Optimizer

from booster.common.torch_internals.optimizer_internals import unhooked
from booster.masters.optimizer_proxy import State
from booster.masters.quantized_state import Encoding, QuantizedState
from booster.masters.rounding import RoundingRNG
from booster.model.optimizer_kinds import KNOWN, Sign, declared_states, known
from booster.model.optimizer_states import probe_of, restored_afterwards

_STEPS, _ELEMENTS = 8, 64


class StateSigns:
    """The sign of each state of `optimizer`: from its class, from what was declared of it, else from steps that are tried.

    measured: names of the states whose sign is what trial steps showed. Raises ValueError for an optimizer that cannot
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
            tried = _tried(optimizer)
            self._signs = {**tried, **declared}
            self.measured = set(tried) - set(declared)

    @property
    def watched(self) -> set[str]:
        """Names of the states that trial steps never made negative, which says nothing of the steps to come."""
        return {name for name in self.measured if self._signs[name] == "unsigned"}

    def __getitem__(self, name: str) -> Sign:
        """Return the sign of the state `name`; a state that nobody knows stays float32."""
        return self._signs.get(name, "fp32")


def _tried(optimizer: Optimizer) -> dict[str, Sign]:
    """Step a copy of `optimizer` on random weights and gradients, and see which states become negative."""
    signs: dict[str, Sign] = {}
    for group in optimizer.param_groups:
        with restored_afterwards(optimizer, group):
            _try(optimizer, group, signs)
    return signs


def _try(optimizer: Optimizer, group: dict[str, Any], signs: dict[str, Sign]) -> None:
    """Note in `signs` what steps on the options of `group` show."""
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


States = Literal["fp32", "bf16", "8bit"]


class FlatBucket(Protocol):
    """What packing asks of a bucket that has one flat handle."""

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
