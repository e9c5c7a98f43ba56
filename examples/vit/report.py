"""The table and the picture at the end of the example."""

import shutil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
from history import History
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

COLOURS = {"fp32": "#6e7781", "bf16": "#2f6fde", "fp16": "#d9480f", "bf16_naive": "#2b8a3e", "fp16_naive": "#8250df"}
DASHES = ("-", "--", ":", "-.")  # lines that lie on each other stay visible
WINDOW = 25  # steps in the running mean of the loss, at most; of short runs a tenth


def make_console() -> Console:
    """A console as wide as the terminal, or as the variable COLUMNS says; as in a log file 120 columns."""
    return Console(width=shutil.get_terminal_size((120, 24)).columns)


def print_table(histories: list[History], title: str) -> None:
    """One row per run. Loss scale and skipped steps are columns only where there were any."""
    columns = {
        "steps": lambda run: f"{len(run.loss)}",
        "loss": lambda run: f"{run.final_loss:.3f}",
        "accuracy": lambda run: "-" if run.accuracy is None else f"{run.accuracy:.2%}",
        "images/s": lambda run: f"{run.images_per_second:,.0f}",
        "seconds": lambda run: f"{run.seconds:.1f}",
        "peak MiB": lambda run: "-" if run.peak_bytes is None else f"{run.peak_bytes / 2**20:,.0f}",
    }
    if any(run.has_scale for run in histories):
        columns["scale"] = lambda run: f"{run.loss_scale[-1]:g}" if run.has_scale else "-"
    if any(any(run.skipped) for run in histories):
        columns["skips"] = lambda run: f"{sum(run.skipped)}"
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("precision", style="bold")
    for name in columns:
        table.add_column(name, justify="right")
    for run in histories:
        table.add_row(run.precision, *(cell(run) for cell in columns.values()))
    make_console().print(table)


def save_plot(histories: list[History], title: str, path: Path) -> None:
    """Write the picture of the runs as a PNG."""
    figure = draw(histories, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw(histories: list[History], title: str) -> Figure:
    """Losses over the steps; next to them what each run reached and took; below, loss scale and skips where there were any."""
    bars = {
        "accuracy on test images, %": [None if run.accuracy is None else 100 * run.accuracy for run in histories],
        "images a second": [run.images_per_second for run in histories],
        "peak of a step, MiB": [None if run.peak_bytes is None else run.peak_bytes / 2**20 for run in histories],
    }
    bars = {name: values for name, values in bars.items() if None not in values}
    below = ["loss scale"] if any(run.has_scale for run in histories) else []
    below += ["skipped steps"] if any(any(run.skipped) for run in histories) else []
    figure = plt.figure(figsize=(10, 4.2 + 1.3 * len(below)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    grid = figure.add_gridspec(1 + len(below), 2, width_ratios=(2.4, 1), height_ratios=(3, *([1] * len(below))))
    loss = figure.add_subplot(grid[0, 0])
    side = grid[:, 1].subgridspec(len(bars), 1)
    for row, (name, values) in enumerate(bars.items()):
        _bars(figure.add_subplot(side[row]), name, values, histories)
    longest = max(len(run.loss) for run in histories)
    window = min(WINDOW, max(1, longest // 10))
    for index, run in enumerate(histories):
        steps = range(1, len(run.loss) + 1)
        loss.plot(steps, run.loss, color=_colour(run, index), alpha=0.3, linewidth=0.7)
        loss.plot(steps, _running_mean(run.loss, window), label=run.precision, linewidth=1.6, **_style(run, index))
    loss.set(xlim=(1, max(2, longest)), xlabel="" if below else "step")
    loss.set_title("training loss", loc="left", fontsize=10)
    loss.legend(title=f"mean of {window} steps (single steps pale)", frameon=False)
    panels = [loss]
    for row, name in enumerate(below, start=1):
        axes = figure.add_subplot(grid[row, 0], sharex=loss)
        (_draw_scales if name == "loss scale" else _draw_skips)(axes, histories)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("step" if row == len(below) else "")
        panels.append(axes)
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _bars(axes: Axes, name: str, values: list[float], histories: list[History]) -> None:
    """One bar for each run, with its number; of one run the number alone."""
    axes.set_title(name, loc="left", fontsize=10)
    if len(values) == 1:
        axes.text(0, 0.5, f"{values[0]:,.1f}" if values[0] < 100 else f"{values[0]:,.0f}", va="center", fontsize=24)
        axes.axis("off")
        return
    axes.barh(
        range(len(values)), values, height=0.6, color=[_colour(run, index) for index, run in enumerate(histories)]
    )
    for row, value in enumerate(values):
        axes.text(value, row, f" {value:,.1f}" if value < 100 else f" {value:,.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(values)), [run.precision for run in histories])
    axes.set(xlim=(0, 1.22 * max(values)), ylim=(len(values) - 0.4, -0.6), xticks=[])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _draw_scales(axes: Axes, histories: list[History]) -> None:
    for index, run in enumerate(histories):
        if run.has_scale:
            steps = range(1, len(run.loss_scale) + 1)
            axes.plot(steps, run.loss_scale, linewidth=1.6, drawstyle="steps-mid", **_style(run, index))
    axes.set_yscale("log", base=2)
    scales = [scale for run in histories if run.has_scale for scale in run.loss_scale]
    axes.set_ylim(min(scales) / 2, max(scales) * 2)


def _draw_skips(axes: Axes, histories: list[History]) -> None:
    """So far, at each step."""
    for index, run in enumerate(histories):
        if not any(run.skipped):
            continue
        steps = range(1, len(run.skipped) + 1)
        axes.plot(steps, _running_sum(run.skipped), linewidth=1.6, drawstyle="steps-post", **_style(run, index))
    most = max(sum(run.skipped) for run in histories)
    axes.set_ylim(-0.05 * most, 1.15 * most)
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)


def _colour(history: History, index: int) -> str:
    return COLOURS.get(history.precision, f"C{index}")


def _style(history: History, index: int) -> dict[str, str]:
    return {"color": _colour(history, index), "linestyle": DASHES[index % len(DASHES)]}


def _running_mean(values: list[float], window: int) -> list[float]:
    means = []
    for step in range(len(values)):
        near = values[max(0, step - window // 2) : step + window // 2 + 1]  # centred, so that it does not lag
        means.append(sum(near) / len(near))
    return means


def _running_sum(flags: list[bool]) -> list[int]:
    return [sum(flags[:end]) for end in range(1, len(flags) + 1)]
