"""The update of an optimizer that steps master weights, decided on the host."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from booster.casting import HALF_DTYPES
from booster.grads import gradient_values
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
        self._half_norms: Any = torch.compile(half_norms, dynamic=False, **OWN_CACHE) if compiled else None
        self._count_zeros = count_zeros
        self._verbose = verbose
        self._zeros_released = 0

    def _decide_and_apply(self) -> StepResult:
        before = self.scaler.scale
        carried = self._grad_scale
        released = self.release is not None and self.release.pending
        zeros = None if not self._count_zeros else self._zeros_released if released else self._num_zeros()
        result = super()._decide_and_apply()
        if result.applied:
            self._scale = carried if self._keeps_any() and not released else self._scale
            result = StepResult(True, result._read()._replace(num_zeros_in_grad=zeros))
        if self._verbose and zeros is not None and result.applied:
            _logger.info("%d elements of the gradients were zero", zeros)
        if self._verbose and self.scaler.scale != before:
            _logger.info("loss scale %g -> %g after %s", before, self.scaler.scale, _outcome(result))
        return result

    @property
    def _grad_scale(self) -> float:
        return self._known_scale / self._pending if self._pending else math.inf

    def _apply(self, grad_scale: float) -> None:
        if self._keeps_any():
            self._step.step(grad_scale)
        else:
            super()._apply(grad_scale)

    def _tensor_norms(self, values: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        if self._half_norms is not None and norm_type == 2.0:
            same = len({value.device for value in values}) == 1 and all(value.dtype in HALF_DTYPES for value in values)
            if same:
                return self._half_norms(values)
        return super()._tensor_norms(values, norm_type)

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
