"""The decision and the step by kernels: one launch reads the gradients, one decides, one for each kind of tensor updates.

Everything else is as on any device (`update/device.py`). What kernels do not know, such as sparse gradients or a step with
hooks, `application` steps on the same states. The rule is that of `update/decision.py`; `launches.decide` computes it.

Kernels step within a backward pass too, in the passes of `update/in_backward.py`. The host does not wait to learn whether the
second of two passes is worth while: where a step is skipped it runs all the same, and its launches write nothing. Norms are
taken in float64, which no gradients overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from booster.common.devices import HostCopy
from booster.common.torch_internals.optimizer_internals import mark_step_called, step_hooks
from booster.kernels.launch_cache import current
from booster.kernels.launches import norm_of
from booster.kernels.readings import KernelNorms, KernelReading, PassReadings, TorchReading
from booster.kernels.rule import Rule
from booster.kernels.segments import Tables
from booster.kernels.steps import UNSCALED, DecisionInputs, KernelSteps
from booster.kernels.supported import SupportedMasters, SupportedParams
from booster.loss_scaler import DeviceScale
from booster.masters.update import MasterApplication
from booster.update.application import Application, StepScalars
from booster.update.choice import step_in_backward
from booster.update.context import OptimizerState, UpdateContext
from booster.update.decision import Copy, LazyStepFields, StepFields, StepResult
from booster.update.device import DeviceDecision, DeviceGradients, DeviceNorm, is_one, nonfinite
from booster.update.gradients import Gradients
from booster.update.in_backward_pass import GradualStep, InBackwardPass
from booster.update.update import Update


class KernelGradualStep(GradualStep):
    """`parts` of a step, which kernels make in their place. decision: a `KernelDecision`."""

    def __init__(self, gradual: GradualStep, decision: Any) -> None:
        super().__init__(gradual.optimizer, gradual.shards)
        self._gradual, self._decision = gradual, decision

    def units(self) -> list[list[torch.Tensor]]:
        return self._gradual.units()

    def prepare(self) -> None:
        self._gradual.prepare()

    def rest(self, params: Sequence[torch.Tensor]) -> None:
        self._gradual.rest(params)

    def end(self) -> None:
        self._gradual.end()

    def _step(self, params: Sequence[torch.Tensor], grad_scale: Any) -> None:
        if self._decision.step_part(params):
            return
        found_inf = self._decision.found_inf_in_part  # what kernels do not know waits for the device
        if found_inf is None or not bool(found_inf):
            self._gradual.step(params, float(self._decision.gradients.grad_scale))


class KernelPass(InBackwardPass):
    """As `InBackwardPass`; waits for the device only where there is no norm yet to clip the next step by."""

    decision: Any

    def __init__(self, gradients: Any) -> None:
        super().__init__(gradients)
        self._dtype = torch.float64
        self._readings: list[Any] = []
        self._read_params: set[torch.Tensor] = set()
        self._next: torch.Tensor | None = None  # what the step after this one is clipped by

    def overflows(self) -> bool:
        return False

    @property
    def _with_norms(self) -> list[torch.Tensor]:
        return [param for param in self.params if param in self.norms or param in self._read_params]

    @property
    def counts(self) -> bool:
        return bool(self._read_params) or super().counts

    def set_norm(self) -> None:
        if self.measures_along:
            self._set_norm_along()
            return
        norms, norm = self.gradients.norms, self.stacked().to(self.gradients.norms.device)
        total = torch.linalg.vector_norm(norm)
        if self._shards.sharded:
            total = norms.shared_total(norm, 2.0, self.measured)
        self.gradients.set_read(DeviceNorm(total, norm, self.measured))
        if self.in_backward.max_norm:
            self.gradients.clip_by(self.in_backward.max_norm, self.gradients.norm)

    def _set_norm_along(self) -> None:
        gradients, device = self.gradients, self.gradients.norms.device
        sums = [reading.sums for reading in self._readings] or [torch.zeros(1, dtype=torch.float64, device=device)]
        found_inf, total = self.decision.found_inf_in_part, torch.cat(sums) if len(sums) > 1 else sums[0]
        scale = self.decision.steps.factor_on("current_scale", gradients.scale, device)
        norms = torch.empty(2, dtype=torch.float64, device=device)
        with current(device):
            previous = self.in_backward.previous
            norm_of[(1,)](total, total.numel(), scale, None, norms, previous, enable_fp_fusion=False)
        gradients.read = [PassReadings(self._readings, total, found_inf)]
        gradients.norm, self._next = norms.unbind()

    def prepare(self) -> None:
        previous: Any = self.in_backward.previous
        if self.measures_along and not isinstance(previous, torch.Tensor):  # of a checkpoint
            device = self.gradients.norms.device
            self.in_backward.previous = torch.full((), previous, dtype=torch.float64, device=device)
        super().prepare()

    def _make_gradual(self) -> GradualStep:
        return KernelGradualStep(super()._make_gradual(), self.decision)

    def _divide_by(self) -> Any:
        """Launches divide by what waits; see `KernelGradualStep` for the others."""
        return None

    def _read_along(self, param: torch.Tensor) -> None:
        """Those that are judged together are looked at together, in one launch."""

    def _decide_next(self) -> None:
        params, self._undecided = self._undecided, []
        if not params:
            return
        self._num_undecided = 0
        with self._local_shards(params) as parts:
            there = {param: part for param, part in zip(params, parts, strict=True) if part.grad is not None}
            self._readings.append(self.decision.read_along(list(there.values())))
        self._read_params.update(there)
        for param in params:
            self._step_when_complete(param)

    def _keep_norm(self, norm: Any) -> None:
        if self._next is None:
            super()._keep_norm(norm)
        else:
            self.in_backward.previous = self._next


# Places in what `decide` writes: of float32, float64 and int64 numbers in the same memory.
_SKIPPED, _NEXT_SCALE, _SEED = 5, 6, 7
_NORM, _GRAD_SCALE = 0, 1
_GROWTH, _HYSTERESIS, _ZEROS = 4, 5, 6


class KernelDecision(DeviceDecision):
    """Decides and steps by kernels. Gradients are only read: after a step they carry the loss scale that they had, and no clip.

    Attributes:
        supported: what kernels step.
        steps: their launches.
    """

    def __init__(self, gradients: DeviceGradients, application: Application, supported: SupportedParams) -> None:
        super().__init__(gradients, application)
        self.supported, self._counts_zeros = supported, supported.steps.counts_zeros
        self.steps = supported.steps
        self._norms: Any = gradients.norms  # a `KernelNorms`
        # Of a backward pass that steps: launches of what is stepped together, and of what is read together, in their order.
        self._parts: list[KernelSteps] = []
        self._readings: list[KernelSteps] = []
        self.prepare_gradual()

    def step(self, params: list[torch.Tensor]) -> tuple[StepResult, Any]:
        gradients, bound = self.gradients, self.gradients.deferred_max_norm
        if gradients.in_backward is not None and gradients.in_backward.step_pending:
            return super().step(params)
        tables = self.supported.tables(params)
        if tables is not None:
            with current(tables.device):
                return self._launch(tables, bound)
        if bound is not None:
            gradients.clip_norm(bound)
        return super().step(params)

    def _launch(self, tables: Tables, bound: float | None) -> tuple[StepResult, Any]:
        """Step what is in `tables`. bound: of a clip that waits for the step."""
        gradients = self.gradients
        scale, pending, seed = gradients.scale, gradients.factor, gradients.loss_scale
        checks, joint, sums, found_in = gradients.any_checks_finite, gradients.joint, None, None
        fresh: KernelReading | None = None
        alone = joint.found_inf is None and len(joint.members) == 1
        if checks:
            last = gradients.read[-1] if len(gradients.read) == 1 and bound is None else None
            fresh = last if isinstance(last, KernelReading) and last.current_scale is scale else None
            if fresh is None and (bound is not None or not gradients.read):
                gradients.read.append(fresh := self._norms.read_tables(tables, scale))
            sums = None if fresh is None else fresh.sums
            if not alone or (gradients.group is not None and not self.supported.sharded):
                found_in = self.agreed()  # others decide with us, so the launch is given their word
            elif gradients.read != [fresh]:
                found_in = gradients.found_inf()
        scaler, zeros = gradients.scaler, self._norms.zeros(tables, fresh) if self._counts_zeros else None
        inputs = DecisionInputs(sums, zeros, found_in, scale, pending, seed, bound)
        out = self.steps.run(tables, self.supported, scaler, inputs, checks=checks)
        single, numbers = out.view(torch.float32), out.view(torch.float64)
        if checks and alone:
            joint.decide(single[_SKIPPED])
        first = gradients.norm is None and sums is not None
        norm = numbers[_NORM] if first else gradients.norm
        plain = bound is None and pending is None and (scale is None or is_one(scale))
        scale = 1.0 if plain else numbers[_GRAD_SCALE]
        if type(scaler) is DeviceScale:
            scaler.hold_tensors(single[_NEXT_SCALE], out[_GROWTH], out[_HYSTERESIS])
        elif scaler.enabled:
            scaler.update(single[_SKIPPED])
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

    def backward_pass(self, gradients: Gradients) -> KernelPass:
        return KernelPass(gradients)

    def prepare_gradual(self) -> None:
        self._num_parts = self._num_readings = 0
        self._zeros_along: list[torch.Tensor] = []
        self._sums_along: list[torch.Tensor] = []  # of squares of gradients that no launch has decided by yet
        # Whether gradients that came before those are not finite, 0-dim; None: there are none.
        self._found_inf: torch.Tensor | None = None

    def _launches(self, kept: list[KernelSteps], place: int, *, only_reads: bool) -> KernelSteps:
        """Return the launches at `place` of a pass, which are those of the pass before: tables are kept by them."""
        if place == len(kept):
            steps, group = self.steps, self.gradients.group
            options = {"counts_zeros": self._counts_zeros, "only_reads": only_reads}
            kept.append(KernelSteps(steps.rule, self.gradients.optimizer, group, **options))
        return kept[place]

    def read_along(self, params: list[torch.Tensor]) -> KernelReading | TorchReading:
        """Read the gradients of `params`, by which the parts that follow are stepped or not."""
        readings = self._launches(self._readings, self._num_readings, only_reads=True)
        self._num_readings += 1
        tables = self.supported.reading_tables(readings, params) if params else None
        if tables is None:
            reading = self._norms.read_by_torch(params)
        else:
            with current(tables.device):
                reading = self._norms.read_tables(tables, self.gradients.scale)
        self._sums_along.append(reading.sums)
        if reading.zeros is not None:
            self._zeros_along.append(reading.zeros)
        return reading

    def step_part(self, params: Sequence[torch.Tensor]) -> bool:
        """Step `params` before the others of their step; return False, with nothing done, where kernels do not know them."""
        steps = self._launches(self._parts, self._num_parts, only_reads=False)
        self._num_parts += 1
        tables, gradients = self.supported.partial_tables(steps, list(params)), self.gradients
        counts = self._counts_zeros and not self._num_readings  # else those that read have counted
        if tables is None:
            if counts:
                self._zeros_along.append(self._norms.zeros_by_torch(params))
            return False
        found_inf, sums = gradients.joint.found_inf, None
        if not isinstance(found_inf, torch.Tensor):
            found_inf = self._found_inf
            if self._sums_along:
                sums = self._sums_along[0] if len(self._sums_along) == 1 else torch.cat(self._sums_along)
        checks = found_inf is not None or sums is not None
        with current(tables.device):
            if counts:
                self._zeros_along.append(self._norms.zeros(tables, None))
            inputs = DecisionInputs(sums, None, found_inf, gradients.scale, gradients.factor)
            out = steps.run(tables, self.supported, UNSCALED, inputs, checks=checks, is_part=True)
        if sums is not None:
            self._sums_along, self._found_inf = [], out.view(torch.float32)[_SKIPPED]
        return True

    @property
    def found_inf_in_part(self) -> torch.Tensor | None:
        """Whether gradients so far are not finite or the step is skipped anyway, 0-dim; None: they were not read."""
        found_inf = self.gradients.joint.found_inf
        # Another optimizer of a joint step has read them already.
        if isinstance(found_inf, torch.Tensor):
            return found_inf
        if self._sums_along:
            found_inf, before = nonfinite(torch.cat(self._sums_along).sum()), self._found_inf
            # One flag for all parts: a launch for each part would read the same sums again.
            self._sums_along, self._found_inf = [], found_inf if before is None else torch.maximum(before, found_inf)
        return self._found_inf

    def zeros_in(self, params: list[torch.Tensor]) -> torch.Tensor | None:
        if not self._counts_zeros:
            return None
        if not self._made_in_backward:
            return self._norms.zeros_by_torch(params).sum()
        zeros = self._zeros_along
        return None if not zeros else zeros[0].sum() if len(zeros) == 1 else torch.cat(zeros).sum()

    def should_skip(self) -> bool:
        """Return whether the host knows that all who decide together skip this step: as a rule it does not ask."""
        joint, hooked = self.gradients.joint, any(step_hooks(self.gradients.optimizer))
        if self.gradients.any_checks_finite:
            self.agreed()
        return bool(joint.found_inf) if hooked or not isinstance(joint.found_inf, torch.Tensor) else False

    @property
    def _made_in_backward(self) -> bool:
        in_backward = self.gradients.in_backward
        return in_backward is not None and in_backward.step_pending

    def _apply_divided(self, params: list[torch.Tensor], found_inf: torch.Tensor, scale: Any, clip: Any) -> bool:
        return True if self._made_in_backward else super()._apply_divided(params, found_inf, scale, clip)

    def _apply(self, params: list[torch.Tensor], scalars: StepScalars) -> bool:
        return True if self._made_in_backward else super()._apply(params, scalars)


def kernel_update(
    context: UpdateContext, rule: Rule, application: Application, kept: OptimizerState, *, counts_zeros: bool = False
) -> Update:
    """Make an update that steps by kernels as `rule` says, and by `application` what they do not know."""
    supported: SupportedParams  # half weights are stepped by their masters
    if isinstance(application, MasterApplication):
        supported = SupportedMasters(context, rule, application.master_step, counts_zeros=counts_zeros)
    else:
        supported = SupportedParams(context, rule, counts_zeros=counts_zeros)
    gradients = DeviceGradients(context, KernelNorms(context, supported))
    decision = KernelDecision(gradients, application, supported)
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

    def map_tensors(self, copy: Copy) -> _Decided:
        return _Decided(copy(self._out))

    def __call__(self) -> bool:
        return float(self.tensor().view(torch.float32)[_SKIPPED]) == 0.0


@dataclass(frozen=True, eq=False)
class _Fields(LazyStepFields):
    """Fields that are read of one copy to the host.

    Attributes:
        decided: has the loss scale where that is on a device, the norm if `is_first`, and the number of zeros if `counted`.
    """

    decided: _Decided | None = None
    is_first: bool = False
    counted: bool = False

    def __call__(self, applied: bool) -> StepFields:
        assert self.decided is not None
        there = self.decided.tensor()
        scale = there.view(torch.float32)[_SEED] if isinstance(self.loss_scale, torch.Tensor) else self.loss_scale
        norm = there.view(torch.float64)[_NORM] if self.is_first else self.grad_norm
        return LazyStepFields(scale, norm, self.report, there[_ZEROS] if self.counted else None)(applied)
