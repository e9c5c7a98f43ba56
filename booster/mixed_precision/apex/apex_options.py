"""The options of apex's `initialize`: four levels, what a user overrides, and what contradicts a level.

And what the levels do to optimizers that surprises users: refused where apex refuses, otherwise one WARNING.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.mixed_precision.policy import DtypePolicy
from booster.model.modules import bare
from booster.tensors.trees import HALF_DTYPES

_DOUBT = "If these options are meant, choose the level that has them: the defaults of each are in `LEVELS`."


@dataclass(frozen=True)
class ApexOptions:
    """What a level and its overrides come to; `resolve` makes it.

    cast_model_type: dtype of parameters and inputs; None or False leaves both. loss_scale: "dynamic" or a number.
    """

    opt_level: str
    cast_model_type: torch.dtype | bool | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str

    @property
    def model_dtype(self) -> torch.dtype | None:
        """The dtype that parameters and inputs are cast to, or None."""
        return self.cast_model_type if isinstance(self.cast_model_type, torch.dtype) else None

    @property
    def dynamic(self) -> bool:
        return self.loss_scale == "dynamic"

    def report(self) -> str:
        """The table that apex prints, by its level and after overrides."""
        return "\n".join(
            [
                f"Selected optimization level {_BRIEFS[self.opt_level]}",
                "Defaults for this optimization level are:",
                *LEVELS[self.opt_level]._rows(),
                "Processing user overrides (additional kwargs that are not None)...",
                "After processing overrides, optimization options are:",
                *self._rows(),
            ]
        )

    def _rows(self) -> list[str]:
        return [f"{name:22} : {value}" for name, value in {"enabled": True, **asdict(self)}.items()]


LEVELS = {
    "O0": ApexOptions("O0", torch.float32, False, None, False, 1.0),
    "O1": ApexOptions("O1", None, True, None, None, "dynamic"),
    "O2": ApexOptions("O2", torch.float16, False, True, True, "dynamic"),
    "O3": ApexOptions("O3", torch.float16, False, False, False, 1.0),
}
_BRIEFS = {
    "O0": "O0:  Pure FP32 training.\n",
    "O1": "O1:  Insert automatic casts around Pytorch functions and Tensor methods.\n",
    "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n",
    "O3": "O3:  Pure FP16 training.",
}


def resolve(
    opt_level: str,
    *,
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
) -> ApexOptions:
    """The options of `opt_level` with those overrides that are not None.

    Raises as apex does, in its order: RuntimeError for disabled cuDNN, an unknown level, and an override that a level
    excludes; AssertionError for a keep_batchnorm_fp32 that is no bool and not "True" or "False"; ValueError for a
    loss_scale that is neither "dynamic" nor a finite number above 0, or a string of one.
    """
    if not torch.backends.cudnn.enabled:
        raise RuntimeError("Amp requires torch.backends.cudnn.enabled = True")
    options = LEVELS.get(opt_level) if isinstance(opt_level, str) else None
    if options is None:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'. Note that in `O0`, `O1`, etc., "
            "the prefix O is the letter O, not the number zero. Write opt_level='O1'."
        )
    if cast_model_type is not None:
        options = replace(options, cast_model_type=_cast_model_type(opt_level, cast_model_type))
    if patch_torch_functions is not None:
        # Texts and order of checks are apex's own: scripts and their tests look for them.
        if opt_level != "O1" and patch_torch_functions is True:
            _refuse("Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'.")
        patch_torch_functions = arguments.flag("patch_torch_functions", patch_torch_functions, also="None")
        options = replace(options, patch_torch_functions=patch_torch_functions)
    if keep_batchnorm_fp32 is not None:
        options = replace(options, keep_batchnorm_fp32=_keep_batchnorm(opt_level, keep_batchnorm_fp32))
    if master_weights is not None:
        if opt_level == "O1":
            _refuse(
                "It doesn't make sense to use master_weights with O1. With O1, your model weights themselves should be "
                f"FP32. master_weights was {master_weights}"
            )
        options = replace(options, master_weights=arguments.flag("master_weights", master_weights, also="None"))
    if loss_scale is not None:
        options = replace(options, loss_scale=_loss_scale(loss_scale))
    return options


def _cast_model_type(opt_level: str, value: Any) -> torch.dtype | bool:
    if opt_level == "O1" and value is not False and value is not torch.float32:
        _refuse(
            "O1 inserts casts around Torch functions rather than model weights, so with O1, the model weights themselves "
            "should remain FP32. If you wish to cast the model to a different type, use opt_level='O2' or 'O3'. "
            f"cast_model_type was {value}"
        )
    if value is not False and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"cast_model_type={value!r} is not legal; pass a floating torch dtype, False or None")
    return value


def _keep_batchnorm(opt_level: str, value: Any) -> bool:
    if opt_level == "O1":
        _refuse(
            "With opt_level O1, batchnorm functions are automatically patched to run in FP32, so keep_batchnorm_fp32 "
            f"should be None. keep_batchnorm_fp32 was {value}"
        )
    if not isinstance(value, (bool, str)) or value not in (True, False, "True", "False"):
        # Apex asserts here, and scripts that catch it would miss a ValueError.
        raise AssertionError(
            "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, found "
            f"keep_batchnorm_fp32={value}"
        )
    return value in (True, "True")


def _loss_scale(value: Any) -> float | str:
    if isinstance(value, str) and value == "dynamic":
        return "dynamic"
    try:
        number = float(value if isinstance(value, str) else arguments.number("loss_scale", value, infinite=True))
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"loss_scale={arguments.shown(value)} is not legal; pass 'dynamic', a number, or a string of one"
        ) from None
    if not 0 < number < math.inf:
        raise ValueError(
            f"loss_scale={value!r} is not legal; a static one must be a finite number above 0, or pass 'dynamic'"
        )
    return number


def _refuse(reason: str) -> None:
    raise RuntimeError(f"{reason} {_DOUBT}")


def check_rest(
    cast_model_outputs: Any, num_losses: Any, verbosity: Any, minimum: Any, maximum: Any, window: Any, backend: Any
) -> None:
    """Raise TypeError or ValueError for an argument that apex does not look at, or does not have, and that is not legal."""
    if cast_model_outputs is not None:
        arguments.floating_dtype("cast_model_outputs", cast_model_outputs)
    arguments.count("num_losses", num_losses)
    arguments.count("verbosity", verbosity, least=-(2**31))
    if minimum is not None:
        arguments.number("min_loss_scale", minimum, least=0, also="None")
    arguments.number("max_loss_scale", maximum, above=0, infinite=True, fix="math.inf is no bound")
    arguments.count("scale_window", window)
    arguments.choice("backend", backend, ("auto", "native", "apex"))


_logger = logging.getLogger(__name__)

_ROUNDS_TO_ZERO = 2.0**-25  # half of float16's smallest number
_AS_THEY_ARE: Mapping[torch.Tensor, torch.dtype] = MappingProxyType({})


def warn_of_static_scale(options: ApexOptions) -> None:
    """One WARNING for half precision, or a scaled loss, with gradients that are not checked."""
    half = options.patch_torch_functions or options.model_dtype == torch.float16
    if not options.dynamic and (half or options.loss_scale != 1.0):
        _logger.warning(
            "loss_scale=%s is static: as in apex, gradients are not checked, and an inf or NaN in them reaches the weights. "
            "loss_scale='dynamic' skips such steps",
            options.loss_scale,
        )


def planned_dtypes(models: Iterable[tuple[nn.Module, DtypePolicy]]) -> dict[torch.Tensor, torch.dtype]:
    """The dtype that each floating parameter will have once its model is cast by its policy."""
    planned: dict[torch.Tensor, torch.dtype] = {}
    for model, policy in models:
        inner, dtype = bare(model), policy.store or policy.param
        # By parameter: a tied weight that any kept module has stays float32 everywhere.
        kept = {param for name in policy.keep_fp32 for param in inner.get_submodule(name).parameters()}
        for param in inner.parameters():
            if dtype is not None and param.is_floating_point():
                planned[param] = torch.float32 if param in kept else dtype
    return planned


def check_dtypes(optimizer: Optimizer, planned: Mapping[torch.Tensor, torch.dtype] = _AS_THEY_ARE) -> None:
    """Raise TypeError for trainable parameters that are neither float16 nor float32, or are not `planned` to be."""
    params = (param for group in optimizer.param_groups for param in group["params"] if param.requires_grad)
    dtypes = {planned.get(param, param.dtype) for param in params}
    other = {str(dtype) for dtype in dtypes - {torch.float16, torch.float32}}
    if other:
        raise TypeError(
            "Optimizer's parameters must be either torch.float16 or torch.float32 under a loss scale or with master weights. "
            f"Received {sorted(other)}"
        )


def check_fused(optimizer: Optimizer, planned: Mapping[torch.Tensor, torch.dtype], device: torch.device) -> None:
    """Raise ValueError for an explicit fused kernel that does not step half-precision parameters on `device`."""
    for group in optimizer.param_groups:
        half = any(planned.get(param, param.dtype) in HALF_DTYPES for param in group["params"])
        if half and group.get("fused") and isinstance(optimizer, torch.optim.SGD) and device.type == "cpu":
            raise ValueError(
                "SGD(fused=True) leaves float16 parameters on CPU as they are, without an error, so this model would not "
                "train; leave fused out, or use opt_level='O2'"
            )


def holds_half(optimizer: Optimizer) -> bool:
    """Whether any parameter is in half precision."""
    return any(p.dtype in HALF_DTYPES for group in optimizer.param_groups for p in group["params"])


def match_dtypes(optimizer: Optimizer) -> None:
    """Cast state that was made before the parameters were; one WARNING where half precision cannot step them."""
    if not holds_half(optimizer):
        return
    # `load_state_dict` casts states to the dtype of their parameters, which is what has changed.
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
    eps = [group["eps"] for group in optimizer.param_groups if isinstance(group.get("eps"), float)]
    if any(value <= _ROUNDS_TO_ZERO for value in eps):
        _logger.warning(
            "%s steps float16 parameters without masters, where its eps=%g rounds to zero and it divides by zero: weights "
            "become NaN, as with apex. Use opt_level='O2', or master_weights=True",
            type(optimizer).__name__,
            min(eps),
        )
