"""Stepping an optimizer on master weights: at once, in parts as gradients come, and with what a host reports of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from booster.masters.bucket import Bucket
from booster.masters.compiled import CompiledMasterStep
from booster.masters.master_state import MasterState
from booster.masters.masters import Masters, own_gradient
from booster.masters.step import MasterStep
from booster.model.params import params_of
from booster.shards import Shards
from booster.tensors.flat import is_dense
from booster.tensors.grads import gradient_values, tensor_norms
from booster.tensors.trees import HALF_DTYPES
from booster.update.application import Application, StepScalars, begins, honours_grad_scale
from booster.update.choice import COMPILER_OPTIONS, UpdateFactories, choose_update, compile_alone
from booster.update.context import UpdateContext
from booster.update.decision import StepResult
from booster.update.gradients import Gradients
from booster.update.host import HostDecision, HostNorms
from booster.update.in_backward_pass import GradualStep
from booster.update.update import Update

_logger = logging.getLogger(__name__)
_DTYPE = attrgetter("dtype")


class MasterGradualStep(GradualStep):
    """Parts of `step`: a bucket and its parameters, and what has no master by itself."""

    def __init__(self, step: MasterStep, shards: Shards) -> None:
        super().__init__(step.masters.optimizer, shards)
        self._master_step = step
        self._buckets: dict[torch.Tensor, list[Bucket]] = {}

    def units(self) -> list[list[torch.Tensor]]:
        self._master_step.refresh_params()
        masters = self._master_step.masters
        self._refresh_buckets()
        # A bucket has one parameter, or several that are in no other.
        # A parameter that is cut over several buckets is stepped with all of them.
        lists = {tuple(bucket.params): None for bucket in masters.buckets}
        return [list(params) for params in lists]

    def prepare(self) -> None:
        super().prepare()
        # Once for all parts of a step, so that rounding draws what a step at once would.
        self._master_step.masters.rng.next()

    def _step(self, params: Sequence[torch.Tensor], grad_scale: float) -> None:
        buckets = list({bucket: None for param in params for bucket in self._buckets.get(param, ())})
        self._master_step.refuse_sparse(buckets)
        plain: list[list[torch.Tensor]] = [[] for _ in self._restricted]
        for param in params:
            if param not in self._buckets:
                plain[self._place[param][0]].append(param)
        self._master_step.check_plain(plain)
        self._master_step.step_those(buckets, plain, StepScalars(grad_scale), self._restricted)

    def rest(self, params: Sequence[torch.Tensor]) -> None:
        self._master_step.masters.divide_by_gradients()
        self._refresh_buckets()

    def _refresh_buckets(self) -> None:
        self._buckets = {}
        for bucket in self._master_step.masters.buckets:
            for param in bucket.params:
                self._buckets.setdefault(param, []).append(bucket)


class MasterApplication(Application):
    """Steps the masters of half-precision parameters, a bucket at a time. It reads their gradients and never writes them:
    `.grad` still carries the loss scale after a step, also for step hooks.

    Without masters it is an `Application`, as under `fully_shard`: float32 shards are stepped as any weights are.
    On a device a bucket is read, stepped and written back whether the step is skipped or not. If it is, what is written back
    is what was read, in every format and encoding.

    compiled: compile steps; `masters` are to be made for it.
    """

    def __init__(self, context: UpdateContext, *, masters: Masters, compiled: bool = False) -> None:
        super().__init__(context)
        self.masters = masters
        self.compiled = compiled
        self.master_step = CompiledMasterStep(masters) if compiled else MasterStep(masters)

    def step(self, gradients: Gradients, params: list[torch.Tensor], scalars: StepScalars) -> bool:
        if not self._keeps_any():
            return super().step(gradients, params, scalars)
        self.master_step.step(scalars)
        return False

    def step_on_device(self, gradients: Gradients, params: list[torch.Tensor], scalars: StepScalars) -> bool:
        if not self._keeps_any():
            return super().step_on_device(gradients, params, scalars)
        if scalars.found_inf is None or not self.must_know(gradients, scalars):
            self.master_step.step(scalars)
        # The host has to know here, as for sparse gradients: it waits, and steps or does not.
        elif not bool(scalars.found_inf):
            self.master_step.step(StepScalars(scalars.number))
        return False

    def step_with_closure(self, gradients: Gradients, closure: Callable[[], Any]) -> tuple[Any, Any]:
        grad_scale: Any = 1.0

        def current_grad_scale() -> float:
            nonlocal grad_scale
            grad_scale = gradients.grad_scale
            gradients.set_grad_scale(grad_scale)
            return float(grad_scale)

        return self.master_step.step_with_closure(closure, current_grad_scale), grad_scale

    def call(self, gradients: Gradients | None, method: Callable[[], Any], *, keep: bool = True) -> tuple[Any, bool]:
        if not self._keeps_any():
            return super().call(gradients, method, keep=keep)
        if gradients is None:
            return self.master_step.call(method, None)
        # apex's O2 adds float32 gradients up elsewhere; a method would find `.grad` of the last pass alone.
        if self.masters.gradient_of is not own_gradient:
            raise RuntimeError(
                f"a method of {type(self.optimizer).__name__} other than step() was called between backward and step, and this "
                "precision keeps sums of gradients out of .grad, which it would not see; use mixed_precision='bf16_naive' or "
                "'bf16', or call it after step() and zero_grad()"
            )
        return self.master_step.call(method, float(gradients.grad_scale), keep=keep)

    def gradual(self, gradients: Gradients) -> GradualStep | None:
        return MasterGradualStep(self.master_step, self.shards) if self._keeps_any() else super().gradual(gradients)

    def must_know(self, gradients: Gradients, scalars: StepScalars) -> bool:
        if super().must_know(gradients, scalars):
            return True
        plain = [param for params in self.master_step.plain() for param in params if param.grad is not None]
        # Of which kernels take none.
        return any(param.grad.is_sparse or not is_dense(param) for param in plain)  # type: ignore[union-attr]

    def _lacks_states(self) -> bool:
        if not self._keeps_any():
            return super()._lacks_states()
        groups, optimizer = self.optimizer.param_groups, self.optimizer
        if honours_grad_scale(optimizer) and not any(group.get("momentum") for group in groups):
            return False
        self.master_step.prepare()  # divides buckets, and makes those of new parameters
        masters = self.masters
        stepped = [b for b in masters.buckets if masters.gradient_of(b.params[0]) is not None]
        held: list[Any] = [(groups[bucket.group], handle) for bucket in stepped for handle in bucket.handles]
        held += [(group, p) for group in groups for p in masters.outside(group["params"]) if p.grad is not None]
        return any(begins(optimizer, group, tensor) for group, tensor in held)

    def _keeps_any(self) -> bool:
        """Return whether there are masters; where a plugin shards, float32 shards are stepped as any weights are."""
        if self.masters.buckets:
            return True
        held = params_of(self.optimizer)
        if self.masters.half_only and HALF_DTYPES.isdisjoint(map(_DTYPE, held)):
            return False  # as under `fully_shard`; without a Python call for each
        return any(self.masters.is_stepped(param) and self.masters.may_have(param) for param in held)


class ReportingDecision(HostDecision):
    """A decision on the host, which also counts the zeros among gradients, and logs.

    count_zeros: put their number into results. verbose: log it, and changes of the loss scale.
    """

    def __init__(
        self, gradients: Gradients, application: Application, *, count_zeros: bool = False, verbose: bool = False
    ) -> None:
        super().__init__(gradients, application)
        self.counts_zeros = count_zeros
        self.verbose = verbose
        self._zeros_released = 0

    def step(self, params: list[torch.Tensor]) -> tuple[StepResult, Any]:
        gradients = self.gradients
        # Read before the step, which moves it.
        before = gradients.scaler.scale
        released = gradients.in_backward is not None and gradients.in_backward.step_pending
        zeros = (
            None if not self.counts_zeros else self._zeros_released if released else _zeros_in(gradient_values(params))
        )
        result, scale = super().step(params)
        if result.applied:
            result = result.with_zeros(zeros)
        if self.verbose and zeros is not None and result.applied:
            _logger.info("%d elements of the gradients were zero", zeros)
        if self.verbose and gradients.scaler.scale != before:
            why = f"a skipped one ({result.skipped_reason}: {', '.join(result.culprit)})"
            outcome = "an applied step" if result.applied else why
            _logger.info("loss scale %g -> %g after %s", before, gradients.scaler.scale, outcome)
        return result, scale

    def prepare_gradual(self) -> None:
        self._zeros_released = 0

    def read_part(self, params: Sequence[torch.Tensor]) -> None:
        if self.counts_zeros:
            self._zeros_released += _zeros_in(gradient_values(params))


def _zeros_in(values: Sequence[torch.Tensor]) -> int:
    return sum(value.numel() for value in values) - int(sum(value.count_nonzero() for value in values))


def stepping_masters(
    masters: Masters, *, count_zeros: bool = False, verbose: bool = False, compiled: bool = False
) -> UpdateFactories:
    """How an optimizer steps `masters`; see `MasterApplication` and `ReportingDecision` for the options, which decide
    on the host."""
    reports = count_zeros or verbose
    return UpdateFactories(
        functools.partial(MasterApplication, masters=masters, compiled=compiled),
        functools.partial(MasterState, masters=masters),
        compiled_half_norms if compiled else HostNorms,
        functools.partial(ReportingDecision, count_zeros=count_zeros, verbose=verbose) if reports else HostDecision,
        decides_on_host=reports or compiled,
    )


def choose_master_update(context: UpdateContext, *, masters: Masters, **options: bool) -> Update:
    """Make the update that steps `masters`; options: those of `stepping_masters`."""
    return choose_update(context, stepping_masters(masters, **options))


def compiled_half_norms(context: UpdateContext) -> HostNorms:
    """Return norms of which those of half-precision gradients are read by one compiled function."""

    def half_norms(values: list[torch.Tensor]) -> torch.Tensor:
        # Sums of squares become one loop for each tensor; a call of a norm would stay a call.
        return torch.stack([value.float().square().sum() for value in values]).sqrt()

    compiled = compile_alone(half_norms, options=COMPILER_OPTIONS)

    def norms(values: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        devices = {value.device for value in values}
        if norm_type == 2.0 and len(devices) == 1 and all(value.dtype in HALF_DTYPES for value in values):
            return compiled(values)
        return tensor_norms(values, norm_type)

    return HostNorms(context, norms)
