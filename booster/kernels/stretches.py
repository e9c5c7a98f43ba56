"""What there is to step: stretches of parameters with their states, plain ones and those of buckets, and what counts steps.

States are those of torch, in the optimizer's own `state`: made here where there are none yet, so that a step by kernels,
a step by torch and a checkpoint find each other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from booster.kernels.arithmetic import BFLOAT16, FLOAT16, FLOAT32
from booster.kernels.rule import Rule
from booster.kernels.table import Stretch, beside, places_of
from booster.kernels.weights import ENCODINGS, FORMS, FULL, FULL_STATE, StateForm
from booster.masters.bucket import Bucket
from booster.masters.quantized_state import QuantizedState
from booster.shards import Shards
from booster.tensors.flat import is_dense
from booster.update.application import lay_states

DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_ADDRESS = torch.Tensor.data_ptr


class Unfit(Exception):
    """What is to be stepped is none of the kernels'; the text says why."""


class Stretches:
    """All that one step updates, by the groups of `optimizer`: see `add` and `add_bucket`; or all that one look reads.

    `holds` tells later whether it still does.
    """

    def __init__(self, optimizer: Optimizer, rule: Rule, shards: Shards) -> None:
        self.all: list[Stretch] = []
        self.clocks: list[tuple[int, int]] = []
        self._optimizer, self._rule, self._shards = optimizer, rule, shards
        self._state = optimizer.state
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        self._owners: list[tuple[Any, dict[str, Any]]] = []
        self._tensors: list[torch.Tensor] = []
        self._flags = [flags_of(rule, group) for group in optimizer.param_groups]

    def holds(self) -> bool:
        """Return whether states, weights and flags are what and where they were."""
        state = self._optimizer.state
        if state is not self._state or list(map(_ADDRESS, self._tensors)) != self._addresses:
            return False
        for owner, own in self._owners:
            if state.get(owner) is not own:
                return False
        for own, name, value in self._entries:
            if own.get(name) is not value:
                return False
        return self._flags == [flags_of(self._rule, group) for group in self._optimizer.param_groups]

    def complete(self) -> None:
        """All was added."""
        self._addresses = list(map(_ADDRESS, self._tensors))

    def add(self, group: int, param: torch.Tensor) -> None:
        """Add a float32 parameter that is stepped as it is. Raises Unfit."""
        if type(param) not in (torch.Tensor, torch.nn.Parameter) or param.dtype != torch.float32:
            raise Unfit(f"a parameter of shape {tuple(param.shape)} is {type(param).__name__} of {param.dtype}")
        if not is_dense(param):
            raise Unfit(f"a parameter of shape {tuple(param.shape)} has gaps or overlaps in memory")
        own, clock = self._own(group, param, param)
        lay_states(param, own)
        names = self._rule.states(self._optimizer.param_groups[group])
        self._check_begun(group, own, names)
        states = [self._state_of(own, name, param) for name in names]
        self._tensors.append(param)
        codes = tuple(tensor.data_ptr() for tensor in states)
        self._put(group, clock, param, 0, param.numel(), param.data_ptr(), 0, codes, (0,) * len(codes), None)

    def add_reading(self, param: torch.Tensor) -> None:
        """Add the gradient of a parameter, which nobody steps here."""
        if not self.clocks:
            self.clocks.append((0, 0))
        self._put(0, 0, param, 0, param.numel(), 0, 0, (), (), None)

    def add_bucket(self, bucket: Bucket) -> None:
        """Add what lies in a bucket. Raises Unfit."""
        if type(bucket.format) not in FORMS:
            raise Unfit(f"weights in the form {type(bucket.format).__name__} have no kernel")
        group, residual = self._optimizer.param_groups[bucket.group], bucket.residual
        names = self._rule.states(group)
        if residual is not None:
            self._tensors.append(residual)
        self._tensors += bucket.params
        of_bucket: Any = None
        for index, (piece, weights) in enumerate(zip(bucket.pieces, bucket.working(), strict=True)):
            if bucket.whole or of_bucket is None:
                handle = bucket.handles[index if bucket.whole else 0]
                own, clock = self._own(bucket.group, handle, weights)
                self._check_begun(bucket.group, own, names)
                self._make_states(bucket, own, names)
                of_bucket = own, clock, [self._kept(bucket, handle, own, name) for name in names]
            own, clock, kept = of_bucket
            offset = 0 if bucket.whole else piece.offset
            place = weights.data_ptr(), beside(residual, piece.offset), *places_of(kept, offset), (bucket, kept)
            self._put(bucket.group, clock, piece.param, piece.start, piece.size, *place, piece.offset, offset)

    def _put(
        self,
        group: int,
        clock: int,
        param: torch.Tensor,
        start: int,
        size: int,
        weights: int,
        residual: int,
        codes: tuple[int, ...],
        scales: tuple[int, ...],
        of: tuple[Bucket, list[Any]] | None,
        offset: int = 0,
        states_offset: int = 0,
    ) -> None:
        form = FULL if of is None else FORMS[type(of[0].format)]
        encodings = (FULL_STATE,) * len(codes) if of is None else tuple(map(_way, of[1]))
        half = DTYPES[param.dtype]
        names = self._rule.states(self._optimizer.param_groups[group])
        copies = self._shards.num_replicas(param) or 1
        place = (
            param,
            start,
            size,
            weights,
            residual,
            codes,
            scales,
            clock,
            form,
            encodings,
            names,
            self._flags[group],
            half,
            copies,
        )
        self.all.append(Stretch(*place, None if of is None else of[0], offset, states_offset))

    def _own(self, group: int, owner: Any, param: torch.Tensor) -> tuple[dict[str, Any], int]:
        """The state of `owner`, a key of the optimizer's, and the index of its clock."""
        own: dict[str, Any] = self._optimizer.state[owner]
        self._owners.append((owner, own))
        address = 0
        if self._rule.counts:
            step = own.get("step")
            there = isinstance(step, torch.Tensor) and step.device == param.device and step.dtype == torch.float32
            if not there:
                given = 0.0 if step is None else float(step)
                own["step"] = step = torch.full((), given, dtype=torch.float32, device=param.device)
            assert isinstance(step, torch.Tensor)
            self._note(own, "step", step)
            address = step.data_ptr()
        self.clocks.append((address, group))
        return own, len(self.clocks) - 1

    def _check_begun(self, group: int, own: dict[str, Any], names: Sequence[str]) -> None:
        if self._rule.begins_by_torch(self._optimizer.param_groups[group]) and any(
            own.get(name) is None for name in names
        ):
            raise Unfit("a first step, which makes states that do not begin at zero")

    def _note(self, own: dict[str, Any], name: str, value: Any) -> None:
        self._entries.append((own, name, value))
        self._tensors += value.tensors if isinstance(value, QuantizedState) else [value]

    def _state_of(self, own: dict[str, Any], name: str, param: torch.Tensor) -> torch.Tensor:
        value = own.get(name)
        if value is None:
            value = own[name] = torch.zeros_like(param, memory_format=torch.preserve_format).detach()
        alike = isinstance(value, torch.Tensor) and (value.dtype, value.device) == (torch.float32, param.device)
        if not alike or value.shape != param.shape:
            raise Unfit(f"the state {name!r} of a parameter of shape {tuple(param.shape)} is no float32 tensor like it")
        self._note(own, name, value)
        return value

    def _make_states(self, bucket: Bucket, own: dict[str, Any], names: Sequence[str]) -> None:
        """Give a flat `bucket` the states that it lacks, zero, where they lie between steps."""
        missing = [] if bucket.whole else [name for name in names if own.get(name) is None]
        for name in missing:
            encoding = None
            if bucket.quantizer is not None:
                like = torch.empty(bucket.size, dtype=torch.float32, device="meta")
                encoding = bucket.quantizer.encoding_of(name, like, bucket)
            if encoding is None:
                own[name] = torch.zeros(bucket.size, dtype=torch.float32, device=bucket.device)
            else:
                own[name] = QuantizedState(encoding, bucket.size, bucket.device)
        if missing and bucket.host is not None:
            bucket.host.keep_states(bucket, self._state)

    def _kept(self, bucket: Bucket, handle: torch.Tensor, own: dict[str, Any], name: str) -> Any:
        if bucket.whole:
            return self._state_of(own, name, handle)
        value = own[name]
        if not isinstance(value, QuantizedState) and (value.dtype, value.shape) != (torch.float32, (bucket.size,)):
            raise Unfit(f"the state {name!r} of a bucket is no float32 tensor of its size")
        self._note(own, name, value)
        return value


def flags_of(rule: Rule, group: dict[str, Any]) -> int:
    """Return the flags of a group in the bits of a number."""
    found = 0
    for place, flag in enumerate(rule.flags(group)):
        found |= bool(flag) << place
    return found


def _way(value: Any) -> StateForm:
    return ENCODINGS[value.encoding] if isinstance(value, QuantizedState) else FULL_STATE


def same(these: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two lists are of the same objects."""
    return len(these) == len(others) and all(map(is_, these, others))


def numbers_of(rule: Rule, groups: Iterable[dict[str, Any]]) -> list[tuple[float, ...]]:
    """Return the rows of numbers of all groups; 0 for a rate that is a tensor, which is not read here."""
    return [
        rule.numbers({**group, "lr": 0.0} if isinstance(group.get("lr"), torch.Tensor) else group) for group in groups
    ]
