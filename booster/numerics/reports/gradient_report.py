"""Gradients as they are now, or as a record last saw them: a table, and a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from booster.common import arguments
from booster.common.text import columns
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.numerics.record.recorded_run import Run, read_run
from booster.numerics.record.samples import Sample
from booster.numerics.record.underflow import Underflow, best_scale, merge
from booster.numerics.reports.page import exponent_maps
from booster.numerics.reports.pictures import standalone

_COLUMNS = ("name", "format", "zero", "of it lost", "subnormal", "headroom", "still", "stored as")
_PICTURE = 720  # pixels


@dataclass(frozen=True)
class Report:
    """One row for each parameter. `str()` of it is a table; `rows` are `Underflow` objects, with more than it shows."""

    rows: tuple[Underflow, ...]

    @property
    def best_scale(self) -> float | None:
        """The constant loss scale that would lose least here; None where nothing bounds it."""
        return best_scale([row for row in self.rows if row.of != "activation"])

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain containers."""
        return {"best_scale": self.best_scale, "rows": [row.as_dict() for row in self.rows]}

    def plot(self, file: str | os.PathLike[str]) -> None:
        """Write the map of exponents, a row for each parameter, as the SVG picture `file`; of the first format, if several."""
        path = arguments.path("file", file)
        maps = [picture for _, _, picture in exponent_maps(self.rows)]
        if not maps:
            raise ValueError("there is nothing to draw: no gradient has a finite number that is not zero")
        path.write_text(standalone(maps[0](_PICTURE)), encoding="utf-8")

    def __str__(self) -> str:
        table = [_COLUMNS, *map(_cells, self.rows)]
        shown = [place for place in range(len(_COLUMNS)) if any(row[place] for row in table[1:])]
        return columns([[row[place] for place in shown] for row in table])


def report(source: Any, *, format: torch.dtype | None = None) -> Report:
    """Say of each parameter how its gradient is spread, what of it underflowed and how much room there is above.

    source: a boosted optimizer, between backward and step: its gradients on this rank, with no collective. Or a record, by
        its folder or as `read_run` gave it: its last sample, of all ranks, with weights that stand still.
    format: of a boosted optimizer, the dtype in which its backward pass computed; None means float16 under a loss scaler, else
        the parameters'.

    Waits for the device. Cost as of a sample of a record.
    """
    if isinstance(source, OptimizerWrapper):
        given = None if format is None else arguments.floating_dtype("format", format)
        update = update_of(source)
        implied = given or (torch.float16 if update.gradients.scaler.enabled else None)
        sample = Sample(
            update, lambda param: param.dtype if implied is None or param.dtype != torch.float32 else implied
        )
        return Report(tuple([merge([{**line, "optimizer": "0", "step": 0}]) for line in sample.lines(applied=False)]))
    if format is not None:
        raise ValueError("format is for a boosted optimizer; a record knows in which format each gradient was computed")
    if not isinstance(source, (Run, str, os.PathLike)):
        legal = "a boosted optimizer, the folder of a record, or what read_run returned"
        raise TypeError(arguments.refusal("source", source, legal))
    run = source if isinstance(source, Run) else read_run(arguments.path("source", source))
    return Report(tuple(row for rows in run.samples.values() for row in rows if row.step == rows[-1].step))


def _cells(row: Underflow) -> tuple[str, ...]:
    return (
        row.label,
        row.format,
        *(f"{share:.2%}" if share else "" for share in (row.zeros, row.lost, row.subnormal)),
        "" if row.headroom is None else f"{row.headroom:.1f} bits",
        "" if row.still is None else f"{row.still:.1%}",
        "" if row.still is None else row.stored or "",
    )
