"""What the update of an optimizer is made of.

| | gradients | norms | decision | application | kept |
|---|---|---|---|---|---|
| on the host | `Gradients` | `HostNorms` | `HostDecision` | as it steps | as it steps |
| on a device, where a kernel heeds it | `DeviceGradients` | `DeviceNorms` | `DeviceDecision` | as it steps | as it steps |
| compiled | `Gradients` | `compiled_norms` | `HostDecision` | `CompiledApplication` | `OptimizerState` |

How it steps is for the precision to say, by `UpdateFactories`: on parameters as they are (`PARAMETERS`), or on masters
(`masters.update.stepping_masters`). Whether kernels step is chosen in `kernels.eligibility`: they take the place of
norms and decision, and leave to the application what they do not know. Apex has its own gradients
(`mixed_precision/apex/apex_gradients.py`).

Torch's fused optimizers take the place of others where that is sound (`switch_to_fused`). The compiled step is norms, scaling
and the optimizer in as few passes as torch.compile finds.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from booster.common.torch_internals.optimizer_internals import set_fused_flags, unhooked
from booster.common.torch_internals.tensor_internals import has_kernel
from booster.model.params import params_of
from booster.ranks import agreement
from booster.ranks.agreement import communication_device
from booster.tensors.flat import has_same_layout, is_dense
from booster.tensors.grads import tensor_norms
from booster.tensors.trees import HALF_DTYPES
from booster.update.application import (
    KERNELS,
    Application,
    StepScalars,
    decides_on_device,
    honours_grad_scale,
    laid_like,
    lay_states,
)
from booster.update.context import OptimizerState, UpdateContext
from booster.update.decision import Decision, Norms
from booster.update.device import DeviceDecision, DeviceGradients, DeviceNorms
from booster.update.gradients import Gradients
from booster.update.host import HostDecision, HostNorms
from booster.update.in_backward import OptimizerInBackward
from booster.update.update import Update

# Inductor's cache on disk does not ask for the width of a CPU's vectors: code made for AVX512 and found again on a CPU with
# AVX2, as by nodes that share a folder, leaves out half of the elements. An option that says the width is part of its key.
_VECTOR_BITS = {"AVX2": 256, "AVX512": 512}.get(torch.backends.cpu.get_cpu_capability())
COMPILER_OPTIONS: dict[str, Any] = {"cpp.simdlen": _VECTOR_BITS} if _VECTOR_BITS else {}


def compile_alone(function: Any, **options: Any) -> Any:
    """Return `function`, or a method, compiled for static shapes, with graphs that no other use of its code counts."""
    # Graphs are counted, and limited, per code; torch >= 2.13 can count per call of torch.compile instead.
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        return torch.compile(function, dynamic=False, **{"isolate_recompiles": True, **options})
    plain = getattr(function, "__func__", function)
    own = FunctionType(plain.__code__.replace(), plain.__globals__, None, plain.__defaults__, plain.__closure__)
    bound = own if plain is function else MethodType(own, function.__self__)
    return torch.compile(bound, dynamic=False, **options)


class CompiledApplication(Application):
    """Steps any optimizer with a `step` that torch.compile understands; build it where `can_compile` says so.

    The first step runs eagerly, because it creates the optimizer's state, which would be compiled for nothing. Learning
    rates enter as tensors for the length of the call, so that a schedule does not recompile. Parameters that change their
    memory order later are stepped without the compiler, after a WARNING.
    """

    compiled = True

    def __init__(self, context: UpdateContext) -> None:
        super().__init__(context)
        self._compiled_step = compile_alone(self._scaled_step, options=COMPILER_OPTIONS)
        self._stepped: list[torch.Tensor] = []
        self._strides: dict[torch.Tensor, tuple[int, ...]] = {}  # for which steps were compiled
        self._seen: Any = None  # that was looked at; torch replaces it when it loads one
        self._said = False

    def step(self, gradients: Gradients, params: list[torch.Tensor], scalars: StepScalars) -> bool:
        if not params or not self.optimizer.state or not self._lies_as_compiled(params):
            return super().step(gradients, params, scalars)
        device = params[0].device
        wide = any(param.dtype == torch.float64 for param in params)
        dtype = torch.float64 if wide else torch.float32
        # A rate that is a number would be compiled in, and each new one be a recompilation.
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        self._stepped = params
        try:
            for group, rate in zip(groups, rates, strict=True):
                if not isinstance(rate, torch.Tensor):
                    group["lr"] = torch.full((), rate, dtype=dtype, device=device)
            self._compiled_step(torch.full((), 1.0 / scalars.number, dtype=dtype, device=device))
        finally:
            self._stepped = []
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        return True

    def gradual(self, gradients: Gradients) -> None:
        return None

    def _lies_as_compiled(self, params: list[torch.Tensor]) -> bool:
        """Give gradients and states the memory order of their parameters; False where that is not what was compiled for."""
        # The compiler makes code for the strides that it finds, and compares those of an optimizer's tensors with nothing.
        for param in params:
            if self._strides.setdefault(param, param.stride()) != param.stride():
                self._seen = None
                if not self._said:
                    self._said = True
                    _logger.warning(
                        "%s: a parameter of shape %s has another memory format than when its step was compiled, as after "
                        "model.to(memory_format=...); such steps run without the compiler. Change it before boost()",
                        type(self.optimizer).__name__,
                        tuple(param.shape),
                    )
                return False
        for param in params:
            if param.grad is not None and param.grad.layout == torch.strided and not has_same_layout(param.grad, param):
                param.grad = laid_like(param.grad, param)
        # A load replaces the dict of states; nothing else changes their layout.
        if self.optimizer.state is not self._seen:
            self._seen = self.optimizer.state
            for param, own in self._seen.items():
                lay_states(param, own)
        return True

    def _scaled_step(self, ratio: torch.Tensor) -> None:
        # Multiplied even by 1: without it there would be a second graph, and torch allows few per function.
        torch._foreach_mul_([param.grad for param in self._stepped if param.grad is not None], ratio)
        self.optimizer.step()


def compiled_norms(context: UpdateContext) -> HostNorms:
    """Return norms that are read by one compiled function."""
    return HostNorms(context, compile_alone(tensor_norms, options=COMPILER_OPTIONS))


def can_compile(optimizer: Optimizer) -> bool:
    """Return whether fused_optimizer="compile" works for `optimizer` here; one WARNING says why not."""
    reason = None
    if any(getattr(param, "is_sparse", False) for param in params_of(optimizer)):
        reason = "it has sparse parameters"
    elif honours_grad_scale(optimizer):
        reason = "it was built with fused=True, which leaves nothing to compile"
    else:
        device = next((param.device for param in params_of(optimizer)), None)
        try:
            # Compiles a one-line function for the parameters' device to find out, which takes a few seconds once per process.
            torch.compile(lambda x: x + 1)(torch.zeros(1, dtype=torch.float32, device=device))
        except Exception as error:
            reason = f"torch.compile finds no working compiler: {str(error).strip().splitlines()[0]}"
    return is_compilable(optimizer, reason)


def is_compilable(optimizer: Optimizer, reason: str | None) -> bool:
    """Return whether there is no `reason` against a compiled step; one WARNING with it."""
    if reason is not None:
        _logger.warning(
            'fused_optimizer="compile" does not apply to this %s: %s; it is stepped as with fused_optimizer=True',
            type(optimizer).__name__,
            reason,
        )
    return reason is None


_logger = logging.getLogger(__name__)

_CHOICES = ("foreach", "fused")


def has_sound_kernel(optimizer: Optimizer) -> bool:
    """Return whether torch's fused kernel can be trusted with the parameters of `optimizer` as they are."""
    params = params_of(optimizer)
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
    name = type(optimizer).__name__
    _logger.info("%s uses its fused implementation; Booster(fused_optimizer=False) keeps the default", name)
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
    params = params_of(optimizer)
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


