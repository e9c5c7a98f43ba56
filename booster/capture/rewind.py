"""What a training step changes, kept to be put back: objects, gradients, memory and random states."""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from booster.common.random_states import random_state, set_random_state
from booster.interface.optimizer import OptimizerWrapper
from booster.interface.scheduler import LRSchedulerWrapper
from booster.masters.quantized_state import QuantizedState
from booster.numerics.diagnosis.replay import Memory

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_OF_TORCH = (nn.Module, Optimizer, LRScheduler)


class Rewind:
    """Everything that is reached from `roots` as it is now, until `put_back`.

    Reached are attributes of modules, optimizers and schedulers, and of objects of this library, what is in containers there,
    and tensors with their gradients. Other memory is put back where `memory` was told of it before it was written, and other
    generators where they were given to `keep_generator` before they were used.

    of_memory: also numbers in tensors; False where nothing writes them meanwhile.
    """

    def __init__(self, roots: Iterable[Any], *, of_memory: bool = True) -> None:
        self.memory = Memory()
        self._of_memory = of_memory
        self._random = random_state()
        self._generators: dict[torch.Generator, torch.Tensor] = {}
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._seen: set[int] = set()
        waiting = list(roots)
        while waiting:
            each = waiting.pop()
            if id(each) not in self._seen:
                waiting += self._keep(each)

    def keep_generator(self, generator: torch.Generator) -> None:
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()

    def put_back(self) -> None:
        for each, own in self._attributes:
            vars(each).clear()
            vars(each).update(own)
        for container, before in self._containers:
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(before)
            else:
                container.update(before)
        for tensor, grad in self._gradients:
            tensor.grad = grad
        self.memory.write_back()
        torch.clear_autocast_cache()
        for generator, state in self._generators.items():
            generator.set_state(state)
        set_random_state(self._random)

    def _keep(self, each: Any) -> list[Any]:
        """Keep `each`; returns what is reached from it."""
        kind = type(each)
        if isinstance(each, torch.Tensor):
            self._seen.add(id(each))
            if each.is_leaf:
                self._gradients.append((each, each.grad))
            if self._of_memory and kind in (torch.Tensor, nn.Parameter) and each.layout is torch.strided:
                self.memory.keep(each)
            return [] if not each.is_leaf or each.grad is None else [each.grad]
        if kind in _CONTAINERS:
            self._seen.add(id(each))
            before = each.copy()
            self._containers.append((each, before))
            return [*before, *before.values()] if isinstance(each, dict) else list(before)
        if isinstance(each, tuple):
            return list(each)
        if isinstance(each, QuantizedState):
            return list(each.tensors)
        of_ours = kind.__module__.startswith("booster.") and hasattr(each, "__dict__")
        if isinstance(each, _OF_TORCH) or (of_ours and not isinstance(each, type)):
            self._seen.add(id(each))
            own = dict(vars(each))
            self._attributes.append((each, own))
            return list(own.values())
        return []


def schedules_of(optimizers: Iterable[OptimizerWrapper]) -> list[Any]:
    """Return the schedulers of `optimizers` in this process, boosted and others: nobody else knows who they are."""
    theirs = {id(each) for wrapper in optimizers for each in (wrapper, wrapper.unwrap())}
    found: list[Any] = []
    for each in gc.get_objects():
        if issubclass(type(each), LRSchedulerWrapper):
            found += [each, vars(each).get("scheduler")]
        elif issubclass(type(each), LRScheduler) and id(vars(each).get("optimizer")) in theirs:
            found.append(each)
    return found
