"""The linear layer of all recipes: three products, one autograd function.

One product of two matrices in a low precision: rounded, then multiplied by a kernel or emulated in a wide dtype. By delayed
scaling the scales of whole matrices follow from the largest magnitudes of earlier steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from booster.common import arguments
from booster.common.torch_internals.autograd_internals import compiler_is_loaded, outside_of_graphs
from booster.common.torch_internals.tensor_internals import is_fake_kind
from booster.mixed_precision.hardware import gives_float32_sums, multiplies_into_sums
from booster.mixed_precision.low_precision.operands import (
    GatheredWeight,
    QuantizedWeight,
    QuantizedWeights,
    multiply,
    quantize_with_transpose,
    quantized,
    transposed,
)
from booster.mixed_precision.low_precision.recipes import DelayedScale, GemmConfig, HighPrecision, Recipe
from booster.model.modules import LinearProxy
from booster.number_formats.number_format import E4M3, E5M2
from booster.number_formats.scaling import ScaledTensor, scale_of
from booster.ranks.agreement import all_names, reduced
from booster.update.context import StepListener


class Watcher(Protocol):
    """Called with every product of a layer: its role ("forward", "input_grad" or "weight_grad"), the matrices, how they were
    multiplied, and the result. It changes nothing."""

    def __call__(
        self, role: str, a: torch.Tensor, b: torch.Tensor, how: GemmConfig | HighPrecision, result: torch.Tensor
    ) -> None: ...


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    how: GemmConfig | HighPrecision,
    recipe: Recipe,
    *,
    dtype: torch.dtype,
    kernels: bool,
) -> torch.Tensor:
    """Return `a @ b.t()` in `dtype`, of m x k and n x k matrices, in the formats of `how`, or in a wide dtype."""
    if isinstance(how, HighPrecision):
        wide = how.dtype or dtype
        return (a.to(wide) @ b.to(wide).t()).to(dtype)
    # No kernel takes an empty matrix, and no scale can be made of one.
    if not (a.numel() and b.numel()):
        return torch.zeros(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    left, right = quantized(a, how.left), quantized(b, how.right)
    # Without `kernels` the same in a wide dtype, which differs by the rounding of the output.
    return multiply_scaled(left, right, how, recipe, dtype=dtype, kernels=kernels)


def multiply_scaled(
    a: ScaledTensor, b: ScaledTensor, how: GemmConfig, recipe: Recipe, *, dtype: torch.dtype, kernels: bool
) -> torch.Tensor:
    """Return `a @ b.t()` in `dtype`, of matrices that are rounded for `how` already; see `product`."""
    return multiply(a, b, how, recipe).to(dtype) if kernels else emulate(a, b, dtype)


def emulate(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `a @ b.t()` in `dtype` of numbers in low formats, summed in float32 and rounded once."""
    scales = [each for each in (_after(a), _after(b, transposed=True), a.outer, b.outer) if each is not None]
    # Operands are multiplied in bfloat16 where that holds them and the device does so fast and right, otherwise in float32.
    exact, device = _in_bfloat16(a) and _in_bfloat16(b), a.values.device
    # Scales of tensors and rows are multiplied after the sum, as kernels do; so the operands may stay exact in bfloat16.
    if exact and gives_float32_sums(device):
        result = torch.mm(_values(a, torch.bfloat16), _values(b, torch.bfloat16).t(), out_dtype=torch.float32)
    elif dtype == torch.bfloat16 and all(each.scaling.scale == "power_of_two" for each in (a, b)):
        return a.dequantize(dtype) @ b.dequantize(dtype).t()
    elif exact and dtype == torch.bfloat16 and (factor := _factor(scales, device)) is not None:
        left, right = _values(a, dtype), _values(b, dtype)
        return torch.addmm(left.new_zeros(()), left, right.t(), beta=0, alpha=factor)
    else:
        result = _values(a, torch.float32) @ _values(b, torch.float32).t()
    for scale in scales:
        result = result * scale
    return result.to(dtype)


