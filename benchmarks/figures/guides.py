"""Pictures of the guides: which plugin, what each rank holds, a skipped step, a folder of checkpoints.

python benchmarks/figures/guides.py
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from style import Theme, draw

QUESTIONS = (
    ("weights, gradients and\noptimizer states fit on a device", "TorchDDPPlugin"),
    ("weights and gradients fit,\noptimizer states do not", "LowLevelZeroPlugin(stage=1)"),
    ("weights fit,\ngradients and states do not", "LowLevelZeroPlugin(stage=2)"),
    ("weights do not fit,\none block at a time does", "TorchFSDPPlugin"),
    ("one layer is too large or too slow,\nor there are very many devices", "HybridParallelPlugin"),
)
# What each of four ranks holds of weights, gradients and states, and what it does about the rest.
PLANS = (
    ("DDP", "www", "gradients are averaged"),
    ("ZeRO-1", "wwp", "gradients are averaged;\nafter the step ranks send\nthe weights they stepped"),
    ("ZeRO-2", "wpp", "the same, with a part\nof the gradients"),
    ("FSDP", "ppp", "gathers the weights of\none block while it computes"),
    ("TP, PP", "ppp", "a part of every layer, or\nsome of the layers;\nactivations travel"),
)
# The run of docs/concepts/step.md: whether the step was applied, and the logarithm of the scale that it had.
STEPS = ((False, 22), (False, 21), (False, 20), (True, 19), (True, 19), (True, 19))
FOLDER = (
    (0, "checkpoints/", "", "grey"),
    (1, "step-0000000004/", "keep_last= removes old ones", "grey"),
    (1, "step-0000000008/", "appears whole, by a rename", "grey"),
    (2, "tensors-00000.safetensors", "rank 0: weights, masters, states", "blue"),
    (2, "tensors-00001.safetensors", "rank 1: its part of them", "blue"),
    (2, "state.json", "scale, schedule, data position, extra", "orange"),
    (2, "manifest.json", "names, shapes, a hash of every file", "green"),
)


def choice(theme: Theme) -> Figure:
    """From what fits on a device to the plugin, top to bottom."""
    figure, axes = plt.subplots(figsize=(5.6, 4.0), layout="constrained")
    for row, (question, plugin) in enumerate(QUESTIONS):
        y = -row
        _box(axes, 0, y, 4.1, theme.paper, theme.faint)
        axes.text(2.05, y, question, ha="center", va="center", fontsize=8.5)
        _box(axes, 5.0, y, 3.7, theme.blue if row < len(QUESTIONS) - 1 else theme.purple, "none")
        axes.text(6.85, y, plugin, ha="center", va="center", family="monospace", fontsize=7.5, color=theme.on)
        _arrow(axes, (4.15, y), (4.95, y), theme)
        if row:
            _arrow(axes, (0.5, y + 0.64), (0.5, y + 0.38), theme)
    axes.set(xlim=(-0.1, 8.8), ylim=(0.5 - len(QUESTIONS), 0.5))
    axes.axis("off")
    return figure


def ranks(theme: Theme) -> Figure:
    """Four ranks a plan: which quarters of weights, gradients and states lie on each."""
    figure, axes = plt.subplots(figsize=(6, 4.6), layout="constrained")
    colours = (theme.blue, theme.orange, theme.grey)
    for row, (name, held, words) in enumerate(PLANS):
        y = -row * 1.35
        axes.text(-0.25, y + 0.45, name, ha="right", va="center")
        for rank in range(4):
            x = rank * 1.15
            for line, (kind, colour) in enumerate(zip(held, colours, strict=True)):
                for quarter in range(4):
                    there = kind == "w" or quarter == rank
                    corner = (x + quarter * 0.25, y + 0.62 - line * 0.31)
                    face = colour if there else theme.paper
                    axes.add_patch(Rectangle(corner, 0.23, 0.27, facecolor=face, edgecolor=theme.faint, linewidth=0.6))
        axes.text(4.75, y + 0.45, words, va="center", color=theme.quiet, fontsize=8.5)
    for rank in range(4):
        axes.text(rank * 1.15 + 0.49, 1.05, f"rank {rank}", ha="center", color=theme.quiet, fontsize=8.5)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours]
    names = ["weights", "gradients", "optimizer states, masters"]
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    axes.set(xlim=(-1.1, 8.3), ylim=(-1.35 * (len(PLANS) - 1) - 0.15, 1.3))
    axes.axis("off")
    return figure


def skip(theme: Theme) -> Figure:
    """Steps of a run whose loss scale begins too large: skipped and halved until the gradients fit."""
    figure, axes = plt.subplots(figsize=(5.6, 2.9), layout="constrained")
    for step, (applied, scale) in enumerate(STEPS):
        colour = theme.blue if applied else theme.orange
        axes.plot([step, step + 1], [scale, scale], color=colour, linewidth=3, solid_capstyle="butt")
        if step and STEPS[step - 1][1] != scale:
            axes.plot([step, step], [scale, scale + 1], color=theme.faint, linewidth=1.5, zorder=0)
        axes.text(step + 0.5, scale + 0.18, f"$2^{{{scale}}}$", ha="center", va="bottom", fontsize=9)
        words = "step()\napplied" if applied else "inf: skip,\nhalve"
        axes.text(step + 0.5, 17.55, words, ha="center", va="center", fontsize=8.5, color=colour)
    axes.text(
        4.5,
        20.6,
        "weights, states and schedule moved\nonly in these steps",
        ha="center",
        color=theme.quiet,
        fontsize=8.5,
    )
    axes.set(xlim=(0, len(STEPS)), ylim=(16.9, 23.0), ylabel="loss scale")
    axes.set_yticks([])
    axes.set_xticks([step + 0.5 for step in range(len(STEPS))], [f"step {step + 1}" for step in range(len(STEPS))])
    axes.tick_params(length=0)
    return figure


def checkpoint(theme: Theme) -> Figure:
    """A folder of checkpoints, its files, and what each holds."""
    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    for row, (depth, name, words, colour) in enumerate(FOLDER):
        x = depth * 0.5
        axes.add_patch(Rectangle((x, -row - 0.14), 0.22, 0.3, facecolor=getattr(theme, colour), edgecolor="none"))
        axes.text(x + 0.35, -row, name, va="center", family="monospace", fontsize=9)
        axes.text(5.2, -row, words, va="center", color=theme.quiet, fontsize=9)
    axes.set(xlim=(-0.1, 9.2), ylim=(0.5 - len(FOLDER), 0.5))
    axes.axis("off")
    return figure


def _box(axes: Axes, x: float, y: float, width: float, face: str, edge: str) -> None:
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y - 0.36), width, 0.72, boxstyle=style, facecolor=face, edgecolor=edge))


def _arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], theme: Theme) -> None:
    axes.add_patch(FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=9, color=theme.quiet, linewidth=1))


if __name__ == "__main__":
    draw("choice", choice)
    draw("ranks", ranks)
    draw("skip", skip)
    draw("checkpoint", checkpoint)
