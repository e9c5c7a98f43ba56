"""Precisions with linear layers that multiply in 4 to 8 bits, inside a model of a higher precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from booster.common import arguments
from booster.masters.formats import MasterOptions
from booster.mixed_precision.half import HalfPrecision
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.mixed_precision.keep_fp32 import Blocks, Ends, KeepFP32, is_batch_norm, normalise_keep_fp32
from booster.mixed_precision.low_precision.conversion import CONVERT, Convert, Emulate, LinearConversion
from booster.mixed_precision.low_precision.linear import DelayedScaling
from booster.mixed_precision.low_precision.recipes import (
    FP8_RECIPES,
    GEMMS,
    INT8_RECIPE,
    MXFP8,
    GemmDtype,
    Recipe,
    fp8_blocks_recipe,
    nvfp4_recipe,
)
from booster.mixed_precision.policy import DtypePolicy


def _written(selected: Iterable[KeepFP32] | None) -> str:
    """What selects modules, as it is written; of a type or a function its name."""
    if selected is None:
        return "None"
    names = [repr(each) if isinstance(each, str) else str(getattr(each, "__name__", each)) for each in selected]
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


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

    `keep=(Ends(), Blocks(last=0.15))` keeps the ends and the last blocks wide. Layers with features that are not a multiple of
    what kernels want stay wide too, and so do subclasses of `nn.Linear`; one INFO line names them.

    `boost` checks each kind of layer against a plain one (`conversion.complaint`), and raises RuntimeError where they differ
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
        forward: GemmDtype = "recipe",
        input_grad: GemmDtype = "recipe",
        weight_grad: GemmDtype = "recipe",
    ) -> None:
        arguments.choice("emulate", emulate, (True, False, "auto"))
        kept = None if keep is None else normalise_keep_fp32(keep, "keep")
        arguments.choice("convert", convert, CONVERT)
        if tokens is not None:
            arguments.count("tokens", tokens, what="of rows")
        # Times of a layer depend on its rows, and nothing else says how many there will be.
        if (convert == "measured") != (tokens is not None):
            raise ValueError(
                "convert='measured' times layers for so many tokens=, the rows that a layer has in a pass: samples times "
                f"positions of a micro-batch on one rank; got convert={convert!r}, tokens={tokens}"
            )
        if convert == "measured" and emulate is True:
            raise ValueError("convert='measured' times kernels, and emulate=True runs none; leave one of them out")
        if convert == "measured" and self._gathers:
            raise ValueError(
                "convert='measured' and gather_in_fp8=True: a checkpoint may make layers wide, and their weights are gathered "
                "in fp8; leave one of them out"
            )
        arguments.choice("weights", weights, ("fp32", "bf16"))
        arguments.choice("compute_dtype", compute_dtype, (torch.bfloat16, torch.float32))
        wide = compute_dtype == torch.float32
        if wide and weights == "bf16":
            raise ValueError("compute_dtype=torch.float32 goes with weights='fp32'; weights='bf16' compute in bfloat16")
        if wide and keep_fp32 is not None:
            raise ValueError("keep_fp32 says nothing under compute_dtype=torch.float32; leave it out, and pass keep=")
        # Under autocast BatchNorm has float32 weights and statistics anyway.
        default = is_batch_norm if weights == "bf16" else ()
        self._keep_fp32 = normalise_keep_fp32(default if keep_fp32 is None else keep_fp32)
        half = torch.bfloat16
        if weights == "bf16":
            self.policy, self.kept = DtypePolicy(param=half, output=torch.float32), MasterOptions()
        elif not wide:
            self.policy = DtypePolicy(compute=half, output=torch.float32)
        self.half_products = HalfProducts(None if wide else half)
        # LowPrecision itself is public, as a base for precisions of users.
        if not hasattr(self, "recipe"):
            raise TypeError(
                f"{type(self).__name__} has no recipe; use one of its subclasses, such as FP8MixedPrecision"
            )
        roles = forward, input_grad, weight_grad
        for name, role in zip(GEMMS, roles, strict=True):
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
            self.recipe.with_dtypes(*roles),
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
            **{name: (repr(role), "'recipe'") for name, role in zip(GEMMS, self._roles, strict=True)},
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
        forward: GemmDtype = "recipe",
        input_grad: GemmDtype = "recipe",
        weight_grad: GemmDtype = "recipe",
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
        # False and None are one from here on.
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
            # Only for forward products: gradients are summed over more terms, and reach the weights.
            self.recipe = FP8_RECIPES[recipe].with_fast_accumulation() if fast_accumulation else FP8_RECIPES[recipe]
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

    stochastic_rounding: of gradients; what is random is a hash of the gradient (`number_format.noise_of`), so that ranks,
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
        forward: GemmDtype = "recipe",
        input_grad: GemmDtype = "recipe",
        weight_grad: GemmDtype = "recipe",
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
