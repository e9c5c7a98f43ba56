"""What the update of an optimizer is made of.

| | gradients | norms | decision | application | kept |
|---|---|---|---|---|---|
| on the host | `Gradients` | `HostNorms` | `HostDecision` | as it steps | as it steps |
| on a device, where a kernel heeds it | `DeviceGradients` | `DeviceNorms` | `DeviceDecision` | as it steps | as it steps |
| compiled | `Gradients` | `compiled_norms` | `HostDecision` | `CompiledApplication` | `OptimizerState` |

How it steps is for the precision to say, by a `Stepping`: on parameters as they are (`PARAMETERS`), or on masters
(`masters.update.stepping_masters`). Kernels take the place of norms, decision and application (`kernels.eligibility`), and
apex has its own gradients (`mixed_precision/apex/apex_gradients.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from booster.ranks import agreement
from booster.ranks.agreement import communication_device
from booster.update.application import Application, decides_on_device
from booster.update.compiled_step import CompiledApplication, compiled_norms
from booster.update.context import UpdateContext
from booster.update.decision import Decision, Norms
from booster.update.device import DeviceDecision, DeviceGradients, DeviceNorms
from booster.update.gradients import Gradients
from booster.update.host import HostDecision, HostNorms
from booster.update.in_backward import OptimizerInBackward
from booster.update.optimizer_state import OptimizerState
from booster.update.update import Update

DECIDING = ("cuda",)
"""Types of devices that are worth not to be waited for."""


class Stepping(NamedTuple):
    """How an optimizer steps, and what decides on a host.

    application, kept: what makes them. norms, decision: on the host. decides_on_host: whether nothing else will do.
    """

    application: Callable[[UpdateContext], Application] = Application
    kept: Callable[[UpdateContext], OptimizerState] = OptimizerState
    norms: Callable[[UpdateContext], Norms] = HostNorms
    decision: Callable[[Gradients, Application], Decision] = HostDecision
    decides_on_host: bool = False


PARAMETERS = Stepping()
COMPILED = Stepping(CompiledApplication, norms=compiled_norms, decides_on_host=True)


def choose_update(context: UpdateContext, stepping: Stepping = PARAMETERS) -> Update:
    """Make the update of an optimizer: on the device where its kernel can decide there, else on the host."""
    # A small collective where ranks hold shards on devices.
    device = None if stepping.decides_on_host else deciding_device(context)
    return (
        update_on_host(context, stepping) if device is None else update_on_device(on_device(context, device), stepping)
    )


def update_on_host(context: UpdateContext, stepping: Stepping = PARAMETERS) -> Update:
    """Make an update that decides on the host."""
    gradients = Gradients(context, stepping.norms(context))
    decision = stepping.decision(gradients, stepping.application(context))
    step_in_backward(context, gradients, decision)
    return Update(gradients, decision, stepping.kept(context))


def step_in_backward(context: UpdateContext, gradients: Gradients, decision: Decision) -> None:
    """Have backward passes use `gradients` as `decision` says, where the options of `context` ask for it."""
    options = context.options
    if options.release_gradients:
        mode, max_norm = str(options.release_gradients), float(options.clip_grad_norm)
        gradients.in_backward = OptimizerInBackward(mode, max_norm, decision)


def update_on_device(context: UpdateContext, stepping: Stepping = PARAMETERS) -> Update:
    """Make an update that decides on a device, where the loss scale of `context` lives."""
    gradients = DeviceGradients(context, DeviceNorms(context))
    return Update(gradients, DeviceDecision(gradients, stepping.application(context)), stepping.kept(context))


def deciding_device(context: UpdateContext) -> torch.device | None:
    """Return the device on which steps of `context` can be decided: its optimizer's kernel skips and divides by itself; None:
    on the host. Inside `context.shards.local()`."""
    if context.options.release_gradients:  # whether there is a second pass is decided on the host
        return None
    devices = {param.device for group in context.optimizer.param_groups for param in group["params"]}
    fit = decides_on_device(context.optimizer) and len(devices) < 2 and all(each.type in DECIDING for each in devices)
    # Where ranks hold shards all answer alike, as one that decides on the host takes part in other collectives.
    if not context.shards.sharded or context.group is None:
        return next(iter(devices)) if fit and devices else None
    there = communication_device(torch.device("cpu"), context.group)
    if there.type not in DECIDING:  # its norms, summed over ranks, would have to be waited for
        return None
    if agreement.largest(float(not fit), context.group):
        return None
    return next(iter(devices), there)


def on_device(context: UpdateContext, device: torch.device) -> UpdateContext:
    """Return `context` with a loss scale that lives on `device`."""
    return dataclasses.replace(context, scaler=context.scaler.on_device(device))
