"""A module that computes in float32 for the time of a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from booster.cast_regions import CastMode, disabled
from booster.casting import HALF_DTYPES, cast_floats
from booster.randomness import random_state, set_random_state
from booster.trees import map_tensors, tensors


@contextmanager
def in_float32(module: nn.Module | None, device_type: str, *, alike: bool = False) -> Iterator[None]:
    """Inside, `module`, if there is one, computes in float32 with its weights widened, and takes what it did before.

    It returns the half dtype of its weights, where they have one. alike: without, it returns the dtypes that it did before,
    as another rank expects them, and is computed twice to know them. Where its code wants half precision and raises, it
    computes as before: on several ranks, one that raises would leave others waiting.
    """
    if module is None:
        yield
        return
    changed = {child: child.__dict__.get("forward") for child in module.modules()}
    switch = _Switch()
    for child in changed:
        if child._parameters:
            child.__dict__["forward"] = _WithWideWeights(child, child.forward, switch)
    module.__dict__["forward"] = _Wide(module, module.forward, switch, device_type, alike)
    try:
        yield
    finally:
        for child, forward in changed.items():
            child.__dict__.pop("forward", None)
            if forward is not None:
                child.__dict__["forward"] = forward


class _Switch:
    """Whether weights are widened at present."""

    def __init__(self) -> None:
        self.is_on = False

    @contextmanager
    def turned(self, on: bool) -> Iterator[None]:
        before, self.is_on = self.is_on, on
        try:
            yield
        finally:
            self.is_on = before


class _Wide:
    """The forward of a module in float32; see `in_float32`."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], switch: _Switch, device_type: str, alike: bool
    ) -> None:
        self._module, self._forward, self._switch = module, forward, switch
        self._device_type, self._alike = device_type, alike

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Looked up now: sharded weights are gathered, in half, for the time of a call.
        half = next((param.dtype for param in self._module.parameters() if param.dtype in HALF_DTYPES), None)
        try:
            if not self._alike or half is not None:
                return cast_floats(self._wide(args, kwargs), half)
            before = random_state()
            with torch.no_grad(), self._switch.turned(False):
                dtypes = iter([tensor.dtype for tensor in tensors(self._forward(*args, **kwargs))])
            set_random_state(before)
            return map_tensors(lambda tensor: tensor.to(next(dtypes)), self._wide(args, kwargs))
        except (RuntimeError, TypeError, ValueError):  # as `keep_fp32` would find out too
            with self._switch.turned(False):
                return self._forward(*args, **kwargs)

    def _wide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        autocast: AbstractContextManager[Any] = (
            torch.autocast(self._device_type, enabled=False)
            if torch.is_autocast_enabled(self._device_type)
            else nullcontext()
        )
        with autocast, disabled(CastMode), self._switch.turned(True):
            return self._forward(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))


class _WithWideWeights:
    """The forward of a module whose own half parameters are float32 for its time."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], switch: _Switch) -> None:
        self._module, self._forward, self._switch = module, forward, switch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = self._module._parameters
        before = dict(own)
        half = [name for name, param in before.items() if param is not None and param.dtype in HALF_DTYPES]
        if not self._switch.is_on:
            return self._forward(*args, **kwargs)
        try:
            for name in half:
                own[name] = _Widened.apply(before[name])
            # Of a module inside that is kept in float32, half activations may come.
            return self._forward(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))
        finally:
            own.update(before)


class _Widened(torch.autograd.Function):
    """A half parameter in float32. Its gradient is not narrowed as it is: a parameter kept in float32 has one in float32."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor) -> torch.Tensor:
        ctx.dtype = param.dtype
        return param.float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        largest = torch.finfo(ctx.dtype).max
        return grad.clamp(-largest, largest).to(ctx.dtype)
