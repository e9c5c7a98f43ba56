"""What is read of gradients as Python numbers, and the decision by them: the optimizer is called, or it is not.

One number is read per step, which waits for the device that the gradients are on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from booster.ranks import agreement
from booster.tensors.grads import clamp_values, nonfinite_indices, tensor_norms
from booster.update.application import NO_SCALARS, Application, StepScalars
from booster.update.context import UpdateContext
from booster.update.decision import Decision, NonFiniteParams, Norms, StepFields, StepResult
from booster.update.gradients import Gradients

_NONFINITE = attrgetter("nonfinite")  # of every norm in every step, without a Python call for each


class HostNorm(NamedTuple):
    """What one reading found."""

    total: float
    nonfinite: tuple[str, ...]  # names of parameters; empty although total is inf if only the sum overflowed


class _Known(NamedTuple):
    """Names that are known already."""

    names: tuple[str, ...]

    def __call__(self) -> tuple[str, ...]:
        return self.names


class HostNorms(Norms):
    """Norms and clip factors are Python numbers. A norm that is not finite is looked at once more, exactly.

    tensor_norms: that of `tensors.grads`, or one like it.
    """

    def __init__(self, context: UpdateContext, tensor_norms: Callable[..., torch.Tensor] = tensor_norms) -> None:
        super().__init__(context)
        self._tensor_norms = tensor_norms

    def read(self, gradients: Gradients, norm_type: float) -> tuple[HostNorm, float]:
        values = gradients.values()
        norms = self._tensor_norms(values, norm_type) if values else torch.zeros(0, dtype=torch.float32)
        if self.shards.sharded:
            total = float(self.shared_total(norms, norm_type, gradients.params()))
        else:
            total = float(torch.linalg.vector_norm(norms, norm_type)) if values else 0.0
        nonfinite: tuple[str, ...] = ()
        # Squares of finite float32 gradients can overflow, so a norm of inf proves nothing yet.
        if not math.isfinite(total):
            total, nonfinite = self._reread_exactly(gradients, values, norms, norm_type, total)
        norm = total if gradients.factor is None else total * gradients.factor
        return HostNorm(total, nonfinite), norm if gradients.scale is None else norm / gradients.scale

    def _reread_exactly(
        self, gradients: Gradients, values: list[torch.Tensor], norms: torch.Tensor, norm_type: float, total: float
    ) -> tuple[float, tuple[str, ...]]:
        params = gradients.params()
        nonfinite = nonfinite_indices(values, norms) if values else []
        # Taken again also where another rank may hold the bad number: all ranks come here together.
        if not nonfinite or self.shards.sharded:
            exact = tensor_norms(values, norm_type, torch.float64) if values else norms
            total = self.total(exact, norm_type, params)
        return total, gradients.parameters.names_of(nonfinite, params)

    def total(self, norms: torch.Tensor, norm_type: float, params: Sequence[torch.Tensor]) -> float:
        """The norm of all gradients from those of `params`; a collective where ranks hold shards."""
        if self.shards.sharded:
            return float(self.shared_total(norms, norm_type, params))
        return float(torch.linalg.vector_norm(norms, norm_type)) if norms.numel() else 0.0

    def as_read(self, total: float, nonfinite: tuple[str, ...]) -> HostNorm:
        """Return what a reading would that found this norm, and these parameters not finite."""
        return HostNorm(total, nonfinite)

    def any_found_inf(self, found_inf: bool) -> bool:
        """Return whether any rank found an inf or NaN; a small collective where ranks hold shards, else `found_inf`."""
        return agreement.largest(float(found_inf), self.group) > 0 if self.shards.sharded else found_inf

    def found_inf(self, read: Sequence[HostNorm]) -> bool:
        return any(map(_NONFINITE, read))

    def all_finite(self, read: Sequence[HostNorm]) -> bool:
        return self.shards.sharded and bool(read) and all(math.isfinite(norm.total) for norm in read)

    def nonfinite_params(self, gradients: Gradients) -> NonFiniteParams:
        return _Known(next((norm.nonfinite for norm in gradients.read if norm.nonfinite), ()))

    def clipped(self, norm: float, max_norm: float, factor: float | None) -> float | None:
        # As `torch.nn.utils.clip_grad_norm_` computes it.
        ratio = max_norm / (norm + 1e-6)
        if ratio < 1.0 and math.isfinite(norm):
            return ratio if factor is None else factor * ratio
        return factor

    def clamp(self, gradients: Gradients, clip_value: float) -> None:
        scale, factor, _ = gradients.factors
        if gradients.found_inf() or factor == 0.0:
            return
        clamp_values(gradients.values(written=True), clip_value * scale / factor)


class HostDecision(Decision):
    """The decision as a bool. Where ranks share gradients, one small collective of those that decide together."""

    gradients: Gradients
    application: Application

    def step(self, params: list[torch.Tensor]) -> tuple[StepResult, Any]:
        gradients, scaler = self.gradients, self.gradients.scaler
        joint, group, factor = gradients.joint, gradients.group, gradients.factor
        alone = joint.found_inf is None and len(joint.members) == 1
        if alone and group is None and gradients.read and not any(map(_NONFINITE, gradients.read)):
            skip = False  # no other rank takes part
        else:
            skip = (gradients.checks_finite or not alone and gradients.any_checks_finite) and self._agreed()
        norm = gradients.norm
        if skip:
            return self._skip()
        scale: Any = 1.0
        if gradients.in_backward is None or not gradients.in_backward.step_pending:
            scalars = NO_SCALARS
            if factor is not None:
                scalars = StepScalars(gradients.grad_scale)
            elif gradients.scale is not None and gradients.scale != 1.0:
                scalars = StepScalars(gradients.scale)
            scale = 1.0 if self.application.step(gradients, params, scalars) else scalars.grad_scale
        if scaler.enabled:
            scaler.update(False)
        return StepResult(True, StepFields(loss_scale=gradients.loss_scale, grad_norm=norm)), scale

    def _skip(self) -> tuple[StepResult, Any]:
        gradients = self.gradients
        if gradients.factor is not None:  # the overflow was another optimizer's, and gradients may outlive this step
            gradients.multiply(gradients.factor)
        if gradients.scaler.enabled:
            gradients.scaler.update(True)
        reason, culprit = gradients.joint.report()()
        culprit = agreement.all_names(culprit, gradients.group)
        norm = gradients.norm
        if norm is not None and gradients.group is not None:
            norm = math.inf  # that of some rank is not finite; all report the same
        fields = StepFields(loss_scale=gradients.loss_scale, grad_norm=norm, skipped_reason=reason, culprit=culprit)
        return StepResult(False, fields), gradients.scale

    def should_skip(self) -> bool:
        """Return whether all who decide together skip this step; asked once what all of them have read is there."""
        return self.gradients.any_checks_finite and self._agreed()

    def _agreed(self) -> bool:
        joint, group = self.gradients.joint, self.gradients.group
        if joint.found_inf is None:
            found_inf = False
            for member in joint.members:  # all are asked: reading shards is a collective
                found_inf = bool(member.found_inf()) or found_inf
            if group is not None and not all(member.norms.all_finite(member.read) for member in joint.members):
                finite = not (found_inf and joint.has_nonfinite_loss())
                found_inf, finite = agreement.agree_on_found_inf(found_inf, finite, group)
                joint.nonfinite_loss = not finite
            if found_inf:
                joint.decide(found_inf)
            else:  # without a call, as in nearly every step
                joint.found_inf = False
        return bool(joint.found_inf)
