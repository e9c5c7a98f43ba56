"""Gradients that are stepped on within backward, on fake tensors: when each is complete, and what is there meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from booster.plugin.ddp.gradient_reducer import MOST_IN_FLIGHT
from booster.shards.zero_buckets import bucketed
from booster.tensors.trees import HALF_DTYPES

Sizes = tuple[tuple[torch.dtype, int], ...]


@dataclass
class Complete:
    """A gradient that is complete: dtype and elements of this rank's part of it, and the tensors that keep it alive."""

    dtype: torch.dtype
    size: int
    memory: list[torch.Tensor]
    free: Callable[[], None] = lambda: None


Take = Callable[[Complete], None]


class Arrivals(ABC):
    """When the gradients of a backward pass are complete on all ranks."""

    @property
    @abstractmethod
    def sizes(self) -> Sizes:
        """Dtype and elements of this rank's part of each trained parameter."""

    @abstractmethod
    def begin(self, take: Take) -> None:
        """A pass follows, in which `take` is given each gradient when it is complete."""

    @abstractmethod
    def end(self) -> None:
        """The pass is over."""


@dataclass(frozen=True)
class Released:
    """How gradients are stepped on within backward. twice: the graph is gone through for their norm before. piece: elements
    of half gradients that are widened at a time for it. step: bytes that stepping takes, and elements that are stepped at
    once, of parameters of these dtypes and sizes."""

    twice: bool
    piece: int
    step: Callable[[Sizes], tuple[int, int]]

    def run(self, loss: torch.Tensor, arrivals: Arrivals, device: torch.device) -> None:
        """Go through the graph of `loss`, on fake tensors, and free each gradient when it would be."""
        scratch, at_once = self.step(arrivals.sizes)
        waiting: list[Complete] = []

        def empty(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        def measure(found: Complete) -> None:
            wide = found.dtype in HALF_DTYPES and found.size > 0
            taken = empty(min(found.size, self.piece) * 4 * wide)
            found.free()
            found.memory.clear()
            del taken

        def step(found: Complete) -> None:
            waiting.append(found)
            if sum(each.size for each in waiting) >= at_once:
                step_all()
            elif any(memory.untyped_storage().nbytes() > found.size * found.dtype.itemsize for memory in found.memory):
                found.memory[:] = [empty(found.size * found.dtype.itemsize)]  # a copy, so that others' memory can go
                found.free()

        def step_all() -> None:
            taken = empty(scratch)
            for each in waiting:
                each.free()
                each.memory.clear()
            waiting.clear()
            del taken

        for action in (measure, step) if self.twice else (step,):
            arrivals.begin(action)
            loss.backward(retain_graph=action is measure)
            arrivals.end()
        step_all()


class Whole(Arrivals):
    """On one rank: a gradient is complete when autograd has it."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = [param for param in params if param.requires_grad]
        self._handles: list[Any] = []

    @property
    def sizes(self) -> Sizes:
        return tuple((param.dtype, param.numel()) for param in self._params)

    def begin(self, take: Take) -> None:
        def filled(param: torch.Tensor) -> None:
            def free() -> None:
                param.grad = None

            take(Complete(param.dtype, param.numel(), [], free))

        self._handles = [param.register_post_accumulate_grad_hook(filled) for param in self._params]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()


class Bucketed(Arrivals):
    """On `world_size` ranks that average whole gradients by buckets of at most bucket_bytes, as `GradientReducer` does.

    parts: into how many parts ranks divide what is stepped. slices: each keeps its slice of an average only (ZeRO-2), else all
    of it. params: in the order of the model.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], *, world_size: int, parts: int, slices: bool, bucket_bytes: float
    ) -> None:
        self._params = [param for param in params if param.requires_grad and param.numel()]
        self._world_size, self._parts, self._slices = world_size, parts, slices
        self._divided = bucketed(self._params, bucket_bytes)
        self._handles: list[Any] = []

    @property
    def sizes(self) -> Sizes:
        return tuple((param.dtype, self._own(param)) for param in self._params)

    def _own(self, param: torch.Tensor) -> int:
        return -(-param.numel() // self._parts)

    def begin(self, take: Take) -> None:
        self._take = take
        self._bucket = {id(p): index for index, own in enumerate(self._divided) for p in own}
        self._missing = [len(own) for own in self._divided]
        self._next = 0
        self._flat: dict[int, torch.Tensor] = {}
        self._sent: deque[tuple[int, list[torch.Tensor]]] = deque()
        self._handles = [param.register_post_accumulate_grad_hook(self._filled) for param in self._params]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        while self._next < len(self._divided):
            self._send()
        self._settle(0)

    def _filled(self, param: torch.Tensor) -> None:
        index = self._bucket[id(param)]
        if not self._slices:  # gradients are written into the bucket as they come
            self._room(index)
            param.grad = None
        self._missing[index] -= 1
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._send()

    def _room(self, index: int) -> torch.Tensor:
        if index not in self._flat:
            own = self._divided[index]
            size = sum(param.numel() for param in own)
            self._flat[index] = torch.empty(size, dtype=own[0].dtype, device=own[0].device)
        return self._flat[index]

    def _send(self) -> None:
        self._settle(MOST_IN_FLIGHT - 1)
        index, self._next = self._next, self._next + 1
        flat = self._room(index)
        for param in self._divided[index]:
            param.grad = None
        sent = [self._flat.pop(index)]
        if self._slices and flat.device.type == "cpu":  # what the others send of this rank's slice
            sent.append(torch.empty_like(flat))
        elif self._slices:
            sent.append(flat.new_empty(-(-flat.numel() // self._world_size)))
        self._sent.append((index, sent))

    def _settle(self, number: int) -> None:
        while len(self._sent) > number:
            index, sent = self._sent.popleft()
            if self._slices:
                sent = [sent[0].new_empty(-(-sent[0].numel() // self._world_size))]
            own = list(sent)
            sent.clear()
            found = [Complete(param.dtype, self._own(param), list(own)) for param in self._divided[index]]
            own.clear()
            while found:
                self._take(found.pop(0))
