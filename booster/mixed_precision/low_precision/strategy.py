"""Precisions whose linear layers multiply in 4 to 8 bits, inside a model of a wider precision."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from booster.common import arguments
from booster.common.torch_internals.autograd_internals import compiled_like
from booster.masters.options import MasterOptions
from booster.mixed_precision.half import HalfPrecision
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.mixed_precision.keep_fp32 import Blocks, Ends, KeepFP32, KeptModules, is_batch_norm, normalise_keep_fp32
from booster.mixed_precision.low_precision.delayed import DelayedScaling, ScaleHistories
from booster.mixed_precision.low_precision.kernels import for_device, lacks
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.recipes import (
    FP8_RECIPES,
    INT8_RECIPE,
    MXFP8,
    ROLES,
    Recipe,
    Role,
    fp8_blocks_recipe,
    nvfp4_recipe,
)
from booster.mixed_precision.low_precision.self_check import Forward, complaint
from booster.mixed_precision.low_precision.timed import CONVERT, ChosenLayers, Convert, Timer, seconds, timed
from booster.mixed_precision.low_precision.weights import RoundedWeights
from booster.mixed_precision.policy import DtypePolicy
from booster.model.modules import bare, places_of
from booster.ranks.communicate import exchange

_logger = logging.getLogger(__name__)

Emulate = bool | Literal["auto"]


@dataclasses.dataclass
class LinearConversion:
    """Linear layers that multiply by `recipe`, forward and backward, in place of a model's own.

    Any precision may hold one as its `conversion`; those here differ in nothing else from the precisions around the layers.
    emulate, keep: see `LowPrecision`. dtype: what the layers take and return. gather_in_fp8: see `FP8MixedPrecision`.
    precision: what errors call the one that holds it. which, tokens: `convert` and `tokens` of `LowPrecision`. timer: what
    times a layer, see `timed.seconds`.
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
    said: bool = dataclasses.field(default=False, init=False, repr=False)  # that it is a rehearsal
    _times: dict[tuple[int, int], tuple[float, float]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Seconds in the wide dtype and in the recipe, by features in and out, as all ranks agreed."""
    _weights: RoundedWeights = dataclasses.field(default_factory=RoundedWeights, init=False, repr=False, compare=False)

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

    def settle(
        self, model: nn.Module, device: torch.device, keep_fp32: Iterable[KeepFP32], group: dist.ProcessGroup | None
    ) -> None:
        if self.which != "measured" or not self.runs(device):
            return
        inner, recipe, own = bare(model), for_device(self.recipe, device), {}
        names, _ = self._choose(inner, keep_fp32, device)
        shapes = {_features(inner, name) for name in names}
        for shape in sorted(shapes - self._times.keys()):
            wide, low = timed(
                (self.tokens or 1, *shape),
                {recipe.name: recipe},
                device,
                dtype=self.dtype,
                timer=self.timer,
            )
            own[shape] = wide, low[recipe.name]
        for rank in exchange(json.dumps([[*shape, *times] for shape, times in own.items()]).encode(), group):
            for inputs, outputs, wide, low in json.loads(rank):
                self._times.setdefault((inputs, outputs), (wide, low))  # those of the first rank that has it

    def policy(
        self, model: nn.Module, policy: DtypePolicy, device: torch.device, keep_fp32: Iterable[KeepFP32]
    ) -> DtypePolicy:
        self.runs(device)
        inner = bare(model)
        names, _ = self._choose(inner, keep_fp32, device)  # raises before anything is changed
        return dataclasses.replace(policy, fp8_weights=_read_alone(inner, names)) if self.gather_in_fp8 else policy

    def convert(self, model: nn.Module, device: torch.device, keep_fp32: Iterable[KeepFP32]) -> None:
        inner, kernels = bare(model), self.runs(device)
        names, wide = self._choose(inner, keep_fp32, device)
        slow = self._slow(inner, names)
        recipe, layers = for_device(self.recipe, device), {}
        for name in names:
            old = inner.get_submodule(name)
            layers[id(old)] = LowPrecisionLinear.of(old, recipe, kernels=kernels)  # type: ignore[arg-type]
        layers_of = {name: layers[id(inner.get_submodule(name))] for name in names}
        self._check_layers(layers_of, device, partial(compiled_like, model))
        for name, module in [*inner.named_modules(remove_duplicate=False)]:
            if id(module) in layers:
                inner.set_submodule(name, layers[id(module)])
        for name in slow:
            layers_of[name].is_wide = True
        self._report(inner, len(names) - len(slow), {**wide, **slow}, device, kernels)

    def revert(self, model: nn.Module) -> None:
        inner = bare(model)
        layers = {id(child): child.plain() for child in inner.modules() if isinstance(child, LowPrecisionLinear)}
        for name, module in [*inner.named_modules(remove_duplicate=False)]:
            if id(module) in layers:
                inner.set_submodule(name, layers[id(module)])

    def follow(self, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> ScaleHistories | None:
        if self.delayed is None:
            return None
        layers = {name: each for name, each in model.named_modules() if isinstance(each, LowPrecisionLinear)}
        return ScaleHistories(self.delayed, layers, device, group)

    def choice(self, model: nn.Module) -> ChosenLayers | None:
        if self.which != "measured" or not self._times:
            return None
        layers = {name: each for name, each in model.named_modules() if isinstance(each, LowPrecisionLinear)}
        return ChosenLayers(layers, {shape: not low < wide for shape, (wide, low) in self._times.items()})

    def keep_weights(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, LowPrecisionLinear):
                module.weights = self._weights

    def forget_weights(self) -> None:
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


def _features(model: nn.Module, name: str) -> tuple[int, int]:
    """Features in and out of the linear layer `name`."""
    layer = arguments.instance("layer", model.get_submodule(name), nn.Linear, "an nn.Linear")
    return layer.in_features, layer.out_features


def _shown(name: str) -> str:
    """Return the name of a module for messages; that of the model itself is empty."""
    return name or "the model itself"


def _written(selected: Iterable[KeepFP32] | None) -> str:
    """What selects modules, as it is written; of a type or a function its name."""
    if selected is None:
        return "None"
    names = [repr(each) if isinstance(each, str) else str(getattr(each, "__name__", each)) for each in selected]
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def _read_alone(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return those of `names` of linear layers whose weight none but such layers read."""
    layers = {model.get_submodule(name) for name in names}
    places = places_of(model)
    alone = {tensor for tensor, found in places.items() if all(place.holder in layers for place in found)}
    return frozenset(name for name in names if model.get_submodule(name).weight in alone)


class LowPrecision(HalfPrecision):
    """Linear layers multiply by `recipe`, forward and backward; all else runs in a wider precision. Base of the four.

    Every `nn.Linear` is replaced by a layer under the same name with the same parameters, so that optimizers, plugins and
    checkpoints see what they saw. A weight is rounded once for each group of micro-batches, from its first forward pass in
    training to the step; in every pass where a plugin shards it, and in evaluation.

    emulate: False needs a device that multiplies in these formats, and raises ValueError on others; True computes the same
        numbers in a wide dtype on any device, slower than that dtype; "auto" emulates where it must.
    keep: linear layers that stay in the wide dtype, by type, name pattern, place or predicate (see `KeptModules`); None means
        the first and the last one, `Ends()`, () none.
    convert: which of the others gain by it: "auto" leaves wide what is too small to be faster on a GPU, as far as that is
        known; "all" none; "measured" what is no faster when `boost` times it on the device.
    tokens: for "measured" the rows that a layer has in a pass: samples times positions of a micro-batch on one rank; None
        goes with the others.
    weights: "fp32" is the precision `bf16` around these layers; "bf16" is `bf16_naive`, half weights with float32 masters.
    compute_dtype: of everything else, and of what layers take and return; torch.float32 is for emulation with "fp32" weights.
    keep_fp32: modules that compute in float32, with the linear layers in them; None means none, with "bf16" weights BatchNorm.
    forward: the dtype of a layer's output product: "recipe" is low precision, "bf16" and "fp32" are these dtypes.
    input_grad: likewise of the product that makes the gradient of its input.
    weight_grad: likewise of the product that makes the gradient of its weight.

    `keep=(Ends(), Blocks(last=0.15))` keeps the ends and the last blocks wide. Layers whose features are no multiple of what
    the kernels want stay wide too, and so do subclasses of `nn.Linear`; one INFO line names them.

    `boost` checks each kind of layer against a plain one (`self_check.complaint`), and raises RuntimeError where they differ
    by more than the recipe may. Raises ValueError for a model of which no layer can be converted. Backward with
    create_graph=True raises RuntimeError.
    """

    recipe: Recipe
    conversion: LinearConversion
    _gathers = False

    def __init__(
        self,
        *,
        emulate: Emulate = False,
        keep: KeepFP32 | Iterable[KeepFP32] | None = None,
        convert: Convert = "auto",
        tokens: int | None = None,
        weights: Literal["fp32", "bf16"] = "fp32",
        compute_dtype: torch.dtype = torch.bfloat16,
        keep_fp32: KeepFP32 | Iterable[KeepFP32] | None = None,
        forward: Role = "recipe",
        input_grad: Role = "recipe",
        weight_grad: Role = "recipe",
    ) -> None:
        arguments.choice("emulate", emulate, (True, False, "auto"))
        kept = None if keep is None else normalise_keep_fp32(keep, "keep")
        arguments.choice("convert", convert, CONVERT)
        if tokens is not None:
            arguments.count("tokens", tokens, what="of rows")
        if (convert == "measured") != (tokens is not None):
            raise ValueError(
                "convert='measured' times layers for so many tokens=, the rows that a layer has in a pass: samples times "
                f"positions of a micro-batch on one rank; got convert={convert!r}, tokens={tokens}"
            )
        if convert == "measured" and emulate is True:
            raise ValueError("convert='measured' times kernels, and emulate=True runs none; leave one of them out")
        if convert == "measured" and self._gathers:
            raise ValueError(
                "convert='measured' and gather_in_fp8=True: a checkpoint may make layers wide whose weights are gathered in "
                "fp8; leave one of them out"
            )
        arguments.choice("weights", weights, ("fp32", "bf16"))
        arguments.choice("compute_dtype", compute_dtype, (torch.bfloat16, torch.float32))
        wide = compute_dtype == torch.float32
        if wide and weights == "bf16":
            raise ValueError("compute_dtype=torch.float32 goes with weights='fp32'; weights='bf16' compute in bfloat16")
        if wide and keep_fp32 is not None:
            raise ValueError("keep_fp32 says nothing under compute_dtype=torch.float32; leave it out, and pass keep=")
        default = is_batch_norm if weights == "bf16" else ()
        self._keep_fp32 = normalise_keep_fp32(default if keep_fp32 is None else keep_fp32)
        half = torch.bfloat16
        if weights == "bf16":
            self.policy, self.kept = DtypePolicy(param=half, output=torch.float32), MasterOptions()
        elif not wide:
            self.policy = DtypePolicy(compute=half, output=torch.float32)
        self.half_products = HalfProducts(None if wide else half)
        if not hasattr(self, "recipe"):
            raise TypeError(
                f"{type(self).__name__} has no recipe; use one of its subclasses, such as FP8MixedPrecision"
            )
        roles = forward, input_grad, weight_grad
        for name, role in zip(ROLES, roles, strict=True):
            arguments.choice(name, role, ("recipe", "bf16", "fp32"))
        if "recipe" not in roles:
            raise ValueError(
                f"forward={forward!r}, input_grad={input_grad!r} and weight_grad={weight_grad!r} leave no product in "
                f"{self.recipe.name}; use mixed_precision='bf16' or 'fp32'"
            )
        if self._gathers and (forward, input_grad) != ("recipe", "recipe"):
            raise ValueError(
                "gather_in_fp8=True rounds weights on their way between ranks, also for products that are to be wide; leave "
                "forward and input_grad 'recipe', or gather_in_fp8 False"
            )
        self._roles = roles
        self.conversion = LinearConversion(
            self.recipe.in_roles(*roles),
            emulate,
            kept,
            compute_dtype,
            self._gathers,
            type(self).__name__,
            which=convert,
            tokens=tokens,
        )

    def tell_no_rehearsal(self) -> None:
        self.conversion.said = True

    @property
    def switch_refusal(self) -> str | None:
        if self.conversion.which == "measured":
            return "layers are measured when a run begins; name those to stay wide in keep=, and leave convert out"
        return super().switch_refusal

    def shown_options(self) -> dict[str, str]:
        half_weights = self.policy.param is not None
        given = {
            "emulate": (repr(self.conversion.emulate), "False"),
            "keep": (_written(self.conversion.keep), "None"),
            "convert": (repr(self.conversion.which), "'auto'"),
            "tokens": (str(self.conversion.tokens), "None"),
            "weights": ("'bf16'" if half_weights else "'fp32'", "'fp32'"),
            "compute_dtype": (str(self.conversion.dtype), "torch.bfloat16"),
            "keep_fp32": (_written(self._keep_fp32), _written([is_batch_norm] if half_weights else [])),
            **{name: (repr(role), "'recipe'") for name, role in zip(ROLES, self._roles, strict=True)},
        }
        return {name: value for name, (value, default) in given.items() if value != default}

    def keeping(self, names: Iterable[str]) -> HalfPrecision:
        if self.conversion.dtype == torch.float32:
            raise ValueError(
                "keep_fp32 says nothing under compute_dtype=torch.float32; leave layers wide with keep= instead"
            )
        return super().keeping(names)

    def check(self, model: nn.Module) -> None:
        try:
            super().check(model)
        except ValueError as error:
            raise ValueError(f"{error}; under {type(self).__name__} that is weights='bf16'") from None


class FP8MixedPrecision(LowPrecision):
    """fp8 training: linear layers multiply in float8, scaled by the largest number. Three recipes are torchao's.

    recipe: "tensorwise" has one scale a matrix, and e5m2 for gradients; "rowwise" one a row, and e4m3 throughout;
        "rowwise_with_gw_hp" is "rowwise" with the weight gradient in the wide dtype; "blocks" has one for 128 x 128 numbers of
        a weight and 1 x 128 of all else, and e4m3, as DeepSeek-V3 was trained, and its kernels are Hopper's alone.
    power_of_two_scales: scales of "blocks" are rounded up to powers of two, so that dividing by them loses nothing.
    delayed_scaling: scales of "tensorwise" follow from the largest magnitudes of earlier steps, not of the matrix itself; True
        is `DelayedScaling()`, which has options; see below.
    gather_in_fp8: a plugin that shards weights gathers those of converted layers as e4m3, 1 byte a number and not 4 or 2; see
        below.
    fast_accumulation: forward products may sum in the accumulator of the tensor cores alone; see below.

    The other options, `emulate`, `keep`, `convert`, `tokens`, `weights`, `compute_dtype`, `keep_fp32`,
    `forward`, `input_grad` and `weight_grad`, are those of `LowPrecision`, which says what None
    means in them.

    fast_accumulation costs low bits of outputs: on Hopper such a sum has about 14 bits (arXiv 2412.19437), so the more features
    are summed over, the more it loses. Sums of gradients go over to float32 at short intervals, as all do with False. It is a
    permission for the product of a CUDA device, and says nothing on a CPU, to an emulation, or to "blocks", which go over to
    float32 after each block.

    delayed_scaling takes the largest magnitude of the last steps on any rank, of each layer's input, weight and gradient of the
    output; ranks agree once a step, for all layers together. What is above is cut off. The first step scales as without.
    Checkpoints hold the histories, so that a run resumes to the bit, and evaluation leaves them alone. `b.switch` is refused.

    gather_in_fp8 changes not a bit of the products, but where a forward reads such a weight by itself. It is for "tensorwise"
    alone: the others round a weight under other scales in backward than in forward, so that no one byte a number serves both.
    It costs an all-reduce of 4 bytes a weight tensor before every forward pass.
    """

    def __init__(
        self,
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blocks"] = "tensorwise",
        *,
        power_of_two_scales: bool = False,
        delayed_scaling: bool | DelayedScaling = False,
        gather_in_fp8: bool = False,
        fast_accumulation: bool = True,
        emulate: Emulate = False,
        keep: KeepFP32 | Iterable[KeepFP32] | None = None,
        convert: Convert = "auto",
        tokens: int | None = None,
        weights: Literal["fp32", "bf16"] = "fp32",
        compute_dtype: torch.dtype = torch.bfloat16,
        keep_fp32: KeepFP32 | Iterable[KeepFP32] | None = None,
        forward: Role = "recipe",
        input_grad: Role = "recipe",
        weight_grad: Role = "recipe",
    ) -> None:
        self._name = arguments.choice("recipe", recipe, (*FP8_RECIPES, "blocks"))
        self._powers = arguments.flag("power_of_two_scales", power_of_two_scales)
        if self._powers and recipe != "blocks":
            raise ValueError(
                f"power_of_two_scales=True goes with recipe='blocks': scales of rows are powers of two and those of tensors "
                f"are not; leave it False with {recipe!r}"
            )
        if delayed_scaling is True:
            delayed_scaling = DelayedScaling()
        elif delayed_scaling is not False:
            arguments.instance("delayed_scaling", delayed_scaling, DelayedScaling, "True, False or a DelayedScaling")
        self._delayed = delayed_scaling or None
        if self._delayed is not None and (recipe != "tensorwise" or gather_in_fp8):
            raise ValueError(
                f"delayed_scaling goes with recipe='tensorwise', got {recipe!r}"
                if recipe != "tensorwise"
                else "delayed_scaling and gather_in_fp8=True scale a weight differently; leave one of them out"
            )
        self._fast = arguments.flag("fast_accumulation", fast_accumulation)
        if recipe == "blocks":
            self.recipe = fp8_blocks_recipe(power_of_two_scales=power_of_two_scales)
        else:
            self.recipe = FP8_RECIPES[recipe].accumulated_fast() if fast_accumulation else FP8_RECIPES[recipe]
        self._gathers = arguments.flag("gather_in_fp8", gather_in_fp8)
        if self._gathers and recipe != "tensorwise":
            raise ValueError(
                f"gather_in_fp8=True goes with recipe='tensorwise': {recipe!r} rounds a weight under other scales in backward "
                "than in forward, so no one byte a number serves both; leave it False, or use that recipe"
            )
        super().__init__(
            emulate=emulate,
            keep=keep,
            convert=convert,
            tokens=tokens,
            weights=weights,
            compute_dtype=compute_dtype,
            keep_fp32=keep_fp32,
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
        )
        self.conversion.delayed = self._delayed

    @property
    def switch_refusal(self) -> str | None:
        if self._delayed is not None:
            return "delayed scaling follows from the steps of a run that begins with it; leave delayed_scaling out"
        return super().switch_refusal

    def shown_options(self) -> dict[str, str]:
        gathers = {"gather_in_fp8": "True"} if self._gathers else {}
        slow = {} if self._fast else {"fast_accumulation": "False"}
        powers = {"power_of_two_scales": "True"} if self._powers else {}
        if self._delayed is not None:
            powers = {"delayed_scaling": "True" if self._delayed == DelayedScaling() else repr(self._delayed)}
        return {"recipe": repr(self._name), **powers, **gathers, **slow, **super().shown_options()}


class MXFP8MixedPrecision(LowPrecision):
    """MXFP8 training: linear layers multiply in float8 with a power-of-two scale for each 32 numbers.

    Its options, `emulate`, `keep`, `convert`, `tokens`, `weights`, `compute_dtype`, `keep_fp32`, `forward`, `input_grad` and
    `weight_grad`, are those of `LowPrecision`, which says what None means in them.
    """

    recipe = MXFP8


class NVFP4MixedPrecision(LowPrecision):
    """NVFP4 training: linear layers multiply in 4 bits with an e4m3 scale for each 16 numbers.

    stochastic_rounding: of gradients; what is random is a hash of the gradient (`number_formats.noise_of`), so that ranks,
        recomputations and resumed runs agree.
    hadamard: rotate the operands of the weight gradient, so that no outlier takes up its block's scale.

    Its own options are those of NVIDIA's recipe (arXiv 2509.25149), which also keeps some layers wide: see `preset`.
    The other options, `emulate`, `keep`, `convert`, `tokens`, `weights`, `compute_dtype`, `keep_fp32`,
    `forward`, `input_grad` and `weight_grad`, are those of `LowPrecision`, which says what None
    means in them.
    """

    def __init__(
        self,
        *,
        stochastic_rounding: bool = True,
        hadamard: bool = True,
        emulate: Emulate = False,
        keep: KeepFP32 | Iterable[KeepFP32] | None = None,
        convert: Convert = "auto",
        tokens: int | None = None,
        weights: Literal["fp32", "bf16"] = "fp32",
        compute_dtype: torch.dtype = torch.bfloat16,
        keep_fp32: KeepFP32 | Iterable[KeepFP32] | None = None,
        forward: Role = "recipe",
        input_grad: Role = "recipe",
        weight_grad: Role = "recipe",
    ) -> None:
        self._stochastic_rounding = arguments.flag("stochastic_rounding", stochastic_rounding)
        self._hadamard = arguments.flag("hadamard", hadamard)
        self.recipe = nvfp4_recipe(stochastic_rounding=self._stochastic_rounding, hadamard=self._hadamard)
        super().__init__(
            emulate=emulate,
            keep=keep,
            convert=convert,
            tokens=tokens,
            weights=weights,
            compute_dtype=compute_dtype,
            keep_fp32=keep_fp32,
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
        )

    def shown_options(self) -> dict[str, str]:
        devices = {"stochastic_rounding": self._stochastic_rounding, "hadamard": self._hadamard}
        return {**{name: "False" for name, on in devices.items() if not on}, **super().shown_options()}

    @classmethod
    def preset(cls, name: Literal["nvidia-2025"], **options: Any) -> NVFP4MixedPrecision:
        """The options that a publication trained with.

        name: "nvidia-2025": NVIDIA 2025, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149): gradients rounded
            stochastically, the weight gradient rotated, and in bfloat16 the ends and the last 15 % of the blocks.
        options: those of this class; they go before what the publication says.

        That recipe also ends runs with a forward in bfloat16: `preset(name, forward="bf16")` in the last phase of a
        `PrecisionSchedule`.
        """
        arguments.choice("name", name, ("nvidia-2025",))
        return cls(**{"stochastic_rounding": True, "hadamard": True, "keep": (Ends(), Blocks(last=0.15)), **options})


class Int8MixedPrecision(LowPrecision):
    """INT8 training: linear layers multiply whole numbers of 8 bits with a scale for each row, which CPUs run as well.

    Its options, `emulate`, `keep`, `convert`, `tokens`, `weights`, `compute_dtype`, `keep_fp32`, `forward`, `input_grad` and
    `weight_grad`, are those of `LowPrecision`, which says what None means in them.
    """

    recipe = INT8_RECIPE
