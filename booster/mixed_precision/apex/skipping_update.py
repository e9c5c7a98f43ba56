"""The update under apex: a step is skipped, once, after an overflow in one of its backward passes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from booster.masters.master_state import MasterState
from booster.masters.masters import Masters
from booster.masters.update import MasterApplication
from booster.mixed_precision.apex.apex_gradients import ApexGradients, ApexMasterGradients
from booster.tensors.cast_regions import casts_as_here, disable_casts
from booster.update.application import Application
from booster.update.context import UpdateContext
from booster.update.host import HostDecision, HostNorms
from booster.update.optimizer_state import OptimizerState
from booster.update.outcome import SkippedReason, StepFields, StepResult
from booster.update.update import Update

_logger = logging.getLogger(__name__)


class ApexUpdate(Update):
    """An update that skips its step, once, after an overflow in one of the backward passes.

    verbose: log skipped steps.
    """

    gradients: ApexGradients

    def __init__(
        self, gradients: ApexGradients, application: Application, kept: OptimizerState, *, verbose: bool
    ) -> None:
        super().__init__(gradients, ApexDecision(gradients, application), kept)
        self._verbose = verbose

    def step(self) -> StepResult:
        gradients = self.gradients
        gradients.check_complete()
        overflow = gradients.overflow
        if overflow is None:
            return super().step()
        loss_scale, culprit = gradients.loss_scale, gradients.clear_overflow()
        if self._verbose:
            _logger.info(
                "Gradient overflow.  Skipping step, loss scaler %s reducing loss scale to %s",
                overflow.loss_id,
                gradients.scaler[overflow.loss_id].scale,
            )
        reason: SkippedReason = "nonfinite_grad" if overflow.finite_loss else "nonfinite_loss"
        gradients.reset(gradients.scale)
        return StepResult(False, StepFields(loss_scale=loss_scale, skipped_reason=reason, culprit=culprit))

    def step_with_closure(self, closure: Callable[[], Any]) -> StepResult:
        # The closure runs the model, with casts; the step around it must not cast the optimizer's arithmetic.
        cast_again = casts_as_here()

        def cast() -> Any:
            with cast_again():
                return closure()

        with disable_casts():
            return super().step_with_closure(cast)


class ApexDecision(HostDecision):
    """A decision that steps outside of the casts of O1."""

    def step(self, params: list[torch.Tensor]) -> tuple[StepResult, Any]:
        with disable_casts():
            return super().step(params)


def make_apex_update(context: UpdateContext, *, masters: Masters | None, verbose: bool) -> ApexUpdate:
    """Make the update of an optimizer under apex, of `masters` where there are any."""
    norms = HostNorms(context)
    if masters is None:
        return ApexUpdate(ApexGradients(context, norms), Application(context), OptimizerState(context), verbose=verbose)
    gradients = ApexMasterGradients(context, norms, masters)
    return ApexUpdate(
        gradients, MasterApplication(context, masters=masters), MasterState(context, masters), verbose=verbose
    )
