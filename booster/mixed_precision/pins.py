"""Modules pinned to float32 inside a half-precision region: which ones, and the hooks that pin them."""

from __future__ import annotations

import re
import threading
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
    for pin in normalise_pins(keep_fp32):
        matches = _matcher(pin)
        chosen = {name for name, module in model.named_modules() if name and matches(name, module)}
        if not chosen and (isinstance(pin, (str, type))):
            raise ValueError(
                f"keep_fp32={pin!r} selects no module of {type(model).__name__}; "
                f"its top-level modules are {[name for name, _ in model.named_children()]}"
            )
        names |= chosen
    return frozenset(name for name in names if not any(parent in names for parent in _parents(name)))


def normalise_pins(keep_fp32: Pin | Iterable[Pin]) -> tuple[Pin, ...]:
    """`keep_fp32` as a tuple; raises TypeError for an entry that is no type, string or callable."""
    pins = (keep_fp32,) if isinstance(keep_fp32, (str, type)) or callable(keep_fp32) else tuple(keep_fp32)
    for pin in pins:
        if isinstance(pin, type) and not issubclass(pin, nn.Module):
            raise TypeError(f"keep_fp32 names the type {pin.__name__}, which is not a torch.nn.Module")
        if not isinstance(pin, (type, str)) and not callable(pin):
            raise TypeError(
                f"keep_fp32 holds {pin!r}; each entry must be a module type, a name pattern or a predicate "
                "(name, module) -> bool"
            )
    return pins


class Float32Hooks:
    """Forward hooks that run one module in float32 under autocast: inputs cast up, autocast off until it returns."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._regions = threading.local()

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        region = torch.autocast(self._device_type, enabled=False)
        region.__enter__()
        self._stack().append(region)
        return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = self._stack()
        if stack:
            stack.pop().__exit__(None, None, None)

    def _stack(self) -> list[torch.autocast]:
        if not hasattr(self._regions, "stack"):
            self._regions.stack = []
        return self._regions.stack

    def __getstate__(self) -> dict[str, Any]:
        return {"_device_type": self._device_type}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._device_type = state["_device_type"]
        self._regions = threading.local()


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
