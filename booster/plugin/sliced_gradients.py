"""Averages of gradients of which each rank keeps its slice only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from booster.plugin.exchanged_sum import ExchangedSum
from booster.plugin.fp8_communication import FP8Sum
from booster.plugin.gradient_reducer import GradientReducer
from booster.shards.zero import SPARSE
from booster.shards.zero_buckets import FlatParameters, Layout

# torch 2.13 renamed the collective and warns about the old name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SliceReducer(GradientReducer):
    """Averages the gradients of `layout` over its group. `.grad` is None afterwards: this rank's slice of the sum is added to
    the bucket's `gradient`.

    dtype: of what is sent; None means that of the parameters. fp8: send e4m3 instead, see `FP8Sum`. Collectives: one
    reduce-scatter a bucket, or one reduce for each rank where parameters are not divided, or on CPU and in float8 one
    all-to-all, and one small all-reduce, of each bucket where gradients are used within backward, whose result only a rank
    with an unreached parameter waits for.
    """

    def __init__(self, layout: Layout, *, dtype: torch.dtype | None = None, fp8: bool = False) -> None:
        super().__init__(layout.params, layout.group)
        self._layout = layout
        self._fp8 = fp8
        self._dtype = dtype

    def buckets(self) -> Sequence[Sequence[torch.Tensor]]:
        self._layout.divide_rest()
        return [bucket.params for bucket in self._layout.buckets]

    def send(self, index: int, params: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        bucket, group, world_size = self._layout.buckets[index], self._layout.group, self._layout.world_size
        values = torch.empty(bucket.size, dtype=self._dtype or bucket.dtype, device=bucket.device)
        # Divided before the sum, as DistributedDataParallel does: the sum of halves could overflow.
        ratio = 1.0 / world_size
        for position, (param, place) in enumerate(zip(params, bucket.cleared(values), strict=True)):
            if not self._put(bucket, position, param, place, ratio):
                place.zero_()
        own = bucket.slice_of(values, self._layout.rank)
        if self._fp8 or values.device.type == "cpu":
            sizes = [stop - start for start, stop in itertools.pairwise(bucket.bounds)]
            length = len(own)  # not `own` itself, of which all that is sent would live on
            exchanged = (FP8Sum if self._fp8 else ExchangedSum)(values, sizes, group)
            return lambda: exchanged.wait()[:length].to(bucket.dtype)
        if bucket.even:
            own = torch.empty(bucket.size // world_size, dtype=values.dtype, device=values.device)
            works = [_reduce_scatter(own, values, group=group, async_op=True)]
        else:
            parts = [(rank, bucket.slice_of(values, rank)) for rank in range(world_size)]
            works = [dist.reduce(p, group=group, group_dst=rank, async_op=True) for rank, p in parts if p.numel()]

        def settle() -> torch.Tensor:
            for work in works:
                work.wait()
            works.clear()
            return own.to(bucket.dtype, copy=not bucket.even)  # in memory of its own

        return settle

    def _put(
        self, bucket: FlatParameters, position: int, param: torch.Tensor, values: torch.Tensor, ratio: float
    ) -> bool:
        """Write the gradient of `param` times `ratio` to its place in the bucket, `values`, 1-dim, and free it.

        Return whether there is one.
        """
        grad = self.gradient_here(param)
        if grad is None:
            return False
        if grad.is_sparse:
            raise RuntimeError(SPARSE.format(shape=tuple(param.shape)))
        place = bucket.shaped(values, position)
        if grad.dtype == place.dtype:
            torch.mul(grad, ratio, out=place)
        else:  # divided in the dtype that is sent, not rounded before
            place.copy_(grad).mul_(ratio)
        param.grad = None
        return True

    def arrived(self, index: int, reduced: torch.Tensor, reached: list[bool]) -> None:
        now = {position for position, here in enumerate(reached) if here}
        self._layout.buckets[index].add_gradient(reduced, now, self._layout.rank)
