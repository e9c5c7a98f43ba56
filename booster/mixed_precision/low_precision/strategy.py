"""Precisions whose linear layers multiply in 4 to 8 bits, inside a model of a wider precision."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from booster.ground import arguments
from booster.ground.torch_internals import compiled_like
from booster.masters.options import MasterOptions
from booster.masters.packing import States
from booster.mixed_precision.amp import BF16MixedPrecision
from booster.mixed_precision.base import FP32, MixedPrecision
from booster.mixed_precision.keep_fp32 import KeepFP32, KeptModules, normalise_keep_fp32
from booster.mixed_precision.low_precision.kernels import for_device, lacks
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.recipes import FP8_RECIPES, INT8_RECIPE, MXFP8, Recipe, nvfp4_recipe
from booster.mixed_precision.low_precision.self_check import Forward, complaint
from booster.mixed_precision.naive import BF16NaiveMixedPrecision
from booster.mixed_precision.policy import DtypePolicy, Placement
from booster.model.modules import bare
from booster.model.tied import places_of
from booster.update.base import Job, Update

_logger = logging.getLogger(__name__)

Emulate = bool | Literal["auto"]


class LowPrecision(MixedPrecision):
    """Linear layers multiply by `recipe`, forward and backward; all else runs in a wider precision. Base of the four.

    Every `nn.Linear` is replaced by a layer under the same name with the same parameters, so that optimizers, plugins and
    checkpoints see what they saw. Weights are rounded anew in every pass.

    emulate: False needs a device that multiplies in these formats, and raises ValueError on others; True computes the same
    numbers in a wide dtype on any device, slower than that dtype, to rehearse; "auto" rehearses where it must.
    keep: linear layers that stay in the wide dtype, by type, name pattern or predicate (see `KeptModules`); None means the
    first and the last one, () none. Layers whose features are no multiple of what the kernels want stay wide too, and so do
    subclasses of `nn.Linear`; one INFO line names them.
    weights: "fp32" is the precision `bf16` around these layers, "bf16" `bf16_naive`, whose masters the optimizer steps.
    compute_dtype: of everything else, and of what layers take and return; torch.float32 is for rehearsals with "fp32" weights.
    keep_fp32: modules that compute in float32, with the linear layers in them, as in these; None means their default.

    `boost` checks each kind of layer against a plain one (`self_check.complaint`), and raises RuntimeError where they differ
    by more than the recipe may. Raises ValueError for a model of which no layer can be converted. Backward with
    create_graph=True raises RuntimeError.
    """

    recipe: Recipe
    _gathers = False

    def __init__(
        self,
        *,
        emulate: Emulate = False,
        keep: KeepFP32 | Iterable[KeepFP32] | None = None,
        weights: Literal["fp32", "bf16"] = "fp32",
        compute_dtype: torch.dtype = torch.bfloat16,
        keep_fp32: KeepFP32 | Iterable[KeepFP32] | None = None,
    ) -> None:
        self._emulate = arguments.choice("emulate", emulate, (True, False, "auto"))
        self._keep = None if keep is None else normalise_keep_fp32(keep, "keep")
        arguments.choice("weights", weights, ("fp32", "bf16"))
        arguments.choice("compute_dtype", compute_dtype, (torch.bfloat16, torch.float32))
        if compute_dtype == torch.float32 and weights == "bf16":
            raise ValueError("compute_dtype=torch.float32 goes with weights='fp32'; weights='bf16' compute in bfloat16")
        if compute_dtype == torch.float32 and keep_fp32 is not None:
            raise ValueError("keep_fp32 says nothing under compute_dtype=torch.float32; leave it out, and pass keep=")
        options: dict[str, Any] = {} if keep_fp32 is None else {"keep_fp32": keep_fp32}
        self._keep_fp32 = normalise_keep_fp32(() if keep_fp32 is None else keep_fp32)
        self._dtype = compute_dtype
        self._wide: MixedPrecision
        if weights == "bf16":
            self._wide = BF16NaiveMixedPrecision(**options)
        else:
            self._wide = FP32() if compute_dtype == torch.float32 else BF16MixedPrecision(**options)
        self.half_products = self._wide.half_products
        self._said = False
        if not hasattr(self, "recipe"):
            raise TypeError(
                f"{type(self).__name__} has no recipe; use one of its subclasses, such as FP8MixedPrecision"
            )

    def shown_options(self) -> dict[str, str]:
        weights = "bf16" if isinstance(self._wide, BF16NaiveMixedPrecision) else "fp32"
        given = {
            "emulate": (repr(self._emulate), "False"),
            "keep": (_written(self._keep), "None"),
            "weights": (repr(weights), "'fp32'"),
            "compute_dtype": (str(self._dtype), "torch.bfloat16"),
            "keep_fp32": (_written(self._keep_fp32), "()"),
        }
        return {name: value for name, (value, default) in given.items() if value != default}

    # ---- the wider precision ----

    @property
    def policy(self) -> DtypePolicy:  # type: ignore[override]
        return self._wide.policy

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self._wide.input_dtype

    def bind(self, device: torch.device) -> None:
        super().bind(device)
        self._wide.bind(device)
        self._runs()

    def keeping(self, names: Iterable[str]) -> LowPrecision:
        if self._dtype == torch.float32:
            raise ValueError(
                "keep_fp32 says nothing under compute_dtype=torch.float32; leave layers wide with keep= instead"
            )
        clone, names = copy.deepcopy(self), tuple(names)
        clone._device, clone._keep_fp32 = None, (*self._keep_fp32, *names)
        clone._wide = self._wide.keeping(names)
        clone.half_products = clone._wide.half_products
        return clone

    @property
    def is_rehearsal(self) -> bool:
        return not self._runs()

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._wide.forward_context()

    def backward_context(self) -> AbstractContextManager[Any]:
        return self._wide.backward_context()

    def check(self, model: nn.Module) -> None:
        try:
            self._wide.check(model)
        except ValueError as error:
            raise ValueError(f"{error}; under {type(self).__name__} that is weights='bf16'") from None

    def keep_weights(self, model: nn.Module, placement: Placement) -> dict[str, torch.Tensor]:
        return self._wide.keep_weights(model, placement)

    def may_fuse(self, optimizer: Optimizer) -> bool:
        return self._wide.may_fuse(optimizer)

    def may_compile(self, optimizer: Optimizer) -> bool:
        return self._wide.may_compile(optimizer)

    def make_update(
        self,
        optimizer: Optimizer,
        names: Mapping[torch.Tensor, str],
        weights: Mapping[torch.Tensor, torch.Tensor],
        *,
        compiled: bool,
    ) -> Callable[[Job], Update] | None:
        return self._wide.make_update(optimizer, names, weights, compiled=compiled)

    @property
    def has_own_update(self) -> bool:
        return self._wide.has_own_update

    def master_options_on(self, device: torch.device) -> MasterOptions | None:
        return self._wide.master_options_on(device)

    @property
    def states(self) -> States:
        return self._wide.states

    def _keeping_states(self, states: States) -> LowPrecision:
        clone = copy.copy(self)
        clone._wide = self._wide.with_states(states)
        return clone

    @property
    def offloads_states(self) -> bool:
        return self._wide.offloads_states

    def _offloading_states(self) -> LowPrecision:
        clone = copy.copy(self)
        clone._wide = self._wide.offloading_states()
        return clone

    def make_released_update(
        self,
        optimizer: Optimizer,
        names: Mapping[torch.Tensor, str],
        weights: Mapping[torch.Tensor, torch.Tensor],
    ) -> Callable[[Job], Update] | None:
        return self._wide.make_released_update(optimizer, names, weights)

    @property
    def release_refusal(self) -> str | None:
        return self._wide.release_refusal

    # ---- the layers ----

    def policy_for(self, model: nn.Module) -> DtypePolicy:
        self._runs()
        names, _ = self._choose(bare(model))  # raises before anything is changed
        policy = self._wide.policy_for(model)
        return dataclasses.replace(policy, fp8_weights=_read_alone(bare(model), names)) if self._gathers else policy

    def convert(self, model: nn.Module) -> nn.Module:
        inner, kernels = bare(model), self._runs()
        names, wide = self._choose(inner)
        recipe, layers = for_device(self.recipe, self.device), {}
        for name in names:
            old = inner.get_submodule(name)
            layers[id(old)] = LowPrecisionLinear.of(old, recipe, kernels=kernels)  # type: ignore[arg-type]
        self._check_layers(
            {name: layers[id(inner.get_submodule(name))] for name in names}, partial(compiled_like, model)
        )
        for name, module in [*inner.named_modules(remove_duplicate=False)]:
            if id(module) in layers:
                inner.set_submodule(name, layers[id(module)])
        self._report(inner, len(names), wide, kernels)
        return self._wide.convert(model)

    def _runs(self) -> bool:
        """Whether kernels run, and not the emulation; raises ValueError where neither may."""
        if self._emulate is True:
            return False
        missing = lacks(self.recipe, self.device)
        if missing and not self._emulate:
            raise ValueError(
                f"{missing}; {type(self).__name__}(emulate=True) computes the same numbers on any device, as a slow rehearsal"
            )
        if not missing and self._dtype == torch.float32 and self.recipe.kernel != "int8":
            raise ValueError(
                f"compute_dtype=torch.float32 is for rehearsals: the kernels of {self.recipe.name} return bfloat16; pass "
                "emulate=True with it"
            )
        return not missing

    def _choose(self, model: nn.Module) -> tuple[list[str], dict[str, str]]:
        """Names of the layers to convert, and of the linear layers that are not, with the reason."""
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        kept = KeptModules(model, self._keep or (), option="keep")
        in_fp32 = KeptModules(model, self._keep_fp32)
        ends = {next(iter(linears)): "the first", next(reversed(linears)): "the last"} if linears else {}
        multiple, names, wide = self.recipe.multiple, [], {}
        for name, module in linears.items():
            if not name:
                wide[name] = "no module holds it: put it into nn.Sequential"
            elif name in ends and self._keep is None:
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
            else:
                names.append(name)
        if not names:
            reasons = "; ".join(f"{_shown(name)} ({reason})" for name, reason in [*wide.items()][:10])
            raise ValueError(
                f"{self.recipe.name} finds no linear layer to convert in {type(model).__name__}"
                f"{f'; wide stay: {reasons}' if reasons else ', which has none'}. Use mixed_precision='bf16' for it, or keep= "
                "to choose what stays wide, () for nothing"
            )
        return names, wide

    def _check_layers(
        self, layers: Mapping[str, LowPrecisionLinear], compiled: Callable[[Forward], Forward | None]
    ) -> None:
        """Check one layer of each shape: the data of a check depends on nothing else."""
        shapes: dict[tuple[Any, ...], list[str]] = {}
        for name, layer in layers.items():
            shapes.setdefault((layer.in_features, layer.out_features, layer.bias is None), []).append(name)
        for alike in shapes.values():
            wrong = complaint(layers[alike[0]], self.device, self._dtype, compiled)
            if wrong:
                more = f" and {len(alike) - 1} of its shape" if len(alike) > 1 else ""
                raise RuntimeError(
                    f"{_shown(alike[0])!r}{more} would not train right in {self.recipe.name} on {self.device}: {wrong}. Keep "
                    "it wide with keep=, and report it; it is a defect of this library or of torch's kernels"
                )

    def _report(self, model: nn.Module, count: int, wide: Mapping[str, str], kernels: bool) -> None:
        listed = ", ".join(f"{_shown(name)} ({reason})" for name, reason in wide.items())
        _logger.info(
            "%s: %d linear layers of %s converted; wide stay: %s",
            self.recipe.name,
            count,
            type(model).__name__,
            listed or "none",
        )
        if not (kernels or self._said):
            _logger.warning(
                "%s is emulated on %s: a rehearsal of its numbers, slower than the wide dtype",
                self.recipe.name,
                self.device,
            )
            self._said = True


def _shown(name: str) -> str:
    """Return the name of a module for messages; that of the model itself is empty."""
    return name or "the model itself"


def _written(selected: Iterable[KeepFP32] | None) -> str:
    """What selects modules, as it is written; of a type or a function its name."""
    if selected is None:
        return "None"
    names = [repr(each) if isinstance(each, str) else getattr(each, "__name__", repr(each)) for each in selected]
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def _read_alone(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return those of `names` of linear layers whose weight none but such layers read."""
    layers = {model.get_submodule(name) for name in names}
    places = places_of(model)
    alone = {tensor for tensor, found in places.items() if all(place.holder in layers for place in found)}
    return frozenset(name for name in names if model.get_submodule(name).weight in alone)


