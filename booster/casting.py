"""Casting the floating tensors of nested inputs and outputs, whatever container they come in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
_CASTABLE = HALF_DTYPES | {torch.float32}


def cast_floats(
    tree: Any,
    dtype: torch.dtype | None,
    *,
    float64: bool = False,
    cast_other: Callable[[Any, torch.dtype], Any] | None = None,
) -> Any:
    """Cast every float16, bfloat16 and float32 tensor in `tree` to `dtype`; integer and bool tensors stay.

    tree: a tensor, or tuples, namedtuples, lists, mappings (transformers' ModelOutput among them) and dataclasses of
    them, nested; containers keep their type, everything else is returned as it is. `dtype` None returns `tree` itself.
    A container none of whose tensors changes is returned as the same object. float64: cast those tensors too.
    cast_other: casts whatever is none of these.
    """
    if dtype is None:
        return tree
    if isinstance(tree, torch.Tensor):
        castable = tree.dtype in _CASTABLE or (float64 and tree.dtype == torch.float64)
        return tree.to(dtype) if castable and tree.dtype != dtype else tree
    if isinstance(tree, (tuple, list)):
        items = [cast_floats(item, dtype, float64=float64, cast_other=cast_other) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return type(tree)(items)
    if isinstance(tree, Mapping):
        changes = {
            key: cast_floats(value, dtype, float64=float64, cast_other=cast_other) for key, value in tree.items()
        }
        return _replace_items(tree, {key: value for key, value in changes.items() if value is not tree[key]})
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        changes = {
            name: cast_floats(value, dtype, float64=float64, cast_other=cast_other) for name, value in fields.items()
        }
        changes = {name: value for name, value in changes.items() if value is not fields[name]}
        if not changes:
            return tree
        clone = copy.copy(tree)
        for name, value in changes.items():
            object.__setattr__(clone, name, value)
        return clone
    return tree if cast_other is None else cast_other(tree, dtype)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `tree`, which is as in `cast_floats`."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors(getattr(tree, field.name))


def _replace_items(mapping: Mapping[Any, Any], changes: dict[Any, Any]) -> Mapping[Any, Any]:
    if not changes:
        return mapping
    if not isinstance(mapping, MutableMapping):
        return type(mapping)({**mapping, **changes})  # type: ignore[call-arg]
    clone = copy.copy(mapping)  # keeps the type, and what a subclass holds beside its items
    for key, value in changes.items():
        clone[key] = value
    return clone
