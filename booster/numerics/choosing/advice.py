"""What `advise` returns: the precisions that were measured, in order, and the one to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from booster.common import arguments
from booster.common.arguments import columns, listed
from booster.mixed_precision import MixedPrecision
from booster.numerics.choosing.trained_subject import LayerError

Status = Literal["measured", "rehearsed", "refused", "left out"]
_LEAST_NOISE = 0.02  # of a step's time: what timings are never better than
_SHOWN_LAYERS = 3
_EMULATED = 2.0  # times as long as in float32: a product in a format that a processor has is no slower than that


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bounds of `advise`: on the measurement, and on what may be advised. Every bound may be None, for none.

    seconds: of the whole measurement, by intention. Precisions after that are left out; one pass of each model
        cannot be cut short.
    max_gradient_error: of the gradients against float32, the norm of the difference over the norm; 0.1 is a cosine of 0.995.
    max_loss_error: likewise of the loss.
    max_memory: bytes at the highest point of a step.
    """

    seconds: float | None = 60.0
    max_gradient_error: float | None = 0.1
    max_loss_error: float | None = None
    max_memory: int | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "max_gradient_error", "max_loss_error", "max_memory"):
            value = getattr(self, name)
            if value is not None:
                arguments.number(name, value, above=0, also="None")

    def objection(self, row: Row) -> str:
        """Return why `row` may not be advised; "" where it may."""
        if not row.finite:
            return "its loss or gradients are not finite"
        for what, value, bound in (
            ("gradient error", row.gradient_error, self.max_gradient_error),
            ("loss error", row.loss_error, self.max_loss_error),
            ("peak memory", row.peak, self.max_memory),
        ):
            if bound is not None and value is not None and value > bound:
                return f"{what} above {bound:g}"
        return ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One precision.

    status: "measured"; "rehearsed": this device emulates it, so that its time and memory say nothing; "refused": it does not
        run here, or not with this model; "left out": the budget was used up.
    note: why.
    rank: from 1, of those that may be advised.
    seconds: median of a step.
    ratio, quartiles: of the time of float32's steps next to it, the median, and its quartiles.
    peak, held: bytes, in a step and after it.
    loss_error: relative.
    gradient_error, cosine: of all gradients, at whichever of the two points it was worse.
    layers: the same by module, the worst first.
    loss_scale: at which gradients were finite.
    skipped: of the timed steps.
    finite: loss and gradients were.
    product: the time of a matrix product in the dtype that it computes in, relative to float32; None where it is multiplied in
        float32.
    """

    name: str
    status: Status
    note: str = ""
    rank: int | None = None
    seconds: float | None = None
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    peak: int | None = None
    held: int | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    cosine: float | None = None
    layers: tuple[LayerError, ...] = ()
    loss_scale: float = 1.0
    skipped: int = 0
    finite: bool = True
    product: float | None = None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to take, and why. `str()` of it is a table and sentences.

    best: the name of the precision; None where none is within the budget's bounds.
    precision: a `MixedPrecision` for `Booster`, bound to no device; None likewise.
    rows: those that may be advised by rank, the others below.
    reasons: sentences, the first of which says what to take.
    noise: by how much the times of two equal float32 models differed, relative; precisions that are no further apart count as
        equally fast.
    device: where it was measured.
    """

    best: str | None
    precision: MixedPrecision | None
    rows: tuple[Row, ...]
    reasons: tuple[str, ...]
    noise: float
    device: str

    def __getitem__(self, name: str) -> Row:
        """Return the row of that name; raises KeyError."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r} was not measured; there are {[row.name for row in self.rows]}")

    def as_dict(self) -> dict[str, Any]:
        """Everything but the precision object, as plain containers."""
        return {
            "best": self.best,
            "device": self.device,
            "noise": self.noise,
            "reasons": list(self.reasons),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def table(self) -> list[tuple[str, ...]]:
        """Return the table that `str()` shows, with its heading."""
        first: dict[str, str] = {}  # by what a note says after the name of its format
        rows = []
        for row in self.rows:
            alike = first.setdefault(row.note.partition(" finds ")[2], row.name)
            again = " finds " in row.note and alike != row.name
            rows.append(dataclasses.replace(row, note=f"as {alike}") if again else row)
        return [_HEADING, *map(_cells, rows)]

    def legend(self) -> list[str]:
        """Return lines that say what the columns of the table mean, and what was not measured."""
        widened = [_WIDENED] if any(row.note.endswith(IN_FLOAT32) for row in self.rows) else []
        rehearsed = [_REHEARSED] if any(row.status == "rehearsed" for row in self.rows) else []
        return [*_LEGEND, *widened, *rehearsed, _PAGE]

    def __str__(self) -> str:
        return "\n".join([columns(self.table()), "", *self.legend(), "", *self.reasons])


def ranked(rows: Sequence[Row], budget: Budget, noise: float) -> tuple[str | None, tuple[Row, ...], tuple[str, ...]]:
    """Return the best, the rows in order, and sentences that say why.

    Best is the fastest that `budget` has no objection to; noise: relative.
    """
    noise = max(noise, _LEAST_NOISE)
    measured = [row for row in rows if row.status == "measured"]
    objections = {row.name: budget.objection(row) for row in measured}
    legal = sorted((row for row in measured if not objections[row.name]), key=_time)
    if legal:
        as_fast = [row for row in legal if _time(row) <= _time(legal[0]) * (1.0 + noise)]
        # Of those as fast as the fastest, within the noise, the one with gradients nearest to float32's.
        first = min(as_fast, key=lambda row: (row.gradient_error or 0.0, _time(row)))
        legal = [first, *(row for row in legal if row is not first)]
    ordered = [dataclasses.replace(row, rank=place) for place, row in enumerate(legal, 1)]
    ordered += [
        dataclasses.replace(row, note=objections[row.name])
        for row in sorted((row for row in measured if objections[row.name]), key=_time)
    ]
    ordered += sorted((row for row in rows if row.status == "rehearsed"), key=lambda row: row.gradient_error or 0.0)
    ordered += [row for row in rows if row.status in ("refused", "left out")]
    best = ordered[0].name if legal else None
    return best, tuple(ordered), tuple(_reasons(best, ordered, noise))


def _reasons(best: str | None, rows: Sequence[Row], noise: float) -> list[str]:
    by_name = {row.name: row for row in rows}
    if best is None:
        said = ["Nothing that was measured is within the bounds of the budget."]
    elif best == "fp32":
        said = ["Take fp32: no lower precision that was measured and is within the bounds is faster than it here."]
    else:
        row = by_name[best]
        gain = f"{row.ratio:.2f} of float32's time" if row.ratio is not None else ""
        error = f", gradient error {row.gradient_error:.2g}" if row.gradient_error is not None else ""
        said = [f"Take {best}: {gain}{error}."]
    slow: dict[str, list[Row]] = {}  # by why
    equal = []
    for row in rows:
        if row.status != "measured" or row.name == "fp32" or row.ratio is None:
            continue
        if row.ratio > 1.0 + noise:
            lacks = row.product is not None and row.product >= _EMULATED
            slow.setdefault(
                f", and a product in its format {row.product:.1f} times as long: this processor does not have it"
                if lacks
                else "",
                [],
            ).append(row)
        elif row.ratio >= 1.0 - noise:
            equal.append(row)
    for why, those in slow.items():
        names, times = listed([row.name for row in those]), sorted(row.ratio or 0.0 for row in those)
        span = f"{times[0]:.2f}" if len(those) == 1 else f"{times[0]:.2f} to {times[-1]:.2f}"
        verb = "is" if len(those) == 1 else "are"
        said.append(f"{names} {verb} not worth it here for speed: a step takes {span} times as long as in fp32{why}.")
    if equal:
        names = listed([row.name for row in equal])
        ratios = ", ".join(f"{row.ratio:.2f}" for row in equal)
        said.append(
            f"{names} {'is' if len(equal) == 1 else 'are'} no faster than fp32 here: {ratios} of its time, within the noise."
        )
    said += [f"{row.name} would overflow: {row.note}." for row in rows if row.status == "rehearsed" and not row.finite]
    worst = by_name[best].layers if best is not None else ()
    if worst and worst[0].relative > 0:
        shown = ", ".join(f"{layer.name} ({layer.relative:.2g})" for layer in worst[:_SHOWN_LAYERS])
        said.append(f"Layers with the largest gradient error in {best}: {shown}.")
    left = [row.name for row in rows if row.status == "left out"]
    if left:
        said.append(f"Not measured, because the budget of time was used up: {', '.join(left)}.")
    said.append(f"Two equal float32 models differed by {noise:.1%} in time; less than that counts as equal.")
    return said


_HEADING = ("", "precision", "step", "x fp32", "peak", "loss err", "grad err", "cosine", "worst layer; notes")
_LEGEND = (
    "step: median time of a training step",
    "x fp32: its time over that of a float32 step timed in turns with it; below 1.00 is faster",
    "peak: memory at the highest point of a step",
    "loss err, grad err, cosine: of loss and gradients against float32's",
    "worst layer: the one with the gradient furthest off, and by how much",
)
IN_FLOAT32 = "in float32"
_WIDENED = (
    "in float32: this CPU has no units for such products of halves, and half_products='auto' takes those of float32"
)
_REHEARSED = "rehearsed: this device lacks the format; its errors are real, its time and memory say nothing"
_PAGE = "more: docs/guides/choose.md"


def _cells(row: Row) -> tuple[str, ...]:
    worst = next((layer for layer in row.layers if layer.relative > 0), None)
    notes = [] if worst is None else [f"{worst.name} {worst.relative:.1e}"]
    notes += [] if row.status == "measured" else [row.status]
    notes += [f"{row.skipped} steps skipped"] if row.skipped else []
    notes += [row.note] if row.note else []
    return (
        "" if row.rank is None else str(row.rank),
        row.name,
        "" if row.seconds is None else f"{row.seconds * 1e3:.3g} ms",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.peak is None else f"{row.peak / 2**20:.1f} MiB",
        "" if row.loss_error is None else f"{row.loss_error:.1e}",
        "" if row.gradient_error is None else f"{row.gradient_error:.1e}",
        "" if row.cosine is None else f"{row.cosine:.5f}",
        "; ".join(notes),
    )


def _time(row: Row) -> float:
    return math.inf if row.ratio is None else row.ratio
