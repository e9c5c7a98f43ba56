"""The boosted optimizer: a torch Optimizer around the user's own, which knows the loss scale and owns the skip decision."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.hang_watchdog import abandon_pass, leaving_pass
from booster.common.misuse import OwnStepGuard, is_called_by_torch_checkpoint
from booster.common.torch_internals.optimizer_internals import accepts_found_inf, remove_guards
from booster.interface.closures import has_keyword, step_with_closure, zero_mixed_gradients
from booster.interface.error_hints import check_nothing_is_lost, check_pickled, refuse_grad_scaler
from booster.update.backward import run_backward
from booster.update.choice import choose_update
from booster.update.context import Fill, UpdateContext, name_of_stranger
from booster.update.decision import StepHistory, StepResult
from booster.update.gradients import Gradients
from booster.update.state_dict import STATE_KEY, state_of
from booster.update.state_loading import Reading, read_state
from booster.update.update import Update

_GRADIENTS = attrgetter("_update.gradients")


def _of_inner(name: str) -> property:
    """Return what reads and writes the attribute `name` of the user's optimizer."""
    return property(lambda self: getattr(self.optimizer, name), lambda self, new: setattr(self.optimizer, name, new))


@accepts_found_inf  # so that `step` can refuse a GradScaler
class OptimizerWrapper(Optimizer):
    """The user's optimizer, stepped on unscaled gradients or not at all.

    To schedulers, hooks and `isinstance` it is a torch Optimizer: `param_groups`, `state`, `defaults` and hooks are those
    of the optimizer inside, which is never re-created.

    make_update: what makes the update from `context`.
    backward_context: what `backward` runs under.
    after_step: see `MixedPrecision.after_step`; None: nothing is called.
    forget_weights: drops what is kept of weights until they are stepped; None: nothing is.
    """

    def __init__(
        self,
        context: UpdateContext,
        make_update: Callable[[UpdateContext], Update] = choose_update,
        *,
        backward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        after_step: Callable[[bool | torch.Tensor], None] | None = None,
        forget_weights: Callable[[], None] | None = None,
    ) -> None:
        # Optimizer.__init__ would make new groups and state, and wrap step() in a second profiler hook.
        self.optimizer = context.optimizer
        self._takes_set_to_none = has_keyword(context.optimizer.zero_grad, "set_to_none")
        self.backward_context = backward_context
        """What `backward` runs under, so that recomputed activations meet the precision of the forward pass."""
        self._after_step = after_step
        self._forget_weights = forget_weights
        with context.shards.local():
            self._update = make_update(context)
        self.bare_passes = self._update.gradients.bare_passes
        self._update.gradients.register_strays()
        self._clip_grad_norm = context.options.clip_grad_norm
        self._forbidden: str | None = None
        self.after_first: Callable[[OptimizerWrapper], Any] | None = None  # called after an applied step, once
        remove_guards(context.optimizer)  # those of a boosted one before this
        self._own_step = OwnStepGuard(context.optimizer, self, self._update)
        self.accumulating = False
        self._history = StepHistory(context.options.max_consecutive_skips, self._update.gradients.scaler)
        in_backward = self._update.gradients.in_backward
        if in_backward is not None:
            in_backward.sync = self._history.sync

    def replace_with(self, other: OptimizerWrapper) -> None:
        """Step as `other` does from now on, which was made of the same optimizer; counters, and who listens, stay."""
        other._update.gradients.listeners = self._update.gradients.listeners
        self.bare_passes.remove()
        other._update.models = self._update.models
        self._update, self.bare_passes, self._clip_grad_norm = (
            other._update,
            other.bare_passes,
            other._clip_grad_norm,
        )
        self.backward_context, self._after_step = other.backward_context, other._after_step
        self._forget_weights = other._forget_weights
        self._history.scaler = self._update.gradients.scaler
        remove_guards(self.optimizer)
        self._own_step = OwnStepGuard(self.optimizer, self, self._update)

    @leaving_pass()
    def backward(
        self, loss: torch.Tensor, *, inputs: Any = None, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Scale `loss` (one element) and accumulate its gradients; as `Booster.backward`, which `accumulate` needs.

        inputs, retain_graph, create_graph: those of `torch.autograd.backward`; inputs=None is every leaf.
        """
        if self.accumulating:
            raise RuntimeError("inside accumulate() call b.backward(loss, optimizer), which counts and divides")
        run_backward(
            loss,
            gradients_of([self]),
            self.backward_context,
            inputs=inputs,
            retain_graph=retain_graph,
            create_graph=create_graph,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Update the parameters, unless the gradients of any rank hold an inf or NaN; then the loss scale.

        closure: computes the loss, with its backward pass, as LBFGS wants; None steps on the gradients there are. Where ranks
            share gradients the optimizer learns the mean of their losses, a small collective each time.

        The check is made under a loss scaler, after a clip, or with `Booster(skip_nonfinite=True)`; otherwise, and with a
        closure, the step is torch's. Side effects of a check: on several ranks one scalar all-reduce (with shards it is
        the one of the clip); one host read, or none if a fused CUDA optimizer skips by itself. Where ranks hold
        shards, a norm that is not finite is followed by two more reductions, and a skip by what names the parameters.
        Raises RuntimeError for gradients of a bare `loss.backward()` or a closure under a loss scaler, and
        `LossScaleError` when the last `max_consecutive_skips` steps were all skipped.
        """
        update, history, gradients = self._update, self._history, self._update.gradients
        try:
            if self._forbidden is not None:
                raise RuntimeError(self._forbidden)
            if "found_inf" in self.__dict__:
                refuse_grad_scaler(self)
            if closure is not None:
                arguments.function("closure", closure, "a function that computes the loss", also="None")
            if gradients.mutation_check is not None:
                gradients.check_mutations()
            self._own_step.stepping = True
            if closure is None and not self.optimizer.state and is_called_by_torch_checkpoint():
                # A step of zeros at a learning rate of zero, to make states: it is none of the run's.
                update.shards.accept_zero_grads()
                return update.step()
            if history.waiting:
                history.sync()
            if closure is None:
                if self._clip_grad_norm and (gradients.in_backward is None or not gradients.in_backward.step_pending):
                    gradients.clip_norm(float(self._clip_grad_norm), asked=False)
                if update.shards.is_distributed:
                    update.shards.check_gradients()
                for listener in gradients.listeners:
                    listener.before_step(update, history.num_steps + 1)
                if self._forget_weights is not None:  # before the step allocates
                    self._forget_weights()
                result = update.step()
            else:
                result = step_with_closure(update, closure, clip=float(self._clip_grad_norm))
                self.forget_weights()
            # A user's autocast around the whole loop would go on with half copies of the weights as they were.
            torch.clear_autocast_cache()
            on_device = update.decision.on_device
            if gradients.listeners or self._after_step is not None or on_device:
                history.record(result)
                if gradients.listeners or self._after_step is not None:  # they may read weights
                    self.wait_for_weights()
                for listener in gradients.listeners:
                    listener.after_step(update, history.num_steps, result)
                if self._after_step is not None:
                    with torch.no_grad():
                        self._after_step(result.decision)
                if not on_device:
                    history.sync()
            else:
                history.sync(result)
            if history.num_applied and self.after_first is not None:
                self.after_first = self.after_first(self)
            return result
        except Exception as error:
            abandon_pass(error)
            raise
        finally:
            self._own_step.stepping = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients and the clips that wait; `set_to_none` is torch's, of optimizers that take it."""
        try:
            if set_to_none is not True:
                arguments.flag("set_to_none", set_to_none)
            gradients = self._update.gradients
            if gradients.in_backward is not None:
                gradients.in_backward.refuse("zero_grad()")
            if not self._takes_set_to_none:
                self.optimizer.zero_grad()
            elif set_to_none or not zero_mixed_gradients(self.param_groups):
                self.optimizer.zero_grad(set_to_none=set_to_none)
            if gradients.shards.is_distributed:
                gradients.shards.clear_gradients(set_to_none)
            gradients.reset(None)
        except Exception as error:
            abandon_pass(error)
            raise

    @leaving_pass()
    def unscale_grads(self) -> None:
        """Make `.grad` readable now: divided by the loss scale and clipped as asked so far. Repeating it does nothing.

        Until then, and until `step()`, gradients under a loss scaler are scaled. What is in `.grad` is what the step uses: it
        may be written to, replaced, or set to None; without this call it is taken to be scaled. Under apex's O2 gradients of
        half parameters add up in float32, besides `.grad`; this rounds the sums into `.grad`, and the step uses the sums where
        `.grad` was not changed. Raises RuntimeError there if several passes were added up and ranks share whole gradients.
        """
        self._ready("unscale_grads()").unscale()

    @torch.no_grad()
    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the unscaled gradients of this optimizer's parameters to a total norm; returns the norm before, 0-dim.

        max_norm: the largest norm that is let through.
        norm_type: which norm, as of `torch.nn.utils.clip_grad_norm_`; 2 is the Euclidean one, inf the largest element.
        error_if_nonfinite: a norm that is not finite raises RuntimeError; otherwise it makes the step a skip.

        May be called any number of times, before or after the other clip. The factor is torch's,
        `max_norm / (norm + 1e-6)`, and reaches the gradients in `step()` or `unscale_grads()`. Raises
        RuntimeError before any backward pass, and after the step.
        """
        try:
            if type(max_norm) is not float or not max_norm >= 0.0:
                max_norm = float(arguments.number("max_norm", arguments.plain(max_norm), least=0, infinite=True))
            if type(norm_type) is not float or norm_type != 2.0:
                norm_type = math.inf if isinstance(norm_type, str) and norm_type == "inf" else norm_type
                norm_type = float(arguments.number("norm_type", norm_type, above=0, infinite=True))
            if error_if_nonfinite is not False:
                arguments.flag("error_if_nonfinite", error_if_nonfinite)
            gradients = self._update.gradients
            if gradients.in_backward is not None or gradients.mutation_check is not None:
                self._ready("clip_grad_by_norm()")
            return gradients.clip_norm(max_norm, norm_type, error_if_nonfinite)
        except Exception as error:
            abandon_pass(error)
            raise

    @leaving_pass()
    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp each unscaled gradient to `clip_value` and its negative; gradients that are not finite make a skip.

        Raises RuntimeError before any backward pass, and after the step.
        """
        clip_value = arguments.number("clip_value", arguments.plain(clip_value), least=0, infinite=True)
        self._ready("clip_grad_by_value()").clip_value(float(clip_value))

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss; 1.0 without a loss scaler. Waits for the device where the scale lives on one."""
        return self._update.gradients.scaler.scale

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last `step()` left the parameters alone; False before the first."""
        last = self._history.last
        return last is not None and not last.applied

    @property
    def last_step(self) -> StepResult | None:
        """What the last `step()` returned, without a closure's loss; None before the first."""
        return self._history.last

    @property
    def num_steps(self) -> int:
        """Steps made, applied or skipped. Waits for nothing."""
        return self._history.num_steps

    @property
    def num_applied(self) -> int:
        """Steps that updated the parameters."""
        self.sync()
        return self._history.num_applied

    @property
    def num_skipped(self) -> int:
        """Steps that did not."""
        self.sync()
        return self._history.num_steps - self._history.num_applied

    @property
    def num_consecutive_skips(self) -> int:
        """Steps skipped since the last one that was applied."""
        self.sync()
        return self._history.num_consecutive_skips

    @property
    def progress(self) -> int:
        """Steps applied in this process, never restored from a checkpoint: what schedulers follow."""
        self.sync()
        return self._history.progress

    def forbid_step(self, reason: str | None) -> None:
        """Make `step()` raise RuntimeError with `reason` until it is called with None."""
        self._forbidden = (
            None if reason is None else arguments.text("reason", reason, "the text of the error", also="None")
        )

    def when_synced(self, action: Callable[[], None]) -> None:
        """Run `action` once the last step's outcome is known to the host: now, or at the next `sync()`."""
        self._history.when_synced(arguments.function("action", action, "a function without arguments"))

    @property
    def always_checks(self) -> bool:
        """Whether every step looks at its gradients: under a loss scaler, with skip_nonfinite, or with its own clip."""
        return bool(self._update.gradients.checks_finite or self._clip_grad_norm)

    def sync(self) -> None:
        """Take the outcome of the last steps into the counters and run what waited for it. Waits for the device at most once.

        Raises `LossScaleError` when `max_consecutive_skips` is reached.
        """
        self._history.sync()

    def forget_weights(self) -> None:
        """Drop what the precision keeps of weights for a group of micro-batches, as `step` does: they may be others now."""
        if self._forget_weights is not None:
            self._forget_weights()

    def wait_for_weights(self) -> None:
        """Wait for weights that the last `step` left on their way from other ranks, as `overlap_allgather` of
        `LowLevelZeroPlugin` does; otherwise this does nothing. No collective."""
        self._update.shards.wait_for_weights()

    # Rebound groups and defaults, as of a scheduler that replaces them, are those of the optimizer inside.
    param_groups: Any = _of_inner("param_groups")
    defaults: Any = _of_inner("defaults")

    @property
    def state(self) -> Any:
        if is_called_by_torch_checkpoint():  # before it sets learning rates and gradients to zero
            with self._update.shards.local():
                check_nothing_is_lost(self._update.optimizer_state.state_dict()[1], self._update)
            return self._update.shards.states.state_of_ranks(self._update.optimizer_state.state)
        return self._update.optimizer_state.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet set: pickle and copy look for attributes on an empty object
            raise AttributeError(name)
        value = getattr(self.optimizer, name)
        if isinstance(value, MethodType) and value.__self__ is self.optimizer:
            return functools.wraps(value)(functools.partial(self._call, name, value))
        return value

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `method` of the user's optimizer, no step: as `train` and `eval` of schedule-free ones. It finds the float32
        numbers that a step would change, and unscaled gradients; what it writes is kept.

        It is no step: counters and records do not know it. But a schedule goes on if it changed weights by gradients.
        """
        if self._own_step.stepping:  # within a step, or another method
            return method(*args, **kwargs)
        self.sync()
        self.wait_for_weights()
        self._own_step.stepping = True
        try:
            result, changed = self._update.call(name, functools.partial(method, *args, **kwargs))
        finally:
            self._own_step.stepping = False
            self.forget_weights()
            torch.clear_autocast_cache()  # of half copies of weights, which the method may have written
        if changed:
            self._history.progress += 1  # what follows progress goes on
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add `param_group`, as torch. Raises ValueError, on several ranks, where gradients of its are not synchronised."""
        if not isinstance(param_group, Mapping) or "params" not in param_group:
            legal = "a dict with the key 'params' and options of the optimizer"
            raise TypeError(arguments.refusal("param_group", param_group, legal))
        params = param_group["params"]
        params = self._update.shards.sharded_params([params] if isinstance(params, torch.Tensor) else list(params))
        self._update.gradients.check_known(params)
        self.optimizer.add_param_group({**param_group, "params": params})
        self._update.gradients.parameters.remember_dtypes()

    def __getstate__(self) -> dict[str, Any]:
        # Torch's keeps groups and state only. Its schedulers replace `step` by a function that steps this very object.
        return {name: value for name, value in self.__dict__.items() if name not in ("step", "_own_step")}

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerWrapper:
        if self._update.shards.is_distributed:
            raise TypeError(
                "an optimizer of parameters or gradients that ranks share is not copied: its copy would step parameters that "
                "no plugin has placed. Keep optimizer.state_dict(), or Booster.save, and load it again; the model alone can be "
                "copied where its weights are whole"
            )
        self.sync()  # what waits for the last step's outcome belongs to this object
        self.wait_for_weights()
        self._update.optimizer_state.wait_for_copies()
        # One strategy serves the copy too.
        for of_strategy in (self.backward_context, self._after_step, self._forget_weights):
            memo[id(of_strategy)] = of_strategy
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return clone

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own_step = OwnStepGuard(self.optimizer, self, self._update)  # torch copies no hooks

    def __reduce_ex__(self, protocol: Any) -> Any:
        check_pickled(self._update)
        return super().__reduce_ex__(protocol)

    def parameter_names(self) -> list[list[tuple[str, int]]]:
        """Return, for each group, the qualified name of every parameter, and its place in the group of the whole model."""
        names, selection = self._update.names, self._update.shards.selection
        # Of the groups that there were when the model was divided.
        positions = [] if selection is None else selection.positions
        named = []
        for index, group in enumerate(self.param_groups):
            places = positions[index] if index < len(positions) else range(len(group["params"]))
            pairs = zip(group["params"], places, strict=True)
            # A parameter that is not of the model is named by group and place.
            named.append([(names.get(param, name_of_stranger(index, place)), place) for param, place in pairs])
        return named

    def unwrap(self) -> Optimizer:
        """The user's optimizer."""
        return self.optimizer

    def state_dict(self) -> dict[str, Any]:
        """Torch's state dict of the optimizer inside, plus the key "booster": loss-scaler state and step counters.

        Raises RuntimeError in `torch.distributed.checkpoint.state_dict`, which drops that key, if masters or a loss scale
        would be lost.
        """
        state, own = self._states()
        if is_called_by_torch_checkpoint():
            check_nothing_is_lost(own, self._update)
        return state

    def divided_state_dict(self) -> dict[str, Any]:
        """`state_dict` without a collective: where ranks divide tensors flat, each has its shard, a `FlatShard`."""
        return self._states(divided=True)[0]

    def _states(self, *, divided: bool = False) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return the state dict, and what in it is of masters and their rounding."""
        self.sync()
        self.wait_for_weights()
        state, own = state_of(self._update, divided=divided)
        scale = self._update.gradients.scaler.state_dict()
        state[STATE_KEY] = {**own, "loss_scaler": scale, **self._history.state_dict()}
        return state, own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a plain torch optimizer's or one without a loss scaler; then the scale stays.

        The implementation (fused, foreach) stays that of this optimizer, gradients and clips that wait stay as they are.
        A collective on several ranks. Raises ValueError or TypeError, on all ranks and with nothing changed on any, for a
        state that does not fit this optimizer or this precision on one of them.
        """
        self.read_state_dict(state_dict).adopt()

    def read_state_dict(self, state_dict: dict[str, Any], fill: Fill | None = None) -> Reading:
        """The first half of loading `state_dict`, which may raise; the weights may be written before the second.

        fill: gives the second what is on the meta device in `state_dict`; None: there is nothing on it.
        """
        self.sync()
        self.wait_for_weights()
        return read_state(self._update, self._history, state_dict, fill)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def _ready(self, call: str) -> Gradients:
        """Return the gradients for `call`, which needs them as the backward pass left them."""
        gradients = self._update.gradients
        if gradients.in_backward is not None:
            gradients.in_backward.refuse(call)
        if gradients.mutation_check is not None:
            gradients.check_mutations()
        return gradients


def update_of(optimizer: OptimizerWrapper) -> Update:
    """Return what steps `optimizer`."""
    return optimizer._update


def gradients_of(optimizers: Iterable[OptimizerWrapper]) -> list[Gradients]:
    """Return the gradients of each of `optimizers`."""
    return list(map(_GRADIENTS, optimizers))
