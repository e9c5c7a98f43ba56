"""Precisions that follow each other in one run, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from booster.ground import arguments
from booster.ground.shares import exact
from booster.mixed_precision.base import MixedPrecision


class PrecisionSchedule:
    """Precisions one after another: `Booster(mixed_precision=PrecisionSchedule({0: "mxfp8", 0.9: "bf16"}, total_steps=1000))`.

    phases: from where on, to a name or an object, as for `Booster`. 0 is the beginning, which must be there; a number below 1
        is that share of total_steps, rounded up; a whole number from 1 on is so many optimizer steps.
    total_steps: optimizer steps of the whole run, needed where there are shares; None where there are none.

    Steps are counted made or skipped, and checkpoints keep count; of several optimizers the one counts that made fewest, from
    its first step on, which counts as the step that the run has reached. At the first forward pass in training after a step
    that ends a phase the Booster goes over, as by `b.switch`: not in evaluation, not between backward and step, nor while
    another forward waits for its backward pass, as a generator's does while the discriminator is stepped. A checkpoint whose
    phases began at other steps is loaded with a WARNING: those given here hold.
    Raises ValueError for phases that do not begin at 0, or of which two begin at the same step.
    """

    def __init__(self, phases: Mapping[float, str | MixedPrecision], *, total_steps: int | None = None) -> None:
        arguments.instance("phases", phases, Mapping, "a dict from where a phase begins to its precision")
        if total_steps is not None:
            arguments.count("total_steps", total_steps, also="None where no phase begins at a share of it")
        starts: dict[int, str | MixedPrecision] = {}
        for place, precision in phases.items():
            start = _start(place, total_steps)
            if start in starts:
                raise ValueError(f"two phases begin at step {start}: {dict(phases)}; leave one of them out")
            if not isinstance(precision, (str, MixedPrecision)):
                raise TypeError(
                    arguments.refusal(f"phases[{place!r}]", precision, "the name of a precision or a MixedPrecision")
                )
            starts[start] = precision
        if 0 not in starts:
            raise ValueError(f"phases begin at {sorted(starts)}, and none at 0, with which a run begins; add one")
        self.total_steps = total_steps
        self.phases = {start: starts[start] for start in sorted(starts)}
        """Precisions by the number of the optimizer step after which they begin."""

    def made(self, make: Callable[[str | MixedPrecision], MixedPrecision]) -> dict[int, MixedPrecision]:
        """Return `phases` with what `make` makes of each precision."""
        return {start: make(precision) for start, precision in self.phases.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.phases!r})"


def due(phases: Mapping[int, MixedPrecision], step: int) -> MixedPrecision:
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
    start = math.ceil(exact(value) * total_steps)
    if start == total_steps:
        raise ValueError(
            f"a phase begins at the share {value} of total_steps={total_steps}, which is none of its steps"
        )
    return start