class FP8MixedPrecision(LowPrecision):
    """float8 products. recipe: "tensorwise", one scale a matrix, e5m2 for gradients; "rowwise", one a row, e4m3 throughout;
    "rowwise_with_gw_hp", rowwise with the weight gradient in the wide dtype. Those of torchao. Other options: `LowPrecision`.

    gather_in_fp8: a plugin that shards weights gathers those of converted layers as e4m3, 1 byte a number and not 4 or 2,
    and not a bit of the products changes, but where a forward reads such a weight by itself. Of "tensorwise" alone: the others
    round a weight under other scales in backward than in forward, so that no one byte a number serves both. Costs an
    all-reduce of 4 bytes a weight tensor before every forward pass.
    """

    def __init__(
        self,
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        *,
        gather_in_fp8: bool = False,
        emulate: Emulate = False,
        keep: KeepFP32 | Iterable[KeepFP32] | None = None,
        weights: Literal["fp32", "bf16"] = "fp32",
        compute_dtype: torch.dtype = torch.bfloat16,
        keep_fp32: KeepFP32 | Iterable[KeepFP32] | None = None,
    ) -> None:
        self.recipe = FP8_RECIPES[arguments.choice("recipe", recipe, tuple(FP8_RECIPES))]
        self._gathers = arguments.flag("gather_in_fp8", gather_in_fp8)
        if self._gathers and recipe != "tensorwise":
            raise ValueError(
                f"gather_in_fp8=True goes with recipe='tensorwise': {recipe!r} rounds a weight under other scales in backward "
                "than in forward, so no one byte a number serves both; leave it False, or use that recipe"
            )
        super().__init__(emulate=emulate, keep=keep, weights=weights, compute_dtype=compute_dtype, keep_fp32=keep_fp32)

    def shown_options(self) -> dict[str, str]:
        recipe = next(name for name, recipe in FP8_RECIPES.items() if recipe is self.recipe)
        gathers = {"gather_in_fp8": "True"} if self._gathers else {}
        return {"recipe": repr(recipe), **gathers, **super().shown_options()}


