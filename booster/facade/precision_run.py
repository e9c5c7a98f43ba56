"""The precision of a run: which one it trains in now, and how it goes over to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from booster.facade import refusals
from booster.facade.accumulation import Accumulations
from booster.facade.boosted_objects import BoostedObjects
from booster.facade.precision_scheduler import PrecisionScheduler
from booster.facade.switch import BoostRecord, Switch, switch_all
from booster.interface.model import ModelWrapper, extras_of
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.mixed_precision import Autopilot, MixedPrecision, PrecisionSchedule, make
from booster.mixed_precision.configure import choose_half_products
from booster.mixed_precision.low_precision.autopilot import Measurement, PrecisionController
from booster.mixed_precision.low_precision.conversion import LinearConversion
from booster.mixed_precision.schedule import Phase
from booster.plugin import Plugin
from booster.update.context import UpdateOptions

if TYPE_CHECKING:
    from booster.masters.quantized_state import States

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
                go=self._go_over,
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
        self._go_over(Phase(new), "switch()")

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

    def _go_over(self, phase: Phase, why: str) -> None:
        """Go over to `phase` in all that was boosted. why: for records."""
        records = self._boosted.boostings()
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
