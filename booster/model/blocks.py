"""The repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that hold others and are not called themselves."""


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the names of the repeated blocks of `model`.

    Those are what a transformers model lists as indivisible; of other models the outermost modules with children and
    parameters that stand in a Sequential, ModuleList or ModuleDict beside another of their class.
    """
    listed = set(getattr(model, "_no_split_modules", None) or ())
    names = [name for name, module in model.named_modules() if name and type(module).__name__ in listed]
    return names or list(_repeated(model, ""))


def _repeated(parent: nn.Module, path: str) -> Iterator[str]:
    for name, child in parent.named_children():
        here = f"{path}{name}"
        is_listed = isinstance(parent, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) and _is_block(child)
        if is_listed and sum(type(other) is type(child) for other in parent._modules.values()) > 1:
            yield here
        else:
            yield from _repeated(child, f"{here}.")


def _is_block(module: nn.Module) -> bool:
    return (
        not isinstance(module, NEVER_CALLED)
        and next(module.children(), None) is not None
        and next(module.parameters(), None) is not None
    )
