"""Ways to update parameters whose gradients are given, for benchmarks of the update alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.timing import clock
from booster import Booster
from booster.mixed_precision import MixedPrecision


class Given(torch.autograd.Function):
    """Backward leaves these gradients, multiplied by what the loss was multiplied by: `Given.apply(grads, *params)`."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return torch.zeros((), device=params[0].device)

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(grad * scale for grad in ctx.grads)


class Bench:
    """One way to update: its own parameters, gradients refilled from a common source."""

    def __init__(self, update: Callable[[list[nn.Parameter]], Callable[[], None]], grads: list[torch.Tensor]) -> None:
        self.params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        self._grads = grads
        self._update = update(self.params)

    def refill(self) -> None:
        for param, grad in zip(self.params, self._grads, strict=True):
            if param.grad is None:
                param.grad = grad.clone()
            else:
                param.grad.copy_(grad)

    def run(self) -> float:
        self.refill()
        start = clock()
        self._update()
        return clock() - start


class Ours(Bench):
    """booster's way: a backward pass, which is not timed, leaves the gradients behind."""

    def __init__(
        self, grads: list[torch.Tensor], precision: str | MixedPrecision, fused_optimizer: bool | str = True
    ) -> None:
        super().__init__(lambda params: self._clip_and_step, grads)
        device = self.params[0].device
        self._booster = Booster(device, precision, fused_optimizer=fused_optimizer)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(self.params, lr=1e-4)
        _, self._optimizer, *_ = self._booster.boost(nn.ParameterList(self.params), optimizer)

    def refill(self) -> None:
        self._optimizer.zero_grad()
        self._booster.backward(Given.apply(self._grads, *self.params), self._optimizer)

    def _clip_and_step(self) -> None:
        self._optimizer.clip_grad_by_norm(1.0)
        self._optimizer.step()
