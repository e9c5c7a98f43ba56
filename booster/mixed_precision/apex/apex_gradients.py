"""Gradients under apex: every backward pass is unscaled and checked by itself, and an overflow skips the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import SGD

from booster.mixed_precision.apex.apex_options import check_dtypes
from booster.mixed_precision.apex.scale import ApexScales
from booster.ranks import agreement
from booster.tensors.grads import gradient_values, unscale_values
from booster.update.backward import BackwardPass
from booster.update.context import UpdateContext
from booster.update.decision import Norms
from booster.update.gradients import Gradients

NO_CLOSURE = "Currently, Amp does not support closure use with optimizers."


class Overflow(NamedTuple):
    """A pass with gradients that were not finite."""

    loss_id: int
    finite_loss: bool


class ApexGradients(Gradients):
    """Gradients that are unscaled between passes, whatever loss scales the passes had.

    A pass sets aside the gradients there are, unscales what it brings, adds both up and moves the scale of its loss. On an
    overflow in a dynamic scale each optimizer of the pass skips its next step, once. Delayed passes pile up scaled gradients
    until one that is not delayed. Clips and `skip_nonfinite` act on the sum, as in other precisions.

    Attributes:
        scaler: the loss scales, shared by all optimizers of a strategy.
        overflow: the first pass since the last step that overflowed, for which the next step is skipped.
        culprit: names of the parameters of those gradients.
    """

    scaler: ApexScales
    piles_up = True
    short_circuits = True  # a static scale of 1 does nothing at all

    def __init__(self, context: UpdateContext, norms: Norms) -> None:
        super().__init__(context, norms)
        self._pass: BackwardPass | None = None
        self._stash: dict[torch.Tensor, torch.Tensor] = {}
        self._before: dict[torch.Tensor, torch.Tensor] = {}  # gradients that the pass adds to, or replaces
        self._delayed_before: float | None = None
        self._delayed: float | None = None  # the scale of gradients that wait for a pass that is not delayed
        self.overflow: Overflow | None = None
        self.culprit: tuple[str, ...] = ()

    def reset(self, scale: Any) -> None:
        super().reset(scale)
        self.check = self.skip_nonfinite
        self._delayed = None
        self._stash = {}
        self._before = {}

    # ------------------------------------------------------------------ backward

    def scale_for(self, loss_id: int) -> float:
        return self.scaler[loss_id].scale if self._prescribed is None else self._prescribed

    def before_backward(self, scale: Any, this: BackwardPass | None = None) -> None:
        with self.shards.local():
            self._before_backward(scale, this or BackwardPass([self]))

    def _before_backward(self, scale: Any, this: BackwardPass) -> None:
        self._pass = this
        self._differentiable = self._differentiable or this.create_graph
        if self._delayed is None:
            self._apply_pending()
        else:
            fresh = [param for param in self.shards.grad_holders() if param.grad is not None]
            # Delayed passes add to scaled gradients in place; a pass that raises must give these back.
            self._before = {param: param.grad.clone() for param in fresh}  # type: ignore[union-attr]
            if self._delayed != scale:  # of another loss
                unscale_values(gradient_values(fresh), scale / self._delayed, check=False)
        self._delayed_before = self._delayed
        self.loss_scale = float(scale)
        self.read = []
        self.norm = None
        self.joint.found = None
        # Of a pass that adds to scaled gradients nothing is set aside: its sum is checked when the last one comes.
        if self._delayed is None and not self._nothing_to_do(this):
            self._stash_grads()

    def after_backward(self, loss: torch.Tensor | None) -> None:
        super().after_backward(loss)  # outside of `local`, as it compares whole parameters of ranks
        with self.shards.local():
            self._finish_backward(loss)

    def _finish_backward(self, loss: torch.Tensor | None) -> None:
        this = self._pass or BackwardPass([self])
        self._pass = None
        self._before = {}
        self.scale = 1.0
        if self._nothing_to_do(this):
            return
        if this.delayed:
            self._delayed = self.loss_scale
            return
        self._delayed = None
        # Unscale what a pass brought and add what was set aside; returns whether it held an inf or NaN
        check = self.scaler[this.loss_id].dynamic
        fresh = self._new_grads()
        found = self._unscale_new(fresh, gradient_values(fresh), check)
        for param, before in self._stash.items():
            if param.grad is None:
                param.grad = before
            elif before.is_sparse or param.grad.is_sparse or param.grad.requires_grad:
                param.grad = param.grad + before
            else:
                param.grad.add_(before)
        self._stash = {}
        this.found.append(found)
        looking = [
            member for member in this.members if isinstance(member, ApexGradients) and not member._nothing_to_do(this)
        ]
        # The last optimizer of the pass decides for all of them.
        if this.checked and len(this.found) == len(looking):
            self._update_scales(looking, this, loss)

    def abandon_backward(self) -> None:
        this, self._pass = self._pass, None
        if this is None or (self._delayed_before is None and self._nothing_to_do(this)):
            return
        before = {**self._before, **self._stash}
        with self.shards.local():
            for param in self.shards.grad_holders():
                param.grad = before.get(param)
        self._delayed, self._before, self._stash = self._delayed_before, {}, {}

    def _nothing_to_do(self, this: BackwardPass) -> bool:
        # An optimizer of another precision in the same pass may have a scale.
        return self.short_circuits and self.scaler[this.loss_id].is_null and self.loss_scale == 1.0

    def _apply_pending(self) -> None:
        """Apply the clips that wait."""
        if self.scale is not None and (self.factor is not None or self.scale != 1.0):
            self.multiply((1.0 if self.factor is None else self.factor) / self.scale)
        self.scale = None if self.scale is None else 1.0
        self.factor = None

    def _stash_grads(self) -> None:
        for param in self.shards.grad_holders():
            if param.grad is not None:
                # The plugin may own the memory, as DistributedDataParallel's buckets do, and write to it in the pass.
                self._stash[param] = param.grad if self.group is None else param.grad.clone()
                param.grad = None

    def _unscale_new(self, params: list[torch.Tensor], values: list[torch.Tensor], check: bool) -> bool:
        # A bare backward inside `scale_loss` does not say whether it made a graph.
        self._differentiable = self._differentiable or any(value.requires_grad for value in values)
        found = unscale_values(values, 1.0 / self.loss_scale, check=check)
        if found:
            bad = [index for index, value in enumerate(values) if not value.isfinite().all()]
            self.culprit = self.parameters.names_of(bad, params)
        return found

    def _update_scales(self, members: list[ApexGradients], this: BackwardPass, loss: torch.Tensor | None) -> None:
        if self._prescribed is not None:
            return  # all optimizers share the scales, and a trial pass must not move them
        found = any(this.found)
        finite = not found or loss is None or bool(loss.isfinite().all())
        scales = {id(member.scaler): member.scaler[this.loss_id] for member in members}.values()
        # A static scale asks no rank: inf is let into the weights, as apex does.
        if any(scale.dynamic for scale in scales):
            found, finite = agreement.on_overflow(found, finite, self.group)
        skips = [scale.update(found) for scale in scales]
        if any(skips):
            overflow = Overflow(this.loss_id, finite)
            for member in members:
                member.overflow = member.overflow or overflow

    def _new_grads(self) -> list[torch.Tensor]:
        """Parameters, or shards of them, with a gradient that a pass brought."""
        return [param for param in self.shards.grad_holders() if param.grad is not None]

    # ------------------------------------------------------------------ step

    def check_complete(self) -> None:
        """Raise RuntimeError, before a step, for gradients that are not what the passes were to bring."""
        if self._delayed is not None and any(param.grad is not None for param in self.parameters.held()):
            self.require_backward()

    def clear_overflow(self) -> tuple[str, ...]:
        """A step was skipped for `overflow`; returns the parameters that overflowed on any rank."""
        self._apply_pending()  # gradients that outlive the step stay clipped, as where a clip writes to them at once
        culprit = agreement.all_names(self.culprit, self.group)
        self.overflow, self.culprit = None, ()
        return culprit

    def check_known(self, params: Sequence[torch.Tensor]) -> None:
        """Also raise TypeError for dtypes that a scaled update cannot step."""
        super().check_known(params)
        if not (self.short_circuits and self.scaler[0].is_null):
            for param in params:
                check_dtypes(SGD([param]))  # of which it reads the groups

    @property
    def closure_refusal(self) -> str | None:
        return None if self.overflow is None else NO_CLOSURE

    def require_backward(self) -> None:
        # Gradients are unscaled between passes, so those of a bare loss.backward() add to them.
        if self._delayed is not None:
            raise RuntimeError(
                "the last backward was one of an unfinished accumulation (inside no_sync, or with delay_unscale=True), so "
                "gradients are still scaled; run the last backward of the group outside of it"
            )
