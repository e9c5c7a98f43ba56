"""Number lines: how far each format reaches, and which numbers it has from 1 to 2.

python benchmarks/figures/formats.py
"""

from dataclasses import dataclass
from math import log2

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from style import Theme, draw


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with a sign bit. largest: where not all of the top exponent is inf and NaN."""

    name: str
    exponent: int
    mantissa: int
    largest: float

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (2 - 2 ** (self.exponent - 1))

    @property
    def smallest(self) -> float:
        return self.smallest_normal * 2.0**-self.mantissa


FORMATS = (
    Format("float32", 8, 23, (2 - 2.0**-23) * 2.0**127),
    Format("bfloat16", 8, 7, (2 - 2.0**-7) * 2.0**127),
    Format("float16", 5, 10, 65504.0),
    Format("float8 e5m2", 5, 2, 57344.0),
    Format("float8 e4m3", 4, 3, 448.0),
    Format("float4 e2m1", 2, 1, 6.0),
)


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 0.01 or value > 1e5 else f"{value:g}"


def reach(theme: Theme) -> Figure:
    """From the smallest number of each format to the largest, in powers of two, with the bits that spend it."""
    figure, axes = plt.subplots(figsize=(9, 3.7), layout="constrained")
    for row, each in enumerate(FORMATS):
        low, normal, high = log2(each.smallest), log2(each.smallest_normal), log2(each.largest)
        axes.barh(row, high - normal, left=normal, height=0.5, color=theme.blue)
        axes.barh(
            row, normal - low, left=low, height=0.5, facecolor="none", edgecolor=theme.blue, hatch="////", linewidth=0
        )
        axes.text(high + 2, row, _short(each.largest), va="center", color=theme.quiet, fontsize=9)
        axes.text(low - 2, row, _short(each.smallest), va="center", ha="right", color=theme.quiet, fontsize=9)
    # Half of the gradients of the guide's model lie below 3e-6; its largest, unscaled, is 966 / 65536.
    axes.axvspan(log2(1e-9), log2(1.5e-2), color=theme.orange, alpha=0.16, linewidth=0)
    axes.text(log2(4e-6), -0.82, "gradients", ha="center", va="center", color=theme.orange, fontsize=9)
    axes.set_yticks(
        range(len(FORMATS)), [f"{f.name}\n1 + {f.exponent} + {f.mantissa} bits" for f in FORMATS], color=theme.ink
    )
    axes.set(ylim=(len(FORMATS) - 0.4, -1.15), xlim=(-178, 152))
    powers = range(-140, 141, 20)
    axes.set_xticks(powers, [f"$2^{{{p}}}$" for p in powers])
    axes.grid(axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def between(theme: Theme) -> Figure:
    """Every number of a format from 1 to 2; where they are too many to draw, a band."""
    figure, axes = plt.subplots(figsize=(9, 2.9), layout="constrained")
    for row, each in enumerate(reversed(FORMATS)):
        steps = 2**each.mantissa
        axes.plot([1, 2], [row, row], color=theme.faint, linewidth=1, zorder=0)
        if steps <= 256:
            axes.vlines(
                [1 + k / steps for k in range(steps + 1)], row - 0.27, row + 0.27, color=theme.blue, linewidth=1.3
            )
        else:
            axes.fill_between([1, 2], row - 0.27, row + 0.27, color=theme.blue, linewidth=0)
        axes.text(2.02, row, f"{steps:,} steps", va="center", color=theme.quiet, fontsize=9)
    axes.set_yticks(range(len(FORMATS)), [f.name for f in reversed(FORMATS)], color=theme.ink)
    axes.set(xlim=(0.99, 2.16), ylim=(len(FORMATS) - 0.5, -0.5))
    axes.set_xticks([1, 1.25, 1.5, 1.75, 2])
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


if __name__ == "__main__":
    draw("formats_reach", reach)
    draw("formats_between", between)
