"""Modules pinned to float32 inside a half-precision region: which ones, and how they are pinned."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from booster.casting import cast_floats

Pin = type | str | Callable[[str, nn.Module], bool]


def pin_names(model: nn.Module, keep_fp32: Pin | Iterable[Pin]) -> frozenset[str]:
    """Names of the modules of `model` that `keep_fp32` selects; a module inside a selected one is not listed again.

    keep_fp32: one or several of: a module type; a name or glob pattern matched against the whole qualified name, where
    `*` matches within one part and `**` across parts ("blocks.*.norm1"); a predicate `(name, module) -> bool`.
    Raises ValueError for a type or pattern that selects nothing: a typo would change the precision silently.
    """
    names: set[str] = set()
    for entry in normalise_pins(keep_fp32):
        matches = _matcher(entry)
        chosen = {name for name, module in model.named_modules() if name and matches(name, module)}
        if not chosen and (isinstance(entry, (str, type))):
            raise ValueError(
                f"keep_fp32={entry!r} selects no module of {type(model).__name__}; "
                f"its top-level modules are {[name for name, _ in model.named_children()]}"
            )
        names |= chosen
    return frozenset(name for name in names if not any(parent in names for parent in _parents(name)))


def normalise_pins(keep_fp32: Pin | Iterable[Pin]) -> tuple[Pin, ...]:
    """`keep_fp32` as a tuple; raises TypeError for an entry that is no type, string or callable."""
    one = isinstance(keep_fp32, (str, type)) or not isinstance(keep_fp32, Iterable)
    pins: tuple[Any, ...] = (keep_fp32,) if one else tuple(keep_fp32)  # type: ignore[arg-type]
    for pin in pins:
        if isinstance(pin, type) and not issubclass(pin, nn.Module):
            raise TypeError(f"keep_fp32 names the type {pin.__name__}, which is not a torch.nn.Module")
        if not isinstance(pin, (type, str)) and not callable(pin):
            raise TypeError(
                f"keep_fp32 holds {pin!r}; each entry must be a module type, a name pattern or a predicate "
                "(name, module) -> bool"
            )
    return pins


class Float32Forward:
    """The forward of one module, in float32 under autocast: inputs cast up, autocast off until it returns.

    It takes the place of the module's `forward`, and not of hooks around it: an exception or interrupt then cannot leave
    autocast off, and torch.compile traces it.
    """

    def __init__(self, forward: Callable[..., Any], device_type: str) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, enabled=False):
            return self._forward(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))


def pin(module: nn.Module, device_type: str) -> None:
    """Make `module` compute in float32 also under autocast, in place. Pinning it again changes nothing."""
    if not isinstance(module.forward, Float32Forward):
        module.forward = Float32Forward(module.forward, device_type)


def _matcher(pin: Pin) -> Callable[[str, nn.Module], bool]:
    if isinstance(pin, type):
        return lambda name, module: isinstance(module, pin)
    if isinstance(pin, str):
        parts = (re.escape(part).replace(r"\*", "[^.]*") for part in pin.split("**"))
        pattern = re.compile(".*".join(parts))
        return lambda name, module: pattern.fullmatch(name) is not None
    return pin


def _parents(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))