class MXFP8MixedPrecision(LowPrecision):
    """float8 products with a power-of-two scale for each 32 numbers. Options: `LowPrecision`."""

    recipe = MXFP8


class NVFP4MixedPrecision(LowPrecision):
    """4-bit products with an e4m3 scale for each 16 numbers. Other options: `LowPrecision`.

    stochastic_rounding: of gradients; what is random is a hash of the gradient (`number_formats.noise_of`), so that ranks,
    recomputations and resumed runs agree. hadamard: rotate the operands of the weight gradient, so that no outlier takes up
    its block's scale. Both as NVIDIA published the recipe (arXiv 2509.25149), which also keeps some layers wide: see keep.
    """

    def __init__(
        self,
        *,
        stochastic_rounding: bool = True,
        hadamard: bool = True,
        emulate: Emulate = False,
        keep: KeepFP32 | Iterable[KeepFP32] | None = None,
        weights: Literal["fp32", "bf16"] = "fp32",
        compute_dtype: torch.dtype = torch.bfloat16,
        keep_fp32: KeepFP32 | Iterable[KeepFP32] | None = None,
    ) -> None:
        self._stochastic_rounding = arguments.flag("stochastic_rounding", stochastic_rounding)
        self._hadamard = arguments.flag("hadamard", hadamard)
        self.recipe = nvfp4_recipe(stochastic_rounding=self._stochastic_rounding, hadamard=self._hadamard)
        super().__init__(emulate=emulate, keep=keep, weights=weights, compute_dtype=compute_dtype, keep_fp32=keep_fp32)

    def shown_options(self) -> dict[str, str]:
        devices = {"stochastic_rounding": self._stochastic_rounding, "hadamard": self._hadamard}
        return {**{name: "False" for name, on in devices.items() if not on}, **super().shown_options()}


class Int8MixedPrecision(LowPrecision):
    """8-bit whole-number products with a scale for each row, which CPUs run as well. Options: `LowPrecision`."""

    recipe = INT8_RECIPE
