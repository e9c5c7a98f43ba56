"""A loss with given gradients: what benchmarks of the update alone go backward through."""

from typing import Any

import torch


class Given(torch.autograd.Function):
    """Backward leaves these gradients, multiplied by what the loss was multiplied by: `Given.apply(grads, *params)`."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return torch.zeros((), device=params[0].device)

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(grad * scale for grad in ctx.grads)
