"""Losses with gradients sent in four ways between ranks, and how far apart they are, from communication.json.

for n in 2 4; do booster run --nproc_per_node $n benchmarks/figures/communication_run.py; done     # trains, and writes it
python benchmarks/figures/communication.py
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from style import Theme, draw, running_mean

RUN = json.loads(Path(__file__).with_name("communication.json").read_text())
NAMES = ("float32", "bfloat16", "float8", "float8, error feedback")
WIDTHS = (6.5, 4.4, 2.6, 1.0)  # lines that lie on one another stay visible


def communication(theme: Theme) -> Figure:
    """On the left the losses on the most ranks; on the right, for each number of them, how far each is from that of float32."""
    ranks = sorted(RUN["ranks"], key=int)
    colours = (theme.grey, theme.orange, theme.blue, theme.green)
    mosaic = ";".join(f"L{number}" for number in ranks)
    figure, panels = plt.subplot_mosaic(mosaic, figsize=(9, 4), width_ratios=(1, 1), layout="constrained")
    for (name, run), colour, width in zip(_runs(ranks[-1]), colours, WIDTHS, strict=True):
        steps = range(1, len(run["loss"]) + 1)
        label = f"{name}: {run['held_out']:.3f}"
        panels["L"].plot(steps, running_mean(run["loss"]), color=colour, linewidth=width, label=label)
    panels["L"].set_title(f"training loss on {ranks[-1]} ranks", loc="left", fontsize=10)
    panels["L"].legend(
        title="gradients sent in: loss of held-out text", frameon=False, fontsize=9, title_fontsize=9, alignment="left"
    )
    for number in ranks:
        plain = RUN["ranks"][number]["float32"]["loss"]
        for (name, run), colour in zip(_runs(number), colours, strict=True):
            if name != "float32":
                apart = [loss - other for loss, other in zip(run["loss"], plain, strict=True)]
                panels[number].plot(steps, apart, color=colour, linewidth=1.0)
        panels[number].axhline(0, color=theme.grey, linewidth=0.8)
        panels[number].set_title(f"loss less that of float32 in the same step, {number} ranks", loc="left", fontsize=10)
    for axes in panels.values():
        axes.set(xlabel="step", xlim=(1, len(steps)))
        axes.grid(axis="y", linewidth=0.6)
        axes.tick_params(length=0)
    return figure


def _runs(number: str) -> list[tuple[str, dict]]:
    return [(name, RUN["ranks"][number][name]) for name in NAMES]


if __name__ == "__main__":
    draw("communication", communication)
