"""Four precisions of one model: their losses, and what a step takes of time and memory, from curves.json.

python benchmarks/figures/curves_run.py     # trains, and writes curves.json
python benchmarks/figures/curves.py
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from style import Theme, draw, running_mean

RUN = json.loads(Path(__file__).with_name("curves.json").read_text())
WIDTHS = (6.5, 4.4, 2.6, 1.0)  # lines that lie on one another stay visible


def curves(theme: Theme) -> Figure:
    """Losses on the left; on the right a bar for each precision, time above and memory below."""
    runs = RUN["runs"]
    colours = (theme.grey, theme.orange, theme.blue, theme.green)
    figure, panels = plt.subplot_mosaic("LT;LM", figsize=(9, 3.5), width_ratios=(1.25, 1), layout="constrained")
    loss = panels["L"]
    for (name, run), colour, width in zip(runs.items(), colours, WIDTHS, strict=True):
        steps = range(1, len(run["loss"]) + 1)
        loss.plot(
            steps,
            running_mean(run["loss"]),
            color=colour,
            linewidth=width,
            label=f"{name}: {run['accuracy']:.1%}",
        )
    loss.set(xlabel="step", xlim=(1, len(steps)), ylim=(0, None))
    loss.set_title("training loss", loc="left", fontsize=10)
    loss.legend(title="accuracy on test images", frameon=False, fontsize=9, title_fontsize=9, alignment="left")
    loss.grid(axis="y", linewidth=0.6)
    loss.tick_params(length=0)
    _bars(panels["T"], "ms of a step", [run["step_ms"] for run in runs.values()], list(runs), colours, theme)
    peaks = [run["memory"]["peak"] / 2**20 for run in runs.values()]
    _bars(panels["M"], "MiB at the peak of a step", peaks, list(runs), colours, theme)
    return figure


def _bars(axes, title: str, values: list[float], names: list[str], colours, theme: Theme) -> None:
    axes.barh(range(len(values)), values, height=0.62, color=colours)
    for row, value in enumerate(values):
        axes.text(value, row, f" {value:.0f}", va="center", fontsize=9)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_yticks(range(len(names)), names, family="monospace", fontsize=9, color=theme.ink)
    axes.set(ylim=(len(values) - 0.5, -0.5), xlim=(0, max(values) * 1.14))
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


if __name__ == "__main__":
    draw("curves", curves)
