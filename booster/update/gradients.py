"""The gradients of one optimizer from backward to step: the scale they carry, the clips that wait, and what was read of them.

Nothing here writes a gradient unless it must. One read of the *scaled* gradients, their norm, tells overflow and clip
factor; scale and clip reach a fused optimizer as one number, `grad_scale`, others as one multiplication. `Norms` knows how a
norm is read, and where the numbers are, on the host or on a device.
"""

from __future__ import annotations

import copy
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch

from booster.ranks import agreement
from booster.tensors.grads import gradient_values, own_memory, scale_in_graph, scale_values
from booster.tensors.trees import HALF_DTYPES
from booster.update.backward import BackwardPass, JointDecision
from booster.update.context import EVERY, FIRST, BarePasses, GradMutationCheck, Parameters, StepListener, UpdateContext
from booster.update.decision import Norms
from booster.update.in_backward import OptimizerInBackward

_logger = logging.getLogger(__name__)
WHOLE = nullcontext()  # where parameters are whole, `local()` changes nothing
_NOT_READ = torch.full((), math.nan, dtype=torch.float32, device="cpu")  # a norm
_OF_PASSES = ("scale", "factor", "norm", "loss_scale", "losses", "num_backwards", "_differentiable")
_OF_STEP = ("checks_finite", "deferred_max_norm")
_DTYPE = attrgetter("dtype")  # of every parameter in every step, without a Python call for each


