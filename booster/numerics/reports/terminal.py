"""Reports for a terminal, drawn by rich: the summary of a record, and gradients as they are or as a record last saw them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from booster.common import arguments
from booster.common.arguments import columns, print_table, shortened
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.numerics.record.recorded_run import Run, Step, read_run
from booster.numerics.record.samples import Sample, Underflow, best_scale, merge
from booster.numerics.reports.page import exponent_maps
from booster.numerics.reports.pictures import standalone
from booster.numerics.reports.summary import STILL, WORTH_SAYING, OptimizerSummary, TensorSummary, summarise

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
_BEFORE_BARS = 61  # columns of a terminal, at most
_MOST_ROWS = 8
_LEAST_NAME = 12  # letters; narrower terminals break cells
_NEAR = 2.0  # bits below overflow, of an activation, which no loss scale moves


def show(run: Run, console: Any = None) -> None:
    """Print what `run` says. console: a `rich.console.Console`; None makes one for stdout.

    Raises ImportError, with the line that installs it, where rich is missing.
    """
    try:
        from rich.console import Console
        from rich.markup import escape
    except ImportError as error:
        raise ImportError(
            "the summary is drawn by rich: pip install rich; or use --json, which needs nothing, or --html, which needs "
            "matplotlib"
        ) from error
    console = console or Console()
    summary = summarise(run)
    console.print(f"[bold]{escape(summary.folder)}[/bold]")
    console.print(escape(summary.heading), style="dim", highlight=False)
    for note in summary.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False)
    for switch in summary.switches:
        console.print(
            f"after step {switch['step']}: {escape(switch['precision'])}, by {escape(switch['why'])}", highlight=False
        )
    for sentence in summary.autopilot_sentences():
        console.print(escape(sentence), highlight=False)
    for each in summary.optimizers:
        _show_optimizer(console, each, run.steps[each.name], several=len(summary.optimizers) > 1)
    if summary.rounded:
        _show_rounded(console, summary.rounded)
    if not summary.optimizers:
        console.print("no optimizer step was recorded")


def _show_rounded(console: Any, rows: Sequence[dict[str, Any]]) -> None:
    """What low precisions do to the operands of layers, those with most in the top bin of their blocks first."""
    console.print()
    headings = ("low precision", "product", "operand", "format", "top bin", "underflow", "saturated")
    cells = [
        (row["name"], row["product"], row["operand"], row["format"])
        + tuple(f"{row[share]:.2%}" for share in ("top", "underflow", "saturated"))
        for row in rows
    ]
    _print_table(console, headings, cells, texts=4)


def _show_optimizer(console: Any, summary: OptimizerSummary, steps: Sequence[Step], *, several: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    pace = f", {summary.pace} a step" if summary.pace else ""
    skipped = f", {summary.num_skipped} skipped" if summary.num_skipped else ""
    title = f"optimizer {escape(summary.name)}: " if several else ""
    console.print()
    console.print(
        f"{title}steps {summary.first_step} to {summary.last_step}{skipped}{pace}", style="bold", highlight=False
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "first", "last", "smallest", "largest", "over time"):
        table.add_column(heading, justify="left" if heading in ("", "over time") else "right")
    rows: list[tuple[str, Any, list[float | None], bool]] = [
        ("loss", summary.loss, [step.loss for step in steps], False),
        ("gradient norm", summary.grad_norm, [step.grad_norm for step in steps], True),
        ("loss scale", summary.scale if summary.is_scaled else None, [step.loss_scale for step in steps], True),
    ]
    for name, spread, values, logarithmic in rows:
        numbers = [value for value in values if value is not None]
        if spread is not None:
            shown = [f"{value:.4g}" for value in spread]
        elif numbers and not any(map(math.isfinite, numbers)):
            shown = [f"{numbers[0]:.4g}", f"{numbers[-1]:.4g}", "", ""]
        else:
            continue
        bars = sparkline(values, logarithmic=logarithmic, width=max(8, min(_WIDTH, console.width - _BEFORE_BARS)))
        table.add_row(name, *shown, bars)
    if table.row_count:
        print_table(console, table)
    if summary.clipped:
        console.print(f"clipped in {summary.clipped:.1%} of the steps", highlight=False)
    for sentence in summary.skips():
        console.print(escape(sentence), style="red", highlight=False)
    if summary.skips_by_culprit and not summary.none_stands_out:
        _print_table(
            console, ("culprit", "skips"), [(name, f"{count}") for name, count in summary.skips_by_culprit.items()]
        )
    if summary.num_samples:
        _show_tensors(console, summary)


def _show_tensors(console: Any, summary: OptimizerSummary) -> None:
    """What underflows, has little room or does not move, the worst first; a table of tensors without any of it says nothing."""
    console.print()
    if summary.least_headroom is not None:
        room = summary.least_headroom
        of = "1 sample" if summary.num_samples == 1 else f"{summary.num_samples} samples"
        came = f"In {of} gradients came within {room:.1f} bits of overflow" if room > 0 else f"Of {of} some overflowed"
        came += f", and in {summary.num_nonfinite} of them some held an inf or NaN" if summary.num_nonfinite else ""
        console.print(
            f"{came}. Of constant loss scales {summary.best_scale:g} would have lost least to underflow.",
            highlight=False,
        )
    small = sorted(summary.tensors, key=lambda tensor: (-tensor.lost, -tensor.subnormal))
    small = [tensor for tensor in small if max(tensor.lost, tensor.subnormal) >= WORTH_SAYING or _near(tensor)]
    if small:
        headings = ("underflow", "of", "format", "zero", "of it lost", "subnormal", "headroom")
        cells = [
            (tensor.name, tensor.of, tensor.format)
            + tuple(f"{share:.2%}" for share in (tensor.zeros, tensor.lost, tensor.subnormal))
            + ("" if tensor.headroom is None else f"{tensor.headroom:.1f} bits",)
            for tensor in small
        ]
        _print_table(console, headings, cells, texts=3)
    still = sorted((t for t in summary.tensors if (t.still or 0) >= STILL), key=lambda t: -(t.still or 0))
    if still:
        rows = [(tensor.name, tensor.stored or "", f"{tensor.still:.1%}") for tensor in still]
        _print_table(console, ("unchanged", "stored as", "weights that steps did not change"), rows, texts=2)
    if summary.groups:
        of_groups = ("group", "gradient norm", "weight norm", "update norm", "update / weight")
        _print_table(console, of_groups, summary.rows_of_groups())


def _near(tensor: TensorSummary) -> bool:
    return tensor.of == "activation" and tensor.headroom is not None and tensor.headroom < _NEAR


def _print_table(console: Any, headings: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1) -> None:
    """Print the first of `rows`, and how many more there are. Names, in the first column, lose their middle where they must.

    texts: how many columns are texts, which are aligned left.
    """
    from rich.table import Table
    from rich.text import Text

    shown = rows[:_MOST_ROWS]
    others = sum(max(len(row[place]) for row in (headings, *shown)) + 2 for place in range(1, len(headings)))
    room = max(_LEAST_NAME, console.width - others)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < texts else "right")
    for name, *cells in shown:
        table.add_row(Text(shortened(name, room)), *map(Text, cells))
    print_table(console, table)
    if len(rows) > len(shown):
        console.print(f"and {len(rows) - len(shown)} more", style="dim", highlight=False)


def sparkline(values: Sequence[float | None], *, logarithmic: bool = False, width: int = _WIDTH) -> str:
    """Draw `values` as at most `width` bars of eight heights; each is the mean of its steps, `×` where all were inf or NaN."""
    size = max(1, math.ceil(len(values) / width))
    means: list[float | None] = []
    for start in range(0, len(values), size):
        numbers = [value for value in values[start : start + size] if value is not None]
        finite = [value for value in numbers if math.isfinite(value) and (value > 0 or not logarithmic)]
        means.append(sum(finite) / len(finite) if finite else math.nan if numbers else None)
    heights = [math.log(mean) if logarithmic and mean is not None and mean > 0 else mean for mean in means]
    ordered = sorted(height for height in heights if height is not None and math.isfinite(height))
    # A few far outliers, as the loss of a batch that overflowed, would make all others look alike.
    # Values outside the middle 90 % are drawn as the lowest or highest bar.
    low, high = (ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]) if ordered else (0.0, 0.0)
    step = (high - low) / len(_BARS) or 1.0

    def bar(height: float | None) -> str:
        if height is None:
            return " "
        return "×" if math.isnan(height) else _BARS[max(0, min(len(_BARS) - 1, int((height - low) / step)))]

    return "".join(map(bar, heights))


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
