"""The update of an optimizer that steps master weights, decided on the host.

The update of an optimizer that steps master weights, decided on the device.

A step on masters in parts, each as soon as the gradients of its buckets are there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import SGD

from booster.masters.bucket import Bucket
from booster.masters.compiled import half_norms
from booster.masters.keeps import KeepsMasters
from booster.masters.masters import Masters
from booster.masters.step import MasterStep, Told
from booster.shards import Shards
from booster.tensors.flat import is_dense
from booster.tensors.grads import gradient_values, tensor_norms
from booster.tensors.trees import HALF_DTYPES
from booster.update.base import Job
from booster.update.choice import deciding_device, on_device
from booster.update.compiled import OWN_CACHE
from booster.update.device import DeviceUpdate, carried_with
from booster.update.host import HostUpdate
from booster.update.outcome import StepResult
from booster.update.parts import Parts


class MasterParts(Parts):
    """Parts of `step`: a bucket and its parameters, and what has no master by itself."""

    def __init__(self, step: MasterStep, shards: Shards) -> None:
        super().__init__(step.masters.optimizer, shards)
        self._whole = step
        self._buckets: dict[torch.Tensor, list[Bucket]] = {}

    def units(self) -> list[list[torch.Tensor]]:
        self._whole.follow_params()
        masters = self._whole.masters
        self._follow_buckets()
        # A bucket has one parameter, or several that lie in no other.
        lists = {tuple(bucket.params): None for bucket in masters.buckets}
        return [list(params) for params in lists]

    def begin(self) -> None:
        super().begin()
        self._whole.masters.dither.next()

    def _step(self, params: Sequence[torch.Tensor], grad_scale: float) -> None:
        buckets = list({bucket: None for param in params for bucket in self._buckets.get(param, ())})
        self._whole.refuse_sparse(buckets)
        plain: list[list[torch.Tensor]] = [[] for _ in self._restricted]
        for param in params:
            if param not in self._buckets:
                plain[self._place[param][0]].append(param)
        self._whole.step_those(buckets, plain, Told(grad_scale), self._restricted)

    def rest(self, params: Sequence[torch.Tensor]) -> None:
        self._whole.masters.divide_by_gradients()
        self._follow_buckets()

    def _follow_buckets(self) -> None:
        self._buckets = {}
        for bucket in self._whole.masters.buckets:
            for param in bucket.params:
                self._buckets.setdefault(param, []).append(bucket)


_logger = logging.getLogger(__name__)


class MasterUpdate(KeepsMasters, HostUpdate):
    """A host update whose gradients are those of the half working parameters, and whose step is that of their masters.

    Norm, finite check and clips read the working gradients; scale and clips reach the optimizer folded into one number,
    so `.grad` still carries the loss scale after a step, also for step hooks.

    count_zeros: report how many gradient elements were zero.
    verbose: log changes of the loss scale.
    compiled: compile norms and steps; `masters` are to be made for it.
    """

    def __init__(
        self,
        job: Job,
        *,
        masters: Masters,
        count_zeros: bool = False,
        verbose: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__(job, masters=masters, compiled=compiled)
        self._half_norms: Any = None
        if compiled:
            self._half_norms = torch.compile(half_norms, dynamic=False, **OWN_CACHE)
            self._tensor_norms = self._compiled_norms
        self._count_zeros = count_zeros
        self._verbose = verbose
        self._zeros_released = 0

    @property
    def reports_on_the_host(self) -> bool:
        """Whether a step counts zeros or logs, for which a host has to know what was decided."""
        return self._count_zeros or self._verbose

    def _decide_and_apply(self) -> StepResult:
        if not (self._count_zeros or self._verbose):
            return super()._decide_and_apply()
        before = self.scaler.scale
        released = self.release is not None and self.release.pending
        zeros = None if not self._count_zeros else self._zeros_released if released else self._num_zeros()
        result = super()._decide_and_apply()
        if result.applied:
            result = StepResult(True, result._read()._replace(num_zeros_in_grad=zeros))
        if self._verbose and zeros is not None and result.applied:
            _logger.info("%d elements of the gradients were zero", zeros)
        if self._verbose and self.scaler.scale != before:
            _logger.info("loss scale %g -> %g after %s", before, self.scaler.scale, _outcome(result))
        return result

    def _apply(self, grad_scale: float) -> float:
        if not self._keeps_any():
            return super()._apply(grad_scale)
        self._step.step(grad_scale)
        return grad_scale  # working gradients are read, never written

    _grad_scale = HostUpdate.grad_scale

    def _compiled_norms(self, values: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        devices = {value.device for value in values}
        if norm_type == 2.0 and len(devices) == 1 and all(value.dtype in HALF_DTYPES for value in values):
            return self._half_norms(values)
        return tensor_norms(values, norm_type)

    def make_parts(self) -> Parts | None:
        self._zeros_released = 0
        return MasterParts(self._step, self.shards) if self._keeps_any() else super().make_parts()

    def look_at_part(self, params: Sequence[torch.Tensor]) -> None:
        if self._count_zeros:
            self._zeros_released += self._num_zeros(params)

    def _num_zeros(self, params: Sequence[torch.Tensor] | None = None) -> int:
        values = gradient_values(self.params() if params is None else params)
        return sum(value.numel() for value in values) - int(sum(value.count_nonzero() for value in values))


def _outcome(result: StepResult) -> str:
    return (
        "an applied step" if result.applied else f"a skipped one ({result.skipped_reason}: {', '.join(result.culprit)})"
    )


class DeviceMasterUpdate(KeepsMasters, DeviceUpdate):
    """As `MasterUpdate`, but scale, norms and the decision are 0-dim tensors, and every bucket's kernel gets them.

    A bucket is read, stepped and written back whether the step is skipped or not. What is written back then is what was
    read, in every form of masters and states, so nobody need know.
    """

    def _decide_and_apply(self) -> StepResult:
        carried = partial(carried_with, self._known_scale, self._clip)
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
