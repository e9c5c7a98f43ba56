"""What a linear layer's three products are made of: formats and scales as data.

Every product is `a @ b.t()` of two matrices. It sums over the last dimension of both; rows and blocks are along that one:
output = x @ weight.t(), gradient of x = g @ weight.t().t(), gradient of weight = g.t() @ x.t().t(); tokens are rows of x and g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from booster.number_formats.number_format import E2M1, E4M3, E5M2, INT8, NumberFormat
from booster.number_formats.scaling import ScaleKind, Scaling, largest_under, scale_of, share_of


@dataclass(eq=False)
class DelayedScale:
    """The scale of one matrix of one layer that follows from earlier steps, and the magnitude that later ones will need.

    Attributes:
        scale: float32, of shape (); 0 where nothing is known yet, and the matrix is scaled by itself.
        largest: likewise, the largest magnitude of this step so far; None records none.
        known: whether the host knows that `scale` is above 0, where it stays. No number changes by that, but a compiled graph
            then computes no scale of the matrix itself, which would be one more pass over it.
    """

    scale: torch.Tensor
    largest: torch.Tensor | None
    known: bool = False

    @torch.no_grad()
    def of(self, x: torch.Tensor, target: NumberFormat) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale to round `x` to `target` with, and the same, or NaN where `x` is not finite, to multiply with."""
        here = largest_under(x, "tensor").float()
        finite = torch.isfinite(here)
        if self.largest is not None:
            self.largest.copy_(torch.maximum(self.largest, torch.where(finite, here, 0.0)))
        taken = self.scale
        if not self.known:
            taken = torch.where(self.scale > 0, self.scale, scale_of(share_of(here, target)))
        # NaN reaches the output, so that the step is skipped; a scale of it would stay for the steps to come.
        return taken, torch.where(finite, taken, torch.nan)


@dataclass(frozen=True)
class CastConfig:
    """How one matrix of a product is rounded.

    Attributes:
        format: the numbers it is rounded to.
        scaling: what shares a scale.
        multiple: its columns, which are summed over, are filled up with zeros to a multiple of it.
        stochastic: rounded stochastically, and not to the nearest.
        hadamard: rotated before, along what is summed over, see `scaling.rotated`; so is the other matrix of the product.
        delayed: the scale of earlier steps that is taken instead, or None.
    """

    format: NumberFormat
    scaling: Scaling
    multiple: int
    stochastic: bool = False
    hadamard: bool = False
    delayed: DelayedScale | None = None


@dataclass(frozen=True)
class GemmConfig:
    """How both matrices of a product are rounded.

    Attributes:
        fast_accumulation: the kernel of fp8 may leave sums in the accumulator of the tensor cores, see `FP8MixedPrecision`.
    """

    left: CastConfig
    right: CastConfig
    fast_accumulation: bool = False


@dataclass(frozen=True)
class HighPrecision:
    """A product of matrices that are not rounded to a format: in `dtype`; None is that of the layer's input."""

    dtype: torch.dtype | None = None


GemmDtype = Literal["recipe", "bf16", "fp32"]
GEMMS = ("forward", "input_grad", "weight_grad")
_WIDE = {"bf16": HighPrecision(torch.bfloat16), "fp32": HighPrecision(torch.float32)}


