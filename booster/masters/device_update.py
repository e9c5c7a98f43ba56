"""The update of an optimizer that steps master weights, decided on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD

from booster.flat import is_dense
from booster.masters.keeps import KeepsMasters
from booster.masters.masters import Masters
from booster.masters.update import MasterUpdate
from booster.update.base import Job
from booster.update.choice import deciding_device, on_device
from booster.update.device import DeviceUpdate
from booster.update.outcome import StepResult


class DeviceMasterUpdate(KeepsMasters, DeviceUpdate):
    """As `MasterUpdate`, but scale, norms and the decision are 0-dim tensors, and every bucket's kernel gets them.

    A bucket is read, stepped and written back whether the step is skipped or not. What is written back then is what was
    read, in every form of masters and states, so nobody need know.
    """

    def _decide_and_apply(self) -> StepResult:
        carried = self._grad_scale
        result = super()._decide_and_apply()
        if self._keeps_any():  # whose step writes no gradient
            self._scale = carried
        return result

    def _apply(self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        if not self._keeps_any():
            super()._apply(grad_scale, found_inf)
        elif found_inf is not None and self._decides_here(grad_scale):
            if not bool(found_inf):
                self._step.step(1.0 if grad_scale is None else float(grad_scale))
        else:
            self._step.step(1.0 if grad_scale is None else grad_scale, found_inf)

    def _decides_here(self, grad_scale: torch.Tensor | None) -> bool:
        if super()._decides_here(grad_scale):
            return True
        plain = [param for params in self._step.plain() for param in params if param.grad is not None]
        # Of which kernels take none.
        return any(param.grad.is_sparse or not is_dense(param) for param in plain)  # type: ignore[union-attr]

    def _lacks_momentum(self) -> bool:
        if not isinstance(self.optimizer, SGD) or not self._keeps_any():
            return super()._lacks_momentum()
        groups, state = self.optimizer.param_groups, self.optimizer.state
        if all(group["momentum"] == 0 for group in groups):
            return False
        self._step.prepare()  # divides buckets, and makes those of new parameters
        masters = self.masters
        stepped = [b for b in masters.buckets if masters.gradient_of(b.params[0]) is not None]
        held: list[Any] = [(groups[bucket.group], handle) for bucket in stepped for handle in bucket.handles]
        held += [(group, p) for group in groups for p in masters.outside(group["params"]) if p.grad is not None]
        return any(
            group["momentum"] != 0 and state.get(tensor, {}).get("momentum_buffer") is None for group, tensor in held
        )


def choose_master_update(
    job: Job, *, masters: Masters, count_zeros: bool = False, verbose: bool = False, compiled: bool = False
) -> KeepsMasters:
    """Make the update that steps `masters`: decided on the device where the optimizer's kernel can do that and nothing is
    asked for that a host has to know. Options: those of `MasterUpdate`. A small collective where ranks hold shards on
    devices."""
    device = None if count_zeros or verbose or compiled else deciding_device(job)
    if device is None:
        return MasterUpdate(job, masters=masters, count_zeros=count_zeros, verbose=verbose, compiled=compiled)
    return DeviceMasterUpdate(on_device(job, device), masters=masters)
