"""Estimates as a table in a terminal, and as stacked bars in a picture."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from booster.common.arguments import print_table
from booster.common.untrusted_files import replace_regular
from booster.memory.estimate import Estimate

PARTS = ("weights", "masters", "gradients", "states", "inputs", "communication")
_COLUMNS = (*PARTS, "held", "activations", "peak", "host")
_MEANINGS = {
    "masters": "float32 copies of half weights, or what is kept of them",
    "states": "of the optimizer",
    "communication": "buffers for gradients on their way between ranks",
    "held": "what is there between steps: the sum of the columns before it",
    "activations": "kept from forward for backward",
    "peak": "the highest point of a step; it has to fit",
    "host": "in the host's memory, in none of the others",
}
_MIB = 2**20
_FILE_WIDTH = 200  # columns, where no terminal sets them
# Of the documentation's figures: what a precision changes is in strong colours, the rest in quiet ones.
_COLOURS = {
    "weights": "#2f6fde",
    "masters": "#8250df",
    "gradients": "#d9480f",
    "states": "#2b8a3e",
    "inputs": "#6e7781",
    "communication": "#9a6700",
    "temporaries": "#d8dee4",
}
_INK, _QUIET = "#1f2328", "#656d76"
_WITH_NUMBER = 0.05  # of the axis, from which on a part has room for its number


def show(
    estimates: Sequence[Estimate],
    *,
    limit: int | None = None,
    batches: Mapping[str, int] | None = None,
    batch_size: int | None = None,
    console: Any = None,
) -> None:
    """Print `estimates` in MiB, one row for each; columns that are zero everywhere are left out, and in a narrow terminal
    the parts of what is held. Memory of the host is in none of the others.

    limit: bytes; then which fit is a column. None has no such column.
    batches: the largest batch of each, by its name; None likewise.
    batch_size: samples in the batch they are of, for the title; None says nothing of it.
    console: a `rich.console.Console`; None makes one for stdout.
    Raises ImportError, with the line that installs it, where rich is missing.
    """
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError as error:
        raise ImportError("the table is drawn by rich: pip install rich; or use --json, which needs nothing") from error
    # rich takes 80 columns for a file or pipe, which would cut the names of precisions.
    console = console or Console(width=shutil.get_terminal_size((_FILE_WIDTH, 24)).columns)
    columns = [name for name in _COLUMNS if any(getattr(each, name) for each in estimates)]
    wide = max(len(each.name) for each in estimates) + sum(max(len(name), 9) + 2 for name in columns) + 22
    narrow = wide > console.width
    if narrow:
        columns = [name for name in columns if name not in PARTS]
    notes = [f"{name}: {what}" for name, what in _MEANINGS.items() if name in columns]
    notes += [f"in a terminal of {wide} columns, and with --json, also what is held"] if narrow else []
    caption = "\n".join([*notes, "all of it: docs/memory.md, Before the first step"])
    title = "MiB on one rank" + ("" if batch_size is None else f", for a batch of {batch_size}")
    table = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", style="bold" if name in ("held", "peak") else "")
    if limit is not None:
        table.add_column("fits")
    if batches is not None:
        table.add_column("largest batch", justify="right")
    for each in estimates:
        cells = [f"{getattr(each, name) / _MIB:,.1f}" for name in columns]
        if limit is not None:
            cells.append("[green]yes[/green]" if each.peak <= limit else "[red]no[/red]")
        if batches is not None:
            cells.append(str(batches[each.name]))
        table.add_row(escape(each.name), *cells)
    print_table(console, table)


def picture(estimates: Sequence[Estimate], path: str | Path, *, limit: int | None = None) -> None:
    """Write `estimates` as stacked bars: what is held, and above it what the peak adds.

    path: the file; its suffix says the format.
    limit: bytes, drawn as a line; None draws none.

    Raises OSError where a link or what is no file has the name, and ImportError, with the line that installs it, where
    matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(9, 1.4 + 0.36 * len(estimates)), layout="constrained")
    # Without pyplot, which would choose a window system and keep the figure.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels = [each.name for each in estimates]
    left = [0.0] * len(estimates)
    most = 1.1 * max(each.peak if limit is None else max(each.peak, limit) for each in estimates) / _MIB
    for part in (*PARTS, "temporaries"):
        sizes = [getattr(each, part) / _MIB for each in estimates]
        if any(sizes):
            name = "activations and temporaries" if part == "temporaries" else part
            bars = axes.barh(labels, sizes, left=left, label=name, color=_COLOURS[part], height=0.66)
            numbers = [_number(size) if size > _WITH_NUMBER * most else "" for size in sizes]
            ink = _INK if part == "temporaries" else "white"
            axes.bar_label(bars, numbers, label_type="center", color=ink, fontsize=8)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for row, peak in enumerate(left):
        axes.text(peak, row, f" {_number(peak)}", va="center", fontsize=9, weight="bold", color=_INK)
    if limit is not None:
        axes.axvline(limit / _MIB, color=_INK, linestyle="--", linewidth=1)
        axes.annotate(
            f"memory {_number(limit / _MIB)}",
            (limit / _MIB, 1),
            (3, 2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=8,
            color=_INK,
        )
    axes.set_xlim(0, most)
    axes.invert_yaxis()
    axes.set_xlabel("MiB on one rank, at the peak of a step", color=_QUIET)
    axes.tick_params(colors=_QUIET, labelsize=9)
    axes.tick_params(axis="y", colors=_INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#d8dee4")
    figure.legend(fontsize=8, loc="outside lower left", ncols=4, frameon=False, labelcolor=_INK)
    # Drawn whole first: an error of matplotlib leaves no half file.
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=Path(path).suffix[1:] or None)
    replace_regular(Path(path), drawn.getvalue())


def _number(size: float) -> str:
    return f"{size:,.0f}" if size >= 100 else f"{size:.1f}"
