"""Gradients that are averaged over ranks during backward, of which each rank keeps its slice only."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.modules import PlacedModule
from booster.plugin.exchanged_sum import ExchangedSum
from booster.plugin.fp8_communication import FP8Sum
from booster.shards.zero import SPARSE
from booster.shards.zero_buckets import FlatParameters, Layout
from booster.torch_internals import graph_task, when_backward_ends
from booster.trees import tensors

# torch 2.13 renamed the collective and warns about the old name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Buckets that are being reduced at one time: a work holds what it sends until it is waited for, so without a bound all whole
# gradients are there when backward ends. Two follow each other without a gap; the third is being filled meanwhile.
MOST_IN_FLIGHT = 2


@dataclass
class _Reduction:
    """A bucket whose gradients are being reduced by `works`; `own` will be this rank's slice, maybe part of what is sent.

    exchanged: what reduces it instead, in float8 or on CPU.
    """

    bucket: FlatParameters
    own: torch.Tensor
    works: list[Any]
    exchanged: FP8Sum | ExchangedSum | None = None

    def wait(self) -> torch.Tensor:
        """Return this rank's slice in memory of its own."""
        if self.exchanged is not None:
            return self.exchanged.wait()[: len(self.own)].to(self.bucket.dtype)
        for work in self.works:
            work.wait()
        self.works = []
        return self.own.to(self.bucket.dtype, copy=not self.bucket.even)