DECIDING = ("cuda",)
"""Types of devices that are worth not to be waited for."""


class UpdateFactories(NamedTuple):
    """How an optimizer steps, and what decides on a host.

    application, optimizer_state: what makes them. norms, decision: on the host. decides_on_host: whether nothing else will do.
    """

    application: Callable[[UpdateContext], Application] = Application
    optimizer_state: Callable[[UpdateContext], OptimizerState] = OptimizerState
    norms: Callable[[UpdateContext], Norms] = HostNorms
    decision: Callable[[Gradients, Application], Decision] = HostDecision
    decides_on_host: bool = False


PARAMETERS = UpdateFactories()
COMPILED = UpdateFactories(CompiledApplication, norms=compiled_norms, decides_on_host=True)


def choose_update(context: UpdateContext, factories: UpdateFactories = PARAMETERS) -> Update:
    """Make the update of an optimizer: on the device where its kernel can decide there, else on the host."""
    # A small collective where ranks hold shards on devices.
    device = None if factories.decides_on_host else deciding_device(context)
    return (
        update_on_host(context, factories)
        if device is None
        else update_on_device(on_device(context, device), factories)
    )


def update_on_host(context: UpdateContext, factories: UpdateFactories = PARAMETERS) -> Update:
    """Make an update that decides on the host."""
    gradients = Gradients(context, factories.norms(context))
    decision = factories.decision(gradients, factories.application(context))
    step_in_backward(context, gradients, decision)
    return Update(gradients, decision, factories.optimizer_state(context))


def step_in_backward(context: UpdateContext, gradients: Gradients, decision: Decision) -> None:
    """Have backward passes use `gradients` as `decision` says, where the options of `context` ask for it."""
    options = context.options
    if options.release_gradients:
        mode, max_norm = str(options.release_gradients), float(options.clip_grad_norm)
        gradients.in_backward = OptimizerInBackward(mode, max_norm, decision)


def update_on_device(context: UpdateContext, factories: UpdateFactories = PARAMETERS) -> Update:
    """Make an update that decides on a device, where the loss scale of `context` lives."""
    gradients = DeviceGradients(context, DeviceNorms(context))
    return Update(
        gradients, DeviceDecision(gradients, factories.application(context)), factories.optimizer_state(context)
    )


def deciding_device(context: UpdateContext) -> torch.device | None:
    """Return the device on which steps of `context` can be decided: its optimizer's kernel skips and divides by itself; None:
    on the host. Inside `context.shards.local()`."""
    if context.options.release_gradients:  # whether there is a second pass is decided on the host
        return None
    devices = {param.device for param in params_of(context.optimizer)}
    fit = decides_on_device(context.optimizer) and len(devices) < 2 and all(each.type in DECIDING for each in devices)
    # Where ranks hold shards all answer alike, as one that decides on the host takes part in other collectives.
    if not context.shards.sharded or context.group is None:
        return next(iter(devices)) if fit and devices else None
    there = communication_device(torch.device("cpu"), context.group)
    if there.type not in DECIDING:  # its norms, summed over ranks, would have to be waited for
        return None
    if agreement.largest(float(not fit), context.group):
        return None
    return next(iter(devices), there)


def on_device(context: UpdateContext, device: torch.device) -> UpdateContext:
    """Return `context` with a loss scale that lives on `device`."""
    return dataclasses.replace(context, scaler=context.scaler.on_device(device))
