"""What graphs hold as it was: where tensors lie, and options of groups of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from booster.interface.optimizer import OptimizerWrapper, update_of

_ADDRESS = torch.Tensor.data_ptr
_TENSORS = ("_parameters", "_buffers")
_READ = ("lr", "initial_lr")


class Layout:
    """Where everything lies that graphs read and write by address."""

    def __init__(self, addresses: list[int], held: list[Any]) -> None:
        self._addresses, self._held = addresses, held

    @classmethod
    def of(cls, modules: Sequence[nn.Module], optimizers: Sequence[OptimizerWrapper]) -> Layout:
        """That of tensors in `modules`, each by itself, and in `optimizers`."""
        own = [vars(module) for module in modules]
        weights = [tensor for each in own for name in _TENSORS for tensor in each[name].values() if tensor is not None]
        held = [child for each in own for child in each["_modules"].values()]
        for optimizer in optimizers:
            held += update_of(optimizer).optimizer_state.master_tensors()
            for state in optimizer.unwrap().state.values():
                held += state.values()  # packed ones, too
            for group in optimizer.param_groups:
                held += group["params"]
        return cls(list(map(_ADDRESS, weights)), held)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Layout)
            and self._addresses == other._addresses
            and len(self._held) == len(other._held)
            and all(map(is_, self._held, other._held))
        )

    __hash__ = None  # type: ignore[assignment]


def options_of(optimizers: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return what graphs hold of groups of parameters as it was: all options but learning rates that are numbers."""
    return [
        (name, value)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params" and (name not in _READ or isinstance(value, torch.Tensor))
    ]


def difference(before: Any, now: Any) -> str | None:
    """Return what is another in the second of two pairs of a layout and options; None where all is the same."""
    if before == now:
        return None
    if before[0] != now[0]:
        return "weights or states were put elsewhere, as by loading them,"
    texts = [{(name, repr(value)) for name, value in options} for _, options in (before, now)]
    names = sorted({name for name, _ in texts[0] ^ texts[1]})
    return f"{', '.join(names) or 'groups'} of a group of parameters changed, which graphs hold as numbers,"