class GradientReducer:
    """Averages the gradients of `layout` over its group, bucket by bucket while backward goes on, a few at a time.

    A bucket is sent once all its gradients are there and all buckets before it are sent, so that ranks send in one order;
    what is left when backward ends, of parameters that it did not reach, is sent as zeros. `.grad` is None afterwards:
    this rank's slice of the sum is added to the bucket's `gradient`. A parameter that no rank reached gets no gradient.
    Gradients that are in `.grad` from passes that were not synchronised are averaged along.

    dtype: of what is sent; None means that of the parameters. fp8: send e4m3 instead, see `FP8Sum`. Collectives: one
    reduce-scatter a bucket, or one reduce for each rank where parameters are not divided, or on CPU and in float8 one
    all-to-all, and one small all-reduce, whose result only a rank with an unreached parameter waits for.
    """

    def __init__(self, layout: Layout, *, dtype: torch.dtype | None = None, fp8: bool = False) -> None:
        self.synchronises = True
        self._layout = layout
        self._fp8 = fp8
        self._dtype = dtype
        self._task: int | None = None  # of the autograd engine, while a backward is under way
        self._index = {param: index for index, param in enumerate(layout.params)}
        self._listen()

    def _listen(self) -> None:
        """See to it that gradients are noticed as they come."""
        for param in self._layout.params:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    def begin(self, *_: Any) -> None:
        """Start the averaging of the backward pass that the engine is in, unless it has started."""
        if self._task is None and self.synchronises:
            self._task = graph_task()
            self._start()
            when_backward_ends(self._finish)

    def abandon(self) -> None:
        """Forget a backward pass that raised."""
        if self._task is not None:
            self._settle(0)
            self._reduced.clear()
            self._task = None

    # ------------------------------------------------------------------ one backward

    def _start(self) -> None:
        self._layout.divide_rest()
        self._missing = [set(bucket.params) for bucket in self._layout.buckets]
        self._bucket = {param: index for index, params in enumerate(self._missing) for param in params}
        self._next = 0
        self._reached = torch.zeros(len(self._index))
        self._in_flight: deque[_Reduction] = deque()
        self._reduced: list[tuple[FlatParameters, torch.Tensor]] = []

    def _on_gradient(self, param: torch.Tensor) -> None:
        if not self.synchronises:
            return
        self.begin()
        index = self._bucket[param]
        if index < self._next:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} got a second gradient in one backward after the first was "
                "averaged, as reentrant activation checkpointing of a shared module does; use "
                "checkpoint(..., use_reentrant=False), or stage=1"
            )
        self._missing[index].discard(param)
        self._send_full()

    def _send_full(self) -> None:
        """Send the buckets whose gradients are all there, in order."""
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._send(self._next)

    @torch.no_grad()
    def _send(self, index: int) -> None:
        self._next = index + 1
        bucket, group = self._layout.buckets[index], self._layout.group
        self._settle(MOST_IN_FLIGHT - 1)
        values = torch.empty(bucket.size, dtype=self._dtype or bucket.dtype, device=bucket.device)
        bucket.clear_gaps(values)
        # Divided before the sum, as DistributedDataParallel does: the sum of halves could overflow.
        ratio = 1.0 / self._layout.world_size
        for position, param in enumerate(bucket.params):
            if self._put(bucket, position, values, ratio):
                self._reached[self._index[param]] = 1.0
            else:
                bucket.view(values, position).zero_()
        own = bucket.slice_of(values, self._layout.rank)
        exchanged: FP8Sum | ExchangedSum | None = None
        works = []
        if self._fp8 or values.device.type == "cpu":
            sizes = [stop - start for start, stop in itertools.pairwise(bucket.bounds)]
            exchanged = (FP8Sum if self._fp8 else ExchangedSum)(values, sizes, group)
        elif bucket.even:
            own = torch.empty(bucket.size // self._layout.world_size, dtype=values.dtype, device=values.device)
            works = [_reduce_scatter(own, values, group=group, async_op=True)]
        else:
            parts = [(rank, bucket.slice_of(values, rank)) for rank in range(self._layout.world_size)]
            works = [dist.reduce(p, group=group, group_dst=rank, async_op=True) for rank, p in parts if p.numel()]
        self._in_flight.append(_Reduction(bucket, own, works, exchanged))

    def _put(self, bucket: FlatParameters, position: int, values: torch.Tensor, ratio: float) -> bool:
        """Write a gradient times `ratio` to its place in `values`, flat as the bucket, and free it.

        Return whether there is one.
        """
        param: Any = bucket.params[position]
        if param.grad is None:
            return False
        if param.grad.is_sparse:
            raise RuntimeError(SPARSE.format(shape=tuple(param.shape)))
        place = bucket.shaped_view(values, position)
        if param.grad.dtype == place.dtype:
            torch.mul(param.grad.detach(), ratio, out=place)
        else:  # divided in the dtype that is sent, not rounded before
            place.copy_(param.grad.detach()).mul_(ratio)
        param.grad = None
        return True

    def _settle(self, number: int) -> None:
        """Wait for the oldest reductions until `number` are left."""
        while len(self._in_flight) > number:
            reduction = self._in_flight.popleft()
            self._reduced.append((reduction.bucket, reduction.wait()))

    @torch.no_grad()
    def _finish(self) -> None:
        while self._next < len(self._missing):
            self._send(self._next)
        found = self._settle_all()
        for bucket, own in self._reduced:
            now = {index for index, param in enumerate(bucket.params) if found[self._index[param]]}
            if not now:
                continue
            bucket.add_gradient(own, now, self._layout.rank)
        self._reduced.clear()
        self._task = None

    def _settle_all(self) -> list[float]:
        """Wait for all reductions; return for each parameter whether any rank reached it."""
        reached = self._reached.to(self._layout.params[0].device)
        unreached = not bool(self._reached.all())
        work: Any = dist.all_reduce(reached, op=dist.ReduceOp.MAX, group=self._layout.group, async_op=True)
        self._settle(0)
        work.wait()
        # Every parameter that this rank reached counts; for the others, ask whether another rank did.
        return reached.tolist() if unreached else [1.0] * len(self._index)


class ReducedModule(PlacedModule):
    """A module whose gradients a `GradientReducer` averages.

    synchronise_buffers: give rank 0's buffers to all at every forward, except under `no_sync`.
    """

    def __init__(
        self, module: nn.Module, reducer: GradientReducer, layout: Layout, *, synchronise_buffers: bool
    ) -> None:
        super().__init__(module)
        self.reducer, self.layout = reducer, layout
        self._synchronise_buffers = synchronise_buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if graph_task() == -1:  # not recomputed inside a backward
            self._before_forward()
        with self.layout.arriving.in_forward(self.module):
            outputs = self.module(*args, **kwargs)
        for output in tensors(outputs):
            if output.requires_grad:
                output.register_hook(self.reducer.begin)
        return outputs

    def wait_for_weights(self) -> None:
        """Wait for weights that a step left on their way."""
        self.layout.arriving.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.layout.clear_gradients(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context whose backward passes leave gradients in `.grad`, to be averaged along with those of a later one."""
        before, self.reducer.synchronises = self.reducer.synchronises, False
        try:
            yield
        finally:
            self.reducer.synchronises = before

    def _before_forward(self) -> None:
        self.reducer.abandon()
        if self._synchronise_buffers and self.reducer.synchronises:
            for buffer in self.module.buffers():
                dist.broadcast(buffer.detach(), group=self.layout.group, group_src=0)
