"""Which linear layers of a model multiply in low precision, and how they take the places of the model's own.

Each is tried on its device first, on data of its own: whether it computes what a plain layer does (`complaint`), which finds
what a silent defect of a kernel would spoil, and where a recipe asks for the faster one, how long it takes (`timed`).
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from booster.common import arguments
from booster.common.devices import clock
from booster.common.torch_internals.autograd_internals import compiled_like
from booster.mixed_precision.keep_fp32 import KeepFP32, KeptModules
from booster.mixed_precision.low_precision.linear import (
    DelayedScaling,
    LowPrecisionLinear,
    ScaleHistories,
    low_layers,
)
from booster.mixed_precision.low_precision.operands import QuantizedWeights, for_device, lacks
from booster.mixed_precision.low_precision.recipes import GemmConfig, Recipe
from booster.mixed_precision.policy import DtypePolicy
from booster.model.modules import bare, tensor_places
from booster.ranks.agreement import gather

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
    low_ones = dict(zip(_PRODUCTS, recipe.products.values(), strict=True))
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
    forward: Forward, x: torch.Tensor, g: torch.Tensor, params: Mapping[str, nn.Parameter | None]
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


# Under the name that docs/low_precision.md gives users.
_logger = logging.getLogger("booster.mixed_precision.low_precision.low_precisions")

Emulate = bool | Literal["auto"]
Convert = Literal["auto", "all", "measured"]
CONVERT = ("auto", "all", "measured")


@dataclasses.dataclass
class LinearConversion:
    """Linear layers that multiply by `recipe`, forward and backward, in place of a model's own.

    Any precision may hold one as its `conversion`; those here differ in nothing else from the precisions around the layers.

    Attributes:
        emulate, keep, tokens: see `LowPrecision`.
        which: `convert` of `LowPrecision`.
        dtype: what the layers take and return.
        gather_in_fp8, delayed: see `FP8MixedPrecision`.
        precision: what errors call the one that holds it.
        timer: what times a layer, see `seconds`.
        said: whether a WARNING has said that the format is emulated.
    """

    recipe: Recipe
    emulate: Emulate = False
    keep: tuple[KeepFP32, ...] | None = None
    dtype: torch.dtype = torch.bfloat16
    gather_in_fp8: bool = False
    precision: str = "LinearConversion"
    delayed: DelayedScaling | None = None
    which: Convert = "auto"
    tokens: int | None = None
    timer: Timer = seconds
    said: bool = dataclasses.field(default=False, init=False, repr=False)
    _times: dict[tuple[int, int], tuple[float, float]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Seconds in the wide dtype and in the recipe, by features in and out, as all ranks agreed."""
    _weights: QuantizedWeights = dataclasses.field(
        default_factory=QuantizedWeights, init=False, repr=False, compare=False
    )

    def runs(self, device: torch.device) -> bool:
        """Whether kernels run, and not the emulation; raises ValueError where neither may."""
        if self.emulate is True:
            return False
        missing = lacks(self.recipe, device)
        if missing and not self.emulate:
            raise ValueError(
                f"{missing}; {self.precision}(emulate=True) computes the same numbers on any device, as a slow rehearsal"
            )
        if not missing and self.dtype == torch.float32 and self.recipe.kernel != "int8":
            raise ValueError(
                f"compute_dtype=torch.float32 is for rehearsals: the kernels of {self.recipe.name} return bfloat16; pass "
                "emulate=True with it"
            )
        return not missing

    def measure(
        self, model: nn.Module, device: torch.device, keep_fp32: Iterable[KeepFP32], group: dist.ProcessGroup | None
    ) -> None:
        """Measure what decides which layers of `model` are swapped, alike on ranks of `group`; `model` is not changed. May run
        collectives."""
        if self.which != "measured" or not self.runs(device):
            return
        inner, recipe, own = bare(model), for_device(self.recipe, device), {}
        names, _ = self._choose(inner, keep_fp32, device)
        shapes = {_features(inner, name) for name in names}
        # By shape and sorted, so that every rank times the same layers in the same order.
        for shape in sorted(shapes - self._times.keys()):
            wide, low = timed(
                (self.tokens or 1, *shape), {recipe.name: recipe}, device, dtype=self.dtype, timer=self.timer
            )
            own[shape] = wide, low[recipe.name]
        for times_of_rank in gather([[*shape, *times] for shape, times in own.items()], group):
            for inputs, outputs, wide, low in times_of_rank:
                self._times.setdefault((inputs, outputs), (wide, low))  # those of the first rank that has it

    def policy(
        self, model: nn.Module, policy: DtypePolicy, device: torch.device, keep_fp32: Iterable[KeepFP32]
    ) -> DtypePolicy:
        """Return the policy of `model`, which is not changed yet, once it is converted; raises ValueError if it cannot be.

        policy: what it is otherwise. keep_fp32: which modules are to compute in float32, and stay as they are.
        """
        self.runs(device)
        inner = bare(model)
        names, _ = self._choose(inner, keep_fp32, device)  # raises before anything is changed
        return dataclasses.replace(policy, fp8_weights=_read_alone(inner, names)) if self.gather_in_fp8 else policy

    def convert(self, model: nn.Module, device: torch.device, keep_fp32: Iterable[KeepFP32]) -> None:
        """Swap the layers of `model`, in place, for those of `device`."""
        inner, kernels = bare(model), self.runs(device)
        names, wide = self._choose(inner, keep_fp32, device)
        slow = self._slow(inner, names)
        recipe, layers = for_device(self.recipe, device), dict[nn.Module, LowPrecisionLinear]()
        for name in names:
            # By layer: one that the model holds under two names is converted once.
            old = inner.get_submodule(name)
            layers[old] = LowPrecisionLinear.of(old, recipe, kernels=kernels)  # type: ignore[arg-type]
        layers_of = {name: layers[inner.get_submodule(name)] for name in names}
        # Before any layer is swapped, so that an error leaves the model as it was.
        self._check_layers(layers_of, device, partial(compiled_like, model))
        _swap(inner, layers)
        for name in slow:
            layers_of[name].in_high_precision = True
        self._report(inner, len(names) - len(slow), {**wide, **slow}, device, kernels)

    def revert(self, model: nn.Module) -> None:
        """Undo `convert`, in place, also in a model that was placed since."""
        inner = bare(model)
        _swap(inner, {layer: layer.plain() for layer in low_layers(inner).values()})

    def make_listener(
        self, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None
    ) -> ScaleHistories | None:
        """Return a listener to the steps of the placed `model`, or None. May run collectives."""
        if self.delayed is None:
            return None
        return ScaleHistories(self.delayed, low_layers(model), device, group)

    def layer_choice(self, model: nn.Module) -> ChosenLayers | None:
        """Return what checkpoints keep of the choice between layers of the placed `model`, or None."""
        if self.which != "measured" or not self._times:
            return None
        return ChosenLayers(low_layers(model), {shape: not low < wide for shape, (wide, low) in self._times.items()})

    def cache_weights(self, model: nn.Module) -> None:
        """Have the layers of a placed model keep their quantized weights until a step; for weights that stay where they are."""
        for layer in low_layers(model).values():
            layer.weights = self._weights

    def drop_weights(self) -> None:
        """Drop the quantized weights; called before an optimizer steps, and where weights change by other ways."""
        self._weights.forget()

    def _choose(
        self, model: nn.Module, keep_fp32: Iterable[KeepFP32], device: torch.device
    ) -> tuple[list[str], dict[str, str]]:
        """Names of the layers to convert, and of the linear layers that are not, with the reason."""
        by_size = self.which == "auto" and device.type == "cuda" and self.runs(device)
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        kept = KeptModules(model, self.keep or (), option="keep")
        in_fp32 = KeptModules(model, keep_fp32)
        ends = {next(iter(linears)): "the first", next(reversed(linears)): "the last"} if linears else {}
        multiple, names, wide = self.recipe.multiple, [], {}
        for name, module in linears.items():
            if not name:
                wide[name] = "no module holds it: put it into nn.Sequential"
            elif name in ends and self.keep is None:
                wide[name] = ends[name]
            elif kept.contains(name):
                wide[name] = "kept"
            elif in_fp32.contains(name):
                wide[name] = "in float32"
            elif type(module) is not nn.Linear or "forward" in module.__dict__:
                wide[name] = "a subclass" if type(module) is not nn.Linear else "its forward was replaced"
            elif module.in_features % multiple or module.out_features % multiple:
                wide[name] = f"{module.in_features} -> {module.out_features}, no multiples of {multiple}"
            elif module.weight.dtype == torch.float64:
                wide[name] = "float64"
            elif by_size and any(
                module.in_features <= most and module.out_features <= out for most, out in self.recipe.too_small
            ):
                wide[name] = f"{module.in_features} -> {module.out_features}, too small to be faster"
            else:
                names.append(name)
        slow = self._slow(model, names)
        if len(slow) == len(names):
            wide |= slow
            reasons = "; ".join(f"{_shown(name)} ({reason})" for name, reason in [*wide.items()][:10])
            raise ValueError(
                f"{self.recipe.name} finds no linear layer to convert in {type(model).__name__}"
                f"{f'; wide stay: {reasons}' if reasons else ', which has none'}. Use mixed_precision='bf16' for it, or keep= "
                "to choose what stays wide, () for nothing"
                + (", with convert='all', which asks for no speed" if by_size or slow else "")
            )
        return names, wide

    def _slow(self, model: nn.Module, names: Iterable[str]) -> dict[str, str]:
        """Which of the layers `names` were measured to be no faster, with their times."""
        slow = {}
        for name in names:
            inputs, outputs = _features(model, name)
            # A shape that was never timed counts as one that gains.
            wide, low = self._times.get((inputs, outputs), (math.inf, 0.0))
            if not low < wide:
                slow[name] = f"{inputs} -> {outputs}, {low * 1e6:.0f} us for {wide * 1e6:.0f} us wide"
        return slow

    def _check_layers(
        self,
        layers: Mapping[str, LowPrecisionLinear],
        device: torch.device,
        compiled: Callable[[Forward], Forward | None],
    ) -> None:
        """Check one layer of each shape: the data of a check depends on nothing else."""
        shapes: dict[tuple[Any, ...], list[str]] = {}
        for name, layer in layers.items():
            # A check takes a few products, so a model of a hundred equal layers is checked once.
            shapes.setdefault((layer.in_features, layer.out_features, layer.bias is None), []).append(name)
        for alike in shapes.values():
            wrong = complaint(layers[alike[0]], device, self.dtype, compiled)
            if wrong:
                more = f" and {len(alike) - 1} of its shape" if len(alike) > 1 else ""
                raise RuntimeError(
                    f"{_shown(alike[0])!r}{more} would not train right in {self.recipe.name} on {device}: {wrong}. Keep "
                    "it wide with keep=, and report it; it is a defect of this library or of torch's kernels"
                )

    def _report(
        self, model: nn.Module, count: int, wide: Mapping[str, str], device: torch.device, kernels: bool
    ) -> None:
        listed = ", ".join(f"{_shown(name)} ({reason})" for name, reason in wide.items())
        _logger.info(
            "%s: %d linear layers of %s converted; wide stay: %s",
            self.recipe.name,
            count,
            type(model).__name__,
            listed or "none",
        )
        if not (kernels or self.said):
            _logger.warning(
                "%s is emulated on %s: a rehearsal of its numbers, slower than the wide dtype", self.recipe.name, device
            )
            self.said = True


def _swap(model: nn.Module, layers: Mapping[nn.Module, nn.Module]) -> None:
    """Put the values of `layers` in the places of its keys in `model`, under all their names."""
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        if module in layers:
            model.set_submodule(name, layers[module])


def _features(model: nn.Module, name: str) -> tuple[int, int]:
    """Features in and out of the linear layer `name`."""
    layer = arguments.instance("layer", model.get_submodule(name), nn.Linear, "an nn.Linear")
    return layer.in_features, layer.out_features


def _shown(name: str) -> str:
    """Return the name of a module for messages; that of the model itself is empty."""
    return name or "the model itself"


def _read_alone(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return those of `names` of linear layers with a weight that only such layers read."""
    layers = {model.get_submodule(name) for name in names}
    places = tensor_places(model)
    alone = {tensor for tensor, found in places.items() if all(place.holder in layers for place in found)}
    return frozenset(name for name in names if model.get_submodule(name).weight in alone)


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
            changed += wide != layer.in_high_precision
            layer.in_high_precision = wide
        return changed
