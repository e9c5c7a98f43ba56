"""Calling the `step` of the user's optimizer on some of its parameters at a time, as parts of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from booster.torch_internals import exchange_step_hooks, note_step, step_hooks, unhooked


class Restricted:
    """Restricts the optimizer, while entered, to one group with the parameters last given to `to`.

    The group's other entries are as the user set them before each call: an optimizer that writes to them, once per step,
    has then written once.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self._optimizer = optimizer
        self._group = group
        self._params = list(group["params"])
        self._entries = dict(group)
        del self._entries["params"]

    def __enter__(self) -> Restricted:
        self._groups = self._optimizer.param_groups
        self._optimizer.param_groups = [self._group]
        return self

    def to(self, params: Sequence[torch.Tensor]) -> None:
        self._group.update(self._entries)
        self._group["params"][:] = params

    def __exit__(self, *error: Any) -> None:
        self._group["params"][:] = self._params
        self._optimizer.param_groups = self._groups


@contextmanager
def hooks_once(optimizer: Any) -> Iterator[None]:
    """Fire step hooks around the whole, with the user's parameters in the groups, and not inside."""
    fire_pre_hooks(optimizer)
    own = exchange_step_hooks(optimizer, None)
    try:
        yield
    finally:
        exchange_step_hooks(optimizer, own)
    fire_post_hooks(optimizer)


def fire_pre_hooks(optimizer: Any) -> None:
    """Call what is to be called before a step. Raises RuntimeError for a hook that changes the arguments of it."""
    for hook in step_hooks(optimizer)[0]:
        if hook(optimizer, (optimizer,), {}) is not None:
            raise RuntimeError("a step pre-hook returned new arguments, which a step in parts cannot pass on")


def fire_post_hooks(optimizer: Any) -> None:
    """Note that a step was taken, and call what is to be called after it."""
    note_step(optimizer)
    for hook in step_hooks(optimizer)[1]:
        hook(optimizer, (optimizer,), {})


def bare_step(optimizer: Any, *args: Any) -> Any:
    """Call `optimizer.step`, without the wrapper by which torch runs hooks; returns its result."""
    return unhooked(type(optimizer).step)(optimizer, *args)
