"""Which functions of torch a torch function mode sees when one of another name is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import get_testing_overrides

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
    """What a mode is given where `module.name` of torch is called.

    Raises ValueError for what no mode sees: Python functions of torch that only call others, and classes of torch.
    """
    function = getattr(module, name)
    if module is torch.Tensor and name in _OPERATORS:
        return (getattr(torch.Tensor, _OPERATORS[name]),)
    if function in _CALLS:
        return _CALLS[function]
    holds_functions = module is torch.Tensor or isinstance(module, ModuleType)
    if not holds_functions or inspect.isclass(function) or not callable(function) or not _dispatches(function):
        raise ValueError(
            f"{getattr(module, '__name__', module)}.{name} cannot be registered: torch does not dispatch it, so its "
            "arguments are never seen. Register the function of torch that it calls, or a function of your own that "
            "calls it"
        )
    with_indices = getattr(module, f"{name}_with_indices", None)
    return (function,) if with_indices is None else (function, with_indices)


def _dispatches(function: Any) -> bool:
    if inspect.isfunction(function):
        return "handle_torch_function" in function.__code__.co_names or function in get_testing_overrides()
    return True
