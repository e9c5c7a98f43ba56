"""The decision and step by kernels: one launch reads the gradients, one decides, one for each kind of tensor updates.

Everything else is as on any device. What the kernels do not know, such as sparse gradients or a step with hooks, is stepped on
the same states.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from booster.common.devices import HostCopy
from booster.common.torch_internals.optimizer_internals import mark_step_called, step_hooks
from booster.kernels.covered import Covered, CoveredMasters
from booster.kernels.launch_cache import current
from booster.kernels.norms import KernelNorms, LookByKernels
from booster.kernels.released import KernelPass, LookByTorch
from booster.kernels.rule import Rule
from booster.kernels.steps import UNSCALED, KernelSteps
from booster.kernels.table import Tables
from booster.loss_scaler import DeviceScale
from booster.masters.update import MasterApplication
from booster.update.application import Application, StepScalars
from booster.update.choice import step_in_backward
from booster.update.context import UpdateContext
from booster.update.device import DeviceDecision, DeviceGradients, nonfinite
from booster.update.gradients import Gradients
from booster.update.optimizer_state import OptimizerState
from booster.update.outcome import Copy, LazyStepFields, StepFields, StepResult
from booster.update.update import Update

_SKIPPED, _DIVISOR = 5, 1  # places in what `decide` writes: of float32 and float64 numbers


class KernelDecision(DeviceDecision):
    """Decides and steps by kernels. Gradients are only read: after a step they carry the loss scale that they had, and no clip.
    What kernels do not know, `application` steps."""

    def __init__(self, gradients: DeviceGradients, application: Application, covered: Covered) -> None:
        super().__init__(gradients, application)
        self.covered, self._counts_zeros = covered, covered.steps.counts_zeros
        self.steps = covered.steps
        self._parts: list[KernelSteps] = []  # of what is stepped together within a backward pass, in its order
        self._looks: list[KernelSteps] = []  # and of what is looked at together
        self.begin_gradual()

    def step(self, params: list[torch.Tensor]) -> tuple[StepResult, Any]:
        gradients, bound = self.gradients, self.gradients.bound
        if gradients.in_backward is not None and gradients.in_backward.uncounted:
            return super().step(params)
        tables = self.covered.ready(params)
        if tables is not None:
            with current(tables.device):
                return self._launch(tables, bound)
        if bound is not None:
            self.gradients.clip_norm(bound)
        return super().step(params)

    def _launch(self, tables: Tables, bound: float | None) -> tuple[StepResult, Any]:
        """Step what is in `tables`. bound: of a clip that waits for the step."""
        gradients = self.gradients
        norms: Any = gradients.norms
        carried, pending, seed = gradients.scale, gradients.factor, gradients.loss_scale
        checks, joint, sums, found_in = gradients.checks, gradients.joint, None, None
        fresh: LookByKernels | None = None
        alone = joint.found is None and len(joint.members) == 1
        if checks:
            last = gradients.read[-1] if len(gradients.read) == 1 and bound is None else None
            fresh = last if isinstance(last, LookByKernels) and last.carried is carried else None
            if fresh is None and (bound is not None or not gradients.read):
                gradients.read.append(fresh := norms.look(tables, carried))
            sums = None if fresh is None else fresh.sums
            if not alone or (gradients.group is not None and not self.covered.sharded):
                found_in = self.agreed()
            elif gradients.read != [fresh]:
                found_in = gradients.found()
        scaler, zeros = gradients.scaler, norms.zeros(tables, fresh) if self._counts_zeros else None
        out = self.steps.run(tables, self.covered, scaler, sums, zeros, found_in, carried, pending, seed, bound, checks)
        if checks and alone:
            joint.decide(out.view(torch.float32)[_SKIPPED])
        numbers = out.view(torch.float64)
        first = gradients.norm is None and sums is not None
        norm = numbers[0] if first else gradients.norm
        plain = bound is None and pending is None and (carried is None or _is_one(carried))
        scale = 1.0 if plain else numbers[_DIVISOR]
        if scaler.enabled:
            self._follow_scale(out)
        mark_step_called(gradients.optimizer)
        if not checks and zeros is None:
            return StepResult(True, StepFields(loss_scale=1.0)), scale
        decided, counted = _Decided(out), zeros is not None
        if not checks:
            return StepResult(True, _Fields(1.0, decided=decided, counted=counted)), scale
        fields = _Fields(seed, norm, joint.report(), decided=decided, is_first=first, counted=counted)
        return StepResult(decided, fields, pending=fields.pending), scale

    def held_by(self, graph: list[Any]) -> AbstractContextManager[None]:
        return self.steps.held_by(graph)

    # ------------------------------------------------------------------ within backward

    def released_pass(self, gradients: Gradients) -> KernelPass:
        return KernelPass(gradients)

    def begin_gradual(self) -> None:
        self._num_parts = self._num_looks = 0
        self._zeros_along: list[torch.Tensor] = []
        self._sums_along: list[torch.Tensor] = []  # of squares of gradients that no launch has decided by yet
        self._found_along: torch.Tensor | None = (
            None  # whether others that came are not finite, 0-dim; None: there are none
        )

    def look_along(self, params: list[torch.Tensor]) -> LookByKernels | LookByTorch:
        """Read the gradients of `params`, by which the parts that follow are stepped or not."""
        norms: Any = self.gradients.norms
        if self._num_looks == len(self._looks):
            steps = self.steps
            group, counts = self.gradients.group, self._counts_zeros
            self._looks.append(
                KernelSteps(steps.rule, self.gradients.optimizer, group, counts_zeros=counts, only_reads=True)
            )
        looks, self._num_looks = self._looks[self._num_looks], self._num_looks + 1
        tables = self.covered.look(looks, params) if params else None
        if tables is None:
            found = norms.look_by_torch(params)
        else:
            with current(tables.device):
                found = norms.look(tables, self.gradients.scale)
        self._sums_along.append(found.sums)
        if found.zeros is not None:
            self._zeros_along.append(found.zeros)
        return found

    def zeros_in(self, params: list[torch.Tensor]) -> torch.Tensor | None:
        if not self._counts_zeros:
            return None
        norms: Any = self.gradients.norms
        in_backward = self.gradients.in_backward
        if in_backward is None or not in_backward.uncounted:
            return norms.zeros_by_torch(params).sum()
        zeros = self._zeros_along
        return None if not zeros else zeros[0].sum() if len(zeros) == 1 else torch.cat(zeros).sum()

    def agree(self) -> bool:
        """Return whether the host knows that all who decide together skip this step: as a rule it does not ask."""
        joint, hooked = self.gradients.joint, any(step_hooks(self.gradients.optimizer))
        if self.gradients.checks:
            self.agreed()
        return bool(joint.found) if hooked or not isinstance(joint.found, torch.Tensor) else False

    @property
    def found_of_part(self) -> torch.Tensor | None:
        """Whether gradients that came so far are not finite, or the step is skipped whatever they are, 0-dim; None: nobody
        looked."""
        found = self.gradients.joint.found
        if isinstance(found, torch.Tensor):
            return found
        if self._sums_along:
            found, before = nonfinite(torch.cat(self._sums_along).sum()), self._found_along
            self._sums_along, self._found_along = [], found if before is None else torch.maximum(before, found)
        return self._found_along

    def _apply_divided(self, params: list[torch.Tensor], found: torch.Tensor, carried: Any, clip: Any) -> bool:
        in_backward = self.gradients.in_backward
        made = in_backward is not None and in_backward.uncounted
        return True if made else super()._apply_divided(params, found, carried, clip)

    def step_part(self, params: Sequence[torch.Tensor]) -> bool:
        """Step `params` before the others of their step; return False, with nothing done, where kernels do not know them."""
        if self._num_parts == len(self._parts):
            group, counts = self.gradients.group, self._counts_zeros
            self._parts.append(KernelSteps(self.steps.rule, self.gradients.optimizer, group, counts_zeros=counts))
        steps, self._num_parts = self._parts[self._num_parts], self._num_parts + 1
        tables, gradients, norms = self.covered.part(steps, list(params)), self.gradients, self.gradients.norms
        if tables is None:
            if self._counts_zeros and not self._num_looks:
                self._zeros_along.append(norms.zeros_by_torch(params))  # type: ignore[attr-defined]
            return False
        found, sums = gradients.joint.found, None
        if not isinstance(found, torch.Tensor):
            found = self._found_along
            if self._sums_along:
                sums = self._sums_along[0] if len(self._sums_along) == 1 else torch.cat(self._sums_along)
        checks = found is not None or sums is not None
        with current(tables.device):
            if self._counts_zeros and not self._num_looks:
                self._zeros_along.append(norms.zeros(tables, None))  # type: ignore[attr-defined]
            scalars = sums, None, found, gradients.scale, gradients.factor, None, None, checks
            out = steps.run(tables, self.covered, UNSCALED, *scalars, is_part=True)
        if sums is not None:
            self._sums_along, self._found_along = [], out.view(torch.float32)[_SKIPPED]
        return True

    def _apply(self, params: list[torch.Tensor], scalars: StepScalars) -> bool:
        in_backward = self.gradients.in_backward
        return True if in_backward is not None and in_backward.uncounted else super()._apply(params, scalars)

    def _follow_scale(self, out: torch.Tensor) -> None:
        single, scaler = out.view(torch.float32), self.gradients.scaler
        if type(scaler) is DeviceScale:
            scaler.follow(single[6], out[4], out[5])
        else:
            scaler.update(single[_SKIPPED])


def kernel_update(
    context: UpdateContext, rule: Rule, application: Application, kept: OptimizerState, *, counts_zeros: bool = False
) -> Update:
    """Make an update that steps by kernels as `rule` says, and by `application` what they do not know.

    counts_zeros: tell how many elements of gradients are zero."""
    masters = isinstance(application, MasterApplication)
    covered: Covered
    if masters:
        covered = CoveredMasters(context, rule, application.whole, counts_zeros=counts_zeros)  # type: ignore[attr-defined]
    else:
        covered = Covered(context, rule, counts_zeros=counts_zeros)
    gradients = DeviceGradients(context, KernelNorms(context, covered))
    decision = KernelDecision(gradients, application, covered)
    step_in_backward(context, gradients, decision)
    return Update(gradients, decision, kept)


class _Decided(HostCopy):
    """What `decide` wrote, on its way to the host."""

    def __init__(self, out: torch.Tensor) -> None:
        super().__init__(out)
        self._out = out

    def on_device(self) -> torch.Tensor:
        """Whether the step was made, 0-dim on the device."""
        return self._out.view(torch.float32)[_SKIPPED] == 0

    def copied(self, copy: Copy) -> _Decided:
        return _Decided(copy(self._out))

    def __call__(self) -> bool:
        return float(self.tensor().view(torch.float32)[_SKIPPED]) == 0.0


@dataclass(frozen=True, eq=False)
class _Fields(LazyStepFields):
    """decided: has the loss scale where that lives on a device, the norm where `is_first` says that it read it, and the number
    of zeros where they are `counted`."""

    decided: _Decided | None = None
    is_first: bool = False
    counted: bool = False

    def __call__(self, applied: bool) -> StepFields:
        assert self.decided is not None
        there = self.decided.tensor()
        on_device = isinstance(self.loss_scale, torch.Tensor)
        scale = there.view(torch.float32)[7] if on_device else self.loss_scale
        norm = there.view(torch.float64)[0] if self.is_first else self.grad_norm
        return LazyStepFields(scale, norm, self.report, there[6] if self.counted else None)(applied)

    def copied(self, copy: Copy) -> _Fields:
        assert self.decided is not None
        plain, decided = super().copied(copy), self.decided.copied(copy)
        fields = plain.loss_scale, plain.grad_norm, plain.report, plain.num_zeros
        return _Fields(*fields, decided, self.is_first, self.counted)


def _is_one(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value == 1.0
