"""Norms, and a step with its scaling, compiled by torch.compile into as few passes as the compiler finds."""

from __future__ import annotations

import inspect
import logging
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from booster.tensors.flat import has_same_layout
from booster.tensors.grads import tensor_norms
from booster.update.application import Application, StepScalars, honours_grad_scale, laid_like, lay_states
from booster.update.context import UpdateContext
from booster.update.gradients import Gradients
from booster.update.host import HostNorms

_logger = logging.getLogger(__name__)

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
        if not self.optimizer.state or not self._lies_as_compiled(params):
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
    if any(getattr(param, "is_sparse", False) for group in optimizer.param_groups for param in group["params"]):
        reason = "it has sparse parameters"
    elif honours_grad_scale(optimizer):
        reason = "it was built with fused=True, which leaves nothing to compile"
    else:
        device = next((param.device for group in optimizer.param_groups for param in group["params"]), None)
        try:
            # Compiles a one-line function for the parameters' device to find out, which takes a few seconds once per process.
            torch.compile(_probe)(torch.zeros(1, dtype=torch.float32, device=device))
        except Exception as error:
            reason = f"torch.compile finds no working compiler: {str(error).strip().splitlines()[0]}"
    if reason is not None:
        _logger.warning(
            'fused_optimizer="compile" does not apply to this %s: %s; it is stepped as with fused_optimizer=True',
            type(optimizer).__name__,
            reason,
        )
    return reason is None


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1
