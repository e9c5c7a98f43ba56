"""Gradients that are stepped on within backward, on fake tensors: when each is complete, and what is there meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from booster.plugin.ddp.gradient_reducer import MOST_IN_FLIGHT
from booster.shards.zero_buckets import bucketed
from booster.tensors.trees import HALF_DTYPES

if TYPE_CHECKING:
    from booster.memory.measured_memory import StepMemory

Sizes = tuple[tuple[torch.dtype, int], ...]


@dataclass
class CompleteGradient:
    """A gradient that all ranks have added to.

    Attributes:
        dtype, size: of this rank's shard of it.
        memory: the tensors that keep it alive.
        free: drops what else does.
    """

    dtype: torch.dtype
    size: int
    memory: list[torch.Tensor]
    free: Callable[[], None] = lambda: None


OnComplete = Callable[[CompleteGradient], None]


class GradientArrivals(ABC):
    """When the gradients of a backward pass are complete on all ranks."""

    @property
    @abstractmethod
    def sizes(self) -> Sizes:
        """Dtype and elements of this rank's shard of each trained parameter."""

    @abstractmethod
    def prepare(self, on_complete: OnComplete) -> None:
        """Call `on_complete` with each gradient of the next backward pass."""

    @abstractmethod
    def finish(self) -> None:
        """The pass is over."""


@dataclass(frozen=True)
class StepsInBackward:
    """How parameters are stepped within backward.

    Attributes:
        twice: the graph is gone through for the norm of the gradients before.
        piece: elements of half-precision gradients that are cast to float32 at a time for the norm.
        step_of: what stepping parameters of these dtypes and sizes takes.
    """

    twice: bool
    piece: int
    step_of: Callable[[Sizes], StepMemory]

    def run(self, loss: torch.Tensor, arrivals: GradientArrivals, device: torch.device) -> None:
        """Go through the graph of `loss`, on fake tensors, and free each gradient when training would."""
        step = self.step_of(arrivals.sizes)
        waiting: list[CompleteGradient] = []

        def empty(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        def add_to_norm(gradient: CompleteGradient) -> None:
            is_cast = gradient.dtype in HALF_DTYPES and gradient.size > 0
            scratch = empty(min(gradient.size, self.piece) * 4 * is_cast)
            gradient.free()
            gradient.memory.clear()
            del scratch

        def step_when_enough(gradient: CompleteGradient) -> None:
            waiting.append(gradient)
            nbytes = gradient.size * gradient.dtype.itemsize
            if sum(each.size for each in waiting) >= step.at_once:
                step_all()
            elif any(memory.untyped_storage().nbytes() > nbytes for memory in gradient.memory):
                # It shares memory with other gradients: a copy lets that memory go.
                gradient.memory[:] = [empty(nbytes)]
                gradient.free()

        def step_all() -> None:
            scratch = empty(step.temporaries)
            for each in waiting:
                each.free()
                each.memory.clear()
            waiting.clear()
            del scratch

        for action in (add_to_norm, step_when_enough) if self.twice else (step_when_enough,):
            arrivals.prepare(action)
            loss.backward(retain_graph=action is add_to_norm)
            arrivals.finish()
        step_all()


class Unsharded(GradientArrivals):
    """On one rank: a gradient is complete when autograd has it."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = [param for param in params if param.requires_grad]
        self._handles: list[Any] = []

    @property
    def sizes(self) -> Sizes:
        return tuple((param.dtype, param.numel()) for param in self._params)

    def prepare(self, on_complete: OnComplete) -> None:
        def filled(param: torch.Tensor) -> None:
            on_complete(CompleteGradient(param.dtype, param.numel(), [], lambda: setattr(param, "grad", None)))

        self._handles = [param.register_post_accumulate_grad_hook(filled) for param in self._params]

    def finish(self) -> None:
        for handle in self._handles:
            handle.remove()


class Bucketed(GradientArrivals):
    """On ranks that average gradients bucket by bucket, as `GradientReducer` does.

    params: in the order of the model.
    shards: over how many ranks what is stepped is sharded.
    reduce_scatter: each rank keeps its shard of an average only (ZeRO-2), else all of it.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], *, world_size: int, shards: int, reduce_scatter: bool, bucket_bytes: float
    ) -> None:
        self._params = [param for param in params if param.requires_grad and param.numel()]
        self._world_size, self._shards, self._reduce_scatter = world_size, shards, reduce_scatter
        self._buckets = bucketed(self._params, bucket_bytes)
        self._handles: list[Any] = []

    @property
    def sizes(self) -> Sizes:
        return tuple((param.dtype, self._shard_size(param)) for param in self._params)

    def _shard_size(self, param: torch.Tensor) -> int:
        return -(-param.numel() // self._shards)

    def prepare(self, on_complete: OnComplete) -> None:
        self._on_complete = on_complete
        self._bucket_of = {id(param): index for index, bucket in enumerate(self._buckets) for param in bucket}
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0
        self._flat: dict[int, torch.Tensor] = {}
        self._in_flight: deque[tuple[int, list[torch.Tensor]]] = deque()
        self._handles = [param.register_post_accumulate_grad_hook(self._filled) for param in self._params]

    def finish(self) -> None:
        for handle in self._handles:
            handle.remove()
        while self._next < len(self._buckets):
            self._send()
        self._wait(0)

    def _filled(self, param: torch.Tensor) -> None:
        index = self._bucket_of[id(param)]
        if not self._reduce_scatter:  # gradients are written into the bucket as they come
            self._flat_bucket(index)
            param.grad = None
        self._missing[index] -= 1
        # Buckets are sent in one order on all ranks, so a full one waits for those before it.
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._send()

    def _flat_bucket(self, index: int) -> torch.Tensor:
        if index not in self._flat:
            bucket = self._buckets[index]
            size = sum(param.numel() for param in bucket)
            self._flat[index] = torch.empty(size, dtype=bucket[0].dtype, device=bucket[0].device)
        return self._flat[index]

    def _send(self) -> None:
        self._wait(MOST_IN_FLIGHT - 1)
        index, self._next = self._next, self._next + 1
        flat = self._flat_bucket(index)
        for param in self._buckets[index]:
            param.grad = None
        sent = [self._flat.pop(index)]
        if self._reduce_scatter and flat.device.type == "cpu":  # what the other ranks send of this rank's shard
            sent.append(torch.empty_like(flat))
        elif self._reduce_scatter:
            sent.append(flat.new_empty(-(-flat.numel() // self._world_size)))
        self._in_flight.append((index, sent))

    def _wait(self, most: int) -> None:
        """Wait until at most so many buckets are in flight, and give their gradients away."""
        while len(self._in_flight) > most:
            index, sent = self._in_flight.popleft()
            if self._reduce_scatter:
                sent = [sent[0].new_empty(-(-sent[0].numel() // self._world_size))]
            complete = [
                CompleteGradient(param.dtype, self._shard_size(param), list(sent)) for param in self._buckets[index]
            ]
            # From here on only the gradients keep the bucket alive, each until it is stepped on.
            sent.clear()
            while complete:
                self._on_complete(complete.pop(0))