@dataclass(frozen=True)
class Recipe:
    """The three products of a layer, and what they need.

    Attributes:
        kernel: which one runs the products.
        capability: the least compute capability of a CUDA device that has the kernel.
        generations: the names of these devices, for messages.
        bounds: of the relative errors (L2) of output, gradient of the input and gradient of the weight, on normally
            distributed numbers; twice what is expected.
        on_cpu: whether the CPU has the kernel.
        too_small: pairs of features in and out; layers of at most so many, of any pair, are no faster on a GPU.
    """

    name: str
    output: GemmConfig | HighPrecision
    input_gradient: GemmConfig | HighPrecision
    weight_gradient: GemmConfig | HighPrecision
    kernel: Literal["fp8", "fp8 blocks", "mxfp8", "nvfp4", "int8", "int8 in float32"]
    capability: tuple[int, int]
    generations: str
    bounds: tuple[float, float, float]
    on_cpu: bool = False
    too_small: tuple[tuple[float, float], ...] = ()

    @property
    def multiple(self) -> int:
        """Both features of a layer must be a multiple of it."""
        return max((how.left.multiple for how in self.products.values() if isinstance(how, GemmConfig)), default=1)

    @property
    def products(self) -> dict[str, GemmConfig | HighPrecision]:
        """The three products by the names of `GEMMS`."""
        return dict(zip(GEMMS, (self.output, self.input_gradient, self.weight_gradient), strict=True))

    def _with_products(self, output: Any, input_gradient: Any, weight_gradient: Any, **changes: Any) -> Recipe:
        return replace(self, output=output, input_gradient=input_gradient, weight_gradient=weight_gradient, **changes)

    def with_fast_accumulation(self) -> Recipe:
        """Return the recipe with a forward that may accumulate fast; backward never does."""
        how = self.output
        return self if isinstance(how, HighPrecision) else replace(self, output=replace(how, fast_accumulation=True))

    def delayed(self, x: DelayedScale, weight: DelayedScale, gradient: DelayedScale) -> Recipe:
        """Return the recipe in which the layer's input, its weight and the gradient of its output have these scales."""
        return self._with((x, weight), (gradient, weight), (gradient, x))

    def without_amax(self) -> Recipe:
        """Return the recipe that records no magnitudes for later steps, as in evaluation."""
        scales = [
            [each.delayed and replace(each.delayed, largest=None) for each in (how.left, how.right)]
            if isinstance(how, GemmConfig)
            else [None, None]
            for how in self.products.values()
        ]
        return self._with(*scales) if any(each for pair in scales for each in pair) else self

    def _with(self, *scales: Sequence[DelayedScale | None]) -> Recipe:
        products = [
            replace(how, left=replace(how.left, delayed=left), right=replace(how.right, delayed=right))
            if isinstance(how, GemmConfig)
            else how
            for how, (left, right) in zip(self.products.values(), scales, strict=True)
        ]
        return self._with_products(*products)

    def with_dtypes(self, *roles: GemmDtype) -> Recipe:
        """Return the recipe of which forward, gradient of the input and gradient of the weight, in this order, are so.

        "recipe" leaves a product as it is, the others have it in that dtype.
        """
        own = self.products.values()
        products = [each if role == "recipe" else _WIDE[role] for each, role in zip(own, roles, strict=True)]
        wide = ", ".join(f"{name} {role}" for name, role in zip(GEMMS, roles, strict=True) if role != "recipe")
        bounds = tuple(
            _WIDE_BOUND if isinstance(each, HighPrecision) else bound
            for each, bound in zip(products, self.bounds, strict=True)
        )
        return self._with_products(*products, name=f"{self.name} ({wide})" if wide else self.name, bounds=bounds)


_WIDE_BOUND = 0.01  # of a product in bfloat16


def _both(operand: CastConfig) -> GemmConfig:
    return GemmConfig(operand, operand)


_ADA = {"kernel": "fp8", "capability": (8, 9), "generations": "Ada, Hopper, Blackwell or newer"}
_BLACKWELL = {"capability": (10, 0), "generations": "Blackwell or newer"}

# Of features in and out, as torchao 0.18 leaves such layers alone: `_auto_filter_for_recipe` of its float8 training, on H100s.
_SMALL_TENSORWISE = ((4096.0, 1024.0),)
_SMALL_ROWWISE = ((math.inf, 2048.0), (1024.0, math.inf), (2048.0, 4096.0))

_TENSOR = CastConfig(E4M3, Scaling("tensor"), 16)
_TENSOR_GRADIENT = CastConfig(E5M2, Scaling("tensor"), 16)
_ROW = CastConfig(E4M3, Scaling("row", "power_of_two"), 16)
_MX = CastConfig(E4M3, Scaling((1, 32), "power_of_two"), 32)
_NV = CastConfig(E2M1, Scaling((1, 16), "e4m3"), 32)
_INT8 = CastConfig(INT8, Scaling("row"), 8)

