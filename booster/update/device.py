"""The update whose decision stays on the device: nothing waits for the host until somebody reads the result.

For fused optimizers, which skip by themselves where `found_inf` is 1. Works on tensors of any device type. Where ranks hold
shards, the norm is a sum over ranks that is not finite if any of them found an inf or NaN: that one small collective, which
a device queues as any other, is all that they need to agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import SGD

from booster.ground.device import HostCopy
from booster.ground.torch_internals import step_hooks
from booster.ranks.communicate import communication_device
from booster.tensors.grads import agree_on, clamp_values, tensor_norms
from booster.update.base import Job, Update
from booster.update.fused import honours_grad_scale
from booster.update.outcome import StepFields, StepResult


class _Norm(NamedTuple):
    total: torch.Tensor
    each: torch.Tensor
    params: list[torch.Tensor]  # whose gradients they are; some may have none when the step comes


class DeviceUpdate(Update):
    """Scale, norms and the decision are 0-dim tensors on the parameters' device."""

    decides_on_device = True
    _carries: Any
    _clip: Any

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._bounds: dict[float, torch.Tensor] = {}  # what `_Clip` adds to, by what is clipped to

    @property
    def device(self) -> torch.device:
        """Where the decision is taken: where the parameters are; where this rank has none, where its ranks communicate."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                return param.device
        return torch.device("cpu") if self._group is None else communication_device(torch.device("cpu"), self._group)

    @property
    def found_is_shared(self) -> bool:
        return self.shards.sharded

    @property
    def next_scale(self) -> Any:
        return self.scaler.factor

    def found(self) -> torch.Tensor:
        self._measure_once()
        found = [_nonfinite(norm.total) for norm in self._measured]
        return found[0] if len(found) == 1 else torch.stack(found).amax()

    def blame(self) -> Callable[[], tuple[str, ...]]:
        measured = list(self._measured)

        def names() -> tuple[str, ...]:
            each = (zip(norm.params, norm.each.isfinite().tolist(), strict=True) for norm in measured)
            return tuple(dict.fromkeys(self.name_of(param) for norms in each for param, finite in norms if not finite))

        return names

    def clip_value(self, clip_value: float) -> None:
        with self.shards.local():
            if self._nobody_has_gradients():
                self._refuse_early_clip("clip_grad_by_value")
                return
            self._require_backward()
            self._check = True
            self.unscale()
            values = self.gradients(written=True)
            if not values:
                return
            norm = self._measured[-1]
            clamp_values(values, clip_value)
            # Zero, or NaN where the clamp hid an inf, which gradients of a further backward would be added to. What is
            # written where ranks hold shards may be more than the parts that were measured, and gradients that were measured
            # may be gone.
            alike = not self.shards.sharded and len(norm.each) == len(values)
            each = norm.each if alike else norm.total.expand(len(values))
            torch._foreach_add_(values, list((each - each).unbind()))

    def _decide_and_apply(self) -> StepResult:
        carried, loss_scale = self._known_scale, self._loss_scale
        if not self._checks:
            self._apply(None, None)
            self._scale = 1.0
            return StepResult(True, StepFields(loss_scale=1.0))
        found = self._agreed()
        norm, report = self._reported_norm, self.joint.report()
        clip = self._clip
        if isinstance(clip, _Clip):
            grad_scale: Any = clip.divisor(carried, self._bounds)
        else:
            grad_scale = carried if clip is None else carried / clip
        self._apply(None if _is_one(grad_scale) else _on(found.device, grad_scale, None), found)
        if self.scaler.enabled:
            self.scaler.update(found)
        # A skip leaves the gradients as they were, and the clips that wait with them.
        self._scale = 1.0 if _is_one(grad_scale) else partial(_left, found, carried, clip)
        outcome = _Applied(found)

        def read(applied: bool) -> StepFields:
            fields = StepFields(loss_scale=float(loss_scale), grad_norm=None if norm is None else float(norm))
            if applied:
                return fields
            reason, culprit = report()
            return fields._replace(skipped_reason=reason, culprit=culprit)

        numbers = {"loss_scale": loss_scale, "grad_norm": norm}
        pending = {name: value for name, value in numbers.items() if isinstance(value, torch.Tensor)}
        return StepResult(outcome, read, pending=pending)

    def _agreed(self) -> torch.Tensor:
        joint = self.joint
        if joint.found is None:
            each = [_on(self.device, update.found()) for update in joint.updates]
            found = each[0] if len(each) == 1 else torch.stack(each).amax()
            if not all(update.found_is_shared for update in joint.updates):
                found = agree_on(found, self._group)
            joint.decide(found)
        return _on(self.device, joint.found)

    def _apply(self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        optimizer: Any = self.optimizer
        self.kernel.prepare(self.params())
        if found_inf is not None and self._decides_here(grad_scale):
            if bool(found_inf):
                return
            if grad_scale is not None:  # not by `unscale`, in which ranks may have to agree: others may not come here
                self._multiply(1.0 / grad_scale)
                self._scale, self._factor = 1.0, None
            grad_scale = found_inf = None
        try:
            if grad_scale is not None:
                optimizer.grad_scale = grad_scale.float()
            if found_inf is not None:
                optimizer.found_inf = found_inf
            self._step_optimizer()
            if grad_scale is not None and self.shards.sharded:
                self.shards.divided(grad_scale if found_inf is None else torch.where(found_inf > 0, 1.0, grad_scale))
        finally:
            # GradScaler and a later plain step take the attributes' presence as an order.
            optimizer.__dict__.pop("grad_scale", None)
            optimizer.__dict__.pop("found_inf", None)

    def _decides_here(self, grad_scale: torch.Tensor | None) -> bool:
        """Return whether the host must decide: hooks fire for updates only, a skipped first step would leave torch's momentum
        uninitialised, the kernel takes a float32 scale also for float64, and may have been given up."""
        if any(step_hooks(self.optimizer)) or self._lacks_momentum() or not honours_grad_scale(self.optimizer):
            return True
        return grad_scale is not None and any(param.dtype == torch.float64 for param in self.params())

    def _lacks_momentum(self) -> bool:
        """Return whether a fused SGD has no momentum yet for something that it is about to step."""
        optimizer = self.optimizer
        return isinstance(optimizer, SGD) and any(
            group["momentum"] != 0
            and param.grad is not None
            and optimizer.state.get(param, {}).get("momentum_buffer") is None
            for group in optimizer.param_groups
            for param in group["params"]
        )

    def _measure(self, values: list[torch.Tensor], norm_type: float) -> _Norm:
        norms = self._norms(values, norm_type) if values else torch.zeros(0, dtype=torch.float32, device=self.device)
        if self.shards.sharded:
            return _Norm(self._shared_total(norms, norm_type), norms, self.params())
        return _Norm(torch.linalg.vector_norm(norms, norm_type) if values else norms.sum(), norms, self.params())

    def _norms(self, values: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        # Powers of finite float32 gradients can overflow float32, and looking again would wait for the host. Squares of
        # float16 gradients cannot.
        narrow = norm_type <= 2.0 and all(value.dtype == torch.float16 for value in values)
        return tensor_norms(values, norm_type, None if narrow or math.isinf(norm_type) else torch.float64)

    def _clipped(self, norm: torch.Tensor, max_norm: float) -> Any:
        clip = _Clip(norm, max_norm)
        return (
            clip if self._clip is None and norm.dtype == torch.float64 and max_norm else self._pending * clip.factor()
        )

    # What few steps ask for is computed where it is asked for: on a device each number is a launch.

    @property
    def _scale(self) -> Any:
        """What gradients are multiplied by."""
        if callable(self._carries):
            self._carries = self._carries()
        return self._carries

    @_scale.setter
    def _scale(self, scale: Any) -> None:
        self._carries = scale

    @property
    def _factor(self) -> Any:
        """The product of the clip factors that wait."""
        if isinstance(self._clip, _Clip):
            self._clip = self._clip.factor()
        return self._clip

    @_factor.setter
    def _factor(self, factor: Any) -> None:
        self._clip = factor


class _Clip:
    """A clip that waits: to `max_norm`, of gradients whose true norm is `norm`, 0-dim."""

    def __init__(self, norm: torch.Tensor, max_norm: float) -> None:
        self._norm, self._max_norm = norm, max_norm

    def factor(self) -> torch.Tensor:
        """What gradients are multiplied by. A norm of inf or NaN makes a skip: its factor, 1, must not reach gradients of a
        later backward."""
        norm = self._norm.nan_to_num(nan=0.0, posinf=0.0).add_(1e-6)
        return norm.reciprocal_().mul_(self._max_norm).clamp_(max=1.0)

    def divisor(self, carried: Any, bounds: dict[float, torch.Tensor]) -> torch.Tensor:
        """What gradients that are multiplied by `carried` are divided by, float32; not finite where the norm is not."""
        start = bounds.get(self._max_norm)
        if start is None:
            start = bounds[self._max_norm] = torch.full_like(self._norm, 1e-6 / self._max_norm)
        out, share = torch.empty_like(self._norm, dtype=torch.float32), 1.0 / self._max_norm
        if _is_one(carried):
            return torch.add(start, self._norm, alpha=share, out=out).clamp_(min=1.0)
        return torch.mul(torch.add(start, self._norm, alpha=share).clamp_(min=1.0), carried, out=out)


def _nonfinite(norm: torch.Tensor) -> torch.Tensor:
    """Return 1 where `norm` is inf or NaN, else 0, 0-dim float32: its product with zero is NaN, or is zero."""
    return torch.mul(norm, 0.0, out=torch.empty_like(norm, dtype=torch.float32)).nan_to_num_(nan=1.0)


def carried_with(scale: Any, clip: Any) -> Any:
    """Return what gradients are multiplied by that a clip, a factor or None, was to reach."""
    return scale if clip is None else scale / (clip.factor() if isinstance(clip, _Clip) else clip)


def _left(found: torch.Tensor, scale: Any, clip: Any) -> torch.Tensor:
    """Return what gradients carry after a step, which left them as they were where it was skipped."""
    return torch.where(found > 0, carried_with(scale, clip), 1.0)


class _Applied(HostCopy):
    """The opposite of a 0-dim found_inf."""

    def __init__(self, found_inf: torch.Tensor) -> None:
        super().__init__(found_inf)
        self._found_inf = found_inf

    def on_device(self) -> torch.Tensor:
        """The same, 0-dim on the device."""
        return self._found_inf == 0

    def __call__(self) -> bool:
        return not super().__call__()


def _on(device: torch.device, value: Any, dtype: torch.dtype | None = torch.float32) -> torch.Tensor:
    """Return `value`, a number or 0-dim tensor, as a tensor on `device`. A number is not waited for.

    dtype: None is a tensor's own, and float64 of a number.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype or value.dtype)
    return torch.full((), float(value), dtype=dtype or torch.float64, device=device)


def _is_one(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value == 1.0
