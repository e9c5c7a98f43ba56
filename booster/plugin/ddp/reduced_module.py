"""A module whose gradients are averaged by hooks of ours.

Modules of which the trainable parameters lie in the flat buckets of a layout.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn

from booster.common.torch_internals.autograd_internals import graph_task
from booster.model.modules import PlacedModule, bare
from booster.plugin.ddp.averaged_gradients import AverageReducer
from booster.plugin.ddp.gradient_reducer import GradientReducer
from booster.ranks.messages import broadcast
from booster.shards.zero_buckets import ModuleBuckets
from booster.tensors.trees import tensors

_OF_COPIES = 25 * 2**20  # bytes in a bucket of gradients, as DistributedDataParallel has it


class LaidOut(nn.Module):
    """A module whose trainable parameters lie in the buckets of `layout`; None where they do not.

    The first base of a wrapper that is laid out and also of another kind, so that clearing gradients clears these too.
    """

    layout: ModuleBuckets | None = None

    def wait_for_weights(self) -> None:
        """Wait for weights that a step left on their way."""
        if self.layout is not None:
            self.layout.pending_all_gathers.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.layout is not None:
            self.layout.clear_gradients(set_to_none)


class ReducedModule(LaidOut, PlacedModule):
    """A module whose gradients `reducer` averages over `group`.

    layout: how ranks divide the parameters; None where they do not. synchronise_buffers: give rank 0's
    buffers to all at every forward, except under `no_sync`.

    A copy is one of a model under `DistributedDataParallel`: whole gradients are averaged, and stay.
    """

    def __init__(
        self,
        module: nn.Module,
        reducer: GradientReducer,
        group: dist.ProcessGroup,
        *,
        layout: ModuleBuckets | None = None,
        synchronise_buffers: bool,
    ) -> None:
        super().__init__(module)
        self.reducer, self.layout = reducer, layout
        self._group = group
        self._synchronise_buffers = synchronise_buffers

    def __deepcopy__(self, memo: dict[int, Any]) -> ReducedModule:
        self.wait_for_weights()
        module = copy.deepcopy(self.module, memo)
        named = {name: param for name, param in bare(module).named_parameters() if param.requires_grad}
        reducer = AverageReducer(named, group=self._group, bucket_bytes=_OF_COPIES, finds_unused=True)
        clone = ReducedModule(module, reducer, self._group, synchronise_buffers=self._synchronise_buffers)
        clone.training = self.training
        memo[id(self)] = clone
        return clone

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if graph_task() == -1:  # not recomputed inside a backward
            self._before_forward()
        with nullcontext() if self.layout is None else self.layout.pending_all_gathers.in_forward(self.module):
            outputs = self.module(*args, **kwargs)
        for output in tensors(outputs):
            if output.requires_grad:
                output.register_hook(self.reducer.begin)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context whose backward passes leave gradients in `.grad`, to be averaged along with those of a later one."""
        before, self.reducer.synchronises = self.reducer.synchronises, False
        try:
            yield
        finally:
            self.reducer.synchronises = before

    def _before_forward(self) -> None:
        self.reducer.before_forward()
        if self._synchronise_buffers and self.reducer.synchronises:
            for buffer in self.module.buffers():
                broadcast(buffer.detach(), 0, self._group)
