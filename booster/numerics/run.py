"""A record read back: the files of all ranks as one run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from booster import arguments
from booster.numerics.lines import Torn, rank_files, read_lines
from booster.numerics.underflow import Underflow, merge

__all__ = ["Run", "Step", "read_run"]

_MOST_RANKS = 16  # that are named


@dataclass(frozen=True)
class Step:
    """One optimizer step, of all ranks together.

    loss: the mean over the ranks that computed one; None where none did. grad_norm, clip: None where the step did not look at
    its gradients, or nothing was clipped. culprit: parameters whose gradients were not finite, of all ranks.
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


@dataclass
class Run:
    """What `read_run` found. steps, samples: by optimizer, in order. about: of the last process that wrote. notes: what is not
    as it should be, such as a line that a kill cut short, as sentences."""

    folder: Path
    about: dict[str, Any]
    steps: dict[str, list[Step]] = field(default_factory=dict)
    samples: dict[str, list[Underflow]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_run(folder: Any) -> Run:
    """Read the record in `folder`, all ranks merged; a step that was made again after a resume counts as made last.

    Files of ranks on several machines are copied into one folder first. Raises FileNotFoundError where there is no record,
    and ValueError for a damaged one; a last line that a kill cut short is left out and noted.
    """
    root = arguments.path("folder", folder)
    files = rank_files(root)
    if not files:
        raise FileNotFoundError(f"there is no record in {root}; Booster.record(folder) writes files named rank-*.jsonl")
    ranks = [_RankFile(path) for path in files]
    about = ranks[0].about
    run = Run(root, about)
    for rank in ranks:
        run.notes += rank.notes
    num_ranks, here = about.get("world_size", 1), {rank.about.get("rank", 0) for rank in ranks}
    missing = list(islice((rank for rank in range(num_ranks) if rank not in here), _MOST_RANKS))
    if missing:
        more = num_ranks - sum(0 <= rank < num_ranks for rank in here) - len(missing)
        others = f" and {more} more" if more else ""
        run.notes.append(f"the files of ranks {missing}{others} are not here; what follows is of the others")
    for name in dict.fromkeys(name for rank in ranks for name in rank.steps):
        lines: dict[int, list[Mapping[str, Any]]] = {}
        for rank in ranks:
            for number, line in rank.steps.get(name, {}).items():
                lines.setdefault(number, []).append(line)
        run.steps[name] = [_merged(number, lines[number]) for number in sorted(lines)]
    parts: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for rank in ranks:
        for key, line in rank.samples.items():
            parts.setdefault(key, []).append(line)
    for key in sorted(parts, key=lambda key: (*key[:3], parts[key][0].get("place", 0))):
        run.samples.setdefault(key[0], []).append(merge(parts[key]))
    return run


class _RankFile:
    """The lines of one rank's file; of steps made twice the later."""

    def __init__(self, path: Path) -> None:
        self.about: dict[str, Any] = {}
        self.steps: dict[str, dict[int, dict[str, Any]]] = {}
        self.samples: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.notes: list[str] = []
        again = processes = 0
        for line in read_lines(path):
            if isinstance(line, Torn):
                self.notes.append(f"line {line.line} of {line.file.name} was cut short, as by a kill; it is left out")
                continue
            if line["kind"] == "run":
                self.about, processes = line, processes + 1
            elif line["kind"] == "step":
                of = self.steps.setdefault(line["optimizer"], {})
                again += line["step"] in of
                of[line["step"]] = line
            elif line["kind"] == "sample":
                self.samples[line["optimizer"], line["step"], line["of"], line["name"]] = line
        if not self.about:
            raise ValueError(f"{path} does not begin with the line of a run, so it is no file of a record")
        if processes > 1 or again:
            twice = f", and {again} steps were made again; the later ones count" if again else ""
            self.notes.append(f"{path.name} was written by {processes} processes in turn{twice}")


def _merged(number: int, lines: list[Mapping[str, Any]]) -> Step:
    first = lines[0]
    losses = [line["loss"] for line in lines if "loss" in line]
    return Step(
        number=number,
        applied=all(line["applied"] for line in lines),
        time=first["time"],
        loss=math.fsum(loss / len(losses) for loss in losses)
        if losses and all(map(math.isfinite, losses))
        else _odd(losses),
        loss_scale=first.get("loss_scale", 1.0),
        grad_norm=_first(line.get("grad_norm") for line in lines),
        clip=_first(line.get("clip") for line in lines),
        lr=tuple(rate for rate in first.get("lr") or () if rate is not None),
        reason=_first(line.get("reason") for line in lines),
        culprit=tuple(dict.fromkeys(name for line in lines for name in line.get("culprit", ()))),
    )


def _odd(losses: list[float]) -> float | None:
    """The mean of `losses`, of which some are not finite."""
    return sum(losses) / len(losses) if losses else None


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)
