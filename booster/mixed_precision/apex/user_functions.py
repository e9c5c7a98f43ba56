"""Functions of the user's that O1 casts arguments for, and those of torch whose rule the user changes."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch

from booster import arguments
from booster.cast_regions import Rule, active_casts
from booster.casting import cast_floats
from booster.mixed_precision.apex.dispatched import dispatched
from booster.mixed_precision.apex.functions import as_float32, as_half, as_widest
from booster.trees import tensors

Kind = Literal["half", "float", "promote"]
Name = tuple[str, str]  # of a module or class, and of what is in it
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_RULES: dict[Kind, Rule] = {"half": as_half, "float": as_float32, "promote": as_widest}


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
        self._torch_functions: dict[Name, Kind] = {}
        self._others: dict[Name, Kind] = {}

    def add(self, module: Any, name: str, kind: Kind) -> None:
        """Give `module.name` the rule `kind`.

        A function of torch is only noted, and nothing is replaced. In another module or class `name` is replaced, once,
        by a function that casts as the innermost O1 region at the call has it registered, and passes through elsewhere.
        Raises ValueError if there is no such function, or if it is a Python function of torch that no rule can reach.
        """
        arguments.text("name", name, "the name of a function of the module")
        if not hasattr(module, name):
            holder = getattr(module, "__name__", module)
            raise ValueError(f"No function named {name} in module {holder}; register functions that exist, by name")
        if not callable(getattr(module, name)):
            raise TypeError(f"name={name!r} is not legal; it must be the name of a function of the module")
        path = _path(module)
        if path.partition(".")[0] == "torch":
            dispatched(module, name)
            self._torch_functions[path, name] = kind
            return
        self._others[path, name] = kind
        _replace(module, name, (path, name))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was registered."""
        return not self._torch_functions and not self._others

    def kind_of(self, function: Name) -> Kind | None:
        """The rule of a function that was replaced, by its module and name."""
        return self._others.get(function)

    def rules(self) -> dict[Callable[..., Any], Rule]:
        """What to add to a table of rules."""
        return {
            function: _instead_of_autocast(_RULES[kind])
            for (path, name), kind in self._torch_functions.items()
            for function in dispatched(_resolve(path), name)
        }


def _cast_arguments(function: Any, kind: Kind) -> Any:
    arguments.function("function", function)

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        return _call(function, kind if active_casts() else None, args, kwargs)

    return cast


def _replace(holder: Any, name: str, key: Name) -> None:
    here = vars(holder).get(name)
    static = here if here is not None else inspect.getattr_static(holder, name)
    kind = type(static) if isinstance(static, (staticmethod, classmethod)) else None
    function = static.__func__ if kind is not None else getattr(holder, name)
    if here is not None and getattr(function, "__booster_key__", None) == key:
        return

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        modes = active_casts()
        registered = modes[-1].owner if modes else None
        return _call(function, registered.kind_of(key) if isinstance(registered, Registered) else None, args, kwargs)

    cast.__booster_key__ = key  # type: ignore[attr-defined]
    setattr(holder, name, cast if kind is None else kind(cast))


def _call(function: Any, kind: Kind | None, args: Any, kwargs: Any) -> Any:
    dtype = None if kind is None else _target(kind, args, kwargs)
    return function(*cast_floats(args, dtype), **cast_floats(kwargs, dtype))


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
    if module is torch.Tensor:
        return "torch.Tensor"
    if isinstance(module, ModuleType):
        return module.__name__
    return f"{getattr(module, '__module__', None)}.{getattr(module, '__qualname__', repr(module))}"


def _resolve(path: str) -> Any:
    return torch.Tensor if path == "torch.Tensor" else sys.modules[path]
