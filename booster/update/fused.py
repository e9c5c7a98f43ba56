"""Torch's fused optimizers: switching to them and back, and keeping them to what their kernels can step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from booster.ground.torch_internals import has_kernel, set_fused_flags, unhooked
from booster.model.optimizer_kinds import KNOWN, known
from booster.tensors.flat import is_dense, lies_like
from booster.tensors.trees import HALF_DTYPES

_logger = logging.getLogger(__name__)

_KERNELS = {cls: row.kernel for cls, row in KNOWN.items() if row.kernel is not None}
_CHOICES = ("foreach", "fused")

# What every step asks of every group and parameter, without a Python call for each.
_FUSED = methodcaller("get", "fused")
_DTYPE, _GRAD = attrgetter("dtype"), attrgetter("grad")


class FusedKernel:
    """Keeps the fused kernel of `optimizer` to what it can step; does nothing for an optimizer without.

    The kernels walk raw memory. Where parameter, gradient and states do not lie alike, elements meet their neighbours'
    numbers, on CPU without a word, and parameters with gaps between their elements have what lies there overwritten.

    switched: the implementation was chosen by `switch_to_fused`, not by the user, and may be given up.
    """

    def __init__(self, optimizer: Optimizer, *, switched: bool = False) -> None:
        self.optimizer = optimizer
        self.switched = switched
        self._state: Any = None  # that was looked at; torch replaces it when it loads one
        self._strides: dict[
            torch.Tensor, tuple[int, ...]
        ] = {}  # of parameters that are not contiguous, or once were not

    def prepare(self, params: Sequence[torch.Tensor]) -> None:
        """Before each step on the gradients of `params`: give gradients and states the memory order of their parameters.

        What a kernel cannot step makes the optimizer go back to torch's default implementation, for good; if fused=True
        was the user's, RuntimeError is raised. Costs two calls for each contiguous parameter.
        """
        groups = self.optimizer.param_groups
        fused = list(map(_FUSED, groups))
        if not any(fused):
            return
        if not all(fused):
            params = [p for group in groups if group.get("fused") for p in group["params"] if p.grad is not None]
        half = type(self.optimizer) is SGD and not HALF_DTYPES.isdisjoint(map(_DTYPE, params))
        contiguous = torch.Tensor.is_contiguous
        alike = not self._strides and all(map(contiguous, params)) and all(map(contiguous, map(_GRAD, params)))
        if half or not alike:
            reason = self._unfit(params)
            if reason is not None:
                self._give_up(reason)
                return
        if self.optimizer.state is not self._state:
            self._state = self.optimizer.state
            for param, own in self._state.items():
                lay_states(param, own)
        if type(self.optimizer) is SGD:
            start_late_momentum(self.optimizer)

    def _unfit(self, params: Sequence[torch.Tensor]) -> str | None:
        """Return why the kernel cannot step `params`; None, with all gradients laid like their parameters, if it can."""
        if type(self.optimizer) is SGD and any(p.dtype in HALF_DTYPES and p.device.type == "cpu" for p in params):
            return "on CPU it leaves most elements of half-precision parameters as they are"
        for param in params:
            grad: Any = param.grad
            if grad.is_sparse:
                if known(self.optimizer).takes_sparse:
                    return "it takes no sparse gradients"
                continue  # torch says that this optimizer takes none at all
            if param in self._strides or not (param.is_contiguous() and grad.is_contiguous()):
                if self._strides.get(param) != param.stride():
                    if not is_dense(param):
                        return f"a parameter of shape {tuple(param.shape)} has gaps or overlaps in memory"
                    self._strides[param] = param.stride()
                    lay_states(param, self.optimizer.state.get(param, {}))
                if not lies_like(grad, param):
                    param.grad = laid_like(grad, param)
        return None

    def give_up(self) -> None:
        """Have the optimizer as it was before `switch_to_fused`, where that switched it."""
        if not self.switched:
            return
        self.optimizer.defaults["fused"] = None
        for group in self.optimizer.param_groups:
            group["fused"] = None
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].cpu()
        set_fused_flags(self.optimizer, False)

    def _give_up(self, reason: str) -> None:
        name = _name(self.optimizer)
        if not self.switched:
            raise RuntimeError(
                f"{name} was built with fused=True, and torch's fused kernel cannot make this step: {reason}; nothing has "
                f"changed. Build the optimizer without fused=True"
            )
        self.give_up()
        _logger.info("%s goes on with torch's default implementation; of its fused one: %s", name, reason)


def honours_grad_scale(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step()` divides gradients by its `grad_scale` and skips on its `found_inf` by itself."""
    # Not by torch's attribute that says so, which a deep copy of the optimizer lacks.
    return type(optimizer) in _KERNELS and all(map(_FUSED, optimizer.param_groups))


def has_sound_kernel(optimizer: Optimizer) -> bool:
    """Return whether torch's fused kernel can be trusted with the parameters of `optimizer` as they are.

    That of SGD on CPU leaves most elements of float16 and bfloat16 parameters as they were (torch 2.13), and says nothing.
    None steps parameters whose elements do not fill one stretch of memory, such as `nn.Parameter(weight[:, :3])`.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not all(map(is_dense, params)):
        return False
    return type(optimizer) is not SGD or not any(p.device.type == "cpu" and p.dtype in HALF_DTYPES for p in params)


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
    set_fused_flags(optimizer, True)
    _logger.info("%s uses its fused implementation; Booster(fused_optimizer=False) keeps the default", _name(optimizer))
    return True


def implementation(optimizer: Optimizer) -> list[dict[str, bool | None]]:
    """Return which implementation each group uses, to be given to `keep_implementation`."""
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
    kind: Any = type(optimizer)
    kernel = _KERNELS.get(kind)
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

    A kernel does not tell: torch 2.11 has that of Adagrad for CUDA, and an Adagrad that refuses the device in its first step.
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


def lay_states(param: Any, state: dict[str, Any]) -> None:
    """Make states of the shape of `param` lie in memory as it does."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == param.shape and not lies_like(value, param):
            state[key] = laid_like(value, param)


def laid_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` that lies in memory as `param` does."""
    laid = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor.detach())


def _move_step_counts(optimizer: Optimizer) -> None:
    # The fused kernels count steps in float32 beside the parameter.
    for param, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device=param.device, dtype=torch.float32)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
