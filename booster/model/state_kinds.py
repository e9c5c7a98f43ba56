"""Kinds of plain values in a state, compared with what is there: what loads and fails in the first step is refused before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import torch


def differences(where: str, now: Any, given: Any, legal: Any = ...) -> Iterator[str]:
    """Say where `given` is of another kind than `now`; numbers are one kind, and 0-dim tensors numbers.

    legal: another value that is legal in its place, as the default of an option is; where it is None, None is legal. What is
    None now, or of no plain kind, may become anything.
    """
    if now is None or (given is None and legal is None):
        return
    if isinstance(now, (list, tuple)):
        if not isinstance(given, (list, tuple)):
            yield f"{where} is {_told(given)}, and {_told(now)} here"
            return
        for index, (one, other) in enumerate(zip(now, given, strict=False)):
            own = legal[index] if isinstance(legal, (list, tuple)) and index < len(legal) else ...
            yield from differences(f"{where}[{index}]", one, other, own)
        return
    if isinstance(now, Counter):
        counts = isinstance(given, Mapping) and all(type(n) is int for pair in given.items() for n in pair)
        fits = counts
    elif isinstance(now, Mapping):
        fits = isinstance(given, Mapping)
        if isinstance(given, Mapping):
            yield from of_names(where, now, given)
    elif isinstance(now, str):
        fits = isinstance(given, str)
    elif isinstance(now, bool):
        fits = isinstance(given, bool)
    elif _is_number(now):
        fits = _is_number(given)
    else:
        return
    if not fits:
        yield f"{where} is {_told(given)}, and {_told(now)} here"


def of_names(where: str, now: Mapping[Any, Any], given: Mapping[Any, Any]) -> Iterator[str]:
    """Say which entries of `given` are of another kind than those of `now`, and which names are others'.

    A single name that only one side has is taken for one of another version, which nobody here reads.
    """
    missing, unknown = (
        {str(k) for k in a.keys() - b.keys() if str(k)[:1] != "_"} for a, b in ((now, given), (given, now))
    )
    if len(missing) + len(unknown) > 1:
        yield f"{where} has {sorted(unknown)[:6]} and lacks {sorted(missing)[:6]}, as that of another class"
    for name in now.keys() & given.keys():
        yield from differences(f"{where}[{name!r}]", now[name], given[name])


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _told(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"of type {type(value).__name__}"
