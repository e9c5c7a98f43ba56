"""DistributedDataParallel of which ranks keep slices of gradients, and whose weights may be on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from booster.plugin.laid_out import LaidOut
from booster.plugin.sliced_gradients import SliceReducer
from booster.shards.zero import SPARSE
from booster.shards.zero_buckets import FlatParameters, Layout
from booster.torch_internals import graph_task, when_backward_ends, without_function_modes


class BucketReducer(SliceReducer):
    """A `SliceReducer` that takes gradients from the buckets of `DistributedDataParallel`, as its communication hook.

    Those buckets keep what this rank alone has, and `.grad` is None after backward. finds_unused: a rank's backward may leave
    parameters out; ranks then tell each other by one small all-reduce.
    """

    def __init__(
        self, layout: Layout, *, dtype: torch.dtype | None = None, fp8: bool = False, finds_unused: bool = False
    ) -> None:
        super().__init__(layout, dtype=dtype, fp8=fp8)
        self._finds_unused = finds_unused
        self._views: dict[torch.Tensor, torch.Tensor] = {}  # of what came and was not sent yet, flat

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Send what `bucket` fills of the layout's buckets; returns at once, and leaves the bucket as it is."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise RuntimeError(SPARSE.format(shape=tuple(buffer.shape)))
        with without_function_modes():
            if self._task is None:
                self._task = graph_task()
                self._start()
            params = bucket.parameters()
            for param, values in zip(params, buffer.split_with_sizes([p.numel() for p in params]), strict=True):
                place = self._index.get(param)
                if place is not None:
                    self._views[param] = values
                    self._take(self._bucket[place], place, param)
                    self._note(self._bucket[place], place)
            self._send_full()
        if bucket.is_last():
            when_backward_ends(self._wait_for_gradients)
        devices: Any = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def abandon(self) -> None:
        super().abandon()
        self._views.clear()

    def _listen(self) -> None:
        pass

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


class ZeroDDP(LaidOut, DistributedDataParallel):
    """`DistributedDataParallel` that waits for weights on their way, and may keep slices of gradients, see `lay_out`.

    A copy, by `copy` or pickle, is as `DistributedDataParallel` leaves it: gradients whole on every rank.
    """

    slices: BucketReducer | None = None

    def lay_out(self, layout: Layout, reducer: BucketReducer | None) -> None:
        """The trainable parameters lie in `layout`. reducer: takes their gradients; None leaves them in `.grad`."""
        self.layout, self.slices = layout, reducer
        if reducer is not None:
            self.register_comm_hook(None, lambda _, bucket: reducer.take(bucket))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.layout is None or graph_task() != -1:  # recomputed inside a backward
            return super().forward(*inputs, **kwargs)
        if self.slices is not None:
            self.slices.abandon()
        with self.layout.arriving.in_forward(self.module):
            return super().forward(*inputs, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        self.wait_for_weights()
        return {**super().__getstate__(), "layout": None, "slices": None}
