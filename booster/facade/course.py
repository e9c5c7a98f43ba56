"""The course of a run through its precisions, which goes on by itself as steps are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.mixed_precision import MixedPrecision
from booster.mixed_precision.schedule import due


class PrecisionCourse:
    """Before a forward pass or a group of micro-batches, goes over to the one of `phases` that is due, by `go`.

    See `PrecisionSchedule`.

    optimizers: those of the run. may_go: whether nothing stands in the way, such as an open group of micro-batches.
    """

    def __init__(
        self,
        phases: Mapping[int, MixedPrecision],
        *,
        optimizers: Callable[[], Sequence[OptimizerWrapper]],
        may_go: Callable[[], bool],
        go: Callable[[MixedPrecision, str], None],
    ) -> None:
        self.phases = phases
        self.now = phases[0]
        self._optimizers, self._may_go, self._go = optimizers, may_go, go

    def __reduce__(self) -> Any:
        return _Idle, ()  # of copies and pickles of a model, which no Booster changes

    def __call__(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook of boosted models."""
        self.follow()

    def follow(self) -> None:
        """Go over to what is due, if anything is and nothing stands in the way."""
        optimizers = self._optimizers()
        if not optimizers:
            return
        step = min(optimizer.num_steps for optimizer in optimizers)
        wanted = due(self.phases, step)
        if (
            wanted is self.now
            or any(update_of(each).gradients.num_backwards for each in optimizers)
            or not self._may_go()
        ):
            return
        self._go(wanted, f"the schedule, after step {step}")
        self.now = wanted


class _Idle:
    """A hook that does nothing."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        pass
