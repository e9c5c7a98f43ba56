"""What is read of gradients as 0-dim tensors, and the decision by them: nothing waits for the host until somebody reads the
result.

For fused optimizers, which skip by themselves where `found_inf` is 1. Works on tensors of any device type. Where ranks hold
shards, the norm is a sum over ranks that is not finite if any of them found an inf or NaN: that one small collective, which
a device queues as any other, is all that they need to agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from booster.common.devices import HostCopy
from booster.ranks.agreement import all_reduce, communication_device
from booster.tensors.grads import clamp_values, tensor_norms
from booster.update.application import NO_SCALARS, Application, StepScalars
from booster.update.decision import Copy, Decision, LazyStepFields, NonFiniteParams, Norms, StepFields, StepResult
from booster.update.gradients import Gradients


def device_of(optimizer: Any, group: dist.ProcessGroup | None) -> torch.device:
    """Return where steps of `optimizer` are decided: with its first parameter; where this rank has none, where its ranks
    communicate."""
    for own in optimizer.param_groups:
        for param in own["params"]:
            device: torch.device = param.device
            return device
    # This rank has no parameter, but takes part in the collectives of the others.
    return torch.device("cpu") if group is None else communication_device(torch.device("cpu"), group)


class DeviceNorm(NamedTuple):
    """What one reading found."""

    total: torch.Tensor
    each: torch.Tensor
    params: list[torch.Tensor]  # of these gradients; some may have none when the step comes

    def map_tensors(self, copy: Copy) -> DeviceNorm:
        """The same, of copies of the norms by parameter."""
        return self._replace(each=copy(self.each))


class DeviceGradients(Gradients):
    """Gradients with a scale and clip factor that are computed when asked for: on a device each number is a launch.

    clip: the factor that waits, a number or tensor, or a `Clip` that makes it; None: none does.
    """

    clip: Any
    _carries: Any

    @property
    def scale(self) -> Any:
        """What gradients are multiplied by; None: there are none that we know of."""
        if callable(self._carries):
            self._carries = self._carries()
        return self._carries

    @scale.setter
    def scale(self, scale: Any) -> None:
        self._carries = scale

    @property
    def factor(self) -> Any:
        """The product of the clip factors that wait; None: none does."""
        if isinstance(self.clip, Clip):
            self.clip = self.clip.factor()
        return self.clip

    @factor.setter
    def factor(self, factor: Any) -> None:
        self.clip = factor


class Clip:
    """A clip that waits: to `max_norm`, of gradients of the true norm `norm`, 0-dim."""

    def __init__(self, norm: torch.Tensor, max_norm: float) -> None:
        self._norm, self._max_norm = norm, max_norm

    def factor(self) -> torch.Tensor:
        """What gradients are multiplied by."""
        # A norm of inf or NaN makes a skip: its factor, 1, must not reach gradients of a later backward.
        norm = self._norm.nan_to_num(nan=0.0, posinf=0.0).add_(1e-6)
        return norm.reciprocal_().mul_(self._max_norm).clamp_(max=1.0)

    def grad_scale(self, scale: Any, bounds: dict[float, torch.Tensor]) -> torch.Tensor:
        """What gradients that are multiplied by `scale` are divided by, float32; not finite where the norm is not.

        bounds: what this adds to, by what is clipped to; kept from step to step."""
        # max(1, (norm + 1e-6) / max_norm) times the scale, in two launches: torch's clip factor, turned into a divisor.
        start = bounds.get(self._max_norm)
        if start is None:
            start = bounds[self._max_norm] = torch.full_like(self._norm, 1e-6 / self._max_norm)
        out, share = torch.empty_like(self._norm, dtype=torch.float32), 1.0 / self._max_norm
        if is_one(scale):
            return torch.add(start, self._norm, alpha=share, out=out).clamp_(min=1.0)
        return torch.mul(torch.add(start, self._norm, alpha=share).clamp_(min=1.0), scale, out=out)


class DeviceNorms(Norms):
    """Scale, norms and clip factors are 0-dim tensors on the parameters' device."""

    on_device = True

    @property
    def device(self) -> torch.device:
        """Where steps are decided; see `device_of`."""
        return device_of(self.optimizer, self.group)

    @property
    def found_inf_is_global(self) -> bool:
        return self.shards.sharded

    def read(self, gradients: Gradients, norm_type: float) -> tuple[Any, Any]:
        params, values = gradients.params(), gradients.values()
        norms = self._each(values, norm_type) if values else torch.zeros(0, dtype=torch.float32, device=self.device)
        if self.shards.sharded:
            total = self.shared_total(norms, norm_type, params)
        else:
            total = torch.linalg.vector_norm(norms, norm_type) if values else norms.sum()
        norm = total if gradients.factor is None else total * gradients.factor
        scale = gradients.scale
        return DeviceNorm(total, norms, params), norm if scale is None or is_one(scale) else norm / scale

    def _each(self, values: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        # Powers of finite float32 gradients can overflow float32, and looking again would wait for the host. Squares of
        # float16 gradients cannot.
        narrow = norm_type <= 2.0 and all(value.dtype == torch.float16 for value in values)
        return tensor_norms(values, norm_type, None if narrow or math.isinf(norm_type) else torch.float64)

    def found_inf(self, read: Sequence[Any]) -> torch.Tensor:
        flags = [nonfinite(norm.total) for norm in read]
        return flags[0] if len(flags) == 1 else torch.stack(flags).amax()

    def nonfinite_params(self, gradients: Gradients) -> NonFiniteParams:
        return _NonfiniteParams(list(gradients.read), gradients.parameters.name_of)

    def clipped(self, norm: torch.Tensor, max_norm: float, factor: Any) -> Any:
        clip = Clip(norm, max_norm)
        if factor is None:
            return clip if norm.dtype == torch.float64 and max_norm else clip.factor()
        return factor * clip.factor()

    def clamp(self, gradients: Gradients, clip_value: float) -> None:
        gradients.unscale()
        values = gradients.values(written=True)
        if not values:
            return
        norm = gradients.read[-1]
        clamp_values(values, clip_value)
        # Zero, or NaN where the clamp hid an inf, which gradients of a further backward would be added to. What is
        # written where ranks hold shards may be more than the parts that were measured, and gradients that were measured
        # may be gone.
        alike = not self.shards.sharded and len(norm.each) == len(values)
        each = norm.each if alike else norm.total.expand(len(values))
        torch._foreach_add_(values, list((each - each).unbind()))


class DeviceDecision(Decision):
    """The decision as a 0-dim tensor, which the optimizer's kernel heeds, as does the loss scale."""

    on_device = True
    gradients: DeviceGradients
    application: Application

    def __init__(self, gradients: DeviceGradients, application: Application) -> None:
        super().__init__(gradients, application)
        self._bounds: dict[float, torch.Tensor] = {}  # see `Clip.grad_scale`

    def step(self, params: list[torch.Tensor]) -> tuple[StepResult, Any]:
        gradients, loss_scale = self.gradients, self.gradients.loss_scale
        scale, clip = 1.0 if gradients.scale is None else gradients.scale, gradients.clip
        zeros = self.zeros_in(params)
        left: Any = partial(_scale_of, scale, clip)
        if not gradients.any_checks_finite:
            divided = self._apply(params, NO_SCALARS)
            fields = StepFields(loss_scale=1.0) if zeros is None else LazyStepFields(1.0, num_zeros=zeros)
            return StepResult(True, fields), 1.0 if divided else left
        found_inf = self.agreed()
        norm, report = gradients.norm, gradients.joint.report()
        if self._apply_divided(params, found_inf, scale, clip):
            # A skip leaves the gradients as they were, and the clips that wait with them.
            left = 1.0
            if not is_one(scale) or not (clip is None or is_one(clip)):
                left = partial(_scale_after, found_inf, scale, clip)
        if gradients.scaler.enabled:
            gradients.scaler.update(found_inf)
        fields = LazyStepFields(loss_scale, norm, report, zeros)
        return StepResult(_Applied(found_inf), fields, pending=fields.pending), left

    def zeros_in(self, params: list[torch.Tensor]) -> torch.Tensor | None:
        """Return how many elements of the gradients of `params` are zero, 0-dim; None where they are not counted."""
        return None

    def _apply_divided(self, params: list[torch.Tensor], found_inf: torch.Tensor, scale: Any, clip: Any) -> bool:
        """Step on gradients that are multiplied by `scale` and that `clip` waits for, unless `found_inf` is 1."""
        if isinstance(clip, Clip):
            grad_scale: Any = clip.grad_scale(scale, self._bounds)
        else:
            grad_scale = scale if clip is None else scale / clip
        return self._apply(
            params,
            StepScalars(grad_scale if is_one(grad_scale) else _on(found_inf.device, grad_scale, None), found_inf),
        )

    def _apply(self, params: list[torch.Tensor], scalars: StepScalars) -> bool:
        return self.application.step_on_device(self.gradients, params, scalars)

    def agreed(self) -> torch.Tensor:
        """Return 1 where all who decide together skip this step, else 0: 0-dim float32, on the device of the parameters."""
        joint, device = self.gradients.joint, self.gradients.norms.device  # type: ignore[attr-defined]
        if joint.found_inf is None:
            each = [_on(device, member.found_inf()) for member in joint.members]
            found_inf = each[0] if len(each) == 1 else torch.stack(each).amax()
            if not all(member.norms.found_inf_is_global for member in joint.members):
                found_inf = all_reduce(found_inf, self.gradients.group, dist.ReduceOp.MAX)
            joint.decide(found_inf)
        return _on(device, joint.found_inf)


class _NonfiniteParams(NamedTuple):
    """Names the parameters with gradients of norms that were not finite; waits for the device."""

    read: list[Any]
    name_of: Callable[[torch.Tensor], str]

    def __call__(self) -> tuple[str, ...]:
        each = (zip(norm.params, norm.each.isfinite().tolist(), strict=True) for norm in self.read)
        return tuple(dict.fromkeys(self.name_of(param) for norms in each for param, finite in norms if not finite))


class _Applied(HostCopy):
    """The opposite of a 0-dim found_inf."""

    def __init__(self, found_inf: torch.Tensor) -> None:
        super().__init__(found_inf)
        self._found_inf = found_inf

    def on_device(self) -> torch.Tensor:
        """The same, 0-dim on the device."""
        return self._found_inf == 0

    def map_tensors(self, copy: Copy) -> _Applied:
        return _Applied(copy(self._found_inf))

    def __call__(self) -> bool:
        return not super().__call__()


def _on(device: torch.device, value: Any, dtype: torch.dtype | None = torch.float32) -> torch.Tensor:
    """Return `value`, a number or 0-dim tensor, as a tensor on `device`. A number is not waited for.

    dtype: None is a tensor's own, and float64 of a number.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype or value.dtype)
    # `torch.tensor(value, device=...)` would copy from the host, and wait.
    return torch.full((), float(value), dtype=dtype or torch.float64, device=device)


def is_one(value: Any) -> bool:
    """Return whether `value` is the number 1; a tensor is not asked."""
    return not isinstance(value, torch.Tensor) and value == 1.0


def nonfinite(norm: torch.Tensor) -> torch.Tensor:
    """Return 1 where `norm` is inf or NaN, else 0, 0-dim float32: its product with zero is NaN, or is zero."""
    return torch.mul(norm, 0.0, out=torch.empty_like(norm, dtype=torch.float32)).nan_to_num_(nan=1.0)


def _scale_of(scale: Any, clip: Any) -> Any:
    """Return what gradients are multiplied by that a clip, a factor or None, was to reach."""
    return scale if clip is None else scale / (clip.factor() if isinstance(clip, Clip) else clip)


def _scale_after(found_inf: torch.Tensor, scale: Any, clip: Any) -> torch.Tensor:
    """Return what gradients carry after a step, which left them as they were where it was skipped."""
    return torch.where(found_inf > 0, _scale_of(scale, clip), 1.0)