class Gradients:
    """State of one optimizer's gradients; see the module docstring.

    Attributes:
        scale: what they are multiplied by; None: there are none that we know of.
        factor: the product of the clip factors that wait; None: no clip does.
        deferred_max_norm: of a clip that waits unread for the decision.
        read: norms taken since the last backward pass; found_inf follows from them.
        norm: the first of them, as it would be unscaled.
        checks_finite: whether the next step reads its gradients without being asked.
        loss_scale: of this step's backward passes.
        losses: of these passes, where a skip has to say why.
        num_backwards: how many passes there were since the last step.
        joint: the decision, shared with the optimizers of the same loss.
        in_backward: how passes step on them, where they do.
        listeners: what hears of passes and steps.
        mutation_check: scaled gradients as the last pass left them, in steps that compare.
        bare_passes: passes that are not ours, in these steps.
        has_unready_grads: whether gradients can wait that no step may use yet although a backward pass has ended.
        check_loss: called with the first loss, to refuse it by raising; None: nothing is.
        takes_bare: whether gradients of a bare `loss.backward()` add up with those of our passes, as where these are unscaled.
    """

    has_unready_grads = takes_bare = False
    check_loss: Callable[[torch.Tensor], None] | None = None

    def __init__(self, context: UpdateContext, norms: Norms) -> None:
        scaler, options = context.scaler, context.options
        if not scaler.enabled and scaler.scale != 1.0:
            raise ValueError(
                f"{type(scaler).__name__} has a scale of {scaler.scale:g} and enabled = False, so nothing would be scaled; set "
                "enabled = True in the class"
            )
        self.optimizer = context.optimizer
        self.shards = context.shards
        self.parameters = Parameters(context.optimizer, context.names)
        self.group = context.group
        self.scaler = scaler
        self.norms = norms
        self.skip_nonfinite = options.skip_nonfinite
        self.joint = JointDecision([self])
        self.in_backward: OptimizerInBackward | None = None
        self.listeners: list[StepListener] = []
        self._warned_of_mutation = False
        self._present: list[torch.Tensor] | None = None  # `params()`, within a step
        self._in_pass = False
        self._prescribed: float | None = None  # the next scale, of a replay
        self._num_steps = 0
        self.bare_passes = BarePasses()
        self.reset(None)

    def __getstate__(self) -> dict[str, Any]:
        # Listeners, such as an open record, stay with the original of a copy.
        return {**self.__dict__, "listeners": [], "mutation_check": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self.joint.members:  # a weak reference is not copied
            self.joint.members.append(weakref.proxy(self))

    def reset(self, scale: Any) -> None:
        """Forget what belongs to one step. scale: what `.grad` is multiplied by now; None: nothing that we know of."""
        self.scale: Any = scale
        self.factor: Any = None
        self.deferred_max_norm: float | None = None
        self.read: list[Any] = []
        self.norm: Any = None
        self.checks_finite = self.scaler.enabled or self.skip_nonfinite
        self.num_backwards = 0
        self.mutation_check: GradMutationCheck | None = None
        self.bare_passes.params.clear()
        self.loss_scale: Any = 1.0
        self.losses: list[torch.Tensor] = []
        self._differentiable = False  # a graph may lead through gradients at rest
        self._present = None
        if len(self.joint.members) > 1:
            self.joint.remove_member(self)
            self.joint = JointDecision([self])
        self.joint.found_inf = None

    def for_replay(self, scale: float) -> Gradients:
        """Return gradients of the same optimizer as before any pass, of losses that are multiplied by `scale`; no listener
        hears of them, and no pass steps on them."""
        other = copy.copy(self)
        # An overflow of the replay must not skip the steps of other optimizers.
        other.joint = JointDecision([other])
        other.listeners, other.in_backward, other._prescribed = [], None, scale
        other.reset(None)
        return other

    def snapshot(self) -> dict[str, Any]:
        """Return what is carried to the next step, by name, for `restore`; tensors in it are not copied."""
        # References alone: whoever restores them runs nothing that writes to these in between.
        values = {name: getattr(self, name) for name in (*_OF_PASSES, *_OF_STEP)}
        return {name: list(value) if type(value) is list else value for name, value in values.items()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Carry what `snapshot` gave as `kept`, with nothing read."""
        for name, value in kept.items():
            setattr(self, name, list(value) if type(value) is list else value)
        self.read, self.mutation_check = [], None
        self.joint.found_inf = None

    # ------------------------------------------------------------------ backward passes

    @property
    def next_scale(self) -> Any:
        """The scale for the next loss: a float, or a 0-dim tensor where it lives on a device."""
        return self.scale_for(0)

    def scale_for(self, loss_id: int) -> Any:
        """The scale for the next loss of that number, as `next_scale`."""
        if self._prescribed is not None:
            return self._prescribed
        return self.scaler.factor if self.norms.on_device else self.scaler.scale

    def before_backward(self, scale: Any, this: BackwardPass | None = None) -> None:
        """Bring gradients that exist already to `scale`, pending clips applied, so that new ones add to them. this: the pass
        that begins; None means one for this optimizer alone, of loss 0, complete."""
        if self.bare_passes.params:
            self.refuse_strays()
        if self.mutation_check is not None:
            self.check_mutations()
        if self.in_backward is not None:  # it steps within the pass
            self.parameters.check_full([param for param in self.parameters.held() if param.requires_grad])
        if self.shards.sharded:  # a step divides shards alone, and what the pass adds to is whole
            self.shards.rescale_unsharded_grads()
        sync_trackers = self.shards.sync_trackers
        if sync_trackers:
            for tracker in sync_trackers.values():
                # With one tracker its gradients are all there are, so it need not look for its own.
                tracker.before_backward(None if this is None else this.loss, only=len(sync_trackers) == 1)
        if not self.norms.on_device:
            scale = float(scale)
        if self.scale is not None and (self.factor is not None or not _same(self.scale, scale)):
            self.multiply(scale / self.scale * (1.0 if self.factor is None else self.factor))
        self._in_pass = True
        self._differentiable = self._differentiable or (this is not None and this.create_graph)
        self.scale = self.loss_scale = scale
        self.factor = None
        self.read = []
        self.norm = None
        self.joint.found_inf = None

    def after_backward(self, loss: torch.Tensor | None) -> None:
        """loss: None where another pipeline stage computes it."""
        self._in_pass = False
        self.num_backwards += 1
        joint = not self.shards.unsynchronised
        for tracker in self.shards.sync_trackers.values():
            tracker.after_backward()
            joint = joint and not tracker.unsynchronised
        replica_check = self.shards.replica_check
        if joint and replica_check is not None:  # without a call, as after nearly every pass
            replica_check.num_passes += 1
            if replica_check.num_passes == replica_check.due:
                replica_check.check(self.shards)
        self.bare_passes.params.clear()  # these were ours
        # Seldom, because version counters of all parameters are read, and each has a hook.
        is_due = self.scaler.enabled and (self._num_steps < FIRST or self._num_steps % EVERY == 0)
        if is_due and self.scale is not None and not _same(self.scale, 1.0):
            self.mutation_check = GradMutationCheck(self.parameters.held())
            self.register_strays()
        elif self.bare_passes.hooks:
            self.bare_passes.remove()
        if self.checks_finite and loss is not None:
            self.losses.append(loss.detach())
        for listener in self.listeners:
            listener.after_backward(None if loss is None else loss.detach())

    def abandon_backward(self) -> None:
        """The pass raised; `after_backward` is not called."""
        self._in_pass = False
        self.bare_passes.params.clear()

    def register_strays(self) -> None:
        """Note passes that are not ours from now on. Not inside `local()`: the hooks are those of whole parameters."""
        if self.scaler.enabled and not self.takes_bare:
            self.bare_passes.register(self.parameters.held())

    def check_mutations(self) -> None:
        """RuntimeError for bare passes, and one WARNING if somebody else wrote to gradients that are noted."""
        if self.bare_passes.params:
            self.refuse_strays()
        # Nor are those of optimizers that step together noted any longer: under `fully_shard` all are views of one tensor, and
        # a write to one counts for each.
        for member in self.joint.members:
            member.warn_of_mutation()

    # ------------------------------------------------------------------ what they are

    @property
    def factors(self) -> tuple[Any, Any, Any]:
        """Before a step: what gradients are multiplied by, the clip factor that waits, and the scale of the last backward
        pass. Floats, or 0-dim tensors where they live on a device."""
        return 1.0 if self.scale is None else self.scale, 1.0 if self.factor is None else self.factor, self.loss_scale

    @property
    def grad_scale(self) -> Any:
        """What gradients are to be divided by: loss scale and clip in one number; inf where a clip leaves nothing of them."""
        scale = 1.0 if self.scale is None else self.scale
        if self.factor is None:
            return scale
        # A clip to 0 leaves nothing: dividing by inf makes every gradient 0.
        return scale / self.factor if isinstance(self.factor, torch.Tensor) or self.factor else math.inf

    def params(self) -> list[torch.Tensor]:
        """Parameters that have a gradient, in the order of the groups."""
        return self._find_params() if self._present is None else self._present

    def _find_params(self) -> list[torch.Tensor]:
        params = []
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    params.append(param)
        return params

    def values(self, *, written: bool = False) -> list[torch.Tensor]:
        """The gradients that `step` will use, one for each of `params()`; `written`: to be written to, whole."""
        if not written:
            return gradient_values(self._find_params() if self._present is None else self._present)
        params = self.shards.grad_targets(self.params())
        own_memory(params)
        return gradient_values(params)

    @contextmanager
    def present(self, params: list[torch.Tensor]) -> Iterator[None]:
        """Inside, `params()` are these."""
        before, self._present = self._present, params
        try:
            yield
        finally:
            self._present = before

    def none_anywhere(self) -> bool:
        """Return whether no rank has a gradient; a collective where ranks hold shards and there was no backward."""
        if self.shards.sharded and self.num_backwards:
            return False  # a rank without any joins the collectives of the others
        has_params = float(bool(self.params()))
        return not (agreement.largest(has_params, self.group) if self.shards.sharded else has_params)

    # ------------------------------------------------------------------ reading

    def true_norm(self, norm_type: float) -> Any:
        """Norm of the gradients as they would be unscaled, clips applied: one read of them. Inside `local()`."""
        with torch.no_grad():
            read, norm = self.norms.read(self, norm_type)
        self.read.append(read)
        # The first is what is reported: a second clip of another order must not change the norm of the step.
        if self.norm is None:
            self.norm = norm
        return norm

    def set_read(self, read: Any) -> None:
        """Have `read` be what was read of the gradients, which a pass has used."""
        self.read = [read]
        self.norm = read.total if self.scale is None else read.total / self.scale

    def found_inf(self) -> Any:
        """Return whether this rank's gradients hold an inf or NaN: a bool, or a 0-dim tensor. Reads them unless a norm was
        taken since the last backward pass."""
        if not self.read:
            # Another optimizer's step may ask, outside of this one's `local()`.
            with self.shards.local() if self.shards.sharded else WHOLE:
                self.true_norm(2.0)
        return self.norms.found_inf(self.read)

    @property
    def any_checks_finite(self) -> bool:
        """Return whether this step looks at its gradients, or is bound by another optimizer that does."""
        joint = self.joint
        return self.checks_finite or joint.found_inf is not None or any(each.checks_finite for each in joint.members)

    # ------------------------------------------------------------------ clips and unscaling

    def unscale(self) -> None:
        """Make `.grad` what it would be without a scale, pending clips applied. Calling it again does nothing."""
        with self.shards.local():
            self._unscale()

    def _unscale(self) -> None:
        if self.none_anywhere():
            return
        self.require_backward()
        if self.checks_finite and not self.read:
            self.true_norm(2.0)
        self.apply_scale()

    def set_grad_scale(self, scale: Any) -> None:
        """`.grad` is multiplied by `scale` now, no clip waits, and no norm was read."""
        self.scale, self.factor, self.read = scale, None, []

    def apply_scale(self) -> None:
        """Apply scale and clips that wait to `.grad`."""
        scale, factor, _ = self.factors
        # One pass over the gradients for both, and none where there is nothing to apply.
        if self.factor is not None or not _same(scale, 1.0):
            self.multiply(factor / scale)
        self.scale = 1.0
        self.factor = None

    def clip_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *, asked: bool = True
    ) -> torch.Tensor:
        """Scale gradients down so that their norm is at most `max_norm`; returns the norm before, unscaled, 0-dim.

        asked: by a call of the user's, which is refused where no backward pass came before it.
        """
        # The norm would be waited for: on a device the decision reads it later.
        if self.norms.defers_clips and not (asked or self.listeners):
            self.checks_finite, self.deferred_max_norm = True, max_norm
            return _NOT_READ
        with self.shards.local() if self.shards.sharded else WHOLE:
            self._present = self._find_params()  # once for all that asks for it below
            try:
                # Ranks with shards may hold none of a gradient, so they ask each other, but only where no pass came.
                unsure = not self.num_backwards if self.shards.sharded else not self._present
                if unsure and self.none_anywhere():
                    if asked:
                        self._refuse_early_clip("clip_grad_by_norm")
                    return torch.tensor(0.0, dtype=torch.float32)
                if self.has_unready_grads or not self.num_backwards:
                    self.require_backward()
                self.checks_finite = True
                norm = self.true_norm(norm_type)
            finally:
                self._present = None
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {float(norm)}, so it cannot be clipped. Under a "
                "loss scaler this is ordinary: leave error_if_nonfinite=False and the step is skipped"
            )
        self.factor = self.norms.clipped(norm, max_norm, self.factor)
        return norm if isinstance(norm, torch.Tensor) else torch.tensor(norm, dtype=torch.float32)

    def clip_by(self, max_norm: float, norm: float) -> None:
        """Clip to `max_norm` gradients of the true norm `norm`, or what is taken for it."""
        self.checks_finite = True
        self.factor = self.norms.clipped(norm, max_norm, self.factor)

    def clip_value(self, clip_value: float) -> None:
        """Clamp the unscaled gradients to [-clip_value, clip_value]. A step with non-finite gradients is skipped."""
        with self.shards.local():
            if self.none_anywhere():
                self._refuse_early_clip("clip_grad_by_value")
                return
            self.require_backward()
            self.checks_finite = True
            self.norms.clamp(self, clip_value)

    def multiply(self, ratio: Any) -> None:
        """Multiply `.grad` in place, or, where a graph may lead through it, by a copy."""
        with self.shards.local() if self.shards.sharded else WHOLE:
            if self._differentiable:
                self._detach_from_graph()
                scale_in_graph(self.values(written=True), ratio)
            else:
                scale_values(self.values(written=True), ratio)

    def _detach_from_graph(self) -> None:
        """Replace gradients that a graph may have saved by copies, which can be written to and lead back into it."""
        for param in self.shards.grad_targets(self.params()):
            if param.grad is not None and param.grad.requires_grad:
                with torch.enable_grad():
                    param.grad = param.grad.clone()

    # ------------------------------------------------------------------ steps

    def enter_step(self) -> list[torch.Tensor] | None:
        """A step begins, inside `local()`; returns `params()`, found once for it, or None if no rank has a gradient.

        Raises RuntimeError for gradients that no step may use, and weights that were made half."""
        self._num_steps += 1
        self._present = params = self._find_params()
        if self.parameters.are_full and not HALF_DTYPES.isdisjoint(map(_DTYPE, params)):
            self.parameters.check_full(params)
        if (not self.num_backwards if self.shards.sharded else not params) and self.none_anywhere():
            return None
        if self._in_pass or self.has_unready_grads or not self.num_backwards or self.bare_passes.params:
            self.require_backward()
        return params

    def abandon_step(self) -> None:
        """The step raised; otherwise `reset` ends it."""
        self._present = None

    # ------------------------------------------------------------------ what is refused

    @property
    def closure_refusal(self) -> str | None:
        """Return why `step(closure)` cannot run; None if it can."""
        if not self.scaler.enabled:
            return None
        return (
            f"{type(self.optimizer).__name__}.step(closure) cannot run under a loss scaler: the decision to skip falls after "
            "backward, inside the closure. Use mixed_precision='fp32' or 'bf16', or, if the optimizer does not need a closure, "
            "call b.backward(loss, optimizer) and then step()"
        )

    def check_known(self, params: Sequence[torch.Tensor]) -> None:
        """Raise ValueError if ranks share gradients and one of `params` belongs to no boosted model."""
        if self.group is not None and any(param not in self.parameters.names for param in params):
            raise ValueError(
                "the added parameters belong to no boosted model, so their gradients would not be synchronised among ranks; "
                "make them parameters of the model before boost()"
            )

    def require_backward(self) -> None:
        """Raise RuntimeError for gradients that no pass of ours has brought."""
        if self.scaler.enabled and self._in_pass:
            raise RuntimeError(
                "this was called within b.backward(loss, optimizer), as by a hook of register_post_accumulate_grad_hook: "
                "under a loss scaler no gradient is used before all of a pass are known to be finite. Call it after "
                "b.backward, use mixed_precision='bf16' or 'fp32', or have Booster(release_gradients=\"exact\") step "
                "within backward"
            )
        if self.scaler.enabled and self.num_backwards == 0:
            raise RuntimeError(
                "there are gradients, but no b.backward(loss, optimizer) since the last step: under a loss scaler those "
                "of a bare loss.backward() are not scaled, and those of the last step have been used. Call "
                "b.backward(loss, optimizer) instead, and name every optimizer that will step on that loss: "
                "b.backward(loss, [optimizer_a, optimizer_b])"
            )
        if self.bare_passes.params:
            self.refuse_strays()

    def warn_of_mutation(self) -> None:
        """One WARNING if somebody else wrote to gradients that are noted, which are noted no longer."""
        mutation_check, self.mutation_check = self.mutation_check, None
        params = [] if mutation_check is None or self._warned_of_mutation else mutation_check.mutated()
        if params:
            self._warned_of_mutation = True
            _logger.warning(
                "the gradient of %s%s was changed between b.backward and step() while it was multiplied by the loss "
                "scale, as by torch's clip_grad_norm_, or by hand: what is added or compared "
                "with a bound there is thousands of times too small. Clip with optimizer.clip_grad_by_norm(max_norm), pass "
                "every loss to b.backward, and call optimizer.unscale_grads() before writing to .grad",
                self.parameters.name_of(params[0]),
                f" (and of {len(params) - 1} others)" if len(params) > 1 else "",
            )

    def _refuse_early_clip(self, method: str) -> None:
        """Raise RuntimeError where the user clips and no backward pass has brought gradients since the last step."""
        if not self.num_backwards:
            raise RuntimeError(
                f"{method}() came before b.backward(loss, optimizer), or after step() and zero_grad(): there are no "
                "gradients, so nothing would be clipped. Call it between backward and step(); Booster(clip_grad_norm=...) "
                "clips in every step by itself"
            )

    def refuse_strays(self) -> None:
        """Raise RuntimeError if a stray pass brought gradients that would be added to those of another scale."""
        # Before a pass of ours nothing is known of gradients, and they are taken to have the scale of the next one.
        if float(self.next_scale if self.scale is None else self.scale) != 1.0:
            self.bare_passes.refuse(self.parameters, self.shards)
        self.bare_passes.params.clear()


def _same(scale: Any, other: Any) -> bool:
    if isinstance(scale, torch.Tensor) or isinstance(other, torch.Tensor):
        # By identity: comparing values would wait for the device.
        return scale is other
    return scale == other
