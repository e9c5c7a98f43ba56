"""A step from left to right, and how often it reads and writes the gradients.

python benchmarks/figures/step.py
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from style import Theme, draw


def timeline(theme: Theme) -> Figure:
    """What happens in which precision, call by call of the loop."""
    figure, axes = plt.subplots(figsize=(9, 3.3), layout="constrained")
    calls = (("model(x), criterion", 0, 24), ("b.backward(loss, optimizer)", 24, 58), ("optimizer.step()", 58, 100))
    for name, begin, end in calls:
        axes.text((begin + end) / 2, 3.3, name, ha="center", family="monospace", fontsize=9)
        axes.plot([begin + 0.5, end - 0.5], [3.1, 3.1], color=theme.faint, linewidth=2)
    rows = (
        ("half", 2, theme.orange, ((0, 17, "forward"), (33, 58, "backward, scaled"))),
        ("float32", 1, theme.blue, ((17, 24, "loss"), (24, 33, "× scale"), (70, 90, "fused update"))),
        ("one number", 0, theme.green, ((58, 70, "norm"), (90, 100, "new scale"))),
    )
    for name, row, colour, spans in rows:
        axes.text(-1.5, row + 0.4, name, ha="right", va="center", color=theme.ink)
        axes.plot([0, 100], [row + 0.4, row + 0.4], color=theme.faint, linewidth=1, zorder=0)
        for begin, end, words in spans:
            box = Rectangle((begin + 0.25, row + 0.05), end - begin - 0.5, 0.7, facecolor=colour, edgecolor="none")
            axes.add_patch(box)
            axes.text((begin + end) / 2, row + 0.4, words, ha="center", va="center", color=theme.on, fontsize=9)
    arrow = {"arrowstyle": "-|>", "mutation_scale": 9, "color": theme.quiet, "linewidth": 1}
    for start, stop in (
        ((17, 2.05), (18.5, 1.8)),
        ((33, 1.75), (34.5, 2.0)),
        ((57.5, 2.0), (61, 0.8)),
        ((69, 0.8), (72, 1.0)),
        ((89.5, 1.0), (92, 0.8)),
    ):
        axes.add_patch(FancyArrowPatch(start, stop, **arrow))
    axes.text(
        64,
        -0.42,
        "not finite? All ranks skip.\nElse it is the clip factor too.",
        ha="center",
        va="top",
        color=theme.quiet,
        fontsize=8.5,
    )
    axes.text(
        95,
        -0.42,
        "halved after a skip,\ndoubled after 2000 steps",
        ha="center",
        va="top",
        color=theme.quiet,
        fontsize=8.5,
    )
    axes.set(xlim=(-13, 101), ylim=(-1.25, 3.7))
    axes.axis("off")
    return figure


def passes(theme: Theme) -> Figure:
    """Reads and writes of all gradients in an update with a fused kernel, which writes the true gradients back as it steps."""
    figure, axes = plt.subplots(figsize=(9, 2.1), layout="constrained")
    usual = (("unscale", "rw"), ("norm", "r"), ("clip", "rw"), ("step", "r"))
    _strip(axes, 1, usual, theme, "a loop by hand")
    _strip(axes, 0, (("norm", "r"), ("step", "rw")), theme, "booster")
    axes.set(xlim=(-2.0, 6.6), ylim=(-0.35, 1.95))
    axes.axis("off")
    return figure


def _strip(axes: Axes, row: int, names: tuple[tuple[str, str], ...], theme: Theme, title: str) -> None:
    axes.text(-0.15, row + 0.3, title, ha="right", va="center")
    x = 0.0
    for name, kinds in names:
        for kind in kinds:
            colour = theme.blue if kind == "r" else theme.orange
            axes.add_patch(Rectangle((x, row), 0.92, 0.6, facecolor=colour, edgecolor="none"))
            axes.text(
                x + 0.46,
                row + 0.3,
                "read" if kind == "r" else "write",
                ha="center",
                va="center",
                color=theme.on,
                fontsize=9,
            )
            x += 1
        axes.text(x - len(kinds) / 2 - 0.04, row + 0.68, name, ha="center", color=theme.quiet, fontsize=9)
    axes.text(x + 0.05, row + 0.3, f"{x:.0f} times over all gradients", va="center", color=theme.quiet, fontsize=9)


if __name__ == "__main__":
    draw("step_timeline", timeline)
    draw("step_passes", passes)
