"""Dtypes as data: what a precision asks of a plugin, without either knowing the other's class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Which dtype each part of a training step uses; None leaves that part as it is.

    param: what forward and backward read.
    store: parameters at rest; None means float32 where the plugin shards, otherwise `param`.
    reduce: dtype of the gradient collectives; None means the dtype of the parameters.
    output: floating dtype of what the model returns, and so of what the criterion receives.
    fp32_modules: names of modules that keep float32 parameters and compute in float32.
    """

    param: torch.dtype | None = None
    store: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    fp32_modules: frozenset[str] = frozenset()


def cast_parameters(module: nn.Module, policy: DtypePolicy) -> nn.Module:
    """Cast the floating parameters and buffers of `module` to the dtype in which `policy` stores them, in place.

    Modules named in `policy.fp32_modules` become float32. Does nothing where the policy names no dtype. Returns `module`.
    """
    dtype = policy.store or policy.param
    if dtype is not None:
        module.to(dtype)
        for name in policy.fp32_modules:
            module.get_submodule(name).to(torch.float32)
    return module
