"""What apex's levels do to optimizers that surprises: refused where apex refuses, otherwise said once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import Optimizer

from booster.casting import HALF_DTYPES
from booster.mixed_precision.apex.options import ApexOptions
from booster.mixed_precision.policy import DtypePolicy
from booster.modules import bare

_logger = logging.getLogger(__name__)

_ROUNDS_TO_ZERO = 2.0**-25  # half of float16's smallest number
_AS_THEY_ARE: Mapping[torch.Tensor, torch.dtype] = MappingProxyType({})


def warn_of_static_scale(options: ApexOptions) -> None:
    """One WARNING for half precision, or a scaled loss, whose gradients nobody checks."""
    half = options.patch_torch_functions or options.model_dtype == torch.float16
    if not options.dynamic and (half or options.loss_scale != 1.0):
        _logger.warning(
            "loss_scale=%s is static: as in apex, gradients are not checked, and an inf or NaN in them reaches the weights. "
            "loss_scale='dynamic' skips such steps",
            options.loss_scale,
        )


def planned_dtypes(models: Iterable[tuple[nn.Module, DtypePolicy]]) -> dict[torch.Tensor, torch.dtype]:
    """The dtype that each floating parameter will have once its model is cast as the policy beside it says."""
    planned: dict[torch.Tensor, torch.dtype] = {}
    for model, policy in models:
        inner, dtype = bare(model), policy.store or policy.param
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


def follow_dtypes(optimizer: Optimizer) -> None:
    """Cast state that was made before the parameters were; one WARNING where half precision cannot step them."""
    if not holds_half(optimizer):
        return
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
