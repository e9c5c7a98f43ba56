"""Averages of gradients of which each rank keeps its slice, also from the buckets of DistributedDataParallel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from booster.common.torch_internals.autograd_internals import graph_task, when_backward_ends, without_function_modes
from booster.plugin.ddp.averaged_gradients import BucketedModule
from booster.plugin.ddp.fp8_communication import ExchangedSum, FP8Sum
from booster.plugin.ddp.gradient_reducer import GradientReducer
from booster.shards.base import SPARSE
from booster.shards.zero_buckets import FlatParameters, ModuleBuckets

# torch 2.13 renamed the collective and warns about the old name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SliceReducer(GradientReducer):
    """Averages the gradients of `layout` over its group. `.grad` is None afterwards: this rank's slice of the sum is added to
    the bucket's `gradient`.

    dtype: of what is sent; None means that of the parameters. fp8: send e4m3 instead, see `FP8Sum`. Collectives: one
    reduce-scatter a bucket, or one reduce for each rank where parameters are not divided, or on CPU and in float8 one
    all-to-all, and one small all-reduce, of each bucket where gradients are used within backward; only a rank
    with an unreached parameter waits for its result.
    """

    def __init__(self, layout: ModuleBuckets, *, dtype: torch.dtype | None = None, fp8: bool = False) -> None:
        super().__init__(layout.params, layout.group)
        self._layout = layout
        self._fp8 = fp8
        self._dtype = dtype

    def buckets(self) -> Sequence[Sequence[torch.Tensor]]:
        self._layout.shard_remaining()
        return [bucket.params for bucket in self._layout.buckets]

    def send(self, index: int, params: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        bucket, group, world_size = self._layout.buckets[index], self._layout.group, self._layout.world_size
        values = torch.empty(bucket.size, dtype=self._dtype or bucket.dtype, device=bucket.device)
        # Divided before the sum, as DistributedDataParallel does: the sum of halves could overflow.
        ratio = 1.0 / world_size
        for position, (param, place) in enumerate(zip(params, bucket.zero_gaps(values), strict=True)):
            if not self._put(bucket, position, param, place, ratio):
                place.zero_()
        own = bucket.slice_of(values, self._layout.rank)
        if self._fp8 or values.device.type == "cpu":
            sizes = [stop - start for start, stop in itertools.pairwise(bucket.bounds)]
            length = len(own)  # not `own` itself, of which all that is sent would live on
            exchanged = (FP8Sum if self._fp8 else ExchangedSum)(values, sizes, group)
            return lambda: exchanged.wait()[:length].to(bucket.dtype)
        if bucket.by_elements:
            own = torch.empty(bucket.size // world_size, dtype=values.dtype, device=values.device)
            works = [_reduce_scatter(own, values, group=group, async_op=True)]
        else:
            parts = [(rank, bucket.slice_of(values, rank)) for rank in range(world_size)]
            works = [dist.reduce(p, group=group, group_dst=rank, async_op=True) for rank, p in parts if p.numel()]

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            works.clear()
            return own.to(bucket.dtype, copy=not bucket.by_elements)  # a copy: `own` is a view of the whole bucket

        return wait

    def _put(
        self, bucket: FlatParameters, position: int, param: torch.Tensor, values: torch.Tensor, ratio: float
    ) -> bool:
        """Write the gradient of `param` times `ratio` to its place in the bucket, `values`, 1-dim, and free it."""
        grad = self.gradient_here(param)
        # Return whether there is one.
        if grad is None:
            return False
        if grad.is_sparse:
            raise RuntimeError(SPARSE.format(name=f"a parameter of shape {tuple(param.shape)}"))
        place = bucket.shaped(values, position)
        if grad.dtype == place.dtype:
            torch.mul(grad, ratio, out=place)
        else:  # divided in the dtype that is sent, not rounded before
            place.copy_(grad).mul_(ratio)
        param.grad = None
        return True

    def store_reduced(self, index: int, reduced: torch.Tensor, reached: list[bool]) -> None:
        now = {position for position, here in enumerate(reached) if here}
        self._layout.buckets[index].add_gradient(reduced, now, self._layout.rank)


class BucketReducer(SliceReducer):
    """A `SliceReducer` that takes gradients from the buckets of `DistributedDataParallel`, as its communication hook.

    Those buckets keep what this rank alone has, and `.grad` is None after backward. finds_unused: a rank's backward may leave
    parameters out; ranks then agree by one small all-reduce.
    """

    def __init__(
        self, layout: ModuleBuckets, *, dtype: torch.dtype | None = None, fp8: bool = False, finds_unused: bool = False
    ) -> None:
        super().__init__(layout, dtype=dtype, fp8=fp8)
        self._finds_unused = finds_unused
        self._views: dict[torch.Tensor, torch.Tensor] = {}  # of what came and was not sent yet, flat

    def send_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Send what `bucket` fills of the layout's buckets; returns at once, and leaves the bucket as it is."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise RuntimeError(SPARSE.format(name=f"a parameter of shape {tuple(buffer.shape)}"))
        with without_function_modes():
            if self._task is None:
                self._task = graph_task()
                self._start()
            params = bucket.parameters()
            for param, values in zip(params, buffer.split_with_sizes([p.numel() for p in params]), strict=True):
                place = self._index.get(param)
                if place is not None:
                    self._views[param] = values
                    self._use_gradient(self._bucket[place], place, param)
                    self._mark_complete(self._bucket[place], place)
            self._send_full()
        if bucket.is_last():  # buckets of the layout that are not full yet are sent when backward ends
            when_backward_ends(self._wait_for_gradients)
        devices: Any = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def abandon(self) -> None:
        super().abandon()
        self._views.clear()

    def _register_hooks(self) -> None:
        pass  # the communication hook says when gradients are there

    def has_gradient_here(self, param: torch.Tensor) -> bool:
        return param in self._views and param.grad is not None  # otherwise the bucket has zeros

    def reached_anywhere(self) -> Callable[[], list[bool]]:
        return super().reached_anywhere() if self._finds_unused else lambda: [True] * len(self._index)

    def _put(
        self, bucket: FlatParameters, position: int, param: torch.Tensor, values: torch.Tensor, ratio: float
    ) -> bool:
        there = self.has_gradient_here(param)
        view = self._views.pop(param, None)
        if not there or view is None:
            return False
        torch.mul(view, ratio, out=values)
        return True

    def _wait_for_gradients(self) -> None:
        # torch's own callback, which puts what is in its buckets into `.grad`, is queued by now.
        when_backward_ends(self._finish)

    def _complete(self) -> None:
        super()._complete()
        for param in self._layout.params:
            param.grad = None


class ZeroDDP(BucketedModule, DistributedDataParallel):
    """`DistributedDataParallel` that waits for weights on their way, and may keep slices of gradients, see `set_layout`.

    A copy, by `copy` or pickle, is as `DistributedDataParallel` leaves it: gradients whole on every rank.
    """

    slices: BucketReducer | None = None

    def set_layout(self, layout: ModuleBuckets, reducer: BucketReducer | None) -> None:
        """Set the buckets of the trainable parameters. reducer: takes their gradients; None leaves them in `.grad`."""
        self.layout, self.slices = layout, reducer
        if reducer is not None:
            self.register_comm_hook(None, lambda _, bucket: reducer.send_bucket(bucket))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.layout is None or graph_task() != -1:  # recomputed inside a backward
            return super().forward(*inputs, **kwargs)
        if self.slices is not None:
            self.slices.abandon()  # what a backward pass that raised left
        with self.layout.pending_all_gathers.in_forward(self.module):
            return super().forward(*inputs, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "layout": None, "slices": None}
