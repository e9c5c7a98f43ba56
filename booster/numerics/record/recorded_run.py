"""A record read back: the files of all ranks as one `Run`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from booster.common import arguments
from booster.common.untrusted_files import printable
from booster.numerics.record.record_file import CutLine, read_lines
from booster.numerics.record.samples import Underflow, merge

_MOST_RANKS = 16  # that are named
_MOST_OPTIMIZERS = 1000


@dataclass(frozen=True)
class Step:
    """One optimizer step, of all ranks together.

    Attributes:
        loss: the mean over the ranks that computed one; None where none did.
        grad_norm, clip: None where the step did not look at its gradients, or nothing was clipped.
        culprit: parameters with gradients that were not finite, of all ranks.
    """

    number: int
    applied: bool
    time: float
    loss: float | None
    loss_scale: float
    grad_norm: float | None
    clip: float | None
    lr: tuple[float, ...]
    reason: str | None
    culprit: tuple[str, ...]


class PrecisionSwitch(NamedTuple):
    """After the step `step` the run went on in another precision. why: by what, in words."""

    step: int
    precision: str
    why: str


class AutopilotChange(NamedTuple):
    """After the step `step` an autopilot made a product of a layer of the `model`-th boosted model wide, or low again.

    Attributes:
        noise: over signal.
        ahead: what the noise was expected to be at the next look.
    """

    step: int
    name: str
    role: str
    wide: bool
    noise: float
    ahead: float
    model: int


class AutopilotLook(NamedTuple):
    """An autopilot measured the step `step` of the `model`-th boosted model, at so many layers.

    Attributes:
        operations: as a share of those of all products from look to look.
        wide: which share of products is, from then on.
        again: between two looks, at what the last one found to grow.
    """

    step: int
    layers: int
    operations: float
    wide: float
    model: int
    again: bool


_EVENTS: dict[str, Any] = {"switch": PrecisionSwitch, "pilot": AutopilotChange, "look": AutopilotLook}
"""By kind of line, what is of no optimizer."""


@dataclass(frozen=True)
class RoundedOperand:
    """How one operand of a low-precision layer was rounded in one step: shares of numbers; see `record.layer_counts`."""

    step: int
    name: str
    product: str
    operand: str
    format: str
    underflow: float
    saturated: float
    top: float


@dataclass
class Run:
    """What `read_run` found.

    folder: of the record.
    steps, samples: by optimizer, in order.
    about: of the last process that wrote.
    notes: what is not as it should be, such as a line that a kill cut short, as sentences.
    switches: to other precisions, in order.
    rounded: of low-precision layers, all ranks together.
    piloted: products that an `Autopilot` made wide, or low again, in order.
    looks: what its looks took, in order.
    """

    folder: Path
    about: dict[str, Any]
    steps: dict[str, list[Step]] = field(default_factory=dict)
    samples: dict[str, list[Underflow]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    switches: list[PrecisionSwitch] = field(default_factory=list)
    rounded: list[RoundedOperand] = field(default_factory=list)
    piloted: list[AutopilotChange] = field(default_factory=list)
    looks: list[AutopilotLook] = field(default_factory=list)


def read_run(folder: Any) -> Run:
    """Read the record in `folder`, all ranks merged; a step that was made again after a resume counts as made last, and later
    ones that it went back behind, and did not make again, are left out.

    a last line that a kill cut short is left out and noted.
    """
    root = arguments.path("folder", folder)
    files = sorted(root.glob("rank-*.jsonl"))
    if not files:
        # Raises FileNotFoundError where there is no record, and ValueError for a damaged one.
        raise FileNotFoundError(f"there is no record in {root}; Booster.record(folder) writes files named rank-*.jsonl")
    # Files of ranks on several machines are copied into one folder first.
    ranks = [_RankFile(path) for path in files]
    first, about = ranks[0], ranks[0].about
    for rank in ranks[1:]:
        rank.drop_lost_ranks(first.spans)
    run = Run(root, about)
    run.piloted, run.looks, run.switches = map(first.still_valid, ("pilot", "look", "switch"))
    for rank in ranks:
        run.notes += rank.notes()
    num_ranks, present = about.get("world_size", 1), {rank.about.get("rank", 0) for rank in ranks}
    missing = list(islice((rank for rank in range(num_ranks) if rank not in present), _MOST_RANKS))
    if missing:
        more = num_ranks - sum(0 <= rank < num_ranks for rank in present) - len(missing)
        others = f" and {more} more" if more else ""
        run.notes.append(f"the files of ranks {missing}{others} are not here; what follows is of the others")
    for name in dict.fromkeys(name for rank in ranks for name in rank.steps):
        lines = _collected(rank.steps.get(name, {}) for rank in ranks)
        run.steps[name] = [_merged_step(number, lines[number]) for number in sorted(lines)]
    for (_, *place), counts in _collected(rank.rounded for rank in ranks).items():
        total, *shares = map(sum, zip(*counts, strict=True))
        run.rounded.append(RoundedOperand(*place, *(count / max(1, total) for count in shares)))
    run.rounded.sort(key=lambda each: each.step)
    samples = _collected(rank.samples for rank in ranks)
    for key in sorted(samples, key=lambda key: (*key[:3], samples[key][0].get("place", 0))):
        run.samples.setdefault(key[0], []).append(merge(samples[key]))
    return run


def _collected(tables: Iterable[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """Return what any of `tables` has, by key."""
    values: dict[Any, list[Any]] = {}
    for table in tables:
        for key, value in table.items():
            values.setdefault(key, []).append(value)
    return values


class _Span:
    """Lines of one process, from its beginning, or from where it went back to an earlier step.

    Attributes:
        about: the line of the process.
        begins: the step that each optimizer began with.
        is_process: it is the first of the process.
    """

    def __init__(self, about: dict[str, Any], *, is_process: bool = True) -> None:
        self.about, self.is_process = about, is_process
        self.begins: dict[str, int] = {}

    def keeps(self, step: int) -> bool:
        """Return whether what an earlier span says of `step` still holds."""
        begin = max(self.begins.values(), default=math.inf)
        # A process that goes back may write of its first step before the line of that step.
        return step < begin or (step == begin and not self.is_process)


class _RankFile:
    """The lines of one rank's file; of steps made twice the later, without those that a resume went back behind."""

    def __init__(self, path: Path) -> None:
        self.spans: list[_Span] = []
        self.steps: dict[str, dict[int, dict[str, Any]]] = {}
        self.samples: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.rounded: dict[tuple[Any, ...], list[int]] = {}
        # By kind, step and what else tells two of a kind apart; each with the place of its span.
        self._events: dict[tuple[Any, ...], tuple[int, Any]] = {}
        self._name = printable(path.name)
        self._cut: list[str] = []
        self._last: dict[str, int] = {}
        self._gone: dict[str, set[int]] = {}
        for line in read_lines(path):
            if isinstance(line, CutLine):
                self._cut.append(f"line {line.number} of {self._name} was cut short, as by a kill; it is left out")
                continue
            if line["kind"] == "run" or not self.spans:
                self.spans.append(_Span(line if line["kind"] == "run" else {}))
            place = len(self.spans) - 1
            if line["kind"] == "step":
                # Add a step's line; what was written before of it and of later ones is of no run any more
                name, number = line["optimizer"], line["step"]
                if number <= self._last.get(name, -1):
                    self._drop(name, {each for each in self.steps[name] if each >= number})
                    if name in self.spans[-1].begins:
                        self.spans.append(_Span(self.spans[-1].about, is_process=False))
                self.spans[-1].begins.setdefault(name, number)
                self._last[name] = number
                self.steps.setdefault(name, {})[number] = line
                if len(self.steps) > _MOST_OPTIMIZERS:
                    raise ValueError(f"{path} has steps of more than {_MOST_OPTIMIZERS} optimizers, which no run has")
            elif line["kind"] in _EVENTS:
                event = _EVENTS[line["kind"]]
                key = tuple(line.get(name) for name in ("kind", "step", "model", "name", "role"))
                self._events[key] = place, event(**{name: line.get(name, "") for name in event._fields})
            elif line["kind"] == "low":
                key = tuple(line[name] for name in ("optimizer", "step", "name", "product", "operand", "format"))
                self.rounded[key] = [line[name] for name in ("total", "underflow", "saturated", "top")]
            elif line["kind"] == "sample":
                self.samples[line["optimizer"], line["step"], line["of"], line["name"]] = line
        if not any(span.about for span in self.spans):
            raise ValueError(f"{path} does not begin with the line of a run, so it is no file of a record")

    def _drop(self, optimizer: str, numbers: set[int]) -> None:
        self._gone.setdefault(optimizer, set()).update(numbers)
        for number in numbers:
            del self.steps[optimizer][number]
        for table in (self.samples, self.rounded):
            for key in [key for key in table if key[0] == optimizer and key[1] in numbers]:
                del table[key]

    @property
    def about(self) -> dict[str, Any]:
        """The line of the last process that wrote."""
        return self.spans[-1].about

    def drop_lost_ranks(self, spans: Sequence[_Span]) -> None:
        """Leave out what this rank wrote of steps that fewer ranks, without it, have made again since."""
        for later in spans:
            since = later.about.get("time", -math.inf)
            # This rank took part in the later process too, and its own file says what was made again.
            if self.about.get("rank", 0) < later.about.get("world_size", math.inf):
                continue
            for optimizer, begin in later.begins.items():
                own = self.steps.get(optimizer, {})
                gone = {number for number, line in own.items() if number >= begin and line["time"] < since}
                self._drop(optimizer, gone)

    def still_valid(self, kind: str) -> list[Any]:
        """Return the events of `kind` that no later span went back behind, by step."""
        own = [placed for key, placed in self._events.items() if key[0] == kind]
        valid = [event for place, event in own if all(later.keeps(event.step) for later in self.spans[place + 1 :])]
        return sorted(valid, key=lambda event: event.step)

    def notes(self) -> list[str]:
        """What is not as it should be, as sentences."""
        processes = sum(span.is_process for span in self.spans)
        gone = [(name, number) for name, numbers in self._gone.items() for number in numbers]
        if processes < 2 and not gone:
            return self._cut
        lost = [number for name, number in gone if number not in self.steps.get(name, {})]
        by = f"{processes} processes in turn" if processes > 1 else "a process that went back"
        said = f"{self._name} was written by {by}"
        if again := len(gone) - len(lost):
            said += f", and {again} steps were made again; the later ones count"
        if lost:
            said += (
                f"; what it has of steps {min(lost)} to {max(lost)} is left out, since the run went back behind them"
            )
        return [*self._cut, said]


def _merged_step(number: int, lines: list[Mapping[str, Any]]) -> Step:
    first = lines[0]
    losses = [line["loss"] for line in lines if "loss" in line]
    add = math.fsum if all(map(math.isfinite, losses)) else sum  # fsum raises for infinities of both signs
    return Step(
        number=number,
        applied=all(line["applied"] for line in lines),
        time=first["time"],
        loss=add(loss / len(losses) for loss in losses) if losses else None,
        loss_scale=first.get("loss_scale", 1.0),
        grad_norm=_first(lines, "grad_norm"),
        clip=_first(lines, "clip"),
        lr=tuple(rate for rate in first.get("lr") or () if rate is not None),
        reason=_first(lines, "reason"),
        culprit=tuple(dict.fromkeys(name for line in lines for name in line.get("culprit", ()))),
    )


def _first(lines: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((line[key] for line in lines if line.get(key) is not None), None)
