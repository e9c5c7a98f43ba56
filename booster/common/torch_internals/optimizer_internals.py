"""Hooks around the steps of optimizers, and what fused ones and GradScaler note, by torch's private names."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from itertools import filterfalse
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from booster.common.misuse import OwnStepGuard


def loads_with_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether anybody's code but this library's guard runs when `optimizer` loads a state."""
    hooks = [*optimizer._optimizer_load_state_dict_pre_hooks.values(), *optimizer._optimizer_load_state_dict_post_hooks]
    return not all(isinstance(getattr(hook, "__self__", None), OwnStepGuard) for hook in hooks)


def multiply_and_check_(grads: list[torch.Tensor], found_inf: torch.Tensor, ratio: torch.Tensor) -> None:
    """Multiply `grads` in place and set `found_inf` to 1 where any was not finite; one kernel, no host sync."""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, ratio)


def update_scale_(
    scale: torch.Tensor, clean: torch.Tensor, found_inf: torch.Tensor, growth: float, backoff: float, interval: int
) -> None:
    """Move a float32 loss scale and its int32 count of clean steps, in place, as GradScaler does; one kernel, no host sync."""
    torch._amp_update_scale_(scale, clean, found_inf, growth, backoff, interval)


def set_fused_flags(optimizer: Optimizer, fused: bool) -> None:
    """Note in `optimizer`, as its constructor does, whether it is stepped by torch's fused kernels."""
    optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
    optimizer._need_device_dtype_check_for_fused = fused  # type: ignore[attr-defined]


_IS_GUARD = OwnStepGuard.__instancecheck__  # asked without a Python call


def step_hooks(optimizer: Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return what is called before and after every step: torch's global hooks and the optimizer's own, in order."""
    module: Any = sys.modules[Optimizer.__module__]
    # Without the guard of this library, which is not the user's.
    own = filterfalse(_IS_GUARD, optimizer._optimizer_step_pre_hooks.values())
    return (
        [*module._global_optimizer_pre_hooks.values(), *own],
        [*optimizer._optimizer_step_post_hooks.values(), *module._global_optimizer_post_hooks.values()],
    )


def remove_guards(optimizer: Optimizer) -> None:
    """Have the guards of this library on `optimizer` let every step pass."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if isinstance(hook, OwnStepGuard):
            hook.remove()


def exchange_step_hooks(optimizer: Optimizer, hooks: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """Give `optimizer` the step hooks `hooks` (None: none) and return those that it had. The global ones are not touched."""
    before = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    pre, post = (OrderedDict(), OrderedDict()) if hooks is None else hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = pre, post
    return before


def mark_step_called(optimizer: Optimizer) -> None:
    """Note that a step was made, for LR schedulers, which warn otherwise."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


_OptimizerClass = TypeVar("_OptimizerClass", bound=type[Optimizer])


def accepts_found_inf(kind: _OptimizerClass) -> _OptimizerClass:
    """Have torch's GradScaler set `found_inf` on optimizers of class `kind` before it calls their `step`; returns `kind`."""
    kind._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return kind


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `step` of an optimizer without torch's profiling around it, which calls the hooks too."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def adjusted_muon_lr(lr: Any, how: str | None, shape: torch.Size) -> Any:
    """Return the learning rate of `torch.optim.Muon` for a matrix of `shape`; `how` is its `adjust_lr_fn`."""
    return import_module("torch.optim._muon")._adjust_lr(lr, how, shape)


def is_counted_step(value: object) -> bool:
    """Return whether `value` is the `step` that a schedule of torch has put before that of an optimizer's class, to count."""
    return getattr(value, "_wrapped_by_lr_sched", False) is True


def unwrapped(function: Any) -> Any:
    """Return a function of an optimizer without what torch puts around it."""
    while True:
        # Torch hides `_init_group` from the compiler, and puts around `step` what calls hooks and what sets the grad mode
        # between graph breaks.
        if hasattr(function, "_torchdynamo_orig_callable"):
            function = function._torchdynamo_orig_callable
        elif function.__dict__.get("hooked", False) or function.__code__.co_name == "_use_grad":
            function = function.__wrapped__
        else:
            return function
