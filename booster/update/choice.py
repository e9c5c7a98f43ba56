"""Which update serves an optimizer."""

from __future__ import annotations

import dataclasses

import torch

from booster.ranks import agreement
from booster.ranks.communicate import communication_device
from booster.update.base import Job, Update
from booster.update.compiled import CompiledUpdate
from booster.update.device import DeviceUpdate
from booster.update.fused import honours_grad_scale
from booster.update.host import HostUpdate

DECIDING = ("cuda",)
"""Types of devices that are worth not to be waited for."""


def choose_update(job: Job, *, compiled: bool = False) -> Update:
    """Make the update of an optimizer: compiled where asked, on the device where its kernel can decide there, else on the
    host. A small collective where ranks hold shards on devices."""
    if compiled:
        return CompiledUpdate(job)
    device = deciding_device(job)
    return HostUpdate(job) if device is None else DeviceUpdate(on_device(job, device))


def deciding_device(job: Job) -> torch.device | None:
    """Return the device on which steps of `job` can be decided: its optimizer's kernel skips and divides by itself; None:
    on the host. Inside `job.shards.local()`.

    Where ranks hold shards all answer alike, as one that decides on the host takes part in other collectives.
    """
    if job.options.release_gradients:  # whether there is a second pass is decided on the host
        return None
    devices = {param.device for group in job.optimizer.param_groups for param in group["params"]}
    fit = honours_grad_scale(job.optimizer) and len(devices) < 2 and all(each.type in DECIDING for each in devices)
    if not job.shards.sharded or job.group is None:
        return next(iter(devices)) if fit and devices else None
    there = communication_device(torch.device("cpu"), job.group)
    if there.type not in DECIDING:  # whose norms, summed over ranks, would have to be waited for
        return None
    if agreement.largest(float(not fit), job.group):
        return None
    return next(iter(devices), there)


def on_device(job: Job, device: torch.device) -> Job:
    """Return `job` with a loss scale that lives on `device`."""
    return dataclasses.replace(job, scaler=job.scaler.on_device(device))
