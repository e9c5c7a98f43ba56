"""The precision of a run: which one it trains in now, which phase of a schedule is due, and how it goes over to another."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from booster.common import arguments
from booster.common.torch_internals.autograd_internals import graph_task
from booster.facade import refusals
from booster.facade.accumulation import Accumulations
from booster.facade.switch import BoostedObjects, BoostRecord, Switch, switch_all
from booster.interface.model import ModelWrapper, extras_of
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.mixed_precision import Autopilot, MixedPrecision, PrecisionSchedule, make
from booster.mixed_precision.configure import choose_half_products
from booster.mixed_precision.low_precision.autopilot import Measurement, PrecisionController
from booster.mixed_precision.low_precision.conversion import LinearConversion
from booster.mixed_precision.schedule import Phase, due
from booster.plugin import Plugin
from booster.ranks.agreement import any_rank
from booster.tensors.trees import tensors
from booster.update.context import UpdateOptions

if TYPE_CHECKING:
    from booster.masters.quantized_state import States

_logger = logging.getLogger(__name__)
PATIENCE = 100
"""After so many steps of another optimizer without a step, an optimizer no longer counts for where the run is."""


class PrecisionScheduler:
    """Before a forward pass or a group of micro-batches, has `run` go over to its phase that is due.

    Only where all ranks are: in a forward that trains. Not while another forward waits for its backward pass: that
    graph belongs to the old precision. See `PrecisionSchedule`.

    total_steps: that shares among the phases were of.
    """

    def __init__(self, run: PrecisionRun, total_steps: int | None) -> None:
        self._run, self._total_steps = run, total_steps
        self._progress: weakref.WeakKeyDictionary[OptimizerWrapper, _Progress] = weakref.WeakKeyDictionary()
        self._waiting: list[weakref.ref[_WaitingGraph]] = []
        self._trained = -1  # steps made when a model in training mode last ran
        why = "a PrecisionSchedule counts steps around each forward pass, and may change the model; compile without fullgraph"
        self._outside = torch.compiler.disable(
            self._around, reason=why
        )  # a compiler would make hooks part of the model

    def __reduce__(self) -> Any:
        return _NoHook, ()  # of copies and pickles of a model, which no Booster changes

    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        """A forward pre-hook of boosted models, and a forward hook."""
        self._outside(module, *output)

    def _around(self, module: nn.Module, *output: Any) -> None:
        # Evaluation is no place to switch, since ranks may do it alone; nor is a pass that backward computes again.
        if not torch.is_grad_enabled() or graph_task() != -1:
            return
        if output:
            self._track_graph(output[0])
            return
        step = self.step
        if module.training:
            self._trained = step
        elif self._trained in (step, step - 1):
            return  # not a model that trains in evaluation mode, as some do
        self.switch_if_due()

    @property
    def _optimizers(self) -> list[OptimizerWrapper]:
        return list(self._run.boosted.optimizers.values())  # in the same order on all ranks

    @property
    def step(self) -> int:
        """How many steps the run has made: those of the optimizer that made fewest, of those that have begun and are not at
        rest. One that begins, or begins again, counts on from there."""
        # An optimizer that has not begun, as of a discriminator trained later, must not hold the run at 0.
        counts = {each: each.num_steps for each in self._optimizers if each.num_steps}
        for each, count in counts.items():
            if self._is_idle(each) and count != self._progress[each].count:
                del self._progress[each]
        places = {
            each: count + self._progress[each].offset
            for each, count in counts.items()
            if each in self._progress and not self._is_idle(each)
        }
        reached = min(places.values(), default=0)
        for each, count in counts.items():
            if each not in self._progress:
                # It may have made steps before it was boosted, or while it was at rest.
                self._progress[each] = _Progress(offset=max(0, reached - count))
                places[each] = max(reached, count)
        first = max(places.values(), default=0)
        for each in places:
            progress = self._progress[each]
            if progress.count != counts[each]:
                progress.count, progress.first = counts[each], first
            # Optimizers that take turns wait for each other too, but not for so long.
            elif first - progress.first >= PATIENCE:
                progress.idle = True
                _logger.warning(
                    "%s of %d parameters has made no step while another optimizer made %d, so the PrecisionSchedule goes on "
                    "without it; steps that it makes later count on from where the run is then",
                    type(each.unwrap()).__name__,
                    sum(len(group["params"]) for group in each.param_groups),
                    first - progress.first,
                )
        return min((place for each, place in places.items() if not self._is_idle(each)), default=0)

    def _is_idle(self, optimizer: OptimizerWrapper) -> bool:
        return optimizer in self._progress and self._progress[optimizer].idle

    def switch_if_due(self) -> None:
        """Go over to what is due, if anything is and nothing forbids it; where it is, a collective."""
        step = self.step
        wanted = due(self._run.phases, step)
        if (
            wanted is self._run.phase
            # Tensors made there could not be trained.
            or torch.is_inference_mode_enabled()
            # Gradients of one precision are not stepped by another.
            or any(update_of(each).gradients.num_backwards for each in self._optimizers)
            or self._run.accumulations.any_open
            # Last, since it is a collective: all that is above is the same on all ranks.
            or any_rank(self._awaits_backward(), self._run.plugin.group)
        ):
            return
        # Graphs of the old precision that no backward came for: their outputs were for reading.
        self._waiting.clear()
        self._run.switch_all(wanted, f"the schedule, after step {step}")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds, as plain containers."""
        step, own = self.step, [self._progress.get(each) for each in self._optimizers]
        return {
            "step": step,
            "starts": list(self._run.phases),
            "total_steps": self._total_steps,
            "ahead": [None if each is None else each.offset for each in own],
            "moved": [[] if each is None else [each.count, each.first] for each in own],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on as when `state` was taken; None: there was no schedule. One WARNING where its phases begin elsewhere."""
        self._progress.clear()
        self._trained = -1
        if state is None:
            return
        optimizers, phases = self._optimizers, self._run.phases
        for each, ahead in zip(optimizers, state["ahead"], strict=False):
            if ahead is not None:
                self._progress[each] = _Progress(arguments.count("ahead", ahead, least=0))
        for each, moved in zip(optimizers, state.get("moved", []), strict=False):
            if moved and each in self._progress:
                count, first = (arguments.count("moved", number, least=0) for number in moved)
                self._progress[each].count, self._progress[each].first = count, first
        before, now = (
            f"after the steps {starts}, of total_steps={total}"
            for starts, total in ((state["starts"], state["total_steps"]), (list(phases), self._total_steps))
        )
        if state["starts"] != list(phases):
            _logger.warning(
                "the phases of the PrecisionSchedule began %s where this checkpoint was saved, and begin %s now: from "
                "step %d on the run is in %r",
                before,
                now,
                self.step,
                due(phases, self.step),
            )

    # ---------------------------------------------------------------- inside

    def _track_graph(self, output: Any) -> None:
        """A forward that trains returned `output`."""
        recorded = [tensor for tensor in tensors(output) if tensor.grad_fn is not None]
        graph = _WaitingGraph({id(each): each.num_steps for each in self._optimizers})
        for tensor in recorded:
            tensor.register_hook(graph)  # which lives as long as the graph
        self._waiting = list(map(weakref.ref, [*self._open_graphs(), *([graph] if recorded else [])]))

    def _open_graphs(self) -> list[_WaitingGraph]:
        """Those that no backward pass came for. One that was dropped dropped its hook, and with it what is referenced here."""
        return [graph for reference in self._waiting if (graph := reference()) is not None and not graph.came]

    def _awaits_backward(self) -> bool:
        """Whether a graph waits for a backward pass, and not in vain: some optimizer that is not at rest has made no step
        since."""
        optimizers = [each for each in self._optimizers if each.num_steps and not self._is_idle(each)]
        return any(
            each.num_steps == graph.steps.get(id(each), 0) for graph in self._open_graphs() for each in optimizers
        )


@dataclass
class _Progress:
    """Of one optimizer.

    Attributes:
        offset: steps that the run had made before it began, less its own of then.
        count: how many steps it had made when it was last seen to.
        first: where the one was then that made most.
        idle: it is at rest.
    """

    offset: int
    count: int = 0
    first: int = 0
    idle: bool = False


class _WaitingGraph:
    """A hook of what one forward returned, which learns that a backward pass came. steps: made then, by id of the optimizer."""

    def __init__(self, steps: dict[int, int]) -> None:
        self.steps, self.came = steps, False

    def __call__(self, grad: torch.Tensor) -> None:
        self.came = True


class _NoHook:
    """A hook that does nothing."""

    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        pass


Given = str | MixedPrecision | PrecisionSchedule | Autopilot | None


class PrecisionRun:
    """The phase that a Booster trains in, and what changes it: `switch`, a PrecisionSchedule or an Autopilot.

    Attributes:
        phases: of a schedule, or the only one, by the step after which they begin: a precision, and the plan of an autopilot if
            there is one.
        phase: the one of now.
        scheduler: what goes over to the phases of a schedule; None where one precision was given.
    """

    def __init__(
        self,
        given: Given,
        *,
        plugin: Plugin,
        device: torch.device,
        options: UpdateOptions,
        states: States | None,
        offload_states: bool,
        half_products: Literal["auto", "native", "float32"],
        boosted: BoostedObjects,
        accumulations: Accumulations,
        on_change: Callable[[Phase, str], None],
        on_measurement: Callable[[int, Measurement], None],
    ) -> None:
        """Begin in what `Booster` was given.

        on_change: called after each change, with the new phase and why.
        on_measurement: called with the number of a model, and what its controller measured.
        """
        self.plugin, self._device, self._options = plugin, device, options
        self._states, self._offload_states, self._half_products = states, offload_states, half_products
        self.boosted, self.accumulations = boosted, accumulations
        self._on_change, self._on_measurement = on_change, on_measurement
        self.scheduler: PrecisionScheduler | None = None
        if isinstance(given, PrecisionSchedule):
            self.scheduler = PrecisionScheduler(self, given.total_steps)
            self.phases = given.made(self._made)
        else:
            self.phases = {0: Phase.of(given, self._made)}
        self.phase = self.phases[0]
        refusals.check_phases(self.precisions, plugin)
        for precision in self.precisions:
            refusals.check_release(options, precision, plugin)

    @property
    def precision(self) -> MixedPrecision:
        """What is trained in now."""
        return self.phase.precision

    @property
    def precisions(self) -> list[MixedPrecision]:
        """Those of all phases, in order."""
        return [phase.precision for phase in self.phases.values()]

    @property
    def changes(self) -> bool:
        """Whether the run changes its precision, or that of layers, by itself."""
        return self.scheduler is not None or self.phase.plan is not None

    def switch(self, mixed_precision: str | MixedPrecision | None) -> None:
        """`Booster.switch`, which says what this does."""
        if self.scheduler is not None:
            raise RuntimeError(
                "switch() in a run with a PrecisionSchedule, which would go back at its next forward pass; put the precision "
                "into the schedule, or give Booster the first one alone"
            )
        if self.phase.plan is not None:
            raise RuntimeError(
                "switch() in a run with an Autopilot, which changes layers by itself; give Booster its precision instead"
            )
        new = self._made(mixed_precision)
        refusals.check_release(self._options, new, self.plugin)
        if self.accumulations.any_open:
            raise RuntimeError(
                "switch() inside accumulate() or no_sync(): the gradients of a group of micro-batches belong to one precision; "
                "call it after the group's step"
            )
        if new.pins_during_run != self.precision.pins_during_run:
            raise ValueError(
                "keep_fp32='auto' has modules pinned during the run by what watches it from boost() on, so a switch can "
                "neither begin nor end it; name the modules in keep_fp32"
            )
        phase = Phase(new)
        self.switch_all(phase, "switch()")
        self.phases = {0: phase}

    def attach(self, boosted: ModelWrapper, optimizers: Sequence[OptimizerWrapper]) -> None:
        """Have the run change the precision of `boosted`, which `boost` has just made."""
        record = self.boosted.records()[-1]
        if self.scheduler is not None:
            for precision in self.precisions:
                if precision is not self.precision:
                    self._switch_to(precision).check(
                        record
                    )  # what cannot be is refused now, and not in the middle of a run
            boosted.register_forward_pre_hook(self.scheduler)
            boosted.register_forward_hook(self.scheduler)
        if any(phase.plan is not None for phase in self.phases.values()):
            number = len(self.boosted.wrappers()) - 1
            controller = PrecisionController(
                boosted.unwrap(), self.plugin.group, lambda measurement: self._on_measurement(number, measurement)
            )
            # Several optimizers of a model see the same layers; one of them is the clock.
            for optimizer in optimizers[:1]:
                update_of(optimizer).gradients.listeners.append(controller)
            self._control(record, controller)

    def switch_if_due(self) -> bool:
        """Go over to the phase that is due, if there is a schedule; returns whether the run did."""
        before = self.phase
        if self.scheduler is not None:
            self.scheduler.switch_if_due()
        return self.phase is not before

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint holds of a schedule; None without one."""
        return None if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on with the schedule, if there is one, as when `state` was taken; None: there was none then."""
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state)

    def _made(self, given: str | MixedPrecision | None) -> MixedPrecision:
        """Return the precision, or one like it, with the states and products of halves of this run, bound to its device."""
        precision = make(given).with_kept(states=self._states, offload=self._offload_states)
        choose_half_products(precision, self._half_products, self._device)
        precision.bind(self._device)
        return precision

    def _switch_to(self, new: MixedPrecision) -> Switch:
        return Switch(self.precision, new, plugin=self.plugin, device=self._device, options=self._options)

    def switch_all(self, phase: Phase, why: str) -> None:
        """Go over to `phase` in all that was boosted. why: for records."""
        records = self.boosted.records()
        # Read before the switch, which replaces the model's extras.
        controllers = [extras_of(each.model).pins for each in records]
        switch_all(self._switch_to(phase.precision), records, self.plugin.group)
        self.phase = phase
        for record, controller in zip(records, controllers, strict=True):
            if isinstance(controller, PrecisionController):
                self._control(record, controller)
        self._on_change(phase, why)

    def _control(self, record: BoostRecord, controller: PrecisionController) -> None:
        """Have `controller` do in the model of `record` what the phase wants."""
        extras_of(record.model).pins = controller
        precision, plan = self.phase
        if plan is None:
            controller.disable()
        else:
            optimizer = next(iter(record.optimizers), None)
            recipe = cast(LinearConversion, precision.conversion).recipe  # as its options say
            controller.enable(plan, recipe, None if optimizer is None else optimizer.num_steps)
