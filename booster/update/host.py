"""The update whose decision is taken on the host: one number is read per step, then the optimizer is called or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from booster.ground.torch_internals import step_hooks
from booster.ranks import agreement
from booster.tensors.grads import clamp_values, nonfinite_indices, tensor_norms
from booster.update.base import Update
from booster.update.fused import honours_grad_scale
from booster.update.outcome import StepFields, StepResult
from booster.update.parts import Parts, PlainParts

# What every step asks of parameters and norms, without a Python call for each.
_DTYPE, _NONFINITE = attrgetter("dtype"), attrgetter("nonfinite")
_FLOAT32_MAX = torch.finfo(torch.float32).max


class _Norm(NamedTuple):
    total: float
    nonfinite: tuple[str, ...]  # names of parameters; empty although total is inf if only the sum overflowed


class HostUpdate(Update):
    """Scale, norms and the decision are Python numbers. Reading the norm waits for the device the gradients are on."""

    _tensor_norms: Callable[..., torch.Tensor] = staticmethod(tensor_norms)

    @property
    def next_scale(self) -> float:
        return self.scaler.scale

    def found(self) -> bool:
        if not self._measured:
            self._measure_once()
        return any(map(_NONFINITE, self._measured))

    @property
    def all_finite(self) -> bool:
        return (
            self.shards.sharded and bool(self._measured) and all(math.isfinite(norm.total) for norm in self._measured)
        )

    def blame(self) -> Callable[[], tuple[str, ...]]:
        names: tuple[str, ...] = next((norm.nonfinite for norm in self._measured if norm.nonfinite), ())
        return lambda: names

    def clip_value(self, clip_value: float) -> None:
        with self.shards.local():
            if self._nobody_has_gradients():
                self._refuse_early_clip("clip_grad_by_value")
                return
            self._require_backward()
            self._check = True
            if self.found() or self._pending == 0.0:
                return
            bound = clip_value * self._known_scale / self._pending
            clamp_values(self.gradients(written=True), bound)

    def _decide_and_apply(self) -> StepResult:
        loss_scale, joint = self._loss_scale, self.joint
        alone = joint.found is None and len(joint.updates) == 1
        if alone and self._group is None and self._measured and not any(map(_NONFINITE, self._measured)):
            skip = False  # nobody else has a say
        else:
            skip = (self._check or not alone and self._checks) and self._agreed()
        norm = self._reported_norm
        if skip:
            if self._factor is not None:  # the overflow was another optimizer's, and gradients may outlive this step
                self._multiply(self._pending)
            if self.scaler.enabled:
                self.scaler.update(True)
            reason, culprit = self.joint.report()()
            culprit = agreement.all_names(culprit, self._group)
            if norm is not None and self._group is not None:
                norm = math.inf  # that of some rank is not finite; all report the same
            return StepResult(
                False, StepFields(loss_scale=loss_scale, grad_norm=norm, skipped_reason=reason, culprit=culprit)
            )
        if self.release is None or not self.release.pending:
            scale = 1.0 if self._scale is None else self._scale
            if self._factor is not None:
                scale = scale / self._factor if self._factor else math.inf
            self._scale = self._apply(scale)
        else:
            self._scale = 1.0
        if self.scaler.enabled:
            self.scaler.update(False)
        return StepResult(True, StepFields(loss_scale=loss_scale, grad_norm=norm))

    @property
    def grad_scale(self) -> float:
        """What gradients are to be divided by: loss scale and clip in one number; inf where a clip leaves nothing of them."""
        pending = self._pending
        return self._known_scale / pending if pending else math.inf

    def make_parts(self) -> Parts | None:
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        divides = self._kernel_divides(trained)
        return PlainParts(
            self.optimizer, self.shards, self.kernel, divides=divides, ratio=lambda: self._pending / self._known_scale
        )

    def take_norm(self, norms: torch.Tensor, nonfinite: list[int]) -> None:
        """Take `norms` of order 2 of the gradients of `params()` for those that were read. nonfinite: which of `params()` had
        an inf or NaN in theirs."""
        norm = self._total(norms, 2.0)
        self._measured = [_Norm(norm, self.culprits(nonfinite, self.params()))]
        self._reported_norm = norm if self._scale is None else norm / self._scale

    def total_norm(self, norms: torch.Tensor) -> float:
        """The norm of all gradients from `norms` of order 2 of those of `params()`; a collective where ranks hold shards."""
        return self._total(norms, 2.0)

    @property
    def last_norm(self) -> float | None:
        """The norm of this step's gradients, unscaled and not clipped; None where nobody looked."""
        return self._reported_norm

    def clip_by(self, max_norm: float, norm: float) -> None:
        """Clip to `max_norm` gradients whose true norm is, or is taken to be, `norm`."""
        self._check = True
        self._factor = self._clipped(norm, max_norm)

    def found_anywhere(self, found: bool) -> bool:
        """Return whether any rank has found what this one says; a small collective where ranks hold shards, else `found`."""
        return agreement.largest(float(found), self._group) > 0 if self.shards.sharded else found

    def agree(self) -> bool:
        """Return whether all who decide together skip this step; asked once what all of them have measured is there."""
        return self._checks and self._agreed()

    def _agreed(self) -> bool:
        joint = self.joint
        if joint.found is None:
            found = False
            for update in joint.updates:  # all are asked: measuring shards is a collective
                found = bool(update.found()) or found
            if self._group is not None and not all(update.all_finite for update in joint.updates):
                finite = not (found and joint.has_nonfinite_loss())
                found, finite = agreement.on_overflow(found, finite, self._group)
                joint.nonfinite_loss = not finite
            if found:
                joint.decide(found)
            else:  # without a call, as in nearly every step
                joint.found = False
        return bool(joint.found)

    def _apply(self, grad_scale: float) -> float:
        """Step on gradients divided by `grad_scale`; the division is the optimizer's own where it can be. Returns what `.grad`
        is multiplied by afterwards."""
        optimizer: Any = self.optimizer
        params = self._find_params() if self._present is None else self._present
        self.kernel.prepare(params)
        if grad_scale == 1.0:
            self.optimizer.step()
        elif grad_scale <= _FLOAT32_MAX and self._kernel_divides(params):
            if params:  # otherwise they are all of other ranks
                optimizer.grad_scale = torch.full((), grad_scale, dtype=torch.float32, device=params[0].device)
            try:
                optimizer.step()
            finally:
                # GradScaler and a later plain step take the attribute's presence as an order.
                if params:
                    del optimizer.grad_scale
            if self.shards.sharded:
                self.shards.divided(grad_scale)
        else:
            self.unscale()
            optimizer.step()
        return 1.0

    def _kernel_divides(self, params: list[torch.Tensor]) -> bool:
        """Return whether the optimizer itself divides gradients by a float32 number, as precisely as they are."""
        if not honours_grad_scale(self.optimizer) or any(step_hooks(self.optimizer)):
            return False
        return torch.float64 not in map(_DTYPE, params)

    def _clipped(self, norm: float, max_norm: float) -> float | None:
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0 and math.isfinite(norm):
            return factor if self._factor is None else self._factor * factor
        return self._factor

    def _measure(self, values: list[torch.Tensor], norm_type: float) -> _Norm:
        norms = self._tensor_norms(values, norm_type) if values else torch.zeros(0, dtype=torch.float32)
        if self.shards.sharded:
            total = float(self._shared_total(norms, norm_type))
        else:
            total = float(torch.linalg.vector_norm(norms, norm_type)) if values else 0.0
        if math.isfinite(total):
            return _Norm(total, ())
        nonfinite = nonfinite_indices(values, norms) if values else []
        # Taken again also where another rank may hold the bad number: all ranks come here together.
        if not nonfinite or self.shards.sharded:
            exact = tensor_norms(values, norm_type, torch.float64) if values else norms
            total = self._total(exact, norm_type)
        return _Norm(total, self.culprits(nonfinite, self.params()))

    def _total(self, norms: torch.Tensor, norm_type: float) -> float:
        """The norm of all gradients from those of the tensors here; a collective where ranks hold shards."""
        if self.shards.sharded:
            return float(self._shared_total(norms, norm_type))
        return float(torch.linalg.vector_norm(norms, norm_type)) if norms.numel() else 0.0
