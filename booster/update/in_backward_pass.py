"""The gradients of one optimizer in a backward pass that uses them: measured, or stepped on, as they come.

A step of the user's optimizer is then made in parts: its `step` is called on some of its parameters at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common.torch_internals.optimizer_internals import (
    exchange_step_hooks,
    mark_step_called,
    step_hooks,
    unhooked,
)
from booster.model.optimizers import OPTIMIZERS, snapshot_entries
from booster.shards import Shards
from booster.tensors.grads import gradient_values, nonfinite_indices, tensor_norms
from booster.tensors.trees import HALF_DTYPES


class Restricted:
    """Restricts the optimizer, while entered, to one group with the parameters last given to `to`.

    The group's other entries are as the user set them before each call: an optimizer that writes to them, once per step,
    has then written once. So are what they hold, and numbers of the optimizer itself, for optimizers that are not torch's,
    which write to none of these.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self._optimizer = optimizer
        self._group = group
        self._params = list(group["params"])
        self._entries = dict(group)
        del self._entries["params"]
        self._put_back = None if type(optimizer) in OPTIMIZERS else snapshot_entries(optimizer, group)
        self._stepped = False

    def __enter__(self) -> Restricted:
        self._groups = self._optimizer.param_groups
        self._optimizer.param_groups = [self._group]
        return self

    def to(self, params: Sequence[torch.Tensor]) -> None:
        if self._put_back is None:
            self._group.update(self._entries)
        else:
            self._put_back()
        self._stepped = True
        self._group["params"][:] = params

    def __exit__(self, *error: Any) -> None:
        self._group["params"][:] = self._params
        self._optimizer.param_groups = self._groups

    def step_if_nothing_was(self) -> None:
        """Step the group once although it has no gradient, as a step of all groups does: the optimizer may count in it."""
        if self._put_back is not None and not self._stepped:
            with self:
                self.to([nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))])
                bare_step(self._optimizer)


@contextmanager
def hooks_once(optimizer: Any) -> Iterator[None]:
    """Fire step hooks around the whole, with the user's parameters in the groups, and not inside."""
    fire_pre_hooks(optimizer)
    # The calls inside are of `step` itself, and would fire hooks for each bucket.
    own = exchange_step_hooks(optimizer, None)
    try:
        yield
    finally:
        exchange_step_hooks(optimizer, own)
    fire_post_hooks(optimizer)


def fire_pre_hooks(optimizer: Any) -> None:
    """Call what is to be called before a step. Raises RuntimeError for a hook that changes the arguments of it."""
    for hook in step_hooks(optimizer)[0]:
        if hook(optimizer, (optimizer,), {}) is not None:
            raise RuntimeError("a step pre-hook returned new arguments, which a step in parts cannot pass on")


def fire_post_hooks(optimizer: Any) -> None:
    """Note that a step was taken, and call what is to be called after it."""
    mark_step_called(optimizer)
    for hook in step_hooks(optimizer)[1]:
        hook(optimizer, (optimizer,), {})


def bare_step(optimizer: Any, *args: Any) -> Any:
    """Call `optimizer.step`, without the wrapper by which torch runs hooks; returns its result."""
    return unhooked(type(optimizer).step)(optimizer, *args)


_FEWEST = 2**16  # elements; fewer are not stepped at once, as a call costs more
_SHARE = 64  # of all elements: so many wait at most for others to be stepped with


