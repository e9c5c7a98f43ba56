"""The user's `wrap_policy`: which modules are blocks, gathered and freed one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from booster.common import arguments
from booster.model.modules import NEVER_CALLED, matcher, repeated_blocks

WrapPolicy = type[nn.Module] | str | int | Callable[[str, nn.Module], bool] | Iterable[type[nn.Module] | str] | None


# Containers are not called themselves, and torch's attention reads the parameters of its children without calling them.
_INDIVISIBLE = (nn.MultiheadAttention,)


def check_wrap_policy(wrap_policy: Any) -> None:
    """Raise TypeError or ValueError unless `wrap_policy` is one that `block_names` takes."""
    legal = (
        "a module class, a name pattern, several of these, a number of parameters, a predicate (name, module), or None"
    )
    if wrap_policy is None or isinstance(wrap_policy, str):
        return
    if isinstance(wrap_policy, int):
        arguments.count("wrap_policy", wrap_policy, what="of parameters")
        return
    if isinstance(wrap_policy, Iterable) and not isinstance(wrap_policy, (type, nn.Module, Mapping, torch.Tensor)):
        entries = list(wrap_policy)
        if not entries:
            raise ValueError(
                "wrap_policy is empty; name a block class or pattern, or pass None for the repeated blocks"
            )
        wrong = [entry for entry in entries if not _is_class_or_pattern(entry)]
        if wrong:
            raise TypeError(
                f"wrap_policy holds {arguments.shown(wrong[0])}; in a list each entry must be a module class or a name pattern"
            )
        return
    if isinstance(wrap_policy, nn.Module):
        raise TypeError(f"wrap_policy is a module object ({type(wrap_policy).__name__}); pass its class, or its name")
    if not (_is_class_or_pattern(wrap_policy) or (callable(wrap_policy) and not isinstance(wrap_policy, type))):
        raise TypeError(f"wrap_policy={arguments.shown(wrap_policy)} is not legal; pass {legal}")


def block_names(model: nn.Module, wrap_policy: WrapPolicy) -> list[str]:
    """Return the qualified names of the blocks of `model`, in the order of its modules; the model itself is not one.

    wrap_policy: module classes; names or patterns, where `*` matches within one part of a name and `**` across parts;
    a predicate `(name, module) -> bool`; a number of parameters, at which a module becomes a block, parameters of blocks
    inside it not counted; None: see `repeated_blocks`. Raises ValueError for a class or pattern that selects nothing, not
    even, for a class, the model, which is gathered as a whole with or without a policy.
    """
    if wrap_policy is None:
        return repeated_blocks(model)
    named = [(name, module) for name, module in model.named_modules() if name and not isinstance(module, NEVER_CALLED)]
    if isinstance(wrap_policy, int):
        return _large_modules(model, wrap_policy)
    if isinstance(wrap_policy, (type, str)):
        entries: list[Any] = [wrap_policy]
    elif isinstance(wrap_policy, Iterable):
        entries = list(wrap_policy)
    else:
        return [name for name, module in named if wrap_policy(name, module)]
    chosen: set[str] = set()
    for entry in entries:
        if isinstance(entry, type):
            matches = {name for name, module in named if isinstance(module, entry)}
        else:
            matches = {name for name, _ in named if matcher(entry)(name)}
        if not matches and not (isinstance(entry, type) and isinstance(model, entry)):  # which is a block by itself
            shown = entry if isinstance(entry, str) else entry.__name__
            kinds = sorted({type(module).__name__ for _, module in named})
            raise ValueError(
                f"wrap_policy names {shown!r}, which selects no module of {type(model).__name__}; its top-level modules are "
                f"{[name for name, _ in model.named_children()]}, its classes {kinds}"
            )
        chosen |= matches
    return [name for name, _ in named if name in chosen]


def _large_modules(model: nn.Module, minimum: int) -> list[str]:
    """Return the modules with at least `minimum` parameters that are in no block inside them, innermost first."""
    chosen: list[str] = []
    seen: set[int] = set()

    def uncovered(module: nn.Module, name: str) -> int:
        """Choose inside `module`, then perhaps itself; return the number of parameters that are in no block yet."""
        if isinstance(module, _INDIVISIBLE):
            left = sum(param.numel() for param in module.parameters())
        else:
            own = [param for param in module.parameters(recurse=False) if id(param) not in seen]
            seen.update(map(id, own))
            children = module.named_children()
            left = sum(param.numel() for param in own)
            left += sum(uncovered(child, f"{name}.{part}" if name else part) for part, child in children)
        if name and left >= minimum and not isinstance(module, NEVER_CALLED):
            chosen.append(name)
            return 0
        return left

    uncovered(model, "")
    return chosen


def _is_class_or_pattern(entry: Any) -> bool:
    return isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module))
