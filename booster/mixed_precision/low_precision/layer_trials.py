"""One low-precision layer tried on a device: whether it computes what a plain layer does, and how long it takes.

The check finds what a silent defect of a kernel would spoil: every kind of layer is checked at `boost`, on its own data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from booster.common.devices import clock
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.recipes import GemmConfig, Recipe

Forward = Callable[[torch.Tensor], torch.Tensor]
Timer = Callable[[nn.Module, torch.Tensor, torch.Tensor], float]

_TOKENS = 64
_PRODUCTS = ("output", "gradient of the input", "gradient of the weight")


def complaint(
    layer: LowPrecisionLinear,
    device: torch.device,
    dtype: torch.dtype,
    compiled: Callable[[Forward], Forward | None] = lambda forward: None,
) -> str:
    """Say what is wrong with `layer` on `device`, its input in `dtype`; empty where nothing is.

    Its forward, its two gradients and that of the bias are compared with those of a plain linear layer of the same shape in
    float32, on normally distributed numbers. Right is: every parameter has a gradient, nothing is NaN or inf, and the error
    of each product is above zero, since rounding that does nothing did not happen, and below the recipe's bound.
    compiled: compiles a forward; where it returns one, that is compared, too.
    Cost: forward and backward of 64 rows, and two weights more for as long. No generator of torch moves.
    """
    # Its own generator: a run must not depend on whether it was checked.
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float32).to(device)

    x, g = normal(_TOKENS, layer.in_features).to(dtype), normal(_TOKENS, layer.out_features).to(dtype)
    params = {"weight": normal(layer.out_features, layer.in_features) / layer.in_features**0.5}
    if layer.bias is not None:
        params["bias"] = normal(layer.out_features)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        # A layer without the user's weights and hooks: the check must not move what will train.
        probe = layer.__class__.__new__(layer.__class__)
        # Not those that hooks compute before each forward, of pruned layers.
        own = {name: value for name, value in layer.__dict__.items() if name not in ("weight", "bias")}
        probe.__dict__.update(own)
        probe._parameters = {"bias": None, **{name: nn.Parameter(value.clone()) for name, value in params.items()}}
        forwards = {"": probe.forward, ", compiled,": compiled(probe.forward)}  # without the hooks of the user's layer
        lows = {how: _results(run, x, g, probe._parameters) for how, run in forwards.items() if run is not None}
        plain = {name: nn.Parameter(value) for name, value in params.items()}
        wide = _results(lambda x: F.linear(x, plain["weight"], plain.get("bias")), x.float(), g.float(), plain)
    for how, low in lows.items():
        wrong = _differs(layer, low, wide, how)
        if wrong:
            return wrong
    return ""


def _differs(layer: LowPrecisionLinear, low: Mapping[str, Any], wide: Mapping[str, Any], how: str) -> str:
    recipe = layer.recipe
    bounds = dict(zip(_PRODUCTS, recipe.bounds, strict=True))
    low_ones = dict(zip(_PRODUCTS, (recipe.output, recipe.input_gradient, recipe.weight_gradient), strict=True))
    for name, expected in wide.items():
        got = low[name]
        if got is None:
            return f"no {name}{how.rstrip(',')}"
        if not bool(torch.isfinite(got).all()):
            return f"the {name}{how} has inf or NaN"
        error = float((got.float() - expected).norm() / expected.norm())
        rounding = 2.0**-7  # of sums in bfloat16, for the bias: no recipe rounds its gradient
        if error > bounds.get(name, rounding):
            return f"the {name}{how} is off by {error:.2g}, and at most {bounds.get(name, rounding):.2g} is right"
        if isinstance(low_ones.get(name), GemmConfig) and error == 0:
            return f"the {name}{how} is not rounded at all"
    return ""


def _results(
    forward: Forward,
    x: torch.Tensor,
    g: torch.Tensor,
    params: Mapping[str, nn.Parameter | None],
) -> dict[str, Any]:
    for param in params.values():
        if param is not None:
            param.grad = None
    x = x.clone().requires_grad_()
    y = forward(x)
    y.backward(g.to(y.dtype))
    of_params = {f"gradient of the {name}": param.grad for name, param in params.items() if param is not None}
    return {"output": y.detach(), "gradient of the input": x.grad, **of_params}


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

    shape: tokens, features in and features out. Weights are float32, and rounded in every pass. rounds: of which the shortest
    counts.
    """
    tokens, inputs, outputs = shape
    # No generator of torch moves.
    draw = torch.Generator(device).manual_seed(0)
    options: Any = {"generator": draw, "device": device}
    wide = nn.utils.skip_init(nn.Linear, inputs, outputs, device=device, dtype=torch.float32)
    with torch.no_grad():
        for param in wide.parameters():
            param.normal_(generator=draw)
    layers: dict[str, nn.Module] = {"": wide}
    for name, recipe in recipes.items():
        # Recipes that do not convert such features are left out.
        if not (inputs % recipe.multiple or outputs % recipe.multiple):
            layers[name] = LowPrecisionLinear.of(copy.deepcopy(wide), recipe, kernels=True)
    x = torch.randn(tokens, inputs, dtype=dtype, requires_grad=True, **options)
    g = torch.randn(tokens, outputs, dtype=dtype, **options)
    best = dict.fromkeys(layers, float("inf"))
    # One round more warms up.
    for turn in range(rounds + 1):  # in turns, so that what slows the machine slows all
        for name, layer in layers.items():
            taken = timer(layer, x, g)
            best[name] = min(best[name], taken) if turn else best[name]
    return best.pop(""), best