# ---------------------------------------------------------------------- inside


def _in_bfloat16(x: ScaledTensor) -> bool:
    """Whether bfloat16 holds the numbers, times their scales where these are of blocks."""
    return x.block is None or x.scaling.scale != "float32"


def _values(x: ScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    return x.values_in(dtype) if x.block is None else x.dequantize(dtype)


def _after(x: ScaledTensor, *, transposed: bool = False) -> torch.Tensor | None:
    """What the product is multiplied with; scales of blocks are in the operands already."""
    if x.block is not None:
        return None
    return x.scale.t() if transposed and x.scale.dim() else x.scale


def _factor(scales: list[torch.Tensor], device: torch.device) -> float | None:
    """The product of scales of whole matrices, where a product of halves can take it as a number; otherwise None."""
    if (
        device.type != "cpu"
        or any(each.dim() for each in scales)
        or torch.compiler.is_compiling()  # where a number would end the graph
        or not multiplies_into_sums()
    ):
        return None
    if any(is_fake_kind(type(each)) for each in scales):
        return math.nan  # there are no numbers; an estimate of memory is to see the product that there will be
    factor = math.prod(each.item() for each in scales)
    numbers = torch.finfo(torch.float32)
    return None if factor < numbers.tiny or factor > numbers.max else factor


class LowPrecisionLinear(LinearProxy):
    """A linear layer that multiplies in the formats of a recipe; `of` makes it of an `nn.Linear`, and it keeps state as that.

    Inputs of any shape (..., in_features) in float32 or half; the output has autocast's dtype where that is on, else the
    input's. The bias is added in that dtype. Each operand is rounded once, but where a product sums over its other dimension
    under other scales; a weight that a plugin gathered in this form is not rounded again. Backward keeps the weight as it came,
    which costs nothing, and of the input what the weight gradient reads: a byte a number and its scales; the input itself where
    the format has no byte, or that product is in high precision. Under the compiler a weight is rounded in every pass.

    Attributes:
        kernels: run the recipe's kernel; otherwise it is emulated.
        watchers: called with products in training, of forward passes that a backward may follow. Copies have none.
        weights: where the quantized weight is kept for a group of micro-batches; None quantizes it in every pass. Copies have
            none.
    """

    recipe: Recipe
    kernels: bool
    watchers: tuple[Watcher, ...] = ()
    weights: QuantizedWeights | None = None

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
            {
                name: value
                for name, value in self.__dict__.items()
                if name not in ("recipe", "kernels", "watchers", "weights", "in_high_precision", "arrived")
            }
        )
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_high_precision:
            return super().forward(x)
        # Watchers change from step to step, which would recompile the graph; so the layer is left out of it.
        if self.watchers and torch.compiler.is_compiling() and self.training and torch.is_grad_enabled():
            why = "an Autopilot or a record looks at products of linear layers in some steps; compile without fullgraph"
            return outside_of_graphs(self._multiplied, why)(x)
        return self._multiplied(x)

    def _multiplied(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        watchers = self.watchers if self.training and torch.is_grad_enabled() else ()
        keeps = torch.is_grad_enabled() and self.weight.requires_grad
        recipe, trains = self.recipe, self.training and torch.is_grad_enabled()
        known: QuantizedWeight | GatheredWeight | None = None
        if not trains:
            recipe = recipe.without_amax()
        if torch.compiler.is_compiling():
            pass
        elif self.arrived is not None:
            known = GatheredWeight(self.weight, self.arrived)
        elif trains and self.weights is not None:
            known = self.weights.of(self.weight)
        y = _Linear.apply(x.to(dtype), self.weight, recipe, self.kernels, watchers, keeps, known)
        return y if self.bias is None else y + self.bias.to(dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("weights", "watchers", "arrived")}

    def extra_repr(self) -> str:
        how = "wide" if self.in_high_precision else f"recipe={self.recipe.name!r}{'' if self.kernels else ', emulated'}"
        return f"{super().extra_repr()}, {how}"


def low_layers(model: nn.Module) -> dict[str, LowPrecisionLinear]:
    """Return the low-precision layers of `model` by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, LowPrecisionLinear)}


class _Linear(torch.autograd.Function):
    """keeps: whether a gradient of the weight may be asked for. known: the weight, where its rounded form is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        recipe: Recipe,
        kernels: bool,
        watchers: tuple[Watcher, ...],
        keeps: bool,
        known: QuantizedWeight | GatheredWeight | None,
    ) -> torch.Tensor:
        how, of_weight, kept = recipe.output, recipe.weight_gradient, None
        options: Any = {"dtype": x.dtype, "kernels": kernels}
        with torch.autocast(x.device.type, enabled=False):  # which would round scales to half
            tokens = x.reshape(-1, weight.shape[1])
            # How the gradient of the weight reads `x`, where that is kept in bytes.
            in_bytes = of_weight.right if keeps and tokens.numel() and isinstance(of_weight, GemmConfig) else None
            if in_bytes is not None and in_bytes.format.dtype is None:
                in_bytes = None
            if isinstance(how, HighPrecision) or not tokens.numel():
                y = product(tokens, weight, how, recipe, **options)
            else:
                if in_bytes is not None:
                    left, kept = quantize_with_transpose(tokens, how.left, in_bytes)
                else:
                    left = quantized(tokens, how.left)
                right = quantized(weight, how.right) if known is None else known.quantized(how.right)
                y = multiply_scaled(left, right, how, recipe, **options)
            for watcher in watchers:
                watcher("forward", tokens, weight, how, y)
            if in_bytes is not None and kept is None:
                kept = transposed(tokens, in_bytes)
        wide = x if keeps and (watchers or kept is None) else None
        # The weight itself costs no memory; its low form may be dropped by then, and is made again.
        ctx.save_for_backward(weight, wide, *((None,) * 3 if kept is None else (kept.values, kept.scale, kept.outer)))
        ctx.recipe, ctx.options, ctx.watchers, ctx.shape, ctx.known = recipe, options, watchers, x.shape, known
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True asks for gradients of gradients, and {ctx.recipe.name} layers have none; keep these layers "
                "wide with keep=, or train in bf16"
            )
        weight, x, *parts = ctx.saved_tensors
        recipe, options, known = ctx.recipe, ctx.options, ctx.known
        g = grads[0].reshape(-1, weight.shape[0])
        tokens: Any = None if x is None else x.reshape(-1, weight.shape[1])
        of_x = of_weight = g_t = None
        with torch.autocast(g.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                how = recipe.input_gradient
                if isinstance(how, HighPrecision) or not g.numel():
                    of_x = product(g, weight.t(), how, recipe, **options)
                else:
                    if ctx.needs_input_grad[1] and parts[0] is not None:
                        left, g_t = quantize_with_transpose(g, how.left, recipe.weight_gradient.left)
                    else:
                        left = quantized(g, how.left)
                    right = transposed(weight, how.right) if known is None else known.transposed(how.right)
                    of_x = multiply_scaled(left, right, how, recipe, **options)
                for watcher in ctx.watchers:
                    watcher("input_grad", g, weight.t(), how, of_x)
                of_x = of_x.view(ctx.shape)
            if ctx.needs_input_grad[1]:
                how = recipe.weight_gradient
                if parts[0] is None:
                    of_weight = product(g.t(), tokens.t(), how, recipe, **options)
                else:
                    kept = ScaledTensor(parts[0], parts[1], parts[2], how.right.scaling)
                    g_t = transposed(g, how.left) if g_t is None else g_t
                    of_weight = multiply_scaled(g_t, kept, how, recipe, **options)
                for watcher in ctx.watchers:
                    watcher("weight_grad", g.t(), tokens.t(), how, of_weight)
                of_weight = of_weight.to(weight.dtype)
        return of_x, of_weight, None, None, None, None, None


_MATRICES = 3  # of a layer: its input, its weight, and the gradient of its output


@dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """How scales follow from earlier steps, under the names of Transformer Engine; for `FP8MixedPrecision("tensorwise")`.

    amax_history_len: a scale fits the largest magnitude of so many steps.
    margin: a scale is 2**margin times as large, so that numbers may grow by that before they are cut off.
    """

    amax_history_len: int = 1024
    margin: int = 0

    def __post_init__(self) -> None:
        arguments.count("amax_history_len", self.amax_history_len, what="of steps")
        arguments.count("margin", self.margin, least=0)


class ScaleHistories(StepListener):
    """The largest magnitudes in the layers of one model, and the scales of the step that follow from them.

    Listens to the optimizer's steps: after each, ranks agree on the largest magnitudes of it, in one collective for all layers,
    and every scale is made anew. A magnitude that is not finite is ignored. For a layer that saw only zeros, or did not run,
    the magnitude of the step before is repeated. Gives `layers` recipes of their own.

    Where something may be compiled, the host reads which scales are known, after the steps 1, 2, 4, 8 and so on until all are:
    for those the compiler makes a second graph, which reads a matrix once.

    layers: by name. On ranks of `group` they may be others, as in a pipeline. device: where they are.
    """

    def __init__(
        self,
        plan: DelayedScaling,
        layers: Mapping[str, LowPrecisionLinear],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.names = all_names(tuple(layers), group)
        self._margin, self._group = 2.0**plan.margin, group
        self._amax = torch.zeros(len(self.names), _MATRICES, dtype=torch.float32, device=device)
        self._scale = torch.zeros_like(self._amax)
        self._history = self._amax.new_zeros(plan.amax_history_len, *self._amax.shape)
        self._largest = self._amax.new_tensor([E4M3.largest, E4M3.largest, E5M2.largest])
        self._steps, self._scales = 0, dict[tuple[int, int], DelayedScale]()
        for row, name in enumerate(self.names):
            if name in layers:
                matrices = [DelayedScale(self._scale[row, i], self._amax[row, i]) for i in range(_MATRICES)]
                layers[name].recipe = layers[name].recipe.delayed(*matrices)
                self._scales.update(((row, i), matrix) for i, matrix in enumerate(matrices))

    @torch.no_grad()
    def after_step(self, update: Any, number: int, result: Any) -> None:
        if self._group is not None:
            self._amax.copy_(reduced(self._amax, dist.ReduceOp.MAX, self._group))
        # A step without numbers, as of a layer that was not used, would otherwise make the scale that of zeros.
        newest = torch.where(self._amax > 0, self._amax, self._history[0])
        self._history.copy_(self._history.roll(1, 0))
        self._history[0].copy_(newest)
        self._amax.zero_()
        self._rescale()
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:
            self._mark_known()

    # ---- what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks. history: of shape (steps, layers, 3), the newest step first."""
        return {"names": list(self.names), "history": self._history.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with `state`, of layers by name; of a history of another length its newest steps. Empty begins anew."""
        self._history.zero_()
        self._amax.zero_()
        places = {name: place for place, name in enumerate(state.get("names", []))}
        known = [row for row, name in enumerate(self.names) if name in places]
        if known:
            history = state["history"][: len(self._history), [places[self.names[row]] for row in known]]
            self._history[: len(history), known] = history.to(self._history)
        self._rescale()
        self._steps = 0
        for scale in self._scales.values():
            scale.known = False
        self._mark_known()

    # ---- inside

    def _mark_known(self) -> None:
        """Mark scales that stay known, those with a newest magnitude above zero. Waits for the device."""
        unknown = {place: scale for place, scale in self._scales.items() if not scale.known}
        if (
            not unknown
            or not compiler_is_loaded()
            or (self._scale.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return
        known = (self._history[0] > 0).tolist()
        for (row, i), scale in unknown.items():
            scale.known = known[row][i]

    def _rescale(self) -> None:
        largest = self._history.amax(0)
        self._scale.copy_(torch.where(largest > 0, scale_of(largest / self._largest * self._margin), 0.0))
