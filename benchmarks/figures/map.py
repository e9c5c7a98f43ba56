"""Precision by parallelism: the cells that the tests trained, and those that they interrupted and resumed.

python -m pytest tests/distributed/test_matrix.py --matrix-out benchmarks/results/matrix.json
python -m pytest tests/distributed/test_checkpoint_ranks.py -k interrupted --resume-out benchmarks/results/resume.json
python benchmarks/figures/map.py
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from style import Theme, draw

RESULTS = Path(__file__).resolve().parents[1] / "results"


def cells(theme: Theme) -> Figure:
    """A filled cell trained like one process; one that was also interrupted and resumed to the bit has a ring."""
    passed = [tuple(cell) for cell in json.loads((RESULTS / "matrix.json").read_text())["passed"]]
    resumed = {tuple(cell) for cell in json.loads((RESULTS / "resume.json").read_text())["passed"]}
    rows = list(dict.fromkeys(row for row, _ in passed))
    columns = list(dict.fromkeys(column for _, column in passed))
    figure, axes = plt.subplots(figsize=(9, 0.36 * len(rows) + 1.1), layout="constrained")
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            there = (row, column) in passed
            colour = (theme.blue if (row, column) in resumed else theme.grey) if there else "none"
            style = {"boxstyle": "round,pad=0,rounding_size=0.14", "linewidth": 0.8, "edgecolor": theme.faint}
            axes.add_patch(FancyBboxPatch((x - 0.42, y - 0.36), 0.84, 0.72, facecolor=colour, **style))
    axes.set_xticks(range(len(columns)), columns, fontsize=9)
    axes.set_yticks(range(len(rows)), rows, family="monospace", fontsize=9, color=theme.ink)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, axis="both", labelcolor=theme.ink)
    axes.set(xlim=(-0.6, len(columns) - 0.4), ylim=(len(rows) - 0.4, -0.6))
    axes.spines[["left", "bottom"]].set_visible(False)
    keys = {"trained, and resumed to the bit": theme.blue, "trained": theme.grey}
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in keys.values()]
    figure.legend(handles, list(keys), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    draw("map", cells)
