"""The update of apex: every backward pass is unscaled and checked by itself, and an overflow skips the next step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import SGD

from booster.cast_regions import casts_as_here, disable_casts
from booster.grads import gradient_values, unscale_values
from booster.mixed_precision.apex.cautions import check_dtypes
from booster.mixed_precision.apex.scale import ApexScales
from booster.update import agreement
from booster.update.backward import BackwardPass
from booster.update.base import Job
from booster.update.host import HostUpdate
from booster.update.outcome import SkippedReason, StepFields, StepResult

_logger = logging.getLogger(__name__)

NO_CLOSURE = "Currently, Amp does not support closure use with optimizers."


class _Overflow(NamedTuple):
    loss_id: int
    finite_loss: bool


class ApexUpdate(HostUpdate):
    """Gradients at rest are true ones, whatever scales their backward passes had; see the module docstring.

    A pass sets the gradients there are aside, unscales what it brings, adds them up again and moves the scale of its loss. On
    an overflow in a dynamic scale each optimizer of the pass skips its next step, once. Delayed passes pile up scaled
    gradients until one that is not. Clips and `skip_nonfinite` act on the sum, as in any update.

    scaler: shared by all optimizers of a strategy. verbose: log skipped steps.
    """

    scaler: ApexScales
    piles_up = True
    short_circuits = True  # a static scale of 1 does nothing at all

    def __init__(
        self,
        job: Job,
        *,
        verbose: bool,
    ) -> None:
        HostUpdate.__init__(self, job)
        self._begin(verbose)

    def _begin(self, verbose: bool) -> None:
        self._verbose_skips = verbose
        self._pass: BackwardPass | None = None
        self._stash: dict[torch.Tensor, torch.Tensor] = {}
        self._before: dict[torch.Tensor, torch.Tensor] = {}  # gradients that the pass adds to, or replaces
        self._delayed_before: float | None = None
        self._delayed: float | None = None  # the scale of gradients that wait for a pass that is not delayed
        self._overflow: _Overflow | None = None  # what the next step answers to
        self._culprit: tuple[str, ...] = ()

    def reset(self) -> None:
        super().reset()
        self._check = self._skip_nonfinite
        self._delayed = None
        self._stash = {}
        self._before = {}

    @contextmanager
    def set_aside(self, scale: float) -> Iterator[None]:
        with super().set_aside(scale):
            # The scales are those of all optimizers of the strategy, and none of this one's own: they stay where they are.
            self.__dict__["_move"] = lambda updates, this, loss: None
            yield

    # ------------------------------------------------------------------ backward

    def scale_for(self, loss_id: int) -> float:
        return self.scaler[loss_id].scale

    def before_backward(self, scale: Any, this: BackwardPass | None = None) -> None:
        with self.shards.local():
            self._before_backward(scale, this or BackwardPass([self]))

    def _before_backward(self, scale: Any, this: BackwardPass) -> None:
        self._pass = this
        self._differentiable = self._differentiable or this.create_graph
        if self._delayed is None:
            self._settle()
        else:
            fresh = [param for param in self.shards.holders() if param.grad is not None]
            self._before = {param: param.grad.clone() for param in fresh}  # type: ignore[union-attr]
            if self._delayed != scale:  # of another loss
                unscale_values(gradient_values(fresh), scale / self._delayed, check=False)
        self._delayed_before = self._delayed
        self._loss_scale = float(scale)
        self._measured = []
        self._reported_norm = None
        self.joint.found = None
        if self._delayed is None and not self._nothing_to_do(this):
            self._set_aside()

    def after_backward(self, loss: torch.Tensor | None) -> None:
        with self.shards.local():
            self._after_backward(loss)

    def _after_backward(self, loss: torch.Tensor | None) -> None:
        this = self._pass or BackwardPass([self])
        self._pass = None
        self._before = {}
        super().after_backward(loss)
        self._scale = 1.0
        if self._nothing_to_do(this):
            return
        if this.delayed:
            self._delayed = self._loss_scale
            return
        self._delayed = None
        this.found.append(self._take_in(self.scaler[this.loss_id].dynamic))
        looking = [
            update for update in this.updates if isinstance(update, ApexUpdate) and not update._nothing_to_do(this)
        ]
        if this.checked and len(this.found) == len(looking):
            self._move(looking, this, loss)

    def abandon_backward(self) -> None:
        this, self._pass = self._pass, None
        if this is None or (self._delayed_before is None and self._nothing_to_do(this)):
            return
        before = {**self._before, **self._stash}
        with self.shards.local():
            for param in self.shards.holders():
                param.grad = before.get(param)
        self._delayed, self._before, self._stash = self._delayed_before, {}, {}

    def _nothing_to_do(self, this: BackwardPass) -> bool:
        # An optimizer of another precision in the same pass may have a scale.
        return self.short_circuits and self.scaler[this.loss_id].is_null and self._loss_scale == 1.0

    def _settle(self) -> None:
        """Apply the clips that wait."""
        if self._scale is not None and (self._factor is not None or self._scale != 1.0):
            self._multiply(self._pending / self._scale)
        self._scale = None if self._scale is None else 1.0
        self._factor = None

    def _set_aside(self) -> None:
        for param in self.shards.holders():
            if param.grad is not None:
                # The plugin may own the memory, as DistributedDataParallel's buckets do, and write to it in the pass.
                self._stash[param] = param.grad if self._group is None else param.grad.clone()
                param.grad = None

    def _take_in(self, check: bool) -> bool:
        """Unscale what a pass brought and add what was set aside; returns whether it held an inf or NaN."""
        fresh = self._fresh()
        found = self._unscale_fresh(fresh, gradient_values(fresh), check)
        for param, before in self._stash.items():
            if param.grad is None:
                param.grad = before
            elif before.is_sparse or param.grad.is_sparse or param.grad.requires_grad:
                param.grad = param.grad + before
            else:
                param.grad.add_(before)
        self._stash = {}
        return found

    def _unscale_fresh(self, params: list[torch.Tensor], values: list[torch.Tensor], check: bool) -> bool:
        # Of a bare backward inside `scale_loss` nobody says whether it made a graph.
        self._differentiable = self._differentiable or any(value.requires_grad for value in values)
        found = unscale_values(values, 1.0 / self._loss_scale, check=check)
        if found:
            bad = [index for index, value in enumerate(values) if not value.isfinite().all()]
            self._culprit = self.culprits(bad, params)
        return found

    def _move(self, updates: list[ApexUpdate], this: BackwardPass, loss: torch.Tensor | None) -> None:
        found = any(this.found)
        finite = not found or loss is None or bool(loss.isfinite().all())
        scales = {id(update.scaler): update.scaler[this.loss_id] for update in updates}.values()
        if any(scale.dynamic for scale in scales):
            found, finite = agreement.on_overflow(found, finite, self._group)
        skips = [scale.update(found) for scale in scales]
        if any(skips):
            overflow = _Overflow(this.loss_id, finite)
            for update in updates:
                update._overflow = update._overflow or overflow

    def _fresh(self) -> list[torch.Tensor]:
        """What holds the gradients that a pass brought."""
        return [param for param in self.shards.holders() if param.grad is not None]

    def _held(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    # ------------------------------------------------------------------ step

    def step(self) -> StepResult:
        if self._delayed is not None and any(param.grad is not None for param in self._held()):
            self._require_backward()
        return super().step() if self._overflow is None else self._skip(self._overflow)

    def _skip(self, overflow: _Overflow) -> StepResult:
        self._settle()  # gradients that outlive the step stay clipped, as where a clip writes to them at once
        if self._verbose_skips:
            _logger.info(
                "Gradient overflow.  Skipping step, loss scaler %s reducing loss scale to %s",
                overflow.loss_id,
                self.scaler[overflow.loss_id].scale,
            )
        reason: SkippedReason = "nonfinite_grad" if overflow.finite_loss else "nonfinite_loss"
        culprit = agreement.all_names(self._culprit, self._group)
        fields = StepFields(loss_scale=self._loss_scale, skipped_reason=reason, culprit=culprit)
        self._overflow, self._culprit = None, ()
        self.reset()
        return StepResult(False, fields)

    def check_known(self, params: list[torch.Tensor]) -> None:
        """Also raise TypeError for dtypes that a scaled update cannot step."""
        super().check_known(params)
        if not (self.short_circuits and self.scaler[0].is_null):
            for param in params:
                check_dtypes(SGD([param]))  # of which it reads the groups

    def step_with_closure(self, closure: Callable[[], Any]) -> StepResult:
        cast_again = casts_as_here()

        def cast() -> Any:
            with cast_again():
                return closure()

        with disable_casts():
            return super().step_with_closure(cast)

    @property
    def closure_refusal(self) -> str | None:
        return None if self._overflow is None else NO_CLOSURE

    def _apply(self, grad_scale: float) -> float:
        with disable_casts():
            return super()._apply(grad_scale)

    def _require_backward(self) -> None:
        # Gradients at rest are true ones, so those of a bare loss.backward() add to them.
        if self._delayed is not None:
            raise RuntimeError(
                "the last backward was one of an unfinished accumulation (inside no_sync, or with delay_unscale=True), so "
                "gradients are still scaled; run the last backward of the group outside of it"
            )
