"""A module whose gradients are averaged by hooks of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn

from booster.modules import PlacedModule
from booster.plugin.gradient_reducer import GradientReducer
from booster.plugin.laid_out import LaidOut
from booster.shards.zero_buckets import Layout
from booster.torch_internals import graph_task
from booster.trees import tensors


class ReducedModule(LaidOut, PlacedModule):
    """A module whose gradients `reducer` averages over `group`.

    layout: how ranks divide the parameters; None where they do not. synchronise_buffers: give rank 0's
    buffers to all at every forward, except under `no_sync`.
    """

    def __init__(
        self,
        module: nn.Module,
        reducer: GradientReducer,
        group: dist.ProcessGroup,
        *,
        layout: Layout | None = None,
        synchronise_buffers: bool,
    ) -> None:
        super().__init__(module)
        self.reducer, self.layout = reducer, layout
        self._group = group
        self._synchronise_buffers = synchronise_buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if graph_task() == -1:  # not recomputed inside a backward
            self._before_forward()
        with nullcontext() if self.layout is None else self.layout.arriving.in_forward(self.module):
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
                dist.broadcast(buffer.detach(), group=self._group, group_src=0)
