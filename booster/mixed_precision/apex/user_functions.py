"""Functions of the user's that O1 casts arguments for, and those of torch whose rule the user changes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch.nn import functional as F

from booster.casting import cast_floats, tensors
from booster.mixed_precision.apex.functions import Rule, active_modes, as_float32, as_half, as_widest

Kind = Literal["half", "float", "promote"]
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_RULES: dict[Kind, Rule] = {"half": as_half, "float": as_float32, "promote": as_widest}
_OVERRIDABLE = (torch, F, torch.Tensor)


def half_function(function: Decorated) -> Decorated:
    """Decorator: in a region that O1 casts, floating arguments become float16; elsewhere nothing changes."""
    return _cast_arguments(function, "half")


def float_function(function: Decorated) -> Decorated:
    """Decorator: in a region that O1 casts, half arguments become float32; matrix products inside still run in half."""
    return _cast_arguments(function, "float")


def promote_function(function: Decorated) -> Decorated:
    """Decorator: in a region that O1 casts, half arguments become float32 if another argument is."""
    return _cast_arguments(function, "promote")


class Registered:
    """The functions that were registered with one strategy, by name."""

    def __init__(self) -> None:
        self._torch_functions: dict[tuple[str, str], Kind] = {}

    def add(self, module: Any, name: str, kind: Kind) -> None:
        """Give `module.name` the rule `kind`.

        A function of torch, torch.nn.functional or torch.Tensor is only noted, and nothing is replaced. In another
        module or class `name` is replaced by the function with the decorator of that kind, which does nothing outside
        regions that O1 casts. Raises ValueError if there is no such function.
        """
        if not hasattr(module, name):
            holder = getattr(module, "__name__", module)
            raise ValueError(f"No function named {name} in module {holder}; register functions that exist, by name")
        if any(module is holder for holder in _OVERRIDABLE):
            self._torch_functions[_path(module), name] = kind
            return
        function = getattr(module, name)
        setattr(module, name, _cast_arguments(getattr(function, "__wrapped_by_booster__", function), kind))

    def rules(self) -> dict[Callable[..., Any], Rule]:
        """What to add to a table of rules."""
        return {
            getattr(_resolve(path), name): _instead_of_autocast(_RULES[kind])
            for (path, name), kind in self._torch_functions.items()
        }


def _cast_arguments(function: Any, kind: Kind) -> Any:
    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        if not active_modes():
            return function(*args, **kwargs)
        dtype = _target(kind, args, kwargs)
        return function(*cast_floats(args, dtype), **cast_floats(kwargs, dtype))

    cast.__wrapped_by_booster__ = function  # type: ignore[attr-defined]
    return cast


def _instead_of_autocast(rule: Rule) -> Rule:
    def alone(mode: Any, function: Any, args: Any, kwargs: Any) -> Any:
        with torch.autocast(mode.device_type, enabled=False):
            return rule(mode, function, args, kwargs)

    return alone


def _target(kind: Kind, args: Any, kwargs: Any) -> torch.dtype | None:
    if kind == "half":
        return torch.float16
    if kind == "float" or any(tensor.dtype == torch.float32 for tensor in tensors((args, kwargs))):
        return torch.float32
    return None


def _path(module: Any) -> str:
    return module.__name__ if isinstance(module, ModuleType) else "torch.Tensor"


def _resolve(path: str) -> Any:
    return torch.Tensor if path == "torch.Tensor" else sys.modules[path]
