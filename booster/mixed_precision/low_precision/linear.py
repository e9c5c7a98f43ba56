"""The linear layer of all recipes: three products, one autograd function.

One product of two matrices in a low precision: rounded, then multiplied by a kernel or emulated in a wide dtype.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from booster.mixed_precision.low_precision.kernels import multiply
from booster.mixed_precision.low_precision.recipes import Operand, Product, Recipe, Wide
from booster.model.modules import LinearStandIn
from booster.number_formats import Scaled, noise_of, scale_to

ROTATION = 16
# Drawn once, as in the paper: all layers and steps rotate alike, and both operands must.
_SIGNS = (1, 1, -1, 1, -1, -1, 1, -1, 1, 1, 1, -1, -1, 1, -1, -1)
_ROTATION = [
    [sign * (-1.0) ** (row & column).bit_count() / ROTATION**0.5 for column in range(ROTATION)]
    for row, sign in enumerate(_SIGNS)
]


class Watcher(Protocol):
    """Who is told of every product of a layer: the role ("forward", "input_grad" or "weight_grad"), the matrices and how they
    were multiplied, and the result. It changes nothing."""

    def __call__(
        self, role: str, a: torch.Tensor, b: torch.Tensor, how: Product | Wide, result: torch.Tensor
    ) -> None: ...


def product(
    a: torch.Tensor, b: torch.Tensor, how: Product | Wide, recipe: Recipe, *, dtype: torch.dtype, kernels: bool
) -> torch.Tensor:
    """Return `a @ b.t()` in `dtype`, of m x k and n x k matrices, in the formats of `how`, or in a wide dtype.

    kernels: run the kernel of `recipe`; otherwise the same in a wide dtype, which differs by the rounding of the output.
    """
    if isinstance(how, Wide):
        wide = how.dtype or dtype
        return (a.to(wide) @ b.to(wide).t()).to(dtype)
    if not (a.numel() and b.numel()):
        return torch.zeros(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    a, b = a.contiguous().float(), b.contiguous().float()
    a, b = laid_out(a, b, how, recipe)
    if kernels:
        return multiply(low, a, b, how, recipe).to(dtype)
    return emulate(low(a, how.left), low(b, how.right), dtype)


def laid_out(a: torch.Tensor, b: torch.Tensor, how: Product, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two float32 matrices as they are rounded for a product: filled up with zeros, and rotated."""
    if a.shape[1] % recipe.multiple:
        a, b = (F.pad(each, (0, -each.shape[1] % recipe.multiple)) for each in (a, b))
    return (rotated(a), rotated(b)) if how.hadamard else (a, b)


def emulate(a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """Return `a @ b.t()` in `dtype` of numbers in low formats, summed in float32.

    In bfloat16 that is its own matrix product, where that holds the scaled operands exactly; otherwise one in float32.
    """
    if dtype == torch.bfloat16 and _in_bfloat16(a) and _in_bfloat16(b):
        return a.wide(torch.bfloat16) @ b.wide(torch.bfloat16).t()
    result = _values(a) @ _values(b).t()
    for scale in (_after(a), _after(b, transposed=True), a.outer, b.outer):
        result = result if scale is None else result * scale
    return result.to(dtype)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with every 16 neighbours of a row, some of their signs turned, through a Hadamard matrix.

    The rotation is orthogonal, so it leaves `a @ b.t()` as it is, and it spreads an outlier over its block. The number of
    columns must be a multiple of 16.
    """
    return (x.reshape(len(x), -1, ROTATION) @ _rotation(x.device)).flatten(1)


# ---------------------------------------------------------------------- inside


def low(x: torch.Tensor, operand: Operand) -> Scaled:
    """Return the matrix `x` in the format of `operand`."""
    return scale_to(x, operand.format, operand.scaling, noise=noise_of(x) if operand.stochastic else None)


def _in_bfloat16(x: Scaled) -> bool:
    """Whether bfloat16 holds the numbers times their scales."""
    return x.scaling.scale == "power_of_two"


def _values(x: Scaled) -> torch.Tensor:
    return x.values.float() if x.block is None else x.wide()


def _after(x: Scaled, *, transposed: bool = False) -> torch.Tensor | None:
    """What the product is multiplied with; scales of blocks are in the operands already."""
    if x.block is not None:
        return None
    return x.scale.t() if transposed and x.scale.dim() else x.scale


def _rotation(device: torch.device) -> torch.Tensor:
    return torch.tensor(_ROTATION, dtype=torch.float32, device=device)


class LowPrecisionLinear(LinearStandIn):
    """An `nn.Linear` whose products run in the formats of a recipe; made of one with `of`, under whose names it keeps state.

    Inputs of any shape (..., in_features) in float32 or half; the output has autocast's dtype where that is on, else the
    input's. The bias is added in that dtype. Input and weight are kept for backward as they came.
    kernels: run the recipe's kernel; otherwise it is emulated.
    """

    recipe: Recipe
    kernels: bool
    watchers: tuple[Watcher, ...] = ()
    """Told of products in training, those of forward passes that a backward may follow."""

    @classmethod
    def of(cls, linear: nn.Linear, recipe: Recipe, *, kernels: bool) -> LowPrecisionLinear:
        """Return the layer that takes the place of `linear`, with its own parameters and hooks."""
        layer = cls.__new__(cls)
        layer.__dict__.update(linear.__dict__)  # the same dictionaries: who holds the old one sees the new weights
        layer.recipe, layer.kernels = recipe, kernels
        return layer

    def plain(self) -> nn.Linear:
        """Return the layer that this one was made of, or one like it, with what both have been given since."""
        linear = nn.Linear.__new__(nn.Linear)
        linear.__dict__.update(
            {name: value for name, value in self.__dict__.items() if name not in ("recipe", "kernels", "watchers")}
        )
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        watchers = self.watchers if self.training and torch.is_grad_enabled() else ()
        y = _Linear.apply(x.to(dtype), self.weight, self.recipe, self.kernels, watchers)
        return y if self.bias is None else y + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name!r}{'' if self.kernels else ', emulated'}"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe, kernels: bool, watchers: tuple[Watcher, ...]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.kernels, ctx.watchers = recipe, kernels, watchers
        with torch.autocast(x.device.type, enabled=False):  # which would round scales to half
            tokens = x.reshape(-1, weight.shape[1])
            y = product(tokens, weight, recipe.output, recipe, dtype=x.dtype, kernels=kernels)
            for watcher in watchers:
                watcher("forward", tokens, weight, recipe.output, y)
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
                of_x = product(g, weight.t(), recipe.input_gradient, recipe, **options)
                for watcher in ctx.watchers:
                    watcher("input_grad", g, weight.t(), recipe.input_gradient, of_x)
                of_x = of_x.view(x.shape)
            if ctx.needs_input_grad[1]:
                of_weight = product(g.t(), tokens.t(), recipe.weight_gradient, recipe, **options)
                for watcher in ctx.watchers:
                    watcher("weight_grad", g.t(), tokens.t(), recipe.weight_gradient, of_weight)
                of_weight = of_weight.to(weight.dtype)
        return of_x, of_weight, None, None, None
