"""Keep everything that Python or torch may change in some objects, and put it back: `StateSnapshot(roots)`, later `restore()`.

    before = StateSnapshot([model, optimizer])
    train_step()                            # weights, states, counters, gradients and random numbers are others now
    before.restore()                        # and are as they were, in the same objects

Three things have to come back. What Python holds: attributes and the content of containers, found by walking from the roots.
What tensors hold: the bytes of their memory. And where random generators are. A walk is cheap, since it copies references; the
bytes are not, so they are copied at once for what the walk finds, or (`numbers=False`) only where `memory` learns of a write
before it happens. `MemorySnapshot` alone is for who knows which tensors are written; `attributes` sets a few for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from booster.common.random_states import random_state, set_random_state
from booster.common.torch_internals.tensor_internals import storage_key

_OF_TORCH = (nn.Module, Optimizer, LRScheduler)


@contextmanager
def attributes(objects: Iterable[Any], **values: Any) -> Iterator[None]:
    """Return a context in which attributes of all `objects` are `values`; afterwards they are what they were."""
    before = [(each, {name: getattr(each, name) for name in values}) for each in objects]
    for each, _ in before:
        for name, value in values.items():
            setattr(each, name, value)
    try:
        yield
    finally:
        for each, own in before:
            for name, value in own.items():
                setattr(each, name, value)


class MemorySnapshot:
    """The bytes of memory that is about to be written, as they were when `keep` was first called for it."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy all of the storage of `tensor`, unless that was done."""
        storage = tensor.untyped_storage()
        # Whole storages: other tensors that are views of them are written by the same operations.
        if storage_key(tensor) not in self._kept and storage.nbytes():
            self._kept[storage_key(tensor)] = (storage, storage.clone())

    def restore(self) -> None:
        # Written as storages, because no version counter sees that: graphs that saved these tensors stay valid.
        for storage, copy in self._kept.values():
            if storage.nbytes() == copy.nbytes():  # one that was resized since is memory that somebody let go
                storage.copy_(copy)
        self._kept.clear()


class ContainerSnapshot:
    """Lists, deques, dicts and sets with what was in them, and attributes of objects."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}

    def keep(self, container: Any) -> list[Any]:
        """Keep the content of `container` unless that was done; returns what is in it."""
        if id(container) in self._kept:
            return []
        before = dict(container) if isinstance(container, dict) else container.copy()
        self._kept[id(container)] = (container, before)
        return [*before, *before.values()] if isinstance(before, dict) else list(before)

    def restore(self) -> None:
        for container, before in self._kept.values():
            if isinstance(container, list):
                # In place: others hold these very objects.
                container[:] = before
                continue
            container.clear()
            if isinstance(container, deque):
                container.extend(before)
            else:
                container.update(before)


class StateSnapshot:
    """What can be reached from `roots`, as it is now.

    The walk follows attributes of modules, optimizers, schedulers and objects of this library, the content of containers, and
    tensors to their gradients.

    Attributes:
        memory: the bytes of tensors; who writes to others than those that were reached calls `memory.keep` before.
        numbers: whether the bytes of all tensors that are reached are copied now.
        random: whether the global random generators come back; others by `keep_generator`.
    """

    def __init__(self, roots: Iterable[Any], *, numbers: bool = True, random: bool = True) -> None:
        self.memory = MemorySnapshot()
        self._numbers = numbers
        self._random = random_state() if random else None
        self._generators: dict[torch.Generator, torch.Tensor] = {}
        self._containers = ContainerSnapshot()
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        seen: dict[int, Any] = {}  # holds what it saw: an object that is gone gives its id to another
        waiting = list(roots)
        while waiting:
            each = waiting.pop()
            if id(each) not in seen:
                seen[id(each)] = each
                waiting += self._keep(each)

    def keep_generator(self, generator: torch.Generator) -> None:
        """Have `generator` come back too; called before it is used."""
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()

    def restore(self) -> None:
        """Put everything back."""
        self._containers.restore()
        for tensor, grad in self._gradients.values():
            tensor.grad = grad
        self.memory.restore()
        torch.clear_autocast_cache()  # of weights as they were in between
        for generator, state in self._generators.items():
            generator.set_state(state)
        if self._random is not None:
            set_random_state(self._random)

    def _keep(self, each: Any) -> list[Any]:
        """Keep `each`; returns what is reached from it."""
        if isinstance(each, torch.Tensor):
            if self._numbers and type(each) in (torch.Tensor, nn.Parameter) and each.layout is torch.strided:
                self.memory.keep(each)
            # What autograd computed has a history instead of a `.grad`, and is freed with its graph.
            if not each.is_leaf:
                return []
            self._gradients[id(each)] = (each, each.grad)
            return [] if each.grad is None else [each.grad]
        if type(each) in (list, set, deque) or isinstance(each, dict):
            return self._containers.keep(each)
        if isinstance(each, tuple):
            return list(each)
        # Objects of others are not walked: their attributes may lead to everything there is.
        ours = type(each).__module__.startswith("booster.") and not isinstance(each, type)
        if ours and not hasattr(each, "__dict__"):  # a quantized state: its slots never change, its tensors do
            return [getattr(each, name, None) for name in getattr(type(each), "__slots__", ())]
        if ours or isinstance(each, _OF_TORCH):
            return self._containers.keep(vars(each))
        return []
