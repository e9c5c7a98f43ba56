"""What a record says, in numbers: the one source of the terminal's summary, the page and `--json`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from booster.common.arguments import counted
from booster.numerics.record.recorded_run import AutopilotLook, RoundedOperand, Run, Step
from booster.numerics.record.samples import Underflow, best_scale

MOST_CULPRITS = 10
WORTH_SAYING = 0.001
STILL = 0.05  # of a small parameter a weight or two always stand still
_REASONS = {
    "nonfinite_loss": "the forward pass made an inf or NaN, which no loss scale can help",
    "nonfinite_grad": "gradients held an inf or NaN; now and then under a loss scale, which then is halved, it is ordinary",
}


@dataclass
class OptimizerSummary:
    """One optimizer's steps.

    Attributes:
        seconds_per_step: the median between steps.
        loss, grad_norm, scale: (first, last, smallest, largest) of the finite ones, or None; scale is the loss scale.
        clipped: the share of applied steps that were.
        skips_by_culprit: how often each parameter's gradient was not finite when a step was skipped, most often first.
        num_samples, num_nonfinite: sampled steps, and those of them in which gradients held an inf or NaN.
        groups: norms of each parameter group in the last sample.
        tensors: each parameter and activation over all samples.
        best_scale: see `samples.best_scale`, over all samples.
        nonfinite_losses: steps with a loss that was inf or NaN.
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
    num_samples: int = 0
    groups: list[dict[str, float | None]] = field(default_factory=list)
    tensors: list[TensorSummary] = field(default_factory=list)
    best_scale: float | None = None
    nonfinite_losses: int = 0
    num_nonfinite: int = 0

    def skips(self) -> list[str]:
        """A sentence for each reason of skipped steps, and one on culprits where there are many and none is worse."""
        said = [
            f"Skipped {counted(count, 'step')}, {reason}{': ' + _REASONS[reason] if reason in _REASONS else ''}."
            for reason, count in self.skips_by_reason.items()
        ]
        if self.none_stands_out:
            count = next(iter(self.skips_by_culprit.values()))
            said.append(
                f"All {len(self.skips_by_culprit)} parameters that are named held an inf or NaN equally often, in "
                f"{counted(count, 'step')}."
            )
        return said

    @property
    def none_stands_out(self) -> bool:
        """Whether many parameters were not finite, and all of them equally often, so that a list of them would say nothing."""
        return len(self.skips_by_culprit) > MOST_CULPRITS and len(set(self.skips_by_culprit.values())) == 1

    @property
    def is_scaled(self) -> bool:
        """Whether a loss was scaled, so that scales and room below overflow say something."""
        return self.scale[3] != 1.0

    @property
    def pace(self) -> str:
        """The median time between steps, in words; "" where it is not known."""
        seconds = self.seconds_per_step
        return "" if seconds is None else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

    @property
    def least_headroom(self) -> float | None:
        """Of all finite gradients, in bits; None where none was sampled, or no loss was scaled."""
        rooms = [each.headroom for each in self.tensors if each.headroom is not None and each.of != "activation"]
        return min(rooms) if rooms and self.is_scaled else None

    def rows_of_groups(self) -> list[list[str]]:
        """Of each parameter group its index, the norms of gradient, weight and update, and update / weight."""
        rows = []
        for index, norms in enumerate(self.groups):
            grad, weight, update = norms["grad_norm"], norms["weight_norm"], norms["update_norm"]
            ratio = update / weight if update is not None and weight else None
            rows.append([f"{index}", *("" if v is None else f"{v:.3g}" for v in (grad, weight, update, ratio))])
        return rows


@dataclass
class TensorSummary:
    """One tensor over the samples of a run. Shares are means.

    Attributes:
        headroom: the smallest, in bits.
        best_scale: of this tensor.
        wider: it is kept in a wider format than `format`, so that nothing of it underflowed there.
    """

    name: str
    of: str
    format: str
    stored: str | None
    zeros: float
    lost: float
    subnormal: float
    still: float | None
    headroom: float | None
    best_scale: float | None
    wider: bool


