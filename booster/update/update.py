"""One optimizer's way from gradients to a step, put together from its gradients, a decision and what checkpoints keep."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from booster.common.arguments import listed
from booster.common.snapshot import attributes
from booster.ranks import agreement
from booster.update.application import NO_SCALARS
from booster.update.context import OptimizerState
from booster.update.decision import Decision, LazyStepFields, StepFields, StepResult
from booster.update.gradients import WHOLE, Gradients
from booster.update.in_backward import OptimizerInBackward

_logger = logging.getLogger(__name__)


class Update:
    """One optimizer's update; see `choice` for what it is made of.

    Attributes:
        gradients: from backward to step.
        decision: whether a step is made, and in it what makes it.
        optimizer_state: what of the optimizer a checkpoint holds.
        models: that had these parameters at `boost`, for the error of `step` where they have others by now.
    """

    def __init__(self, gradients: Gradients, decision: Decision, optimizer_state: OptimizerState) -> None:
        self.gradients = gradients
        self.decision = decision
        self.optimizer_state = optimizer_state
        self.optimizer = gradients.optimizer
        self.shards = gradients.shards
        self.names = gradients.parameters.names
        self.models: list[weakref.ref[nn.Module]] = []
        self._said_idle = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "models": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.gradients.in_backward is not None:
            self.gradients.in_backward.decision_is(self.decision)

    @contextmanager
    def for_replay(self, scale: float) -> Iterator[None]:
        """Inside, gradients are as before any pass, without listeners, and losses are multiplied by `scale`; afterwards all
        is what it was."""
        bare = self.gradients.bare_passes.params
        before = [*bare]
        try:
            with attributes([self], gradients=self.gradients.for_replay(scale)):
                yield
        finally:
            bare.clear()  # those of the replay
            bare.extend(before)

    def name_of(self, param: torch.Tensor) -> str:
        """The qualified name of `param`, for reports."""
        return self.gradients.parameters.name_of(param)

    def step(self) -> StepResult:
        """Update the parameters unless the gradients of any rank are not finite, then the loss scale."""
        gradients, shards = self.gradients, self.shards
        in_backward = gradients.in_backward
        if in_backward is not None:
            in_backward.check_weights()
            if in_backward.step_pending:
                return self._finish(in_backward)
        with shards.local() if shards.sharded else WHOLE:
            try:
                params = gradients.enter_step()
                if not params:
                    self._refuse_strangers(params is None)
                if params is None:
                    self.decision.application.step(gradients, [], NO_SCALARS)
                    next_scale = gradients.next_scale
                    gradients.reset(gradients.scale)
                    return StepResult(True, LazyStepFields(next_scale))
                result, scale = self.decision.step(params)
            except BaseException:
                gradients.abandon_step()
                raise
        # What a device skipped is gathered as it was: to know whether it did would be to wait.
        if shards.sharded and (self.decision.on_device or result.applied):
            shards.sync_params()
        gradients.reset(scale)
        return result

    def _refuse_strangers(self, nowhere: bool) -> None:
        """Where none of these has a gradient: raise RuntimeError if parameters that came after boost have, tell once of others.

        nowhere: on no rank.
        """
        models = [model for each in self.models if (model := each()) is not None]
        named = [pair for model in models for pair in model.named_parameters()]
        # This rank may step nothing of the parameters that have a gradient; then all ranks raise alike.
        if not nowhere and any(param.requires_grad and param in self.names for _, param in named):
            return
        unmanaged = [name for name, param in named if param.grad is not None and param not in self.names]
        others = [name for name, param in named if param.grad is not None]
        if others and not unmanaged and not self._said_idle:
            self._said_idle = True  # as where optimizers of one model take turns, this may be meant
            what = f"a step of {type(self.optimizer).__name__} changed nothing: none of its parameters has a gradient"
            _logger.warning("%s, and others of its model have: %s. This is said once", what, listed(others, 3))
        if unmanaged:
            raise RuntimeError(
                f"no parameter of the optimizer has a gradient, and {listed(unmanaged, 3)} of its model, which came into the "
                "model after boost(), do: nothing would train. What replaces parameters, as peft's load_adapter does for half "
                "weights, comes before boost(); afterwards load values into those that are there, by model.load_state_dict or "
                "peft's set_peft_model_state_dict"
            )

    def _finish(self, in_backward: OptimizerInBackward) -> StepResult:
        """Do what a step does besides updating parameters, which were updated within backward."""
        try:
            result, _ = self.decision.step([])
        finally:
            in_backward.step_pending = False
        # What came before a gradient that is not finite may have been stepped.
        if self.shards.sharded and (self.decision.on_device or result.applied or in_backward.mode == "previous_norm"):
            self.shards.sync_params()
        self.gradients.reset(None)
        return result

    def give_back(self) -> dict[torch.Tensor, torch.Tensor]:
        """Leave the optimizer as `boost` found it, but for its states, which are by this rank's shards of parameters where
        ranks divide them; return the float32 numbers behind half parameters, each laid out as its parameter is."""
        with self.shards.local():
            # A collective where ranks divide parameters flat.
            values = self.optimizer_state.restore_params()
        # The user's optimizer gets back the implementation that it had.
        self.decision.application.kernel.give_up()
        return self.shards.states.full_masters(values)

    def call(self, name: str, method: Callable[[], Any]) -> tuple[Any, bool]:
        """Call `method`, called `name`, of the optimizer and no step, on the float32 numbers that a step would change, and on
        unscaled gradients. Returns its result, and whether it changed weights while there were gradients."""
        gradients, shards = self.gradients, self.shards
        pending = gradients.num_backwards > 0 and gradients.in_backward is None
        with shards.local() if shards.sharded else WHOLE:
            culprits = None
            if pending:
                gradients.check_mutations()
                # Collectives on ranks that hold shards.
                culprits = self._nonfinite()
            application = self.decision.application
            result, changed = application.call(gradients if pending else None, method, keep=culprits is None)
            if pending:
                # The method may have written gradients too, so that their norm is no longer known.
                gradients.read, gradients.joint.found_inf = [], None
        # The weights were put back already.
        if culprits is not None and changed:
            raise RuntimeError(
                f"{name}() of {type(self.optimizer).__name__} changed weights by gradients that are not finite (of "
                f"{', '.join(culprits[:4]) or 'another rank'}), and the weights were put back. step() skips such a step and "
                "lowers the loss scale; other methods of an optimizer cannot be skipped one by one. Use mixed_precision='bf16' "
                f"or 'bf16_naive', which need no loss scale; or look before {name}(): where "
                "optimizer.clip_grad_by_norm(math.inf) is not finite, call optimizer.step(), which skips, and "
                "optimizer.zero_grad(), and go on with the next batch"
            )
        if shards.sharded:
            shards.sync_params()
            shards.reshard()
        elif pending and not gradients.params():
            gradients.reset(None)
        return result, pending and changed

    def _nonfinite(self) -> tuple[str, ...] | None:
        """Return the parameters with gradients that are not finite, where a step looks and would be skipped; else None."""
        gradients = self.gradients
        if not gradients.checks_finite:
            return None
        found_inf = bool(gradients.found_inf())
        if self.shards.sharded:
            found_inf = agreement.largest(float(found_inf), gradients.group) > 0
        return gradients.norms.nonfinite_params(gradients)() if found_inf else None

    def step_with_closure(self, closure: Callable[[], Any]) -> StepResult:
        """Step an optimizer that evaluates the loss itself, without a loss scaler; clips inside the closure take effect."""
        self._refuse_closure()
        gradients = self.gradients
        loss, scale = self.decision.application.step_with_closure(gradients, closure)
        norm = None if gradients.norm is None else float(gradients.norm)
        gradients.reset(scale)
        return StepResult(True, StepFields(loss_scale=1.0, grad_norm=norm), loss=loss)

    def _refuse_closure(self) -> None:
        gradients, name = self.gradients, f"{type(self.optimizer).__name__}.step(closure)"
        if gradients.in_backward is not None:
            raise RuntimeError(
                f"{name} would use gradients after their backward pass, and "
                f"release_gradients={gradients.in_backward.mode!r} frees them within it; call b.backward and step() without a "
                "closure, or use release_gradients=False"
            )
        if self.shards.sharded:
            raise RuntimeError(f"{name} cannot run on shards of the parameters; call b.backward and step() without it")
        if gradients.skip_nonfinite:
            raise RuntimeError(
                f"{name} computes and uses its gradients in one go, so skip_nonfinite=True cannot look at them; call "
                "b.backward and step() without a closure, or use Booster(skip_nonfinite=False)"
            )
