"""Which update serves an optimizer."""

from __future__ import annotations

import dataclasses

from booster.update.base import Job, Update
from booster.update.compiled import CompiledUpdate
from booster.update.device import DeviceUpdate
from booster.update.fused import honours_grad_scale
from booster.update.host import HostUpdate


def choose_update(job: Job, *, compiled: bool = False) -> Update:
    """Make the update of an optimizer: compiled where asked, on the device where its kernel can decide there, else on the
    host, as always where ranks hold shards and norms are sums over ranks."""
    if compiled:
        return CompiledUpdate(job)
    devices = {param.device for group in job.optimizer.param_groups for param in group["params"]}
    if not job.shards.sharded and honours_grad_scale(job.optimizer) and [each.type for each in devices] == ["cuda"]:
        return DeviceUpdate(dataclasses.replace(job, scaler=job.scaler.on_device(next(iter(devices)))))
    return HostUpdate(job)
