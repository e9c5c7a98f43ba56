"""Two records of what should be the same training: where they part by more than their formats explain, and by what."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from booster.common import arguments
from booster.common.arguments import counted
from booster.numerics.record.recorded_run import Run, Step
from booster.numerics.record.samples import Underflow

DifferenceKind = Literal["alike", "weights", "forward", "gradient", "update", "skip", "drift"]

# Unit roundoffs, and how many of them rounding may make in a loss, and in the norm of a gradient, in the first step. Errors
# of many steps add up as a random walk.
_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-11}
_IN_LOSS = 8
_IN_NORM = 32
_JUMP = 10  # times the largest difference so far: less is that difference, amplified
_DRIFT = 0.05  # relative difference of losses at the end that is worth a word
_SHOWN = 5

_MEANING: dict[DifferenceKind, str] = {
    "alike": "The runs are alike: what differs is explained by their formats.",
    "weights": "The weights differ from the first step on: another initialisation, seed or checkpoint.",
    "forward": "The losses part while gradients and updates were alike before: other data, another forward pass or criterion.",
    "gradient": "Gradients part: another backward pass, clip, loss weight, frozen layer or averaging.",
    "update": "Updates part while gradients are alike: another learning rate, weight decay or optimizer.",
    "skip": "One run skipped the step and the other did not.",
    "drift": "The losses drift apart without a step where they part: rounding errors that the training amplifies.",
}


@dataclass(frozen=True)
class Difference:
    """A number of both runs.

    relative: their difference, to the larger of them.
    explained: what their formats explain.
    """

    name: str
    a: float | None
    b: float | None
    relative: float
    explained: float


@dataclass
class Comparison:
    """What `compare` found.

    kind: in what they part; "alike" where they do not.
    step: where the runs part first; None where they are alike.
    optimizer: that made the step.

    losses: of that step.
    parameters: those that part there, the furthest first.
    last_common: the last step both recorded.
    num_common: how many both recorded.
    notes: sentences on what could not be compared, or differs besides.
    """

    kind: DifferenceKind
    optimizer: str
    step: int | None
    losses: Difference | None
    parameters: list[Difference] = field(default_factory=list)
    last_common: int = 0
    num_common: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def alike(self) -> bool:
        return self.kind in ("alike", "drift")

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain containers."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [_MEANING[self.kind] if self.step is None else f"Step {self.step}. {_MEANING[self.kind]}"]
        if self.losses is not None:
            lines.append(_line(self.losses))
        lines += [_line(parted) for parted in self.parameters[:_SHOWN]]
        if len(self.parameters) > _SHOWN:
            lines.append(f"  and {len(self.parameters) - _SHOWN} more parameters")
        lines.append(f"Compared: {counted(self.num_common, 'step')}.")
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])


def compare(a: Run, b: Run) -> Comparison:
    """Compare the records `a` and `b` step by step; of several optimizers, the first that parts counts.

    Explained is a relative difference of 8 unit roundoffs of the coarser format in a loss, and of 32 in the norm of a
    parameter's gradient or update, times the square root of the step; and one of up to 10 times the largest so far, which
    training amplifies. Beyond that the runs part. Losses are compared in every step, parameters in those that both sampled:
    record with `every=1` to have each parameter's first step. Raises TypeError for what is no
    run, and ValueError where the runs have no step in common.
    """
    for name, run in (("a", a), ("b", b)):
        arguments.instance(name, run, Run, "what booster.numerics.read_run returned")
    # The coarser run decides what rounding explains.
    roundoff = max(_roundoff(a), _roundoff(b))
    comparisons: list[Comparison] = []
    notes = [f"{side.folder.name}: {note}" for side in (a, b) for note in side.notes]
    for name in a.steps.keys() & b.steps.keys():
        comparisons.append(_of_optimizer(name, a, b, roundoff))
    comparisons = [each for each in comparisons if each.num_common]
    if not comparisons:
        raise ValueError(f"the records in {a.folder} and {b.folder} have no step in common")
    others = sorted(a.steps.keys() ^ b.steps.keys())
    if others:
        notes.append(f"only one of the runs has the optimizers {', '.join(others)}")
    first = min(
        comparisons, key=lambda each: (each.alike, each.step if each.step is not None else math.inf, each.optimizer)
    )
    first.notes = notes + first.notes
    return first


def _of_optimizer(name: str, a: Run, b: Run, roundoff: float) -> Comparison:
    ours, theirs = ({step.number: step for step in run.steps[name]} for run in (a, b))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return Comparison("alike", name, None, None)
    samples = [_by_step(run.samples.get(name, [])) for run in (a, b)]
    sampled = sorted(samples[0].keys() & samples[1].keys() & set(common))
    notes = []
    rates = next((n for n in common if ours[n].lr != theirs[n].lr), None)
    if rates is not None:
        notes.append(f"learning rates differ from step {rates} on: {_rates(ours[rates])} and {_rates(theirs[rates])}")
    losses, norms = _TrackedDifference(roundoff * _IN_LOSS), _TrackedNorms(roundoff * _IN_NORM)
    kind: DifferenceKind = "alike"
    at: int | None = None
    parted: list[Difference] = []
    for number in common:
        one, other = ours[number], theirs[number]
        first, second = (each[number] if number in sampled else {} for each in samples)
        pairs = [_Pair(name, first.get(name), second.get(name)) for name in dict.fromkeys([*first, *second])]
        if number == common[0]:
            parted = _weights_apart(pairs, roundoff * _IN_NORM)
            kind = "weights" if parted else kind
        if kind == "alike" and losses.beyond("loss", one.loss, other.loss, number) is not None:
            kind, parted = "forward", norms.beyond("norm", pairs, number)
        if kind == "alike":
            parted = norms.beyond("norm", pairs, number)
            kind = "gradient" if parted else kind
        # After losses and gradients: a skip that follows from a different gradient is no cause of its own.
        if kind == "alike" and one.applied != other.applied:
            kind = "skip"
            folder, skipped = (b.folder, other) if one.applied else (a.folder, one)
            notes.append(f"{folder.name} skipped it: {skipped.reason}, {', '.join(skipped.culprit[:_SHOWN])}")
        if kind == "alike" and one.applied:
            parted = norms.beyond("update_norm", pairs, number)
            kind = "update" if parted else kind
        if kind != "alike":
            at = number
            break
    if at is not None and at > common[0] and not {at, common[common.index(at) - 1]} <= set(sampled):
        notes.append(
            f"parameters were not sampled in each step up to {at}; record with every=1 to see which part first"
        )
    shown = None
    if at is not None:
        shown = losses.difference("loss", ours[at].loss, theirs[at].loss, at)
    elif _ends_apart(ours, theirs, common):
        kind, at = "drift", losses.first_beyond
        shown = losses.difference("loss", ours[common[-1]].loss, theirs[common[-1]].loss, common[-1])
    return Comparison(kind, name, at, shown, parted, common[-1], len(common), notes)


class _TrackedDifference:
    """One number of both runs over steps.

    share: what rounding explains in the first step, relative.

    Attributes:
        first_beyond: the first step with a difference that rounding alone does not explain.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._largest = 0.0
        self.first_beyond: int | None = None

    def difference(
        self, name: str, a: float | None, b: float | None, step: int, floor: float = 0.0
    ) -> Difference | None:
        if a is None and b is None:
            return None
        # Independent roundings add up like the root of their number; training then amplifies what is there.
        explained = max(self._share * math.sqrt(step), _JUMP * self._largest)
        # One run has a number and the other has none, or inf: no rounding explains that.
        if a is None or b is None or math.isfinite(a) != math.isfinite(b):
            return Difference(name, a, b, math.inf, explained)
        if not math.isfinite(a):
            return Difference(name, a, b, 0.0, explained)
        relative = abs(a - b) / (max(abs(a), abs(b)) + floor) if a != b else 0.0
        return Difference(name, a, b, relative, explained)

    def beyond(self, name: str, a: float | None, b: float | None, step: int, floor: float = 0.0) -> Difference | None:
        """Return the difference where it is more than explained; otherwise later ones may grow from it."""
        difference = self.difference(name, a, b, step, floor)
        if difference is None:
            return None
        if difference.relative > difference.explained:
            return difference
        if difference.relative > self._share * math.sqrt(step) and self.first_beyond is None:
            self.first_beyond = step
        self._largest = max(self._largest, difference.relative)
        return None


