"""Gradients under apex: every backward pass is unscaled and checked by itself, and an overflow skips the next step.

Where half-precision parameters have float32 masters, these keep the unscaled sum of all passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD

from booster.common.torch_internals.optimizer_internals import step_hooks
from booster.common.torch_internals.tensor_internals import sparse_values, version
from booster.masters.masters import Masters
from booster.mixed_precision.apex.apex_options import check_dtypes
from booster.mixed_precision.apex.scale import ApexScales
from booster.model.params import dtensor_around, local_shard
from booster.ranks import agreement
from booster.tensors.grads import gradient_values, own_memory, scale_values, unscale_values
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
    has_unready_grads = takes_bare = True
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
        self.checks_finite = self.skip_nonfinite
        self._delayed = None
        self._stash = {}
        self._before = {}

    # ------------------------------------------------------------------ backward

    def scale_for(self, loss_id: int) -> float:
        return self.scaler[loss_id].scale if self._prescribed is None else self._prescribed

    def before_backward(self, scale: Any, this: BackwardPass | None = None) -> None:
        self._pass = this = this or BackwardPass([self])
        self._differentiable = self._differentiable or this.create_graph
        with self.shards.local():
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
            self.joint.found_inf = None
            # Of a pass that adds to scaled gradients nothing is set aside: its sum is checked when the last one comes.
            if self._delayed is None and not self._nothing_to_do(this):
                self._stash_grads()

    def after_backward(self, loss: torch.Tensor | None) -> None:
        super().after_backward(loss)  # outside of `local`, as it compares whole parameters of ranks
        this, self._pass = self._pass or BackwardPass([self]), None
        self._before = {}
        self.scale = 1.0
        if self._nothing_to_do(this):
            return
        if this.delayed:
            self._delayed = self.loss_scale
            return
        self._delayed = None
        with self.shards.local():
            found_inf = self._add_pass(self.scaler[this.loss_id].dynamic)
        this.found_inf.append(found_inf)
        looking = [
            member for member in this.members if isinstance(member, ApexGradients) and not member._nothing_to_do(this)
        ]
        # The last optimizer of the pass decides for all of them.
        if this.checked and len(this.found_inf) == len(looking):
            self._update_scales(looking, this, loss)

    def _add_pass(self, check: bool) -> bool:
        """Unscale what a pass brought and add what was set aside; returns whether it held an inf or NaN, if that is checked."""
        fresh = self._new_grads()
        found_inf = self._unscale_new(fresh, gradient_values(fresh), check)
        for param, before in self._stash.items():
            if param.grad is None:
                param.grad = before
            elif before.is_sparse or param.grad.is_sparse or param.grad.requires_grad:
                param.grad = param.grad + before
            else:
                param.grad.add_(before)
        self._stash = {}
        return found_inf

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
        found_inf = unscale_values(values, 1.0 / self.loss_scale, check=check)
        if found_inf:
            bad = [index for index, value in enumerate(values) if not value.isfinite().all()]
            self.culprit = self.parameters.names_of(bad, params)
        return found_inf

    def _update_scales(self, members: list[ApexGradients], this: BackwardPass, loss: torch.Tensor | None) -> None:
        if self._prescribed is not None:
            return  # all optimizers share the scales, and a trial pass must not move them
        found_inf = any(this.found_inf)
        finite = not found_inf or loss is None or bool(loss.isfinite().all())
        scales = {id(member.scaler): member.scaler[this.loss_id] for member in members}.values()
        # A static scale asks no rank: inf is let into the weights, as apex does.
        if any(scale.dynamic for scale in scales):
            found_inf, finite = agreement.agree_on_found_inf(found_inf, finite, self.group)
        skips = [scale.update(found_inf) for scale in scales]
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


class _GradSnapshot:
    """Which memory a gradient was in after a pass, and how often it had been written to.

    shown: the gradient that users see, where it is another tensor. The memory is kept: no other tensor gets its address.
    """

    def __init__(self, grad: torch.Tensor, shown: torch.Tensor | None) -> None:
        local = local_shard(grad)
        values = sparse_values(local) if local.is_sparse else local
        self._memory = values.untyped_storage()
        self._address = values.data_ptr()
        self._writes = version(values) + (0 if shown is None else version(shown))

    def is_same(self, other: _GradSnapshot) -> bool:
        """Whether the other is of the same memory, not written to in between."""
        return self._writes == other._writes and self._address == other._address


class ApexMasterGradients(ApexGradients):
    """As `ApexGradients`; gradients of half-precision parameters add up in float32 besides `.grad`, which keeps the last pass
    as that left it: in half, scaled.

    Norms, clips and the step use these sums. A step, applied or not, clears them. Where the user has written to a `.grad` since
    the pass, or put another tensor or None there, that is the gradient instead, with the scale of the pass; after `unscale`,
    which writes the sums into `.grad`, without a scale.
    """

    short_circuits = False

    def __init__(self, context: UpdateContext, norms: Norms, masters: Masters) -> None:
        self._masters = masters
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._snapshots: dict[torch.Tensor, _GradSnapshot] = {}
        self._has_older: set[torch.Tensor] = set()  # their sums hold more than the last pass brought
        self._in_grad = False  # whether `.grad` holds the sums, unscaled
        self._compares = False  # whether to compare `.grad` with the sums that were put there
        self._has_snapshots = False  # whether `_snapshots` are of the present gradients
        self._pass_scale = 1.0
        self._hooked = False  # whether step hooks may write to `.grad` within the step
        masters.gradient_of = self._sum_of  # a method, which follows this object into a deep copy
        super().__init__(context, norms)

    def check_complete(self) -> None:
        if self.num_backwards == 0 and any(p.grad is not None and self._has_master(p) for p in self.parameters.held()):
            self.require_backward()  # or the step would say that it was applied, and move nothing
        self._hooked = any(step_hooks(self.optimizer))
        super().check_complete()

    def reset(self, scale: Any) -> None:
        super().reset(scale)
        # New containers: gradients that were stashed for a while keep theirs.
        self._sums, self._snapshots, self._has_older = {}, {}, set()
        self._in_grad = self._compares = self._has_snapshots = self._hooked = False

    def _find_params(self) -> list[torch.Tensor]:
        self._accept_written()
        return [p for p in self.parameters.held() if (p in self._sums if self._has_master(p) else p.grad is not None)]

    def values(self, *, written: bool = False) -> list[torch.Tensor]:
        params = self.params()
        others = [p for p in params if not self._has_master(p)]
        plain = iter(gradient_values(self.shards.grad_targets(others) if written else others))
        self._compares = self._compares and not written
        return [self._sums[p] if self._has_master(p) else next(plain) for p in params]

    def master_params(self) -> Iterator[nn.Parameter]:
        """What apex calls master parameters: one float32 parameter for each in the groups."""
        with self.shards.local():
            self._accept_written()
        self._compares = False
        values = self._masters.values()
        for param in self.parameters.held():
            if not self._has_master(param):
                yield param  # type: ignore[misc]
                continue
            master = nn.Parameter(values[param].detach())
            total = self._sums.get(param)
            # For one with a master it is the master (see `Masters.values`), with the very gradient that the next step will use.
            master.grad = None if total is None else dtensor_around(total, param)
            yield master

    @property
    def closure_refusal(self) -> str | None:
        return NO_CLOSURE

    def _detach_from_graph(self) -> None:
        super()._detach_from_graph()
        with torch.enable_grad():
            self._sums = {param: total.clone() for param, total in self._sums.items()}

    def _sum_of(self, param: torch.Tensor) -> torch.Tensor | None:
        if self._hooked and self._has_snapshots and param.dtype == torch.float16:
            self._accept(param)
        return self._sums.get(param)

    def _stash_grads(self) -> None:
        self._accept_written()
        self._has_snapshots = False
        halves = [p for p in self.shards.grad_holders() if self._has_master(p)]
        for param in halves:
            if param.grad is not None:
                self._before[param] = param.grad if self.group is None else param.grad.clone()
                param.grad = None
        super()._stash_grads()

    def _new_grads(self) -> list[torch.Tensor]:
        # Of half-precision parameters this rank's shards, to which its masters and sums belong.
        halves = [p for p in self.parameters.held() if self._has_master(p) and p.grad is not None]
        return halves + [p for p in super()._new_grads() if not self._has_master(p)]

    def _unscale_new(self, params: list[torch.Tensor], values: list[torch.Tensor], check: bool) -> bool:
        wide = [
            local_shard(p.grad).to_dense().to(torch.float32, copy=True) if self._has_master(p) else value  # type: ignore[arg-type]
            for p, value in zip(params, values, strict=True)
        ]
        found_inf = super()._unscale_new(params, wide, check)
        self._has_older = set(self._sums)
        for param, value in zip(params, wide, strict=True):
            if not self._has_master(param):
                continue
            if param in self._sums and self._differentiable:
                self._sums[param] = self._sums[param] + value
            elif param in self._sums:
                self._sums[param].add_(value)
            else:
                self._sums[param] = value
        self._in_grad = self._compares = False
        self._pass_scale = self.loss_scale
        self._snapshot_grads()
        return found_inf

    def abandon_backward(self) -> None:
        super().abandon_backward()
        if self._delayed is None and self.num_backwards:
            with self.shards.local():
                self._snapshot_grads()  # what was set aside may have come back as a copy

    def _unscale(self) -> None:
        pending = 1.0 if self.factor is None else self.factor
        super()._unscale()
        if not self._sums:
            return
        halves = [p for p in self.parameters.held() if p in self._sums]
        written = self.shards.grad_targets([p for p in halves if p.grad is not None])
        if not {id(p) for p in halves if p.grad is not None} <= set(map(id, written)):
            # `.grad` is whole on every rank, and each has the sum of its part.
            if self._has_older and not self._in_grad:
                raise RuntimeError(
                    "unscale_grads() cannot show the gradients of half parameters here: several backward passes were added up "
                    "in float32, on each rank its part, and `.grad` is whole and holds the last pass. Run the passes inside "
                    "b.accumulate(), which adds them up in `.grad`"
                )
            # Other ranks hold other shards of the sums, so the whole `.grad` is unscaled in place instead.
            whole = [param for param in written if param.dtype == torch.float16]
            own_memory(whole)
            scale_values(gradient_values(whole), pending if self._in_grad else pending / self._pass_scale)
        for param in halves:
            total = self._sums[param]
            grad = param.grad
            if grad is None or grad.is_sparse or grad.requires_grad:
                with torch.set_grad_enabled(total.requires_grad):
                    param.grad = dtensor_around(total.to(param.dtype), param)
            else:
                own_memory([param])
                local_shard(param.grad).copy_(total.detach())  # type: ignore[arg-type]
        self._in_grad = self._compares = True
        self._snapshot_grads()

    def _snapshot_grads(self) -> None:
        self._snapshots = {
            p: _GradSnapshot(p.grad, self.shards.param_of(p).grad)
            for p in self.parameters.held()
            if p.dtype == torch.float16 and p.grad is not None
        }
        self._has_snapshots = True

    def _accept_written(self) -> None:
        """Take gradients that the user wrote to since the last pass, replaced or removed, for the next step."""
        if not self._has_snapshots:
            return
        for param in self.parameters.held():
            if param.dtype == torch.float16:
                self._accept(param)

    def _accept(self, param: torch.Tensor) -> None:
        left = self._snapshots.get(param)
        if param.grad is None:
            if left is not None:
                del self._snapshots[param]
                self._sums.pop(param, None)
            return
        now = _GradSnapshot(param.grad, self.shards.param_of(param).grad)
        if left is not None and now.is_same(left) and not (self._compares and self._differs(param)):
            return
        if param in self._has_older and not self._in_grad:
            raise RuntimeError(
                f"the gradient of {self.parameters.name_of(param)} was changed by hand after several backward passes, of "
                "which `.grad` holds only the last: O2 adds them up in float32. Call optimizer.unscale_grads() before, "
                "which puts their sum there, or run the passes inside b.accumulate()"
            )
        self._snapshots[param] = now
        value = local_shard(param.grad).to_dense().to(torch.float32, copy=True)
        if not self._in_grad:
            unscale_values([value], 1.0 / self._pass_scale, check=False)
        self._sums[param] = value

    def _differs(self, param: torch.Tensor) -> bool:
        """Whether `.grad` is not what was put there: a write through `.data` counts in no version."""
        total = self._sums.get(param)
        grad = local_shard(param.grad)  # type: ignore[arg-type]
        return total is None or grad.is_sparse or not torch.equal(grad, total.to(grad.dtype))

    def require_backward(self) -> None:
        super().require_backward()
        if self.num_backwards == 0:  # a bare loss.backward() does not reach the masters
            Gradients.require_backward(self)

    def _has_master(self, param: torch.Tensor) -> bool:
        # As in apex, freezing a weight does not take back the gradient that its master has.
        return param.dtype == torch.float16 and (param.requires_grad or param in self._sums)
