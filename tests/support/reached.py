"""Everything that can be reached from some objects by attributes and containers, as it is now, for a comparison to the bit."""

import enum
import functools
import logging
import types
from collections.abc import Mapping
from typing import Any

import torch

_LEAVES = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_COUNTERS = ("num_syncs",)  # how often somebody asked, which no step depends on
_OTHERS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, logging.Logger)


def reached(**roots: Any) -> dict[str, Any]:
    """Return path -> value for all that can be reached from `roots`: of tensors the bits and their layout.

    Each object has one path, the first by which it was found. Classes, functions, modules of Python and objects without
    attributes in Python, such as process groups, are known by their identity alone; weak references are followed.
    """
    found: dict[str, Any] = {}
    seen: dict[int, str] = {}
    kept = []  # so that no identity is given away meanwhile
    waiting = [(name, value) for name, value in reversed(roots.items())]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _LEAVES):
            found[path] = (type(value).__name__, repr(value))
            continue
        if id(value) in seen:
            found[path] = ("as", seen[id(value)])
            continue
        seen[id(value)] = path
        kept.append(value)
        if isinstance(value, torch.Tensor):
            found[path] = _of_tensor(value)
            if value.is_leaf:
                waiting.append((f"{path}.grad", value.grad))
        elif isinstance(value, torch.Generator):
            found[path] = ("generator", bytes(value.get_state().tolist()))
        elif isinstance(value, _OTHERS):
            found[path] = ("known", id(value))
        elif isinstance(value, types.MethodType):
            waiting.append((f"{path}.self", value.__self__))
        elif isinstance(value, functools.partial):
            waiting += [
                (f"{path}.args", value.args),
                (f"{path}.keywords", value.keywords),
                (f"{path}.func", value.func),
            ]
        elif isinstance(value, Mapping):
            found[path] = (type(value).__name__, len(value))
            # Keys are objects or names; an object is known by its place, as mappings keep their order.
            keys = [key if isinstance(key, str) else f"#{number}" for number, key in enumerate(value)]
            waiting += [(f"{path}[{name}]", own) for name, own in zip(keys, value.values(), strict=True)]
            waiting += [(f"{path}[{name}] key", key) for name, key in zip(keys, value, strict=True)]
        elif isinstance(value, list | tuple):
            found[path] = (type(value).__name__, len(value))
            waiting += [(f"{path}[{number}]", own) for number, own in enumerate(value)]
        elif isinstance(value, set | frozenset):
            found[path] = (type(value).__name__, len(value), sorted(map(repr, value)) if _are_leaves(value) else None)
        else:
            own = {**getattr(value, "__dict__", {}), **_of_slots(value)}
            found[path] = (type(value).__name__, None if own else id(value))
            waiting += [(f"{path}.{name}", each) for name, each in own.items() if name not in _COUNTERS]
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the paths that differ, sorted."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def _are_leaves(values: Any) -> bool:
    return all(isinstance(value, _LEAVES) for value in values)


def _of_slots(value: Any) -> dict[str, Any]:
    names = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return {name: getattr(value, name) for name in names if hasattr(value, name) and name != "__weakref__"}


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _of_tensor(value: torch.Tensor) -> tuple[Any, ...]:
    local = getattr(value, "_local_tensor", value)
    known = (type(value).__name__, value.dtype, tuple(value.shape), value.requires_grad)
    if local.is_meta or local.layout != torch.strided or type(local) not in (torch.Tensor, torch.nn.Parameter):
        return known
    return (*known, local.stride(), bytes(local.detach().contiguous().flatten().view(torch.uint8).tolist()))