class _TrackedNorms:
    """A `_TrackedDifference` for each norm of each parameter."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._tracked: dict[tuple[str, str], _TrackedDifference] = {}

    def beyond(self, norm: str, pairs: Sequence[_Pair], step: int) -> list[Difference]:
        """Return the parameters with a `norm` that parts in this step, the furthest first."""
        # A gradient that is zero but for rounding, as of a bias before a BatchNorm, is noise in both runs.
        floor = self._share * math.hypot(*(value for pair in pairs for value in pair.values(norm) if value is not None))
        differences = []
        for pair in pairs:
            tracked = self._tracked.setdefault((norm, pair.name), _TrackedDifference(self._share))
            one, other = pair.values(norm)
            parted = tracked.beyond(pair.name, one, other, step, floor)
            if parted is not None:
                differences.append(parted)
        return sorted(differences, key=lambda parted: -parted.relative)


@dataclass(frozen=True)
class _Pair:
    name: str
    a: Underflow | None
    b: Underflow | None

    def values(self, norm: str) -> tuple[float | None, float | None]:
        return tuple(None if side is None else getattr(side, norm) for side in (self.a, self.b))  # type: ignore[return-value]


def _weights_apart(pairs: Sequence[_Pair], share: float) -> list[Difference]:
    """Return the parameters with weights that differ after the first step by more than rounding and both updates explain."""
    differences = []
    for pair in pairs:
        (a, b), updates = pair.values("weight_norm"), pair.values("update_norm")
        if a is None or b is None or not max(a, b):
            continue
        explained = share + sum(update or 0.0 for update in updates) / max(a, b)
        if abs(a - b) / max(a, b) > explained:
            differences.append(Difference(pair.name, a, b, abs(a - b) / max(a, b), explained))
    return sorted(differences, key=lambda parted: -parted.relative)


def _by_step(samples: Sequence[Underflow]) -> dict[int, dict[str, Underflow]]:
    by_step: dict[int, dict[str, Underflow]] = {}
    for sample in samples:
        if sample.of == "gradient":
            by_step.setdefault(sample.step, {})[sample.name] = sample
    return by_step


def _ends_apart(ours: dict[int, Step], theirs: dict[int, Step], common: Sequence[int]) -> bool:
    last = common[-max(1, len(common) // 10) :]
    pairs = [(ours[number].loss, theirs[number].loss) for number in last]
    finite = [(a, b) for a, b in pairs if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)]
    apart = [abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in finite]
    return bool(apart) and statistics.median(apart) > _DRIFT


def _roundoff(run: Run) -> float:
    formats = {sample.format for samples in run.samples.values() for sample in samples} | {
        run.about.get("format", "float32")
    }
    if any(step.loss_scale != 1.0 for steps in run.steps.values() for step in steps):
        formats.add("float16")
    return max(_ROUNDOFF.get(format, 0.0) for format in formats)


def _rates(step: Step) -> str:
    return ", ".join(f"{rate:g}" for rate in step.lr) or "none"


def _line(parted: Difference) -> str:
    a, b = ("nothing" if value is None else f"{value:.6g}" for value in (parted.a, parted.b))
    apart = f", {parted.relative:.2%} apart" if math.isfinite(parted.relative) else ""
    return f"  {parted.name}: {a} and {b}{apart}; the formats explain {parted.explained:.2%}"
