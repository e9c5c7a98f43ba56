"""Losses with prescribed gradients, and optimizers boosted around either kind of update, for tests of the step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from booster.interface.optimizer import OptimizerWrapper
from booster.loss_scaler import DynamicScale, LossScaler, NoScale
from booster.update.choice import update_on_device
from booster.update.context import UpdateContext, UpdateOptions

HOST, DEVICE = "host", "device"


class _Prescribed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: float, grads: Any, *params: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return torch.full((), value, dtype=torch.float32, device=params[0].device)

    @staticmethod
    def backward(ctx: Any, seed: torch.Tensor) -> Any:  # type: ignore[override]
        return (None, None, *(None if grad is None else grad * seed for grad in ctx.grads))


def loss_with(params: Sequence[torch.Tensor], grads: Sequence[Any], value: float = 1.0) -> torch.Tensor:
    """A loss of `value` with exactly the gradient `grads[i]` by `params[i]`; None means no gradient."""
    whole = [
        grad if grad is None or isinstance(grad, torch.Tensor) else torch.full_like(param, grad)
        for param, grad in zip(params, grads, strict=True)
    ]
    return _Prescribed.apply(value, whole, *params)


def parameters(*shapes: tuple[int, ...] | int, fill: float = 1.0) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((s,) if isinstance(s, int) else s, fill)) for s in shapes]


def values_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [param.detach().clone() for param in params]


class DeviceOptimizer(OptimizerWrapper):
    """A boosted optimizer that decides the way a fused one on CUDA does, on any device."""

    def __init__(self, context: UpdateContext) -> None:
        device = context.optimizer.param_groups[0]["params"][0].device
        super().__init__(dataclasses.replace(context, scaler=context.scaler.on_device(device)), update_on_device)


def boost(
    optimizer: Optimizer, scale: float | LossScaler | None = None, decides: str = HOST, **options: Any
) -> OptimizerWrapper:
    """`optimizer` boosted; scale: None (no loss scaling), an initial scale, or a scaler. Parameters are p0, p1, ..."""
    if not isinstance(scale, LossScaler):
        scale = NoScale() if scale is None else DynamicScale(init_scale=scale)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = {param: f"p{index}" for index, param in enumerate(params)}
    kind = DeviceOptimizer if decides == DEVICE else OptimizerWrapper
    return kind(UpdateContext(optimizer=optimizer, scaler=scale, names=names, options=UpdateOptions(**options)))


def sgd(
    params: list[torch.nn.Parameter], decides: str = HOST, scale: Any = None, lr: float = 1.0, **options: Any
) -> Any:
    return boost(SGD(params, lr=lr, fused=True), scale, decides, **options)


def step_on(optimizer: Any, params: list[torch.nn.Parameter], *grads: Any, value: float = 1.0) -> Any:
    optimizer.zero_grad()
    optimizer.backward(loss_with(params, grads, value))
    return optimizer.step()
