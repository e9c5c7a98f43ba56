"""What averages gradients over ranks within backward, as shards see it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from booster.shards.base import FROZEN, UNSYNCHRONISED, Shards


class Reducer(Protocol):
    """Averages gradients of some parameters; `booster.plugin.gradient_reducer.GradientReducer` is the one here.

    synchronises: whether it does at present. left: whether passes in which it did not have left gradients.
    """

    synchronises: bool
    left: bool

    def __contains__(self, param: object) -> bool: ...

    def watch(
        self,
        params: Collection[torch.Tensor],
        filled: Callable[[torch.Tensor], None],
        held: Mapping[torch.Tensor, torch.Tensor],
        *,
        again: bool,
    ) -> Any: ...


def watch_reduced(
    shards: Shards,
    reducers: Iterable[Reducer],
    params: Sequence[torch.Tensor],
    filled: Callable[[torch.Tensor], None],
    held: Mapping[torch.Tensor, torch.Tensor],
    *,
    again: bool,
) -> list[Any]:
    """Do what `Shards.watch` says, of parameters whose gradients `reducers` average."""
    several = list(reducers)
    for param in params:
        own = next((each for each in several if param in each), None)
        if own is None:
            raise RuntimeError(FROZEN.format(name=shards.name_of(param)))
        if not own.synchronises:
            raise RuntimeError(UNSYNCHRONISED)
    return [each.watch(params, filled, held, again=again) for each in several]


def check_averaged(shards: Shards, reducers: Iterable[Reducer]) -> None:
    """Raise RuntimeError if the optimizer of `shards` holds a gradient that passes without synchronisation left."""
    for reducer in reducers:
        if not reducer.left:
            continue
        held = (param for group in shards.optimizer.param_groups for param in group["params"])
        if any(param.grad is not None and param in reducer for param in held):
            raise RuntimeError(UNSYNCHRONISED)
