"""Skipped steps that are diagnosed as training goes on: replayed from what the step's log of calls kept.

`SkipWatcher` logs each diagnosis. `PinningWatcher`, for `keep_fp32="auto"`, also counts where they begin, and pins a module to
float32 in which several do.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.interface.call_log import CallLog, LoggedCall, LoggedPass
from booster.interface.model import CriterionWrapper, ModelWrapper, extras_of
from booster.interface.optimizer import OptimizerWrapper, gradients_of, update_of
from booster.logging import get_dist_logger
from booster.mixed_precision.keep_fp32 import SKIPS, WINDOW
from booster.numerics.diagnosis.diagnosis import Diagnosis
from booster.numerics.diagnosis.replay import RanksApart, Replay
from booster.numerics.diagnosis.trials import diagnose
from booster.ranks import agreement
from booster.tensors.cast_regions import region
from booster.update.backward import end_backward, prepare_backward, run_backward
from booster.update.context import StepListener
from booster.update.decision import StepResult

_ADVICE = "To see all of it, pass the criterion to boost(), or call b.diagnose(lambda: loss, optimizer)."
_logger = get_dist_logger("booster.numerics")


class SkipWatcher:
    """Diagnoses steps that were skipped, the "first", "every" one or so many, and logs each as one WARNING.

    make_replay: makes the replay of a function that runs the passes of a step, of its optimizers and loss scale.
    group: ranks that skip together, and replay together.

    Whatever goes wrong in a replay is logged, and never ends the training, unless ranks were left waiting for one another.
    """

    def __init__(
        self,
        diagnose: int | str,
        make_replay: Callable[[Callable[[], Any], Sequence[OptimizerWrapper], float], Replay],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.log = CallLog(device)
        self.diagnoses: list[Diagnosis] = []
        if isinstance(diagnose, str):
            self._left = {"first": 1, "every": None}[arguments.choice("diagnose", diagnose, ("first", "every"))]
        else:
            self._left = arguments.count("diagnose", diagnose, what="of skipped steps", also="'first', 'every' or None")
        self._make_replay, self._group, self._device = make_replay, group, device
        self._waiting: weakref.WeakKeyDictionary[OptimizerWrapper, Callable[[], None]] = weakref.WeakKeyDictionary()

    def attach(self, model: ModelWrapper, criterion: Any, optimizers: Iterable[OptimizerWrapper]) -> None:
        """Keep the calls of a boosted model and criterion, and diagnose the skipped steps of `optimizers`."""
        for each in (model, criterion):
            if isinstance(each, (ModelWrapper, CriterionWrapper)):
                each.keep_calls(self.log)
        for optimizer in optimizers:
            update_of(optimizer).gradients.listeners.append(_StepsOf(optimizer, self))
            if not optimizer.always_checks:
                _logger.warning(
                    "diagnose replays steps that are skipped, and without a loss scaler a step is skipped only where "
                    "something looks at its gradients: after a clip, or with Booster(skip_nonfinite=True). A step on NaN "
                    "that was not clipped is applied, and not diagnosed"
                )

    def keep_pipeline(self, run: Callable[[], Any], optimizers: Sequence[OptimizerWrapper]) -> Any:
        """Return `run()`, the forward and backward passes of a pipeline, which can be run again as a whole."""
        state = self.log.random_state()
        with self.log.paused():
            result = run()
        self.log.end_pipeline(run, optimizers, state)
        return result

    def after_step(self, optimizer: OptimizerWrapper, result: StepResult, decides_on_device: bool) -> None:
        """The step is made or skipped; which of them may be known later."""
        passes = self.log.pop_passes(optimizer)
        # True: applied for certain. Without passes, as of gradients by hand, there is nothing to replay.
        if not passes or result.decision is True:
            return
        if self._group is not None and decides_on_device:
            # A rank may read the result of the step alone, and a replay is a collective: it waits for the next step.
            self._waiting[optimizer] = lambda: self._on_result(passes, result)
        else:
            optimizer.when_synced(lambda: self._on_result(passes, result))

    def before_step(self, optimizer: OptimizerWrapper) -> None:
        """The next step of `optimizer` begins, on all ranks."""
        if optimizer in self._waiting:
            self._waiting.pop(optimizer)()

    def _on_result(self, passes: list[LoggedPass], result: StepResult) -> None:
        if result.applied or self._left == 0:
            return
        if self._left is not None:
            # Before the replay, so that one that fails counts too: it would fail again.
            self._left -= 1
            if self._left == 0:
                # Inputs are kept for replays; after the last one that memory is free.
                self.log.stop()
        try:
            diagnosis = self._diagnose(passes, result.loss_scale)
        # Ranks that wait for each other cannot go on: this one ends the training.
        except RanksApart:
            raise
        except Exception as error:
            _logger.warning(f"a skipped step could not be replayed: {type(error).__name__}: {error}")
            return
        self.diagnoses.append(diagnosis)
        _logger.warning(f"a step was skipped. {diagnosis}", ranks=[0])

    def _diagnose(self, passes: list[LoggedPass], scale: float) -> Diagnosis:
        whole = all(
            each.run is not None or (each.link is not None and not any(call.loose for call in each.calls))
            for each in passes
        )
        # Collectives of a backward pass differ by whether the loss is in it, so ranks replay alike.
        whole = not agreement.largest(float(not whole), self._group)
        written = any(call.was_written_to for each in passes for call in each.calls)
        written = bool(agreement.largest(float(written), self._group))
        notes = ["An input was written to in place since, so the replay may differ from the step."] if written else []
        with self.log.paused():
            replay = self._make_replay(lambda: _run_again(passes, whole, scale), passes[0].optimizers, scale)
            diagnosis = diagnose(replay, group=self._group, device=self._device)
        if not whole:
            notes.append(f"What computes the loss is not in the replay. {_ADVICE}")
            if diagnosis.kind is None:
                diagnosis = dataclasses.replace(diagnosis, **_outside_of_calls(passes))
        # With other inputs the replay may overflow elsewhere.
        certain = diagnosis.certain and not written
        return dataclasses.replace(diagnosis, certain=certain, notes=(*diagnosis.notes, *notes))


class _StepsOf(StepListener):
    """Hands the steps of one optimizer to its watcher; see `StepListener`."""

    def __init__(self, optimizer: OptimizerWrapper, watcher: SkipWatcher) -> None:
        # Weakly, since the optimizer's update holds this listener: a circle would outlive the user's references.
        self._optimizer, self._watcher = weakref.ref(optimizer), watcher

    def before_step(self, update: Any, number: int) -> None:
        if (optimizer := self._optimizer()) is not None:
            self._watcher.before_step(optimizer)

    def after_step(self, update: Any, number: int, result: StepResult) -> None:
        if (optimizer := self._optimizer()) is not None:
            self._watcher.after_step(optimizer, result, update.decision.on_device)


def _run_again(passes: list[LoggedPass], whole: bool, scale: float) -> Any:
    """Run the passes of a step once more.

    whole: the loss is computed again too; otherwise the gradients of the models' outputs are those of the step.

    Returns the last loss, or, where losses are not known, what the models returned.
    """
    result: Any = None
    for each in passes:
        members = gradients_of(each.optimizers)
        context = each.optimizers[0].backward_context
        if each.run is not None:
            result = each.run()
            continue
        made: dict[LoggedCall, list[torch.Tensor]] = {}
        for call in each.calls:
            made[call] = call.again(made, linked=whole)
        if whole and each.link is not None:
            result = each.link.of(made[each.link.call])
            run_backward(result, members, context, divisor=each.divisor)
            continue
        roots = [(made[call][number], grad) for call in each.calls for number, grad in call.grads.items()]
        this, now = prepare_backward(members)
        with region(context):
            torch.autograd.backward(
                [root for root, _ in roots],
                # What the loss made infinite is left out: the question is what the model adds to it.
                [torch.nan_to_num(grad * (now / scale), 0.0, 0.0, 0.0) for _, grad in roots],
            )
        end_backward(this, None)
        result = [root for root, _ in roots]
    return result


def _outside_of_calls(passes: list[LoggedPass]) -> dict[str, Any]:
    """Return what can be said of a step in which models and criteria made nothing bad."""
    for index, each in enumerate(passes):
        loss = None if each.loss is None else each.loss.double()
        if loss is not None and not bool(loss.isfinite().all()):
            text = f"What the model returned is finite; what computes the loss from it made it {float(loss):g}."
            return {"kind": "loss", "direction": "loss", "loss": float(loss), "micro_batch": index, "notes": (text,)}
        if any(not bool(grad.isfinite().all()) for call in each.calls for grad in call.grads.values()):
            text = "The loss is finite, and the gradient that came back from it to the model's output is not."
            return {"kind": "loss", "direction": "backward", "micro_batch": index, "notes": (text,)}
    return {}


_COMPILED = "_orig_mod."  # what torch.compile puts before the names of a model


class PinningWatcher(SkipWatcher):
    """Diagnoses every skipped step, and adds the module in which it began to the pins of its model.

    models: the boosted ones by label, as diagnoses name their modules. All ranks of `group` pin alike: where they do not
    name one and the same module, none does.
    """

    def __init__(
        self,
        models: Callable[[], Mapping[str, ModelWrapper]],
        make_replay: Callable[[Callable[[], Any], Sequence[OptimizerWrapper], float], Replay],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        super().__init__("every", make_replay, group, device)
        self._models = models

    def attach(self, model: ModelWrapper, criterion: Any, optimizers: Iterable[OptimizerWrapper]) -> None:
        """As `SkipWatcher.attach`. Raises ValueError for a second model of one class: names would mean either."""
        kinds = [type(each.unwrap()).__name__ for each in self._models().values()]
        if len(set(kinds)) < len(kinds):
            raise ValueError(
                f"keep_fp32='auto' names modules of models by the class of the model, and two of these are alike: {kinds}; use "
                "a Booster for each"
            )
        super().attach(model, criterion, optimizers)

    def _on_result(self, passes: list[LoggedPass], result: StepResult) -> None:
        before = len(self.diagnoses)
        super()._on_result(passes, result)
        if result.applied:
            return
        own = blamed_module(self.diagnoses[-1]) if len(self.diagnoses) > before else ""
        # A pin is named as the user named the module, before torch.compile.
        own = own.replace(_COMPILED, "")
        # A module in float32 on some ranks alone would send other dtypes.
        if len(set(agreement.gather(own, self._group))) > 1 or not own:
            return
        optimizer = passes[0].optimizers[0]
        step = optimizer.num_applied + optimizer.num_skipped
        for label, model in self._models().items():
            name = own.removeprefix(f"{label}.") if label else own
            if label and name == own:  # of another model
                continue
            pins = extras_of(model).pins
            if pins is not None and pins.count_skip(name, step):
                _logger.warning(
                    f"{own} computes in float32 from now on (keep_fp32='auto'): {SKIPS} skipped steps within {WINDOW}, the "
                    f"last of them {step}, began there. Checkpoints keep it; a new run has it from the start with "
                    f"keep_fp32=[{name!r}, 'auto']",
                    ranks=[0],
                )


def blamed_module(diagnosis: Diagnosis) -> str:
    """Return the module that `diagnosis` blames and float32 would help; "" where there is none.

    Where no single module was enough, because several overflow, that of the first overflow.
    """
    if diagnosis.kind not in ("overflow", "operation"):
        return ""
    # The innermost module with which, computed in float32, the replay was finite.
    for name in reversed(diagnosis.modules):
        if f"finite with keep_fp32={name!r}" in diagnosis.remedies:
            return name
    # None for bad data or weights, and where a smaller loss scale is enough.
    return diagnosis.module if diagnosis.kind == "overflow" else ""
