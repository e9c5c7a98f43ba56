"""The casts of O1 in one strategy: functions that the user registers or decorates, and the contexts in which O1 casts.

A function of torch is registered by its rule in a table of a torch function mode. A mode does not see every function of torch
by the name that was called, so `dispatched` says which one it sees. Functions of other modules are replaced, once, by one
that casts as the innermost O1 region at the call says.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch.nn import functional as F
from torch.overrides import get_testing_overrides

from booster.common import arguments
from booster.mixed_precision.apex.cast_rules import as_float32, as_half, as_widest, make_table
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.tensors.cast_regions import (
    CastFunctions,
    Rule,
    Table,
    active_casts,
    both,
    cast_floats,
    disable_casts,
    holds_casts,
)
from booster.tensors.trees import tensors

# Python functions and operators that call another function before anything is dispatched.
_CALLS: dict[Any, tuple[Callable[..., Any], ...]] = {
    F.sigmoid: (torch.Tensor.sigmoid,),
    F.tanh: (torch.Tensor.tanh,),
    F.upsample: (F.interpolate,),
}
_OPERATORS = {
    **{f"__{name}__": name for name in ("add", "mul", "sub", "div", "matmul", "ge", "gt", "le", "lt", "ne")},
    **{f"__i{name}__": f"{name}_" for name in ("add", "mul", "sub", "div")},
    "__radd__": "add",
    "__rmul__": "mul",
    "__truediv__": "div",
    "__mod__": "remainder",
    "__itruediv__": "div_",
    "__ifloordiv__": "floor_divide_",
    "__imod__": "remainder_",
}


def dispatched(module: Any, name: str) -> tuple[Callable[..., Any], ...]:
    """What a mode is given where `module.name` of torch is called."""
    function = getattr(module, name)
    if module is torch.Tensor and name in _OPERATORS:
        return (getattr(torch.Tensor, _OPERATORS[name]),)
    if function in _CALLS:
        return _CALLS[function]
    holds_functions = module is torch.Tensor or isinstance(module, ModuleType)
    # A Python function of torch gives way to a mode where it says so in its first lines, or where torch overrides it.
    dispatches = not inspect.isfunction(function) or (
        "handle_torch_function" in function.__code__.co_names or function in get_testing_overrides()
    )
    if not holds_functions or inspect.isclass(function) or not callable(function) or not dispatches:
        # No mode sees Python functions of torch that only call others, nor classes of torch.
        raise ValueError(
            f"{getattr(module, '__name__', module)}.{name} cannot be registered: torch does not dispatch it, so its "
            "arguments are never seen. Register the function of torch that it calls, or a function of your own that "
            "calls it"
        )
    with_indices = getattr(module, f"{name}_with_indices", None)
    return (function,) if with_indices is None else (function, with_indices)


Kind = Literal["half", "float", "promote"]
Name = tuple[str, str]  # of a module or class, and of what is in it
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_RULES: dict[Kind, Rule] = {"half": as_half, "float": as_float32, "promote": as_widest}


def half_function(function: Decorated) -> Decorated:
    """Decorate `function`: where O1 casts, floating arguments become float16; elsewhere nothing changes."""
    return _cast_arguments(function, "half")


def float_function(function: Decorated) -> Decorated:
    """Decorate `function`: where O1 casts, half arguments become float32; matrix products inside still run in half."""
    return _cast_arguments(function, "float")


def promote_function(function: Decorated) -> Decorated:
    """Decorate `function`: where O1 casts, half arguments become float32 if another argument is."""
    return _cast_arguments(function, "promote")


class Registered:
    """The functions that were registered with one strategy, by name."""

    def __init__(self) -> None:
        self._torch_functions: dict[Name, Kind] = {}
        self._others: dict[Name, Kind] = {}

    def add(self, module: Any, name: str, kind: Kind) -> None:
        """Give `module.name` the rule `kind`.

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
            # A function of torch is only noted, and nothing is replaced.
            self._torch_functions[path, name] = kind
            return
        self._others[path, name] = kind
        # In another module or class `name` is replaced, once, by a function that casts as the innermost O1 region at the call
        # has it registered, and passes through elsewhere.
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
            for function in dispatched(torch.Tensor if path == "torch.Tensor" else sys.modules[path], name)
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


class O1Casts:
    """The contexts of one strategy."""

    def __init__(self) -> None:
        self._registered = Registered()
        self._tables: dict[str, Table] = {}
        self._disabled = 0

    def register(self, module: Any, name: str, kind: Kind) -> None:
        """See `Registered.add`."""
        self._registered.add(module, name, kind)
        self._tables = {}

    @property
    def registers(self) -> bool:
        """Whether any function is registered."""
        return not self._registered.is_empty

    def use(self, registered: Registered) -> None:
        """Cast by these registrations instead of those made so far."""
        self._registered = registered
        self._tables = {}

    def forward_context(self, device_type: str, products: HalfProducts) -> AbstractContextManager[Any]:
        """A new context for one forward pass."""
        if self._disabled:
            return nullcontext()
        # In a session, which no forward pass ends, autocast's cache of half weights would outlive them.
        autocast = torch.autocast(device_type, torch.float16, cache_enabled=not holds_casts())
        wide, mode = products.forward_context(device_type), self.mode(device_type)
        return both(autocast, mode if wide is None else both(wide, mode))

    def backward_context(self, device_type: str, products: HalfProducts) -> AbstractContextManager[Any]:
        """A new context for one backward pass, where activations may be recomputed."""
        modes = active_casts()
        if self._disabled or (modes and modes[-1].owner is self._registered):
            return nullcontext()
        return both(products.backward_context(device_type), self.mode(device_type))

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Inside, torch functions run without casts, and so do the contexts of this object."""
        self._disabled += 1
        try:
            with disable_casts():
                yield
        finally:
            self._disabled -= 1

    def mode(self, device_type: str) -> CastFunctions:
        """A new mode, to be entered inside autocast."""
        if device_type not in self._tables:
            self._tables[device_type] = make_table(device_type) | self._registered.rules()
        return CastFunctions(self._tables[device_type], device_type, self._registered)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}  # made of torch's functions, which do not pickle
