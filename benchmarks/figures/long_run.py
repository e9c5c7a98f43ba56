"""A long run with packed optimizer states beside float32: training loss and held-out loss, from long_run.json.

python -m benchmarks.long_run         # trains, and writes long_run.json
python benchmarks/figures/long_run.py
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from style import Theme, draw

RUN = json.loads(Path(__file__).with_name("long_run.json").read_text())


def long_run(theme: Theme) -> Figure:
    """Training loss as thin lines, held-out loss as dots, the difference of the two runs below."""
    colours = dict(zip(RUN["runs"], (theme.grey, theme.blue), strict=True))
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 4.6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for (name, run), width in zip(RUN["runs"].items(), (3.5, 1.2), strict=True):
        steps = [RUN["mean_over"] * (index + 0.5) for index in range(len(run["loss"]))]
        above.plot(steps, run["loss"], color=colours[name], linewidth=width, label=f"{name}, training")
        turns = [RUN["turn"] * (index + 1) for index in range(len(run["held_out"]))]
        losses = [each["loss"] for each in run["held_out"]]
        above.plot(
            turns, losses, "o--", color=colours[name], linewidth=0.8, markersize=2 + width, label=f"{name}, held out"
        )
    first, second = (run["loss"] for run in RUN["runs"].values())
    below.plot(steps, [b - a for a, b in zip(first, second, strict=True)], color=theme.blue, linewidth=1)
    below.axhline(0, color=theme.quiet, linewidth=0.8)
    above.set_title("loss, mean of 25 steps", loc="left", fontsize=10)
    below.set_title("second less first, training", loc="left", fontsize=10)
    below.set(xlabel="step", xlim=(0, RUN["steps"]))
    above.legend(frameon=False, fontsize=9)
    for axes in (above, below):
        axes.grid(axis="y", linewidth=0.6)
        axes.tick_params(length=0)
    return figure


if __name__ == "__main__":
    draw("long_run", long_run)
