"""JSON-like values with tensors in them, as text and a dict of tensors, and back: what is never a pickle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from booster.shards.divided import Divided

_TAG = "__booster__"  # the key of everything that JSON has no form for


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor | Divided]) -> Any:
    """Return `value` as what `json.dumps` takes; its tensors go into `tensors`, under names that begin with `where`.

    Takes None, booleans, numbers, strings, lists, tuples, sets of them, mappings with any of these as keys, tensors, dtypes
    and devices. Raises TypeError that names the place of anything else.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, (torch.Tensor, Divided)):
        tensors[where] = value if isinstance(value, Divided) else value.detach()
        return {_TAG: "tensor", "name": where}
    if isinstance(value, (torch.dtype, torch.device)):
        return {_TAG: type(value).__name__, "value": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        items = [[key, encode(entry, f"{where}/{key}", tensors)] for key, entry in value.items()]
        if all(isinstance(key, str) and key != _TAG for key, _ in items):
            return dict(items)
        keys = [encode(key, f"{where}/keys", tensors) for key, _ in items]
        return {_TAG: "dict", "items": [[key, entry] for key, (_, entry) in zip(keys, items, strict=True)]}
    if type(value) in (list, tuple, set, frozenset):
        entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        coded = [encode(entry, f"{where}/{index}", tensors) for index, entry in enumerate(entries)]
        return coded if type(value) is list else {_TAG: type(value).__name__, "items": coded}
    number = getattr(value, "item", None)
    if callable(number) and getattr(value, "shape", None) == ():  # a scalar of numpy
        return encode(number(), where, tensors)
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold: give tensors, numbers, strings, lists, "
        "tuples, dicts of these, or an object with state_dict() and load_state_dict()"
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor | Divided]) -> Any:
    """Return what `encode` was given. Raises ValueError for what it did not write."""
    if isinstance(value, list):
        return [decode(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(entry, tensors) for key, entry in value.items()}
    kind = value[_TAG]
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "float":
        return float(value["value"])
    if kind == "dtype":
        return _dtype(value["value"])
    if kind == "device":
        return torch.device(value["value"])
    if kind == "dict":
        return {decode(key, tensors): decode(entry, tensors) for key, entry in value["items"]}
    made = {"tuple": tuple, "set": set, "frozenset": frozenset}.get(kind)
    if made is None:
        raise ValueError(f"{kind!r} is no kind of value that a checkpoint holds")
    return made(decode(entry, tensors) for entry in value["items"])


def reference(value: Any) -> str | None:
    """Return the name of the tensor that an entry of what `encode` gave refers to; None for any other entry.

    Raises ValueError for a reference without a name.
    """
    if not isinstance(value, dict) or value.get(_TAG) != "tensor":
        return None
    if not isinstance(value.get("name"), str):
        raise ValueError("a tensor is referred to by no name")
    return str(value["name"])


def references(tree: Any) -> Iterator[str]:
    """Yield the names of the tensors that all entries of what `encode` gave refer to, in order, however deep it is."""
    left = [tree]
    while left:
        value = left.pop()
        name = reference(value)
        if name is not None:
            yield name
        elif isinstance(value, (dict, list)):
            left += reversed(value.values() if isinstance(value, dict) else value)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
