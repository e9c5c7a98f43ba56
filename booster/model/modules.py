"""The user's model inside what plugins and `torch.compile` wrap around it, and the base of what plugins wrap.

Patterns for the qualified names of modules and parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from booster.number_formats import Scaled


class LinearStandIn(nn.Linear):
    """Base of what takes the place of an `nn.Linear` and multiplies in another way; plugins divide it as one."""

    arrived: Callable[[torch.Tensor], Scaled | None] | None = None
    """Gives the weight that is passed to it in e4m3, m x n under one scale, where a plugin gathered it so and it is that still,
    otherwise None. Plugins set it. Copies have none."""
    is_wide = False
    """Whether it multiplies as the `nn.Linear` that it stands for, since that was measured to be faster."""


class PlacedModule(nn.Module):
    """Base of what a plugin wraps around the user's model, which is `module`; names are those of the user's model.

    A subclass defines `forward`, which calls `self.module`. `Plugin.place` returns it, and everything in this library
    looks through it: parameters, state dicts and attributes are those of the model. Other wrappers, but for
    `DistributedDataParallel` and those of `torch.compile`, would give parameters other names, and `boost` refuses them.

    is_partial: whether other ranks hold layers that this one lacks.
    """

    module: nn.Module
    is_partial = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def own_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters on this rank, by their first names in the user's whole model."""
        return dict(bare(self.module).named_parameters())


def bare(module: nn.Module) -> nn.Module:
    """Return the module at the bottom of plugin and `torch.compile` wrappers: the one whose names users know."""
    module = unwrap_placed(module)
    while isinstance(getattr(module, "_modules", {}).get("_orig_mod"), nn.Module):
        module = module._modules["_orig_mod"]  # type: ignore[assignment]
    return module


def wait_for_weights(placed: nn.Module) -> None:
    """Wait for weights of a placed module that an optimizer's step left on their way from other ranks."""
    wait = getattr(type(placed), "wait_for_weights", None)
    if wait is not None:
        wait(placed)


def unwrap_placed(module: nn.Module) -> nn.Module:
    """Return the user's model inside what a plugin wrapped around it."""
    while is_placed(module):
        module = module.module  # type: ignore[assignment]
    return module


def is_placed(module: Any) -> bool:
    """Return whether `module` is what a plugin wrapped around another."""
    return isinstance(module, (nn.parallel.DistributedDataParallel, PlacedModule))


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return what tells whether `pattern` says the whole of a name: `*` is anything within one part, `**` across parts."""
    parts = (re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("**"))
    expression = re.compile(".*".join(parts))
    return lambda name: expression.fullmatch(name) is not None


def parents(name: str) -> Iterator[str]:
    """Yield the names of what holds `name`, outermost first; the whole model, whose name is empty, is not among them."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))