# The three of torchao's float8 training, under its names, scales included: rows have powers of two.
FP8_RECIPES = {
    "tensorwise": Recipe(
        name="fp8 tensorwise",
        output=_both(_TENSOR),
        input_gradient=GemmConfig(_TENSOR_GRADIENT, _TENSOR),
        weight_gradient=GemmConfig(_TENSOR_GRADIENT, _TENSOR),
        bounds=(0.075, 0.12, 0.12),
        too_small=_SMALL_TENSORWISE,
        **_ADA,  # type: ignore[arg-type]
    ),
    "rowwise": Recipe(
        name="fp8 rowwise",
        output=_both(_ROW),
        input_gradient=_both(_ROW),
        weight_gradient=_both(_ROW),
        bounds=(0.075, 0.075, 0.075),
        too_small=_SMALL_ROWWISE,
        **_ADA,  # type: ignore[arg-type]
    ),
    "rowwise_with_gw_hp": Recipe(
        name="fp8 rowwise_with_gw_hp",
        output=_both(_ROW),
        input_gradient=GemmConfig(_ROW, CastConfig(E4M3, Scaling("tensor", "power_of_two"), 16)),
        weight_gradient=HighPrecision(),
        bounds=(0.075, 0.075, _WIDE_BOUND),
        too_small=_SMALL_ROWWISE,
        **_ADA,  # type: ignore[arg-type]
    ),
}


def fp8_blocks_recipe(*, power_of_two_scales: bool) -> Recipe:
    """DeepSeek-AI 2024, DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.3.

    Weights in blocks of 128 x 128, activations and gradients of 128 numbers, e4m3 throughout.
    """
    scale: ScaleKind = "power_of_two" if power_of_two_scales else "float32"
    tokens, weight = (CastConfig(E4M3, Scaling(block, scale), 128) for block in ((1, 128), (128, 128)))
    # Here both are rounded from the wide numbers for each dimension that is summed over, where the report rounds an activation
    # in fp8 again.
    return Recipe(
        name="fp8 blocks",
        output=GemmConfig(tokens, weight),
        input_gradient=GemmConfig(tokens, weight),
        weight_gradient=_both(tokens),
        kernel="fp8 blocks",
        capability=(9, 0),
        generations="Hopper",
        bounds=(0.075, 0.075, 0.075),
    )


# Mishra et al. 2025, Recipes for Pre-training LLMs with MXFP8 (arXiv 2506.08027): e4m3 throughout, scales rounded up.
MXFP8 = Recipe(
    name="mxfp8",
    output=_both(_MX),
    input_gradient=_both(_MX),
    weight_gradient=_both(_MX),
    kernel="mxfp8",
    bounds=(0.075, 0.075, 0.075),
    **_BLACKWELL,  # type: ignore[arg-type]
)


def nvfp4_recipe(*, stochastic_rounding: bool, hadamard: bool) -> Recipe:
    """NVIDIA 2025, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149).

    Weights in blocks of 16 x 16; gradients rounded stochastically; the operands of the weight gradient rotated by a random
    Hadamard transform.
    """
    # Blocks of 16 x 16, so that both passes see the same weights.
    weight = CastConfig(E2M1, Scaling((16, 16), "e4m3"), 32)
    gradient = replace(_NV, stochastic=stochastic_rounding)
    return Recipe(
        name="nvfp4",
        output=GemmConfig(_NV, weight),
        input_gradient=GemmConfig(gradient, weight),
        weight_gradient=GemmConfig(replace(gradient, hadamard=hadamard), replace(_NV, hadamard=hadamard)),
        kernel="nvfp4",
        bounds=(0.3, 0.36, 0.36),
        **_BLACKWELL,  # type: ignore[arg-type]
    )


# Rows of both operands, in all three products; torchao's int8 mixed-precision training does the same.
INT8_RECIPE = Recipe(
    name="int8",
    output=_both(_INT8),
    input_gradient=_both(_INT8),
    weight_gradient=_both(_INT8),
    kernel="int8",
    capability=(7, 5),
    generations="Turing or newer",
    bounds=(0.03, 0.03, 0.03),
    on_cpu=True,
)
