"""What apex's levels do to optimizers that surprises: refused where apex refuses, otherwise said once."""

from __future__ import annotations

import logging

import torch
from torch.optim import Optimizer

from booster.casting import HALF_DTYPES
from booster.mixed_precision.apex.options import ApexOptions

_logger = logging.getLogger(__name__)

_ROUNDS_TO_ZERO = 2.0**-25  # half of float16's smallest number


def warn_of_static_scale(options: ApexOptions) -> None:
    """One WARNING for half precision, or a scaled loss, whose gradients nobody checks."""
    half = options.patch_torch_functions or options.model_dtype == torch.float16
    if not options.dynamic and (half or options.loss_scale != 1.0):
        _logger.warning(
            "loss_scale=%s is static: as in apex, gradients are not checked, and an inf or NaN in them reaches the weights. "
            "loss_scale='dynamic' skips such steps",
            options.loss_scale,
        )


def check_dtypes(optimizer: Optimizer) -> None:
    """Raise TypeError for trainable parameters that are neither float16 nor float32."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    other = {str(p.dtype) for p in params if p.requires_grad and p.dtype not in (torch.float16, torch.float32)}
    if other:
        raise TypeError(
            "Optimizer's parameters must be either torch.float16 or torch.float32 under a loss scale or with master weights. "
            f"Received {sorted(other)}"
        )


def holds_half(optimizer: Optimizer) -> bool:
    """Whether any parameter is in half precision."""
    return any(p.dtype in HALF_DTYPES for group in optimizer.param_groups for p in group["params"])


def follow_dtypes(optimizer: Optimizer) -> None:
    """Cast state that was made before the parameters were; one WARNING where half precision cannot step them."""
    if not holds_half(optimizer):
        return
    for group in optimizer.param_groups:
        if group.get("fused") and isinstance(optimizer, torch.optim.SGD) and group["params"][0].device.type == "cpu":
            raise ValueError(
                "SGD(fused=True) leaves float16 parameters on CPU as they are, without an error, so this model would not "
                "train; leave fused out, or use opt_level='O2'"
            )
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
