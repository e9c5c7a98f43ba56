"""Linear layers of a shape timed in the wide dtype and in low precisions, and what was chosen by that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from booster.common import arguments
from booster.common.devices import clock
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.recipes import Recipe

Timer = Callable[[nn.Module, torch.Tensor, torch.Tensor], float]
Convert = Literal["auto", "all", "measured"]
CONVERT = ("auto", "all", "measured")


def seconds(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> float:
    """Return how long a forward and a backward pass of `layer` take, of the input `x` and the gradient `g` of its output."""
    start = clock(x.device)
    with torch.enable_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype == torch.bfloat16):
        y = layer(x)
    y.backward(g)
    x.grad = None
    layer.zero_grad()
    return clock(x.device) - start


def timed(
    shape: tuple[int, int, int],
    recipes: Mapping[str, Recipe],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 10,
    timer: Timer = seconds,
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a forward and a backward pass of a linear layer in `dtype`, and by name in `recipes`.

    shape: tokens, features in and features out. Weights are float32, and rounded in every pass. Recipes that do not convert
    such features are left out. rounds: of which the shortest counts; one more warms up. No generator of torch moves.
    """
    tokens, inputs, outputs = shape
    draw = torch.Generator(device).manual_seed(0)
    options: Any = {"generator": draw, "device": device}
    wide = nn.utils.skip_init(nn.Linear, inputs, outputs, device=device, dtype=torch.float32)
    with torch.no_grad():
        for param in wide.parameters():
            param.normal_(generator=draw)
    layers: dict[str, nn.Module] = {"": wide}
    for name, recipe in recipes.items():
        if not (inputs % recipe.multiple or outputs % recipe.multiple):
            layers[name] = LowPrecisionLinear.of(copy.deepcopy(wide), recipe, kernels=True)
    x = torch.randn(tokens, inputs, dtype=dtype, requires_grad=True, **options)
    g = torch.randn(tokens, outputs, dtype=dtype, **options)
    best = dict.fromkeys(layers, float("inf"))
    for turn in range(rounds + 1):  # in turns, so that what slows the machine slows all
        for name, layer in layers.items():
            taken = timer(layer, x, g)
            best[name] = min(best[name], taken) if turn else best[name]
    return best.pop(""), best


class ChosenLayers:
    """Which layers of one model multiply in their recipe, and which are wide, since they were measured to gain nothing.

    layers: by name, those that may do either. chosen: by features in and out, of all ranks, whether a layer is wide.
    """

    def __init__(self, layers: Mapping[str, LowPrecisionLinear], chosen: Mapping[tuple[int, int], bool]) -> None:
        self._layers, self._own = dict(layers), dict(chosen)
        self._now = dict(chosen)

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks: features in and out of layers in their recipe, and of those that are wide."""
        kinds = {"low": False, "wide": True}
        return {
            kind: [list(shape) for shape, wide in self._now.items() if wide == each] for kind, each in kinds.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Multiply as when `state` was taken, and where it says nothing as measured here; how many layers changed."""
        said = {
            (arguments.count("features", shape[0]), arguments.count("features", shape[1])): kind == "wide"
            for kind in ("low", "wide")
            for shape in state.get(kind, [])
        }
        self._now = {**self._own, **said}
        changed = 0
        for layer in self._layers.values():
            wide = self._now[layer.in_features, layer.out_features]
            changed += wide != layer.is_wide
            layer.is_wide = wide
        return changed
