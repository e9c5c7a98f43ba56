"""A region after which everything is as it was: weights, buffers, gradients, random states, and what an update knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from booster.randomness import random_state, set_random_state
from booster.torch_internals import storage_key
from booster.update.base import Update


class Memory:
    """Memory that existed before a replay, kept when the replay is about to write to it, and written back."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy all of the memory of `tensor`, unless that was done."""
        storage = tensor.untyped_storage()
        if storage_key(tensor) not in self._kept and storage.nbytes():
            self._kept[storage_key(tensor)] = (storage, storage.clone())

    def write_back(self) -> None:
        # On storages, because no version counter tells of it: graphs that saved these tensors stay valid.
        for storage, copy in self._kept.values():
            if storage.nbytes() == copy.nbytes():
                storage.copy_(copy)
        self._kept.clear()


_OF_TORCH = frozenset(nn.Module().__dict__)  # children, parameters and hooks: nobody adds one while it computes


class _Containers:
    """Lists, dicts and sets, and those inside of them, with what was in them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}

    def keep(self, value: Any) -> None:
        if type(value) not in (list, dict, set) or id(value) in self._kept:
            return
        self._kept[id(value)] = (value, value.copy())
        for inner in value.values() if type(value) is dict else value:
            self.keep(inner)

    def write_back(self) -> None:
        for value, before in self._kept.values():
            if type(value) is list:
                value[:] = before
            else:
                value.clear()
                value.update(before)


@contextmanager
def unchanged(modules: Iterable[nn.Module], updates: Iterable[Update], scale: float) -> Iterator[Memory]:
    """Inside there are no gradients; afterwards, gradients and all else are what and where they were.

    scale: that `updates` multiply losses by inside.
    modules: those that compute: their buffers come back, and plain attributes such as counters, with what is in lists, dicts
    and sets among them. Other memory comes back where
    the `Memory` that this yields was told of it before it was written.
    """
    modules, updates = list(modules), list(updates)
    memory, random = Memory(), random_state()
    for module in modules:
        for buffer in module.buffers():
            if type(buffer) is torch.Tensor:
                memory.keep(buffer)
    inner = {child: None for module in modules for child in module.modules()}
    containers = _Containers()
    for child in inner:
        for name, value in child.__dict__.items():
            if name not in _OF_TORCH:
                containers.keep(value)
    attributes = [(child, dict(child.__dict__), dict(child._buffers)) for child in inner]
    with ExitStack() as gradients:
        params = {param: None for module in modules for param in module.parameters()}
        held = [param for update in updates for group in update.optimizer.param_groups for param in group["params"]]
        gradients.enter_context(_without_gradients([*params, *(param for param in held if param not in params)]))
        for update in updates:
            gradients.enter_context(update.shards.without_gradients())
            gradients.enter_context(update.set_aside(scale))
        try:
            yield memory
        finally:
            for child, own, buffers in attributes:
                child.__dict__.clear()
                child.__dict__.update(own)
                child._buffers.clear()
                child._buffers.update(buffers)
            containers.write_back()
            memory.write_back()
            torch.clear_autocast_cache()
            set_random_state(random)


@contextmanager
def _without_gradients(params: Iterable[Any]) -> Iterator[None]:
    held = [(param, param.grad) for param in params]
    for param, _ in held:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in held:
            param.grad = grad
