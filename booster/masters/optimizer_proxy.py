"""Stand-ins for an optimizer: its step on tensors that are given, with nothing of it touched."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from booster.common.torch_internals.optimizer_internals import is_counted_step, unwrapped
from booster.model.optimizer_states import restored_afterwards

Entries = dict[str, Any]
State = dict[str, Any]

# Of a group: what no `step` reads, but differs from group to group. Each value seen is a graph.
NOT_READ = ("params", "lr", "initial_lr", "param_names")


def read_entries(group: Entries) -> Entries:
    """Return the entries of a group that a step reads, the learning rate excepted."""
    entries = {key: value for key, value in group.items() if key not in NOT_READ}
    # One tensor needs no foreach, and some foreach implementations refuse a tensor for a learning rate.
    return entries | ({"foreach": False} if "foreach" in entries else {})


def step_proxy(
    proxy: type, attributes: Entries, group: Entries, rate: Any, masters: torch.Tensor, state: State
) -> tuple[Entries, State]:
    """Step a new stand-in on `masters`, in place by their `.grad`. Returns the group and the state afterwards."""
    optimizer: Any = proxy()
    for key, value in attributes.items():
        setattr(optimizer, key, value)
    own = {**group, "params": [masters]}
    if rate is not None:
        own["lr"] = rate
    optimizer.param_groups = [own]
    optimizer.state = {masters: state}
    optimizer.step()
    return {key: own[key] for key in group}, optimizer.state[masters]


def keeps_state(optimizer: Optimizer, group: Entries, device: torch.device) -> bool:
    """Return whether a first step of `optimizer` creates state for a parameter; tries it on one of a few zeros."""
    masters = torch.zeros(1, dtype=torch.float32, device=device)
    masters.grad = torch.zeros(1, dtype=torch.float32, device=device)
    own = proxy_class(type(optimizer)), instance_attributes(optimizer)
    with restored_afterwards(optimizer, group):
        return bool(step_proxy(*own, read_entries(group), group.get("lr"), masters, {})[1])


def instance_attributes(optimizer: Optimizer) -> Entries:
    """Return what a step may read of the instance beside groups and state, without what torch's schedules put there."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups")
        and not key.startswith(("_optimizer_", "_zero_grad_", "_warned_"))
        and not is_counted_step(value)
    }


def proxy_class(cls: type[Optimizer]) -> type:
    """Return a class with the functions of `cls` and its bases that is no Optimizer, without what torch wraps them in."""
    members: Entries = {}
    for base in reversed(cls.__mro__[:-1]):
        for name, value in vars(base).items():
            if not name.startswith("__"):
                members[name] = unwrapped(value) if inspect.isfunction(value) else value
    return type(cls.__name__, (), members)