def most_at_once(num_elements: int) -> int:
    """Return how many of all elements are stepped at once, where nothing else binds parameters together."""
    return max(_FEWEST, num_elements // _SHARE)


class GradualStep(ABC):
    """One step of `optimizer`: `units`, `prepare`, `step` for some parameters at a time, `rest` before the last ones, `end`.

    Step hooks are called once, before the first part and after the last one. Parameters are this rank's parts of them; `units`
    and `rest` are called inside `shards.local()`, the others outside of it.
    """

    def __init__(self, optimizer: Optimizer, shards: Shards) -> None:
        self.optimizer = optimizer
        self.shards = shards

    def units(self) -> list[list[torch.Tensor]]:
        """Return parameters that are stepped together, each in one list; those in none can be stepped with any others."""
        return []

    def prepare(self) -> None:
        """The first part follows."""
        fire_pre_hooks(self.optimizer)
        groups = self.optimizer.param_groups
        self._restricted = [Restricted(self.optimizer, group) for group in groups]
        shard_of = self.shards.shard_of
        self._place = {shard_of(p): (i, j) for i, group in enumerate(groups) for j, p in enumerate(group["params"])}

    @torch.no_grad()
    def step(self, params: Sequence[torch.Tensor], grad_scale: float) -> None:
        """Step `params` on their gradients, divided by `grad_scale`. All of a unit, each of which has a gradient."""
        hooks = exchange_step_hooks(self.optimizer, None)
        try:
            self._step(params, grad_scale)
        finally:
            exchange_step_hooks(self.optimizer, hooks)

    @abstractmethod
    def _step(self, params: Sequence[torch.Tensor], grad_scale: float) -> None:
        """As `step`, without step hooks."""

    def rest(self, params: Sequence[torch.Tensor]) -> None:
        """What is stepped from now on are `params`, all that still have a gradient, of units of which others have none."""

    def end(self) -> None:
        """All is stepped."""
        for only in self._restricted:
            only.step_if_nothing_was()
        fire_post_hooks(self.optimizer)


class InBackwardPass:
    """One optimizer in one backward pass. Where ranks hold shards all of them meet the same parameters in the same order.

    Attributes:
        params, trained: all parameters, and those that a pass fills.
        norms, nonfinite: by parameter, of this rank's shard of its gradient; there may be none.
        stashed: gradients of earlier passes, put away while a first pass measures.
        reads_exactly: whether norms are taken in float64, after float32 ones overflowed.
        measures_first: whether a first pass is needed, since a number of all gradients comes before the first step.
        measures_along: whether norms are taken while stepping, for the next step to clip by.
    """

    def __init__(self, gradients: Any) -> None:
        self.gradients = gradients
        self.in_backward: Any = gradients.in_backward  # an `OptimizerInBackward`
        self.decision: Any = self.in_backward.decision
        self.params: list[torch.Tensor] = gradients.parameters.held()
        self.trained = [param for param in self.params if param.requires_grad]
        self.norms: dict[torch.Tensor, torch.Tensor] = {}
        self.nonfinite: set[torch.Tensor] = set()
        self.stashed: dict[torch.Tensor, torch.Tensor] = {}
        self._apart: dict[torch.Tensor, torch.Tensor | None] = {}
        self.reads_exactly = False
        self._seen: set[torch.Tensor] = set()
        dtypes = {param.dtype for param in self.params}
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        self._dtype = None if dtypes.isdisjoint(HALF_DTYPES) else wide
        self._shards = gradients.shards
        self._most = most_at_once(sum(param.numel() for param in self.params))
        self._num_stepped = 0
        exact = self.in_backward.mode == "exact" or self.in_backward.previous is None
        self.measures_first = exact and bool(gradients.checks_finite or self.in_backward.max_norm)
        self.measures_along = not exact and bool(self.in_backward.max_norm)

    # ------------------------------------------------------------------ the first of two passes

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, gradients that there are already are set aside; a pass brings new ones."""
        self.stashed = {param: param.grad for param in self.params if param.grad is not None}
        for param in self.stashed:
            param.grad = None
        self.norms, self._seen = {}, set()
        try:
            yield
        finally:
            for param in self.params:
                self._shards.drop_gradient(param)
            for param, grad in self.stashed.items():
                param.grad = grad
            self.stashed = {}

    def measure(self, param: torch.Tensor) -> None:
        """Take the norm of the gradient of `param`, which is complete, and free it."""
        if self._shards.has_gradient(param):
            self._read_norm(param)
            self._shards.drop_gradient(param)

    def measure_rest(self) -> None:
        """Take the norms of gradients that there were before and to which the pass adds nothing."""
        for param, grad in self.stashed.items():
            if param not in self._seen:
                param.grad = grad
                self._read_norm(param)
                param.grad = None

    def overflows(self) -> bool:
        """Whether the norm of all is not finite: gradients are not, or the sum of their squares. Waits for the device."""
        if not self.counts:
            return False
        return not math.isfinite(self._total(self.measured))

    @property
    def counts(self) -> bool:
        """Whether there are gradients; where ranks hold shards all go on together, also those without."""
        return bool(self.norms) or self._shards.sharded

    def read_exactly(self) -> None:
        """Let `measure` find what is not finite, with norms in float64 that finite numbers do not overflow."""
        self.reads_exactly, self._dtype = True, torch.float64

    def _read_norm(self, param: torch.Tensor) -> None:
        """Take the norm of this rank's shard of the gradient of `param`, if it has one."""
        self._seen.add(param)
        with self._local_shards([param]) as (shard,):
            if shard.grad is None:
                return
            values = gradient_values([shard])
            self.norms[param] = tensor_norms(values, 2.0, self._dtype)[0]
            if self.reads_exactly and not values[0].isfinite().all():
                self.nonfinite.add(param)

    def _read_along(self, param: torch.Tensor) -> None:
        """As `_read_norm`, in a pass that steps, before `_decide_next`."""
        self._read_norm(param)

    def _find_nonfinite(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether a gradient of `params` is not finite in this rank's shard; keeps which. Waits for the device."""
        own = [param for param in params if param in self.norms]
        if not own:
            return False
        with self._local_shards(own) as local_shards:
            norms = torch.stack([self.norms[param].to(self.norms[own[0]].device) for param in own])
            bad = nonfinite_indices(gradient_values(local_shards), norms)
        self.nonfinite.update(own[index] for index in bad)
        return bool(bad)

    # ------------------------------------------------------------------ the decision

    @property
    def _with_norms(self) -> list[torch.Tensor]:
        return [param for param in self.params if param in self.norms]

    @property
    def measured(self) -> list[torch.Tensor]:
        """What this rank holds of the parameters with gradients that were looked at, in the order of the groups."""
        return [self._shards.shard_of(param) for param in self._with_norms]

    def stacked(self) -> torch.Tensor:
        norms = [self.norms[param] for param in self._with_norms]
        if not norms:
            return torch.zeros(0, dtype=torch.float32)
        return torch.stack([norm.to(norms[0].device) for norm in norms])

    def set_norm(self) -> None:
        """Have the gradients know the norm that was measured."""
        measured = self.measured
        nonfinite = [index for index, param in enumerate(self._with_norms) if param in self.nonfinite]
        names_of = self.gradients.parameters.names_of(nonfinite, measured)
        self.gradients.set_read(self.gradients.norms.as_read(self._total(measured), names_of))
        if self.in_backward.max_norm and not self.measures_along:
            self.gradients.clip_by(self.in_backward.max_norm, self.gradients.norm)

    def _total(self, params: Sequence[torch.Tensor]) -> float:
        """The norm of all gradients; a collective where ranks hold shards."""
        return self.gradients.norms.total(self.stacked(), 2.0, params)

    # ------------------------------------------------------------------ the pass that steps

    def prepare(self) -> None:
        if self.measures_along and self.in_backward.previous is not None:
            self.gradients.clip_by(self.in_backward.max_norm, self.in_backward.previous)
        self._divisor: Any = self._divide_by()
        with self._shards.local():
            self.decision.prepare_gradual()
            self._gradual = self._make_gradual()
            param_of = {self._shards.shard_of(param): param for param in self.params}
            units = [[param_of[shard] for shard in unit] for unit in self._gradual.units()]
        self._unit = {param: index for index, unit in enumerate(units) for param in unit}
        self._units = units
        self._missing = [sum(param.requires_grad for param in unit) for unit in units]
        self._undecided: list[torch.Tensor] = []
        self._loose: list[torch.Tensor] = []
        self._num_undecided = self._num_loose = 0
        self._began = self._stopped = False

    def _divide_by(self) -> Any:
        """Return what the gradients of this pass are divided by."""
        return self.gradients.grad_scale

    def _make_gradual(self) -> GradualStep:
        return self.decision.application.gradual(self.gradients)

    def step_on(self, param: torch.Tensor) -> None:
        """The gradient of `param` is complete: step it, or what it completes."""
        if not self._shards.has_gradient(param):
            return
        self._seen.add(param)
        if not self.measures_along:
            self._step_when_complete(param)
            return
        self._read_along(param)
        self._undecided.append(param)
        self._num_undecided += param.numel()
        if self._num_undecided >= self._most:
            self._decide_next()
        else:
            self._copy_apart(param)

    def step_rest(self) -> None:
        """Step what has a gradient and was not stepped yet: what waited for others, and what had one before the pass."""
        if self.measures_along:
            for param in self.params:
                if param not in self._seen and self._has_gradient(param):
                    self.step_on(param)
            self._decide_next()
        self._step_loose()
        rest = [param for param in self.params if self._has_gradient(param)]
        if rest:
            with self._shards.local():
                local_shards = {param: self._shards.shard_of(param) for param in rest}
                before = {param: local_shards[param].grad for param in self._apart}
                for param in self._apart:
                    local_shards[param].grad = self._apart[param]
                self._gradual.rest(list(local_shards.values()))
                for param, grad in before.items():  # this rank may have no shard of it
                    local_shards[param].grad = grad
            self._step(rest)
        if self._began:
            self._gradual.end()

    def _decide_next(self) -> None:
        """Step those that wait for a decision, unless a gradient of theirs, or one before, is not finite on any rank."""
        params, self._undecided = self._undecided, []
        if not params:
            return
        self._num_undecided = 0
        # Where ranks hold shards, one small collective, before which all of them have met the same parameters.
        self._stopped = self._stopped or self.gradients.norms.any_found_inf(self._find_nonfinite(params))
        for param in params:
            if self._stopped:
                self._drop(param)
            else:
                self._step_when_complete(param)

    def _step_when_complete(self, param: torch.Tensor) -> None:
        index = self._unit.get(param)
        if index is not None:
            self._missing[index] -= 1
            if not self._missing[index] and all(map(self._has_gradient, self._units[index])):
                self._step(self._units[index])
            else:
                self._copy_apart(param)
            return
        self._loose.append(param)
        self._num_loose += param.numel()
        if self._num_loose >= self._most:
            self._step_loose()
        else:
            self._copy_apart(param)

    def _step_loose(self) -> None:
        loose, self._loose, self._num_loose = self._loose, [], 0
        if loose:
            self._step(loose)

    def _step(self, params: Sequence[torch.Tensor]) -> None:
        if not self._began:
            self._began = True
            self._gradual.prepare()
        with self._local_shards(params) as local:
            local_shards = [shard for shard in local if shard.grad is not None]
            if local_shards:
                self.decision.read_part(local_shards)
                self._gradual.step(local_shards, self._divisor)
        self._num_stepped += len(params)
        for param in params:
            self._drop(param)

    # ------------------------------------------------------------------ gradients that wait

    def _copy_apart(self, param: torch.Tensor) -> None:
        """Copy the gradient of `param`, which waits, out of memory that it shares with others, so that this can be freed."""
        if param in self._apart:
            return
        with self._shards.local_shards([param]) as (shard,):
            grad = shard.grad
            if grad is not None:
                # Gradients of a bucket, or of what `fully_shard` reduces together, share memory that lives as long as any of
                # them does.
                if grad.is_sparse or grad.untyped_storage().nbytes() <= grad.nbytes:
                    return
                grad = grad.clone()
            self._apart[param] = grad
        self._shards.drop_gradient(param)

    @contextmanager
    def _local_shards(self, params: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        """As `local_shards` of the shards, with the gradients that were copied apart."""
        with self._shards.local_shards(params) as local_shards:
            for param, shard in zip(params, local_shards, strict=True):
                if self._apart.get(param) is not None:
                    shard.grad = self._apart[param]
            yield local_shards

    def _has_gradient(self, param: torch.Tensor) -> bool:
        return param in self._apart or self._shards.has_gradient(param)

    def _drop(self, param: torch.Tensor) -> None:
        self._apart.pop(param, None)
        self._shards.drop_gradient(param)

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """The gradients were used, or dropped."""
        self.in_backward.step_pending = bool(self._seen) or self._num_stepped > 0
        for param in self.params:
            self._shards.drop_gradient(param)
        self.gradients.bare_passes.params.clear()  # of two passes the second was ours too
        if self.in_backward.mode == "previous_norm" and self.gradients.norm is not None:
            self._keep_norm(self.gradients.norm)

    def _keep_norm(self, norm: Any) -> None:
        """The next step clips by `norm`, if it is finite."""
        if math.isfinite(norm):
            self.in_backward.previous = norm

    def mark_partial_step(self) -> None:
        if self._num_stepped:
            self.in_backward.mark_partial_step(self._num_stepped, len(self.params))
