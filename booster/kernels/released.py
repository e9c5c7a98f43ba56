"""Kernels within a backward pass that uses its gradients: what is known of them stays on the device, and the host goes on.

The passes are those of `update/released_backward.py`. Nobody waits to know whether the second of two is worth while: where a
step is skipped it runs all the same, and its launches write nothing. Norms are taken in float64, which no gradients overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from booster.tensors.grads import agree_on, gradient_values, tensor_norms
from booster.update.device import DeviceNorm, nonfinite
from booster.update.gradual import GradualStep
from booster.update.released_pass import ReleasedPass


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

    def _step(self, params: Sequence[torch.Tensor], divisor: Any) -> None:
        if self._decision.step_part(params):
            return
        found = self._decision.found_of_part  # what kernels do not know waits for the device
        if found is None or not bool(found):
            self._gradual.step(params, float(divisor))


class KernelPass(ReleasedPass):
    """As `ReleasedPass`; waits for the device only where there is no norm yet to clip the next step by."""

    decision: Any

    def __init__(self, gradients: Any) -> None:
        super().__init__(gradients)
        self._dtype = torch.float64

    def overflows(self) -> bool:
        return False

    def take_norm(self) -> None:
        norms, norm = self.gradients.norms, self.stacked().to(self.gradients.norms.device)
        total = torch.linalg.vector_norm(norm)
        if self._shards.sharded:
            total = norms.shared_total(norm, 2.0, self.measured)
        self.gradients.take(DeviceNorm(total, norm, self.measured))
        if self.release.max_norm and not self.measures_along:
            self.gradients.clip_by(self.release.max_norm, self.gradients.norm)

    def begin(self) -> None:
        previous: Any = self.release.previous
        if self.measures_along and not isinstance(previous, torch.Tensor):  # of a checkpoint
            device = self.gradients.norms.device
            self.release.previous = torch.full((), previous, dtype=torch.float64, device=device)
        super().begin()

    def _make_gradual(self) -> GradualStep:
        return KernelGradualStep(super()._make_gradual(), self.decision)

    def _look_along(self, param: torch.Tensor) -> None:
        """Those that are judged together are looked at together, since each look is two launches."""

    def _judge(self) -> None:
        params, self._unjudged = self._unjudged, []
        if not params:
            return
        self._num_unjudged = 0
        with self._lent(params) as parts:
            there = {param: part for param, part in zip(params, parts, strict=True) if part.grad is not None}
            norms = tensor_norms(gradient_values(there.values()), 2.0, self._dtype) if there else None
        device = self.gradients.norms.device
        if norms is None:
            found = torch.zeros((), dtype=torch.float32, device=device)
        else:
            self.norms.update(zip(there, norms.unbind(), strict=True))
            found = nonfinite(norms.sum())
        if self._shards.sharded:
            found = agree_on(found, self.gradients.group)
        before = self.decision.found_along
        self.decision.found_along = found if before is None else torch.maximum(before, found)
        for param in params:
            self._admit(param)

    def _keep_norm(self, norm: Any) -> None:
        before: Any = self.release.previous
        if before is None:
            super()._keep_norm(norm)
        else:
            self.release.previous = torch.where(norm < torch.inf, norm, before)
