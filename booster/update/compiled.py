"""The update with norm, scaling and optimizer compiled by torch.compile into as few passes as the compiler finds."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch.optim import Optimizer

from booster.grads import tensor_norms
from booster.update.base import Job
from booster.update.fused import honours_grad_scale
from booster.update.host import HostUpdate

_logger = logging.getLogger(__name__)

# Graphs are counted, and limited, per function; torch >= 2.13 can count per optimizer instead.
OWN_CACHE: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)


class CompiledUpdate(HostUpdate):
    """A host update for any optimizer whose `step` torch.compile understands; build it where `can_compile` says so.

    The first step runs eagerly, because it creates the optimizer's state, which would be compiled for nothing. Learning
    rates enter as tensors for the length of the call, so that a schedule does not recompile. Every order in memory of
    parameters, gradients and states has a graph of its own.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._compiled_norms: Any = torch.compile(tensor_norms, dynamic=False, **OWN_CACHE)
        self._compiled_step: Any = torch.compile(self._scaled_step, dynamic=False, **OWN_CACHE)
        self._layouts: dict[Any, int] = {None: 0}

    def _tensor_norms(self, values: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        return self._compiled_norms(values, norm_type)

    def _apply(self, grad_scale: float) -> None:
        if not self.optimizer.state:
            super()._apply(grad_scale)
            return
        params = self.params()
        device = params[0].device
        wide = any(param.dtype == torch.float64 for param in params)
        dtype = torch.float64 if wide else torch.float32
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                if not isinstance(rate, torch.Tensor):
                    group["lr"] = torch.full((), rate, dtype=dtype, device=device)
            self._compiled_step(torch.full((), 1.0 / grad_scale, dtype=dtype, device=device), self._layout(params))
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def make_parts(self) -> None:
        return None

    def _layout(self, params: list[torch.Tensor]) -> int:
        """Return a number of how `params`, their gradients and their states lie in memory; 0 is contiguous throughout."""
        states = [value for param in params for value in self.optimizer.state.get(param, {}).values()]
        tensors = [*params, *(param.grad for param in params), *states]
        tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        if all(map(torch.Tensor.is_contiguous, tensors)):
            return 0
        return self._layouts.setdefault(tuple(map(torch.Tensor.stride, tensors)), len(self._layouts))

    def _scaled_step(self, ratio: torch.Tensor, layout: int) -> None:
        # Of an optimizer's tensors the compiler compares no strides; the number, once it is read, it does.
        if layout < 0:
            return
        # Multiplied even by 1: without it there would be a second graph, and torch allows few per function.
        torch._foreach_mul_([param.grad for param in self.params() if param.grad is not None], ratio)
        self.optimizer.step()


def can_compile(optimizer: Optimizer) -> bool:
    """Return whether fused_optimizer="compile" works for `optimizer` here; one WARNING says why not.

    Compiles a one-line function for the parameters' device to find out, which takes a few seconds once per process.
    """
    reason = None
    if any(getattr(param, "is_sparse", False) for group in optimizer.param_groups for param in group["params"]):
        reason = "it has sparse parameters"
    elif honours_grad_scale(optimizer):
        reason = "it was built with fused=True, which leaves nothing to compile"
    else:
        device = next((param.device for group in optimizer.param_groups for param in group["params"]), None)
        try:
            torch.compile(_probe)(torch.zeros(1, device=device))
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
