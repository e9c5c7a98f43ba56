"""The precision of a run: which one it trains in now, which phase of a schedule is due, and how it goes over to another."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
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
    """Before a forward pass or a group of micro-batches, goes over to the one of `phases` that is due, by `go`.

    Only where all ranks are: in a forward that trains. Not while another forward waits for its backward pass: that
    graph belongs to the old precision. See `PrecisionSchedule`.

    total_steps: that shares among `phases` were of.
    optimizers: those of the run, in the same order on all ranks.
    may_go: False while something forbids it, such as an open group of micro-batches.
    group: the ranks that go together.
    """

    def __init__(
        self,
        phases: Mapping[int, Phase],
        total_steps: int | None,
        *,
        optimizers: Callable[[], Sequence[OptimizerWrapper]],
        may_go: Callable[[], bool],
        go: Callable[[Phase, str], None],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.phases, self._total_steps = phases, total_steps
        self.now = phases[0]
        self._optimizers, self._is_allowed, self._go, self._group = optimizers, may_go, go, group
        # Steps that the run had made before an optimizer began, less its own of then.
        self._offsets: weakref.WeakKeyDictionary[OptimizerWrapper, int] = weakref.WeakKeyDictionary()
        # How many steps an optimizer had made when it was last seen to, and where the one was then that made most.
        self._last_progress: weakref.WeakKeyDictionary[OptimizerWrapper, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._idle: weakref.WeakSet[OptimizerWrapper] = weakref.WeakSet()
        # Forward passes with the steps that were made then, by id of the optimizer.
        self._waiting: list[tuple[weakref.ref[_BackwardSeen], dict[int, int]]] = []
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
    def precisions(self) -> list[MixedPrecision]:
        """Those of all phases, in order."""
        return [phase.precision for phase in self.phases.values()]

    @property
    def has_autopilots(self) -> bool:
        """Whether any phase has one."""
        return any(phase.plan is not None for phase in self.phases.values())

    @property
    def step(self) -> int:
        """How many steps the run has made: those of the optimizer that made fewest, of those that have begun and are not at
        rest. One that begins, or begins again, counts on from there."""
        # An optimizer that has not begun, as of a discriminator trained later, must not hold the run at 0.
        counts = {each: each.num_steps for each in self._optimizers() if each.num_steps}
        awake = [each for each in counts if not self._is_idle(each, counts[each]) and each in self._offsets]
        here = min((counts[each] + self._offsets[each] for each in awake), default=0)
        for each, count in counts.items():
            if each not in self._offsets:
                # It may have made steps before it was boosted, or while it was at rest.
                self._offsets[each] = max(0, here - count) if awake else 0
                awake.append(each)
        places = {each: counts[each] + self._offsets[each] for each in awake}
        first = max(places.values(), default=0)
        for each in places:
            if self._last_progress.get(each, (0, 0))[0] != counts[each]:
                self._last_progress[each] = counts[each], first
            # Optimizers that take turns wait for each other too, but not for so long.
            elif first - self._last_progress[each][1] >= PATIENCE:
                self._idle.add(each)
                _logger.warning(
                    "%s of %d parameters has made no step while another optimizer made %d, so the PrecisionSchedule goes on "
                    "without it; steps that it makes later count on from where the run is then",
                    type(each.unwrap()).__name__,
                    sum(len(group["params"]) for group in each.param_groups),
                    first - self._last_progress[each][1],
                )
        return min((place for each, place in places.items() if each not in self._idle), default=0)

    def _is_idle(self, each: OptimizerWrapper, count: int) -> bool:
        """Whether an optimizer, which has made `count` steps, has been at rest and is so still."""
        if each in self._idle and count != self._last_progress[each][0]:
            self._idle.discard(each)
            del self._offsets[each]
        return each in self._idle

    def switch_if_due(self) -> None:
        """Go over to what is due, if anything is and nothing forbids it; where it is, a collective."""
        step = self.step
        wanted = due(self.phases, step)
        if (
            wanted is self.now
            # Tensors made there could not be trained.
            or torch.is_inference_mode_enabled()
            # Gradients of one precision are not stepped by another.
            or any(update_of(each).gradients.num_backwards for each in self._optimizers())
            or not self._is_allowed()
            # Last, since it is a collective: all that is above is the same on all ranks.
            or any_rank(self._awaits_backward(), self._group)
        ):
            return
        # Graphs of the old precision that no backward came for: their outputs were for reading.
        self._waiting.clear()
        self._go(wanted, f"the schedule, after step {step}")
        self.now = wanted

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds, as plain containers."""
        step, optimizers = self.step, self._optimizers()
        return {
            "step": step,
            "starts": list(self.phases),
            "total_steps": self._total_steps,
            "ahead": [self._offsets.get(each) for each in optimizers],
            "moved": [list(self._last_progress.get(each, ())) for each in optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on as when `state` was taken; None: there was no schedule. One WARNING where its phases begin elsewhere."""
        for known in (self._offsets, self._last_progress, self._idle):
            known.clear()
        self._trained = -1
        if state is None:
            return
        for each, ahead in zip(self._optimizers(), state["ahead"], strict=False):
            if ahead is not None:
                self._offsets[each] = arguments.count("ahead", ahead, least=0)
        for each, moved in zip(self._optimizers(), state.get("moved", []), strict=False):
            if moved:
                count, there = (arguments.count("moved", number, least=0) for number in moved)
                self._last_progress[each] = count, there
        before, now = (
            f"after the steps {starts}, of total_steps={total}"
            for starts, total in ((state["starts"], state["total_steps"]), (list(self.phases), self._total_steps))
        )
        if state["starts"] != list(self.phases):
            _logger.warning(
                "the phases of the PrecisionSchedule began %s where this checkpoint was saved, and begin %s now: from "
                "step %d on the run is in %r",
                before,
                now,
                self.step,
                due(self.phases, self.step),
            )

    # ---------------------------------------------------------------- inside

    def _track_graph(self, output: Any) -> None:
        """A forward that trains returned `output`."""
        # A graph that was dropped dropped its hook, and with it what is referenced here.
        self._waiting = [(found, then) for found, then in self._waiting if _is_open(found)]
        waiting = _BackwardSeen()
        recorded = [tensor for tensor in tensors(output) if tensor.grad_fn is not None]
        for tensor in recorded:
            tensor.register_hook(waiting)  # which lives as long as the graph
        if recorded:
            self._waiting.append((weakref.ref(waiting), {id(each): each.num_steps for each in self._optimizers()}))

    def _awaits_backward(self) -> bool:
        """Whether a graph waits for a backward pass, and not in vain: some optimizer that is not at rest has made no step
        since."""
        optimizers = [each for each in self._optimizers() if each.num_steps and each not in self._idle]
        return any(
            _is_open(found) and any(each.num_steps == then.get(id(each), 0) for each in optimizers)
            for found, then in self._waiting
        )


class _BackwardSeen:
    """A hook of what one forward returned, which learns that a backward pass came."""

    came = False

    def __call__(self, grad: torch.Tensor) -> None:
        self.came = True


def _is_open(found: weakref.ref[_BackwardSeen]) -> bool:
    waiting = found()
    return waiting is not None and not waiting.came


class _NoHook:
    """A hook that does nothing."""

    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        pass


Given = str | MixedPrecision | PrecisionSchedule | Autopilot | None


class PrecisionRun:
    """The phase that a Booster trains in, and what changes it: `switch`, a PrecisionSchedule or an Autopilot.

    Attributes:
        phase: the precision, and the plan of an autopilot if there is one.
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
        self._plugin, self._device, self._options = plugin, device, options
        self._kept, self._half_products = {"states": states, "offload": offload_states}, half_products
        self._boosted, self._accumulations = boosted, accumulations
        self._on_change, self._on_measurement = on_change, on_measurement
        self.scheduler: PrecisionScheduler | None = None
        if isinstance(given, PrecisionSchedule):
            self.scheduler = PrecisionScheduler(
                given.made(self._made),
                given.total_steps,
                optimizers=lambda: list(boosted.optimizers.values()),
                may_go=lambda: not accumulations.any_open,
                go=self._switch_all,
                group=plugin.group,
            )
            refusals.check_phases(self.precisions, plugin)
            self.phase = self.scheduler.now
        else:
            self.phase = Phase.of(given, self._made)
        for precision in self.precisions:
            refusals.check_release(options, precision, plugin)

    @property
    def precision(self) -> MixedPrecision:
        """What is trained in now."""
        return self.phase.precision

    @property
    def precisions(self) -> list[MixedPrecision]:
        """Those of all phases, in order."""
        return [self.phase.precision] if self.scheduler is None else self.scheduler.precisions

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
        refusals.check_release(self._options, new, self._plugin)
        if self._accumulations.any_open:
            raise RuntimeError(
                "switch() inside accumulate() or no_sync(): the gradients of a group of micro-batches belong to one precision; "
                "call it after the group's step"
            )
        if new.pins_during_run != self.precision.pins_during_run:
            raise ValueError(
                "keep_fp32='auto' has modules pinned during the run by what watches it from boost() on, so a switch can "
                "neither begin nor end it; name the modules in keep_fp32"
            )
        self._switch_all(Phase(new), "switch()")

    def attach(self, boosted: ModelWrapper, optimizers: Sequence[OptimizerWrapper]) -> None:
        """Have the run change the precision of `boosted`, which `boost` has just made."""
        record = self._boosted.boostings()[-1]
        if self.scheduler is not None:
            for precision in self.precisions:
                if precision is not self.precision:
                    self._switch_to(precision).check(
                        record
                    )  # what cannot be is refused now, and not in the middle of a run
            boosted.register_forward_pre_hook(self.scheduler)
            boosted.register_forward_hook(self.scheduler)
        if self.phase.plan is not None or (self.scheduler is not None and self.scheduler.has_autopilots):
            number = len(self._boosted.wrappers()) - 1
            controller = PrecisionController(
                boosted.unwrap(), self._plugin.group, lambda found: self._on_measurement(number, found)
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
        precision = make(given).with_kept(**self._kept)  # type: ignore[arg-type]
        choose_half_products(precision, self._half_products, self._device)
        precision.bind(self._device)
        return precision

    def _switch_to(self, new: MixedPrecision) -> Switch:
        return Switch(self.precision, new, plugin=self._plugin, device=self._device, options=self._options)

    def _switch_all(self, phase: Phase, why: str) -> None:
        """Go over to `phase` in all that was boosted. why: for records."""
        records = self._boosted.boostings()
        # Read before the switch, which replaces the model's extras.
        controllers = [extras_of(each.model).pins if isinstance(each.model, ModelWrapper) else None for each in records]
        switch_all(self._switch_to(phase.precision), records, self._plugin.group)
        self.phase = phase
        for record, controller in zip(records, controllers, strict=True):
            if isinstance(controller, PrecisionController):
                self._control(record, controller)
        self._on_change(phase, why)

    def _control(self, record: BoostRecord, controller: PrecisionController) -> None:
        """Have `controller` do in the model of `record` what the phase wants."""
        if record.model is not None:
            extras_of(record.model).pins = controller
        precision, plan = self.phase
        if plan is None:
            controller.disable()
        else:
            optimizer = next(iter(record.optimizers), None)
            recipe = cast(LinearConversion, precision.conversion).recipe  # as its options say
            controller.enable(plan, recipe, None if optimizer is None else optimizer.num_steps)
