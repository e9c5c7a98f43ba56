"""Averaging a model's floating buffers, such as the running statistics of BatchNorm, among ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class BufferAverage:
    """Before a forward in training, replace every floating buffer by its mean over `group`; in evaluation do nothing.

    group: None means the whole world. Integer and complex buffers are left alone. A group of one, or no process group at
    all, costs nothing.

    Call it with a module, or register it: `model.register_forward_pre_hook(BufferAverage(group))`. On a boosted model it
    runs before DistributedDataParallel broadcasts the buffers of rank 0, which then are the mean.

    Side effect: one float32 SUM all-reduce for each device that holds buffers. Every rank must run its forward.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: Any = ()) -> None:
        if not module.training or not dist.is_initialized():
            return
        world_size = dist.get_world_size(self._group)
        if world_size < 1:
            raise RuntimeError("this rank is not in the group over which the buffers are to be averaged")
        if world_size == 1:
            return
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point() and buffer.numel()]
        for device in dict.fromkeys(buffer.device for buffer in buffers):
            _average([buffer for buffer in buffers if buffer.device == device], world_size, self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferAverage:
        return type(self)(self._group)  # a process group cannot be copied


def _average(buffers: list[torch.Tensor], world_size: int, group: dist.ProcessGroup | None) -> None:
    # In float32, because a sum of halves rounds and overflows; divided afterwards, because gloo has no AVG.
    flat = torch.cat([buffer.reshape(-1).float() for buffer in buffers])
    dist.all_reduce(flat, group=group)
    flat /= world_size
    for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))
