"""A step of the user's optimizer in parts: some parameters after others, as their gradients come.

Calling the `step` of the user's optimizer on some of its parameters at a time, as parts of one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common.torch_internals.optimizer_internals import (
    exchange_step_hooks,
    mark_step_called,
    step_hooks,
    unhooked,
)
from booster.model.optimizer_kinds import KNOWN
from booster.model.optimizer_states import snapshot_entries
from booster.shards import Shards


class Restricted:
    """Restricts the optimizer, while entered, to one group with the parameters last given to `to`.

    The group's other entries are as the user set them before each call: an optimizer that writes to them, once per step,
    has then written once. So are what they hold, and numbers of the optimizer itself, for optimizers that are not torch's,
    which write to none of these.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self._optimizer = optimizer
        self._group = group
        self._params = list(group["params"])
        self._entries = dict(group)
        del self._entries["params"]
        self._put_back = None if type(optimizer) in KNOWN else snapshot_entries(optimizer, group)
        self._stepped = False

    def __enter__(self) -> Restricted:
        self._groups = self._optimizer.param_groups
        self._optimizer.param_groups = [self._group]
        return self

    def to(self, params: Sequence[torch.Tensor]) -> None:
        if self._put_back is None:
            self._group.update(self._entries)
        else:
            self._put_back()
        self._stepped = True
        self._group["params"][:] = params

    def __exit__(self, *error: Any) -> None:
        self._group["params"][:] = self._params
        self._optimizer.param_groups = self._groups

    def step_if_nothing_was(self) -> None:
        """Step the group once although it has no gradient, as a step of all groups does: the optimizer may count in it."""
        if self._put_back is not None and not self._stepped:
            with self:
                self.to([nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))])
                bare_step(self._optimizer)


@contextmanager
def hooks_once(optimizer: Any) -> Iterator[None]:
    """Fire step hooks around the whole, with the user's parameters in the groups, and not inside."""
    fire_pre_hooks(optimizer)
    # The calls inside are of `step` itself, and would fire hooks for each bucket.
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
    mark_step_called(optimizer)
    for hook in step_hooks(optimizer)[1]:
        hook(optimizer, (optimizer,), {})


def bare_step(optimizer: Any, *args: Any) -> Any:
    """Call `optimizer.step`, without the wrapper by which torch runs hooks; returns its result."""
    return unhooked(type(optimizer).step)(optimizer, *args)


_FEWEST = 2**16  # elements; fewer are not stepped at once, as a call costs more
_SHARE = 64  # of all elements: so many wait at most for others to be stepped with


def most_at_once(num_elements: int) -> int:
    """Return how many of all elements are stepped at once, where nothing else binds parameters together."""
    return max(_FEWEST, num_elements // _SHARE)


class GradualStep(ABC):
    """One step of `optimizer`: `units`, `begin`, `step` for some parameters at a time, `rest` before the last ones, `end`.

    Step hooks are called once, before the first part and after the last one. Parameters are this rank's parts of them; `units`
    and `rest` are called inside `shards.local()`, the others outside of it.
    """

    def __init__(self, optimizer: Optimizer, shards: Shards) -> None:
        self.optimizer = optimizer
        self.shards = shards

    def units(self) -> list[list[torch.Tensor]]:
        """Return parameters that are stepped together, each in one list; those in none can be stepped with any others."""
        return []

    def begin(self) -> None:
        """The first part follows."""
        fire_pre_hooks(self.optimizer)
        groups = self.optimizer.param_groups
        self._restricted = [Restricted(self.optimizer, group) for group in groups]
        shard_of = self.shards.shard_of
        self._place = {shard_of(p): (i, j) for i, group in enumerate(groups) for j, p in enumerate(group["params"])}

    @torch.no_grad()
    def step(self, params: Sequence[torch.Tensor], grad_scale: float) -> None:
        """Step `params` on their gradients, divided by `grad_scale`. All of a unit, each of which has a gradient."""
        hooks = exchange_step_hooks(self.optimizer, None)
        try:
            self._step(params, grad_scale)
        finally:
            exchange_step_hooks(self.optimizer, hooks)

    @abstractmethod
    def _step(self, params: Sequence[torch.Tensor], grad_scale: float) -> None:
        """As `step`, without step hooks."""

    def rest(self, params: Sequence[torch.Tensor]) -> None:
        """What is stepped from now on are `params`, all that still have a gradient, of units of which others have none."""

    def end(self) -> None:
        """All is stepped."""
        for only in self._restricted:
            only.step_if_nothing_was()
        fire_post_hooks(self.optimizer)
