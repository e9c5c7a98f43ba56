"""The linear layer of all recipes: three products, one autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from booster.mixed_precision.low_precision.product import product
from booster.mixed_precision.low_precision.recipes import Recipe
from booster.modules import LinearStandIn


class LowPrecisionLinear(LinearStandIn):
    """An `nn.Linear` whose products run in the formats of a recipe; made of one with `of`, under whose names it keeps state.

    Inputs of any shape (..., in_features) in float32 or half; the output has autocast's dtype where that is on, else the
    input's. The bias is added in that dtype. Input and weight are kept for backward as they came.
    kernels: run the recipe's kernel; otherwise it is emulated.
    """

    recipe: Recipe
    kernels: bool

    @classmethod
    def of(cls, linear: nn.Linear, recipe: Recipe, *, kernels: bool) -> LowPrecisionLinear:
        """Return the layer that takes the place of `linear`, with its own parameters and hooks."""
        layer = cls.__new__(cls)
        layer.__dict__.update(linear.__dict__)  # the same dictionaries: who holds the old one sees the new weights
        layer.recipe, layer.kernels = recipe, kernels
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y = _Linear.apply(x.to(dtype), self.weight, self.recipe, self.kernels)
        return y if self.bias is None else y + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name!r}{'' if self.kernels else ', emulated'}"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe, kernels: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.kernels = recipe, kernels
        with torch.autocast(x.device.type, enabled=False):  # which would round scales to half
            tokens = x.reshape(-1, weight.shape[1])
            y = product(tokens, weight, recipe.output, recipe, dtype=x.dtype, kernels=kernels)
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True asks for gradients of gradients, and {ctx.recipe.name} layers have none; keep these layers "
                "wide with keep=, or train in bf16"
            )
        x, weight = ctx.saved_tensors
        recipe, options = ctx.recipe, {"dtype": x.dtype, "kernels": ctx.kernels}
        g, tokens = grads[0].reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
        of_x = of_weight = None
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_x = product(g, weight.t(), recipe.input_gradient, recipe, **options).view(x.shape)
            if ctx.needs_input_grad[1]:
                of_weight = product(g.t(), tokens.t(), recipe.weight_gradient, recipe, **options).to(weight.dtype)
        return of_x, of_weight, None, None
