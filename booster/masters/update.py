"""The update of an optimizer that steps master weights, decided on the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from booster.casting import HALF_DTYPES
from booster.grads import gradient_values, tensor_norms
from booster.masters.compiled import half_norms
from booster.masters.keeps import KeepsMasters
from booster.masters.masters import Masters
from booster.masters.parts import MasterParts
from booster.update.base import Job
from booster.update.compiled import OWN_CACHE
from booster.update.host import HostUpdate
from booster.update.outcome import StepResult
from booster.update.parts import Parts

_logger = logging.getLogger(__name__)


class MasterUpdate(KeepsMasters, HostUpdate):
    """A host update whose gradients are those of the half working parameters, and whose step is that of their masters.

    Norm, finite check and clips read the working gradients; scale and clips reach the optimizer folded into one number,
    so `.grad` still carries the loss scale after a step, also for step hooks.

    count_zeros: report how many gradient elements were zero.
    verbose: log changes of the loss scale.
    compiled: compile norms and steps; `masters` are to be made for it.
    """

    def __init__(
        self,
        job: Job,
        *,
        masters: Masters,
        count_zeros: bool = False,
        verbose: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__(job, masters=masters, compiled=compiled)
        self._half_norms: Any = None
        if compiled:
            self._half_norms = torch.compile(half_norms, dynamic=False, **OWN_CACHE)
            self._tensor_norms = self._compiled_norms
        self._count_zeros = count_zeros
        self._verbose = verbose
        self._zeros_released = 0

    def _decide_and_apply(self) -> StepResult:
        if not (self._count_zeros or self._verbose):
            return super()._decide_and_apply()
        before = self.scaler.scale
        released = self.release is not None and self.release.pending
        zeros = None if not self._count_zeros else self._zeros_released if released else self._num_zeros()
        result = super()._decide_and_apply()
        if result.applied:
            result = StepResult(True, result._read()._replace(num_zeros_in_grad=zeros))
        if self._verbose and zeros is not None and result.applied:
            _logger.info("%d elements of the gradients were zero", zeros)
        if self._verbose and self.scaler.scale != before:
            _logger.info("loss scale %g -> %g after %s", before, self.scaler.scale, _outcome(result))
        return result

    def _apply(self, grad_scale: float) -> float:
        if not self._keeps_any():
            return super()._apply(grad_scale)
        self._step.step(grad_scale)
        return grad_scale  # working gradients are read, never written

    _grad_scale = HostUpdate.grad_scale

    def _compiled_norms(self, values: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        devices = {value.device for value in values}
        if norm_type == 2.0 and len(devices) == 1 and all(value.dtype in HALF_DTYPES for value in values):
            return self._half_norms(values)
        return tensor_norms(values, norm_type)

    def make_parts(self) -> Parts | None:
        self._zeros_released = 0
        return MasterParts(self._step, self.shards) if self._keeps_any() else super().make_parts()

    def look_at_part(self, params: Sequence[torch.Tensor]) -> None:
        if self._count_zeros:
            self._zeros_released += self._num_zeros(params)

    def _num_zeros(self, params: Sequence[torch.Tensor] | None = None) -> int:
        values = gradient_values(self.params() if params is None else params)
        return sum(value.numel() for value in values) - int(sum(value.count_nonzero() for value in values))


def _outcome(result: StepResult) -> str:
    return (
        "an applied step" if result.applied else f"a skipped one ({result.skipped_reason}: {', '.join(result.culprit)})"
    )
