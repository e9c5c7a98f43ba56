"""Runs with a planted flaw: last losses in bfloat16, in nvfp4, by an autopilot, by a schedule and by both, from planted.json.

python -m benchmarks.planted --out benchmarks/figures/planted.json   # trains
python benchmarks/figures/planted.py
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from style import Theme, draw

ROWS = json.loads(Path(__file__).with_name("planted.json").read_text())


def planted(theme: Theme) -> Figure:
    """A dot a seed, one column a way of running, one panel a flaw."""
    models = list(dict.fromkeys(row["model"] for row in ROWS))
    flaws = list(dict.fromkeys(row["flaw"] for row in ROWS))
    ways = list(dict.fromkeys(row["way"] for row in ROWS))
    colours = dict(zip(ways, (theme.grey, theme.orange, theme.blue, theme.green, theme.purple), strict=True))
    figure, grid = plt.subplots(
        len(models), len(flaws), figsize=(9, 4), sharex=True, sharey="row", layout="constrained", squeeze=False
    )
    for model, line in zip(models, grid, strict=True):
        for flaw, axes in zip(flaws, line, strict=True):
            for place, way in enumerate(ways):
                own = [row for row in ROWS if (row["model"], row["flaw"], row["way"]) == (model, flaw, way)]
                axes.plot([place] * len(own), [row["loss"] for row in own], "o", color=colours[way], markersize=5)
            axes.set_title(f"{model}:\n{flaw}", loc="left", fontsize=8)
            axes.set_visible(any((row["model"], row["flaw"]) == (model, flaw) for row in ROWS))
            axes.set_xticks(range(len(ways)), ways, rotation=40, fontsize=8)
            axes.set_xlim(-0.6, len(ways) - 0.4)
            axes.grid(axis="y", linewidth=0.6)
            axes.tick_params(length=0)
    return figure


if __name__ == "__main__":
    draw("planted", planted)
