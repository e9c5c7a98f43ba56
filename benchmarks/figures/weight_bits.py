"""Where the bits of one weight live, and what a parameter takes with AdamW.

python benchmarks/figures/weight_bits.py
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from style import Theme, draw

# What a parameter takes between two steps, gradients included: (what, bytes), from docs/measured/memory.md.
HELD = {
    "fp32, bf16, fp16": (("weight", 4), ("gradient", 4), ("moments", 8)),
    'naive, masters "fp32"': (("weight", 2), ("master", 4), ("gradient", 2), ("moments", 8)),
    'naive, masters "split"': (("weight", 2), ("rest", 2), ("gradient", 2), ("moments", 8)),
    'naive, masters "split24"': (("weight", 2), ("rest", 1), ("gradient", 2), ("moments", 8)),
    'naive, masters "none"': (("weight", 2), ("gradient", 2), ("moments", 8)),
    '"split24", states "8bit"': (("weight", 2), ("rest", 1), ("gradient", 2), ("moments", 2.125)),
}


def bits(theme: Theme) -> Figure:
    """A float32 number as a bfloat16 weight and the signed difference to it, which the optimizer alone reads."""
    figure, axes = plt.subplots(figsize=(9, 2.9), layout="constrained")
    _row(axes, 0, 2, [("sign", 1, theme.grey), ("exponent", 8, theme.orange), ("mantissa", 23, theme.blue)], theme)
    axes.text(-0.6, 2.4, "float32", ha="right", va="center")
    _row(axes, 0, 0, [("", 1, theme.grey), ("exponent", 8, theme.orange), ("mantissa", 7, theme.blue)], theme)
    _row(axes, 17.2, 0, [("signed difference", 16, theme.green)], theme)
    axes.text(-0.6, 0.4, '"split"', ha="right", va="center")
    axes.text(
        8, -0.55, "bfloat16 weight, rounded: the model computes with it", ha="center", color=theme.quiet, fontsize=9
    )
    axes.text(
        25.2, -0.55, "int16, master minus weight: the optimizer adds it", ha="center", color=theme.quiet, fontsize=9
    )
    for x, target in ((0, 0), (16, 16), (16, 17.2), (32, 33.2)):
        axes.plot([x, target], [1.95, 0.85], color=theme.grey, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set(xlim=(-4.6, 33.6), ylim=(-1.0, 3.0))
    axes.axis("off")
    return figure


def _row(axes: Axes, x: float, y: float, fields: list[tuple[str, int, str]], theme: Theme) -> None:
    for name, width, colour in fields:
        axes.add_patch(Rectangle((x + 0.05, y), width - 0.1, 0.8, facecolor=colour, edgecolor="none"))
        for place in range(1, width):
            axes.plot([x + place] * 2, [y, y + 0.14], color=theme.paper, linewidth=0.9)
            axes.plot([x + place] * 2, [y + 0.66, y + 0.8], color=theme.paper, linewidth=0.9)
        if width > 1:
            axes.text(x + width / 2, y + 0.4, f"{name}, {width}", ha="center", va="center", color=theme.on, fontsize=9)
        x += width


def held(theme: Theme) -> Figure:
    """Bytes of a parameter with AdamW, by what they serve."""
    colours = {
        "weight": theme.blue,
        "master": theme.purple,
        "rest": theme.green,
        "gradient": theme.orange,
        "moments": theme.grey,
    }
    names = {"weight": "weight", "master": "float32 master", "rest": "rest of the master"}
    names |= {"gradient": "gradient", "moments": "AdamW's two moments"}
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")  # on a phone its words are to be read
    for row, parts in enumerate(HELD.values()):
        left = 0.0
        for kind, size in parts:
            axes.barh(row, size, left=left, height=0.62, color=colours[kind], edgecolor=theme.paper, linewidth=1.5)
            left += size
        axes.text(left + 0.2, row, f"{left:.1f}".removesuffix(".0"), va="center")
    axes.set_yticks(range(len(HELD)), HELD, color=theme.ink)
    axes.set(ylim=(len(HELD) - 0.4, -0.6), xlim=(0, 17.5), xlabel="bytes a parameter, gradients included")
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in colours]
    figure.legend(
        handles, [names[kind] for kind in colours], loc="outside upper left", ncols=3, frameon=False, fontsize=9
    )
    return figure


if __name__ == "__main__":
    draw("weight_bits", bits)
    draw("weight_held", held)
