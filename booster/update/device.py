"""The update whose decision stays on the device: nothing waits for the host until somebody reads the result.

For fused optimizers, which skip by themselves where `found_inf` is 1. Works on tensors of any device type.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Optimizer

from booster.grads import agree_on, gradient_values, tensor_norms
from booster.update.base import Update
from booster.update.step_result import StepFields, StepResult


class _Norm(NamedTuple):
    total: torch.Tensor
    each: torch.Tensor


class DeviceUpdate(Update):
    """Scale, norms and the decision are 0-dim tensors on the parameters' device."""

    decides_on_device = True

    @property
    def next_scale(self) -> Any:
        return getattr(self.scaler, "tensor", 1.0)

    def found(self) -> torch.Tensor:
        if self._known_found is None:
            if not self._norms:
                self._total(2.0)
            norm = next(iter(self._norms.values())).total
            self._known_found = norm.isfinite().logical_not().float()
        return self._known_found

    def clip_value(self, clip_value: float) -> None:
        if not self.params():
            return
        self._require_backward()
        self._check = True
        self.unscale()
        values = gradient_values(self.params())
        torch._foreach_clamp_min_(values, -clip_value)
        torch._foreach_clamp_max_(values, clip_value)
        self._norms = {}

    def _decide_and_apply(self) -> StepResult:
        loss_scale, norm = self._known_scale, self._reported_norm
        if not self._check:
            self._apply(None, None)
            self._scale = 1.0
            return StepResult(True, StepFields(loss_scale=1.0))
        found = self._agreed()
        losses = [loss for update in self.joint.updates for loss in update.losses]
        each = next(iter(self._norms.values())).each if self._norms else None
        params = self.params()
        if norm is None and self.scaler.enabled:
            norm = self._total(2.0) * self._pending / loss_scale
        grad_scale = loss_scale / self._pending
        self._apply(None if _is_one(grad_scale) else torch.as_tensor(grad_scale, device=found.device), found)
        self.scaler.update(found)
        self._scale = 1.0
        outcome = _Applied(found)

        def read(applied: bool) -> StepFields:
            fields = StepFields(loss_scale=float(loss_scale), grad_norm=None if norm is None else float(norm))
            if applied:
                return fields
            finite_loss = all(bool(loss.isfinite()) for loss in losses)
            return fields._replace(
                skipped_reason="nonfinite_grad" if finite_loss else "nonfinite_loss",
                culprit=self.culprits(_nonfinite(each), params),
            )

        return StepResult(outcome, read)

    def nonfinite_names(self) -> tuple[str, ...]:
        each = next(iter(self._norms.values())).each if self._norms else None
        return self.culprits(_nonfinite(each), self.params())

    def _agreed(self) -> torch.Tensor:
        joint = self.joint
        if joint.found is None:
            device = self.params()[0].device
            found = [torch.as_tensor(update.found(), dtype=torch.float32, device=device) for update in joint.updates]
            joint.found = agree_on(torch.stack(found).amax(), self._group)
        return torch.as_tensor(joint.found, dtype=torch.float32, device=self.params()[0].device)

    def _apply(self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        optimizer: Any = self.optimizer
        if found_inf is not None and (self._has_step_hooks or _lacks_momentum(optimizer)):
            # Hooks fire for updates only, and a skipped first step would leave torch's momentum uninitialised.
            if bool(found_inf):
                return
            self.unscale()
            grad_scale = found_inf = None
        try:
            if grad_scale is not None:
                optimizer.grad_scale = grad_scale.float()
            if found_inf is not None:
                optimizer.found_inf = found_inf
            optimizer.step()
        finally:
            # GradScaler and a later plain step take the attributes' presence as an order.
            optimizer.__dict__.pop("grad_scale", None)
            optimizer.__dict__.pop("found_inf", None)

    def _total(self, norm_type: float) -> torch.Tensor:
        if norm_type not in self._norms:
            with torch.no_grad():
                self._norms[norm_type] = _measure(gradient_values(self.params()), norm_type)
        return self._norms[norm_type].total

    def _times(self, norm: _Norm, ratio: Any) -> _Norm:
        return _Norm(norm.total * ratio, norm.each)

    def _clipped(self, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # A norm of inf or NaN makes a skip; its factor must not reach gradients of a later backward.
        return self._pending * torch.where(norm.isfinite(), factor, 1.0)


class _Applied:
    """The opposite of a 0-dim found_inf, on its way to the host; a call waits for that copy, not for what comes later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor.clone()

    def __call__(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return not bool(self._host)


def _measure(values: list[torch.Tensor], norm_type: float) -> _Norm:
    # Squares of finite float32 gradients can overflow float32, and looking again would wait for the host. Squares of
    # float16 gradients cannot.
    wide = None if math.isinf(norm_type) or all(value.dtype == torch.float16 for value in values) else torch.float64
    norms = tensor_norms(values, norm_type, wide)
    return _Norm(torch.linalg.vector_norm(norms, norm_type), norms)


def _lacks_momentum(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, SGD) and any(
        group["momentum"] != 0
        and param.grad is not None
        and optimizer.state.get(param, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
    )


def _nonfinite(norms: torch.Tensor | None) -> list[int]:
    return [] if norms is None else [index for index, finite in enumerate(norms.isfinite().tolist()) if not finite]


def _is_one(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value == 1.0
