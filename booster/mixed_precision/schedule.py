"""Precisions that follow each other in one run, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from booster.common import arguments
from booster.common.arguments import as_fraction
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.low_precision.autopilot import Autopilot


class Phase(NamedTuple):
    """What a run is in for a while: a precision, and what flies its models then, where one does."""

    precision: MixedPrecision
    plan: Autopilot | None = None

    @classmethod
    def of(
        cls,
        given: str | MixedPrecision | Autopilot | None,
        make: Callable[[str | MixedPrecision | None], MixedPrecision],
    ) -> Phase:
        """Return the phase that a user gave, with what `make` makes of its precision."""
        return cls(given.made(make), given) if isinstance(given, Autopilot) else cls(make(given))

    def __repr__(self) -> str:
        return repr(self.plan or self.precision)


class PrecisionSchedule:
    """Precisions one after another: `Booster(mixed_precision=PrecisionSchedule({0: "mxfp8", 0.9: "bf16"}, total_steps=1000))`.

    phases: from where on, to a name or an object, as for `Booster`, or an `Autopilot`. 0 is the beginning, which must be
        there; a number below 1 is that share of total_steps, rounded up; a whole number from 1 on is so many optimizer steps.
    total_steps: optimizer steps of the whole run, needed where there are shares; None where there are none.

    Steps are counted made or skipped, and checkpoints keep count; of several optimizers the one counts that made fewest, from
    its first step on, which counts as the step that the run has reached. One that has made no step while another made 100 does
    not count until it makes one again; a WARNING names it. At the first forward pass in training after a step
    that ends a phase the Booster goes over, as by `b.switch`: not in evaluation, not between backward and step, nor while
    another forward waits for its backward pass, as a generator's does while the discriminator is stepped. A checkpoint with
    phases that began at other steps is loaded with a WARNING: those given here hold. What one autopilot made wide, the next
    one of the schedule has wide, too. Raises ValueError for phases that do not begin at 0, or of which two begin at the same
    step.
    """

    def __init__(
        self, phases: Mapping[float, str | MixedPrecision | Autopilot], *, total_steps: int | None = None
    ) -> None:
        arguments.instance("phases", phases, Mapping, "a dict from where a phase begins to its precision")
        if total_steps is not None:
            arguments.count("total_steps", total_steps, also="None where no phase begins at a share of it")
        starts: dict[int, str | MixedPrecision | Autopilot] = {}
        for place, precision in phases.items():
            start = _start(place, total_steps)
            if start in starts:
                raise ValueError(f"two phases begin at step {start}: {dict(phases)}; leave one of them out")
            if not isinstance(precision, (str, MixedPrecision, Autopilot)):
                legal = "the name of a precision, a MixedPrecision or an Autopilot"
                raise TypeError(arguments.refusal(f"phases[{place!r}]", precision, legal))
            starts[start] = precision
        if 0 not in starts:
            raise ValueError(f"phases begin at {sorted(starts)}, and none at 0, with which a run begins; add one")
        self.total_steps = total_steps
        self.phases = {start: starts[start] for start in sorted(starts)}
        """Precisions by the number of the optimizer step after which they begin."""

    def made(self, make: Callable[[str | MixedPrecision | None], MixedPrecision]) -> dict[int, Phase]:
        """Return `phases` with what `make` makes of each precision."""
        return {start: Phase.of(given, make) for start, given in self.phases.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.phases!r})"


def due(phases: Mapping[int, Phase], step: int) -> Phase:
    """Return the one of `phases`, by their starts in order, that a run is in after so many steps."""
    return phases[max(start for start in phases if start <= step)]


def _start(place: object, total_steps: int | None) -> int:
    value = arguments.number("a place in phases", place, least=0)
    if value >= 1 and value != int(value):
        raise ValueError(f"a phase begins at {value}; pass a whole number of steps, or a share of total_steps below 1")
    if value == 0 or value >= 1:
        start = int(value)
        if total_steps is not None and start >= total_steps:
            raise ValueError(f"a phase begins at step {start}, and the run has total_steps={total_steps}")
        return start
    if total_steps is None:
        raise ValueError(f"a phase begins at the share {value} of the run; pass total_steps")
    start = math.ceil(as_fraction(value) * total_steps)
    if start == total_steps:
        raise ValueError(
            f"a phase begins at the share {value} of total_steps={total_steps}, which is none of its steps"
        )
    return start