@dataclass
class Summary:
    """What `summarise` returns; `as_dict` is what `booster report --json` prints.

    Attributes:
        switches: to another precision, with step, precision and why.
        rounded: mean shares of each operand of each low-precision layer.
        piloted, looks: what an autopilot changed, and what its looks took, by model.
    """

    folder: str
    about: dict[str, Any]
    optimizers: list[OptimizerSummary]
    notes: list[str] = field(default_factory=list)
    switches: list[dict[str, Any]] = field(default_factory=list)
    rounded: list[dict[str, Any]] = field(default_factory=list)
    piloted: list[dict[str, Any]] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def heading(self) -> str:
        """Precision, plugin, ranks and device, in a line."""
        ranks = counted(self.about.get("world_size", 1), "rank")
        parts = (self.about.get("precision"), self.about.get("plugin"), ranks, self.about.get("device"))
        return ", ".join(str(part) for part in parts if part)

    def autopilot_sentences(self) -> list[str]:
        """A sentence for each product that an autopilot made wide, or low again, and what looking at each model took."""
        several = len({each["model"] for each in (*self.looks, *self.piloted)}) > 1
        said = [
            f"After step {change['step']}: {change['role']} of {change['name']}{_of_model(change, several)} "
            f"{'wide' if change['wide'] else 'low again'}, noise {change['noise']:.2f} of the signal, "
            f"{change['ahead']:.2f} by the next look."
            for change in self.piloted
        ]
        for looks in self.looks:
            often = f"{counted(looks['looks'], 'look')} at {counted(looks['layers'], 'layer')}"
            often += f" and {looks['again']} again" if looks["again"] else ""
            said.append(
                f"Autopilot{_of_model(looks, several)}: {often}, {looks['operations']:.1%} of the operations of their "
                f"products; wide {looks['wide']:.0%} of the products, at most {looks['most_wide']:.0%}."
            )
        return said

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain containers."""
        return asdict(self)


def _of_model(said: dict[str, Any], several: bool) -> str:
    return f" of model {said['model']}" if several else ""


def summarise(run: Run) -> Summary:
    """Summarise a record that was read back."""
    optimizers = [_of_optimizer(name, steps, run.samples.get(name, [])) for name, steps in run.steps.items() if steps]
    return Summary(
        str(run.folder),
        run.about,
        optimizers,
        list(run.notes),
        [each._asdict() for each in run.switches],
        _rounded(run),
        [each._asdict() for each in run.piloted],
        _autopilot_rows(run.looks),
    )


def _autopilot_rows(looks: Sequence[AutopilotLook]) -> list[dict[str, Any]]:
    """Of each model how often its autopilot looked, at how many layers, how often again at what grew, what all of it took, and
    how much was wide, in the mean and at most."""
    rows = []
    for model in sorted({look.model for look in looks}):
        own = [look for look in looks if look.model == model]
        # A look again is at some layers alone, so it would lower the means.
        first = [look for look in own if not look.again] or own
        rows.append(
            {
                "model": model,
                "looks": len(first),
                "layers": max(look.layers for look in first),
                "again": len(own) - len(first),
                "operations": sum(look.operations for look in own) / len(first),
                "wide": sum(look.wide for look in first) / len(first),
                "most_wide": max(look.wide for look in own),
            }
        )
    return rows


def _rounded(run: Run) -> list[dict[str, Any]]:
    """Shares of each operand of each low-precision layer, means over the samples, those with most in the top bin first."""
    by_operand: dict[tuple[str, str, str, str], list[RoundedOperand]] = {}
    for each in run.rounded:
        by_operand.setdefault((each.name, each.product, each.operand, each.format), []).append(each)
    rows = [
        dict(zip(("name", "product", "operand", "format"), key, strict=True))
        | {share: sum(getattr(each, share) for each in own) / len(own) for share in ("underflow", "saturated", "top")}
        for key, own in by_operand.items()
    ]
    # Saturation spoils a product more than what is lost at the bottom.
    return sorted(rows, key=lambda row: (-row["top"], -row["underflow"]))


def by_tensor(samples: Sequence[Underflow]) -> dict[tuple[str, str], list[Underflow]]:
    """Samples by what they are of and the name, each in the order of steps."""
    samples_of: dict[tuple[str, str], list[Underflow]] = {}
    for sample in samples:
        samples_of.setdefault((sample.of, sample.name), []).append(sample)
    return samples_of


def _of_tensor(samples: Sequence[Underflow]) -> TensorSummary:
    last = samples[-1]
    still = [sample.still for sample in samples if sample.still is not None]
    return TensorSummary(
        name=last.name,
        of=last.of,
        format=last.format,
        stored=next((sample.stored for sample in samples if sample.stored is not None), None),
        zeros=sum(sample.zeros for sample in samples) / len(samples),
        lost=sum(sample.lost for sample in samples) / len(samples),
        subnormal=sum(sample.subnormal for sample in samples) / len(samples),
        still=sum(still) / len(still) if still else None,
        headroom=min((sample.headroom for sample in samples if sample.headroom is not None), default=None),
        best_scale=best_scale(samples),
        wider=any(sample.wider for sample in samples),
    )


def _groups(samples: Sequence[Underflow]) -> list[dict[str, float | None]]:
    """Norms of the parameters of each group, by those of its parameters."""
    groups = []
    for group in sorted({sample.group for sample in samples if sample.group is not None}):
        own = [sample for sample in samples if sample.group == group]
        norms: dict[str, float | None] = {}
        for name in ("norm", "update_norm", "weight_norm"):
            values = [getattr(sample, name) for sample in own if getattr(sample, name) is not None]
            norms["grad_norm" if name == "norm" else name] = math.hypot(*values) if values else None
        groups.append(norms)
    return groups


def _of_optimizer(name: str, steps: Sequence[Step], samples: Sequence[Underflow]) -> OptimizerSummary:
    applied = [step for step in steps if step.applied]
    # Where a run was resumed the clock may have gone back; the median forgives pauses of a checkpoint.
    between = sorted(b.time - a.time for a, b in zip(steps, steps[1:], strict=False) if b.time > a.time)
    # Without a norm nobody asked for a clip in that step, so it says nothing of how often clips bite.
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
        num_samples=len({sample.step for sample in samples}),
        groups=_groups([sample for sample in samples if sample.step == samples[-1].step]),
        tensors=[_of_tensor(own) for own in by_tensor(samples).values()],
        best_scale=best_scale([sample for sample in samples if sample.of != "activation"]),
        nonfinite_losses=sum(step.loss is not None and not math.isfinite(step.loss) for step in steps),
        num_nonfinite=len({each.step for each in samples if each.of == "gradient" and each.exponents.nonfinite}),
    )


def _spread(values: Sequence[float | None]) -> tuple[float, float, float, float] | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return (finite[0], finite[-1], min(finite), max(finite)) if finite else None
