"""Torch's fused optimizers: switching to them, and what they take over from the update."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from booster.casting import HALF_DTYPES

_logger = logging.getLogger(__name__)

_KERNELS: dict[type[Optimizer], str] = {
    Adam: "aten::_fused_adam_",
    AdamW: "aten::_fused_adamw_",
    SGD: "aten::_fused_sgd_",
    Adagrad: "aten::_fused_adagrad_",
}
_CHOICES = ("foreach", "fused")


def honours_grad_scale(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step()` divides gradients by its `grad_scale` and skips on its `found_inf` by itself."""
    # Not by torch's attribute that says so, which a deep copy of the optimizer lacks.
    return type(optimizer) in _KERNELS and all(group.get("fused") for group in optimizer.param_groups)


def has_sound_kernel(optimizer: Optimizer) -> bool:
    """Whether torch's fused kernel can be trusted with the parameters of `optimizer` as they are.

    That of SGD on CPU leaves most elements of float16 and bfloat16 parameters as they were (torch 2.13), and says nothing.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return type(optimizer) is not SGD or not any(p.device.type == "cpu" and p.dtype in HALF_DTYPES for p in params)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether a hook runs around `optimizer.step()`, of its own or of all optimizers."""
    own: Any = optimizer
    return bool(
        own._optimizer_step_pre_hooks
        or own._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def switch_to_fused(optimizer: Optimizer, model: nn.Module | None = None) -> bool:
    """Make a torch Adam, AdamW, SGD or Adagrad use its fused kernel, state included; returns whether it does now.

    Left alone: other classes and subclasses, an explicit foreach, fused, capturable or differentiable, SGD with dampened
    momentum (see `start_late_momentum`), devices without the kernel, parameters that are not floating point or get sparse
    gradients (`model` tells). One INFO line says so.
    """
    if not _can_switch(optimizer, model):
        return False
    optimizer.defaults["fused"] = True
    for group in optimizer.param_groups:
        group["fused"] = True
    _move_step_counts(optimizer)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
    _logger.info("%s uses its fused implementation; Booster(fused_optimizer=False) keeps the default", _name(optimizer))
    return True


def implementation(optimizer: Optimizer) -> list[dict[str, bool | None]]:
    """Which implementation each group uses, to be given to `keep_implementation`."""
    return [{name: group[name] for name in _CHOICES if name in group} for group in optimizer.param_groups]


def keep_implementation(optimizer: Optimizer, before: list[dict[str, bool | None]]) -> None:
    """After `optimizer.load_state_dict`, whose groups bring the writer's choice: use the implementation of `before`."""
    for group, choice in zip(optimizer.param_groups, before, strict=True):
        group.update(choice)
    if honours_grad_scale(optimizer):
        _move_step_counts(optimizer)


def start_late_momentum(optimizer: Optimizer) -> None:
    """Give zero momentum to parameters of a fused SGD whose first gradient comes after that of others.

    Torch's kernel starts all of a group at once or none. With dampening, zero would not be the right start.
    """
    if type(optimizer) is not SGD:
        return
    for group in optimizer.param_groups:
        if not group.get("fused") or group["momentum"] == 0 or group["dampening"] != 0:
            continue
        state = optimizer.state
        params = [param for param in group["params"] if param.grad is not None]
        late = [param for param in params if state.get(param, {}).get("momentum_buffer") is None]
        if late and len(late) < len(params):
            for param in late:
                state[param]["momentum_buffer"] = torch.zeros_like(param)


def _can_switch(optimizer: Optimizer, model: nn.Module | None) -> bool:
    kernel = _KERNELS.get(type(optimizer))
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
        device in keys and torch._C._dispatch_has_kernel_for_dispatch_key(kernel, keys[device]) for device in devices
    )


def _move_step_counts(optimizer: Optimizer) -> None:
    # The fused kernels count steps in float32 beside the parameter.
    for param, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device=param.device, dtype=torch.float32)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
