"""Torch's fused optimizers: switching to them where that is sound, and keeping to the implementation that there is."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from booster.common.torch_internals.optimizer_internals import set_fused_flags, unhooked
from booster.common.torch_internals.tensor_internals import has_kernel
from booster.tensors.flat import is_dense
from booster.tensors.trees import HALF_DTYPES
from booster.update.application import KERNELS, honours_grad_scale

_logger = logging.getLogger(__name__)

_CHOICES = ("foreach", "fused")


def has_sound_kernel(optimizer: Optimizer) -> bool:
    """Return whether torch's fused kernel can be trusted with the parameters of `optimizer` as they are."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # None steps parameters with elements that do not fill one stretch of memory, such as `nn.Parameter(weight[:, :3])`.
    if not all(map(is_dense, params)):
        return False
    # That of SGD on CPU leaves most elements of float16 and bfloat16 parameters as they were (torch 2.13), and says nothing.
    return type(optimizer) is not SGD or not any(p.device.type == "cpu" and p.dtype in HALF_DTYPES for p in params)


def switch_to_fused(optimizer: Optimizer, model: nn.Module | None = None) -> bool:
    """Make a torch Adam, AdamW, SGD or Adagrad use its fused kernel, state included; returns whether it does now.

    Left alone: other classes and subclasses, an explicit foreach, fused, capturable or differentiable, SGD with dampened
    momentum (see `start_late_momentum`), devices without the kernel, parameters that are not floating point or get sparse
    gradients (`model` tells).
    """
    if not _can_switch(optimizer, model):
        return False
    optimizer.defaults["fused"] = True
    for group in optimizer.param_groups:
        group["fused"] = True
    _move_step_counts(optimizer)
    set_fused_flags(optimizer, True)
    # One INFO line says so.
    _logger.info("%s uses its fused implementation; Booster(fused_optimizer=False) keeps the default", _name(optimizer))
    return True


def implementation(optimizer: Optimizer) -> list[dict[str, bool | None]]:
    """Return which implementation each group uses, to be given to `keep_implementation`."""
    return [{name: group[name] for name in _CHOICES if name in group} for group in optimizer.param_groups]


def keep_implementation(optimizer: Optimizer, before: list[dict[str, bool | None]]) -> None:
    """After `optimizer.load_state_dict`, as loaded groups bring the writer's choice: use the implementation of `before`."""
    for group, choice in zip(optimizer.param_groups, before, strict=True):
        group.update(choice)
    if honours_grad_scale(optimizer):
        _move_step_counts(optimizer)


def _can_switch(optimizer: Optimizer, model: nn.Module | None) -> bool:
    kind: Any = type(optimizer)
    kernel = KERNELS.get(kind)
    if kernel is None:
        return False
    for options in (optimizer.defaults, *optimizer.param_groups):
        explicit = options.get("foreach") is not None or options.get("fused") is not None
        if explicit or options.get("capturable") or options.get("differentiable"):
            return False
        if options.get("momentum") and options.get("dampening"):
            return False
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if model is not None:
        sparse = {id(p) for m in model.modules() if getattr(m, "sparse", False) is True for p in m.parameters(False)}
        if any(id(param) in sparse for param in params):
            return False
    keys = {"cpu": "CPU", "cuda": "CUDA"}
    devices = {param.device.type for param in params}
    return all(torch.is_floating_point(param) for param in params) and all(
        device in keys and has_kernel(kernel, keys[device]) and _lets_step(kind, device) for device in devices
    )


@functools.cache
def _lets_step(kind: Any, device: str) -> bool:
    """Return whether torch's `kind` lets its fused kernel step parameters on `device`: looked at once, with one of them.

    A kernel does not say so: torch 2.11 has that of Adagrad for CUDA, and an Adagrad that refuses the device in its first step.
    """
    try:
        param = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        trial = kind([param], lr=0.0, fused=True)
        param.grad = torch.zeros_like(param)
        unhooked(kind.step)(trial)
    except RuntimeError as error:
        _logger.info("torch does not let %s use its fused implementation on %s: %s", kind.__name__, device, error)
        return False
    return True


def _move_step_counts(optimizer: Optimizer) -> None:
    # The fused kernels count steps in float32 next to the parameter.
    for param, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device=param.device, dtype=torch.float32)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
