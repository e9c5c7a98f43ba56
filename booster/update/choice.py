"""Which update serves an optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from booster.loss_scaler import LossScaler
from booster.shards import Shards
from booster.update.base import Update
from booster.update.compiled import CompiledUpdate
from booster.update.device import DeviceUpdate
from booster.update.fused import honours_grad_scale
from booster.update.host import HostUpdate


def choose_update(
    optimizer: Optimizer,
    scaler: LossScaler,
    names: Mapping[torch.Tensor, str],
    *,
    compiled: bool,
    group: dist.ProcessGroup | None,
    shards: Shards,
    skip_nonfinite: bool,
) -> Update:
    """The update of `optimizer`: compiled where asked, on the device where its kernel can decide there, else on the host,
    as always where ranks hold shards and norms are sums over ranks."""
    if compiled:
        return CompiledUpdate(optimizer, scaler, names, group=group, shards=shards, skip_nonfinite=skip_nonfinite)
    devices = {param.device for param_group in optimizer.param_groups for param in param_group["params"]}
    if (
        not shards.sharded
        and honours_grad_scale(optimizer)
        and len(devices) == 1
        and next(iter(devices)).type == "cuda"
    ):
        scaler = scaler.on_device(next(iter(devices)))
        return DeviceUpdate(optimizer, scaler, names, group=group, shards=shards, skip_nonfinite=skip_nonfinite)
    return HostUpdate(optimizer, scaler, names, group=group, shards=shards, skip_nonfinite=skip_nonfinite)
