"""What a record says, in numbers: the one source of the terminal's summary, the page and `--json`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from booster.numerics.run import Run, Step

__all__ = ["OptimizerSummary", "Summary", "summarise"]


@dataclass
class OptimizerSummary:
    """One optimizer's steps. seconds_per_step: the median between steps. clipped: the share of applied steps that were.

    loss, grad_norm: (first, last, smallest, largest) of the finite ones, or None. scale: the same of the loss scale.
    skips_by_culprit: how often each parameter's gradient was not finite when a step was skipped, most often first.
    """

    name: str
    first_step: int
    last_step: int
    num_steps: int
    num_skipped: int
    seconds_per_step: float | None
    loss: tuple[float, float, float, float] | None
    grad_norm: tuple[float, float, float, float] | None
    scale: tuple[float, float, float, float]
    clipped: float | None
    skips_by_reason: dict[str, int]
    skips_by_culprit: dict[str, int]


@dataclass
class Summary:
    """What `summarise` returns; `as_dict` is what `booster report --json` prints."""

    folder: str
    about: dict[str, Any]
    optimizers: list[OptimizerSummary]
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain containers."""
        return asdict(self)


def summarise(run: Run) -> Summary:
    """Summarise a record that was read back."""
    optimizers = [_of_optimizer(name, steps) for name, steps in run.steps.items() if steps]
    return Summary(str(run.folder), run.about, optimizers, list(run.notes))


def _of_optimizer(name: str, steps: Sequence[Step]) -> OptimizerSummary:
    applied = [step for step in steps if step.applied]
    between = sorted(b.time - a.time for a, b in zip(steps, steps[1:], strict=False) if b.time > a.time)
    looked = [step for step in applied if step.grad_norm is not None]
    return OptimizerSummary(
        name=name,
        first_step=steps[0].number,
        last_step=steps[-1].number,
        num_steps=len(steps),
        num_skipped=len(steps) - len(applied),
        seconds_per_step=between[len(between) // 2] if between else None,
        loss=_spread([step.loss for step in steps]),
        grad_norm=_spread([step.grad_norm for step in steps]),
        scale=_spread([step.loss_scale for step in steps]) or (1.0, 1.0, 1.0, 1.0),
        clipped=sum(step.clip is not None for step in looked) / len(looked) if looked else None,
        skips_by_reason=dict(Counter(step.reason or "unknown" for step in steps if not step.applied)),
        skips_by_culprit=dict(Counter(name for step in steps for name in step.culprit).most_common()),
    )


def _spread(values: Sequence[float | None]) -> tuple[float, float, float, float] | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return (finite[0], finite[-1], min(finite), max(finite)) if finite else None
