"""Kernels that step within a backward pass: what is known of the gradients stays on the device, and the host goes on.

The passes are those of `update/in_backward.py`. The host does not wait to learn whether the second of two passes is worth
while: where a step is skipped it runs all the same, and its launches write nothing. Norms are taken in float64, which no
gradients overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from booster.kernels.launch_cache import current
from booster.kernels.launches import norm_of
from booster.kernels.readings import PassReadings
from booster.update.device import DeviceNorm
from booster.update.gradual import GradualStep
from booster.update.in_backward_pass import InBackwardPass


class KernelGradualStep(GradualStep):
    """`parts` of a step, which kernels make in their place. decision: a `KernelDecision`."""

    def __init__(self, gradual: GradualStep, decision: Any) -> None:
        super().__init__(gradual.optimizer, gradual.shards)
        self._gradual, self._decision = gradual, decision

    def units(self) -> list[list[torch.Tensor]]:
        return self._gradual.units()

    def begin(self) -> None:
        self._gradual.begin()

    def rest(self, params: Sequence[torch.Tensor]) -> None:
        self._gradual.rest(params)

    def end(self) -> None:
        self._gradual.end()

    def _step(self, params: Sequence[torch.Tensor], grad_scale: Any) -> None:
        if self._decision.step_part(params):
            return
        found = self._decision.found_of_part  # what kernels do not know waits for the device
        if found is None or not bool(found):
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
        gradients, device, sums = self.gradients, self.gradients.norms.device, [look.sums for look in self._readings]
        sums = sums or [torch.zeros(1, dtype=torch.float64, device=device)]
        found, total = self.decision.found_of_part, torch.cat(sums) if len(sums) > 1 else sums[0]
        carried = self.decision.steps.factor_on("carried", gradients.scale, device)
        norms = torch.empty(2, dtype=torch.float64, device=device)
        with current(device):
            previous = self.in_backward.previous
            norm_of[(1,)](total, total.numel(), carried, None, norms, previous, enable_fp_fusion=False)
        gradients.read = [PassReadings(self._readings, total, found)]
        gradients.norm, self._next = norms.unbind()

    def begin(self) -> None:
        previous: Any = self.in_backward.previous
        if self.measures_along and not isinstance(previous, torch.Tensor):  # of a checkpoint
            device = self.gradients.norms.device
            self.in_backward.previous = torch.full((), previous, dtype=torch.float64, device=device)
        super().begin()

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
