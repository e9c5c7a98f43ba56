"""What the figures share: each is drawn twice, for a light page and for a dark one, as SVG without a date in it.

`python benchmarks/figures/NAME.py` draws one, `make figures` all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


@dataclass(frozen=True)
class Theme:
    """Colours of one page. Kinds: series that stand beside each other."""

    suffix: str
    paper: str
    ink: str
    faint: str  # lines of a grid, frames
    quiet: str  # words beside the point
    blue: str
    orange: str
    green: str
    purple: str
    grey: str
    on: str  # words on any of these


LIGHT = Theme(
    "", "#ffffff", "#1f2328", "#d8dee4", "#656d76", "#2f6fde", "#d9480f", "#2b8a3e", "#8250df", "#6e7781", "#ffffff"
)
DARK = Theme(
    "-dark",
    "#1e2129",
    "#e6e8eb",
    "#3a3f4b",
    "#a5abb6",
    "#6ea3ff",
    "#ff8f5e",
    "#63c174",
    "#b794ff",
    "#8b93a1",
    "#14161c",
)


def draw(name: str, picture: Callable[[Theme], Figure]) -> None:
    """Write `picture` to docs/images/NAME.svg and NAME-dark.svg."""
    for theme in (LIGHT, DARK):
        settings = {
            "figure.facecolor": theme.paper,
            "axes.facecolor": theme.paper,
            "savefig.facecolor": theme.paper,
            "text.color": theme.ink,
            "axes.labelcolor": theme.ink,
            "axes.edgecolor": theme.faint,
            "xtick.color": theme.quiet,
            "ytick.color": theme.quiet,
            "grid.color": theme.faint,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "font.size": 10,
            "hatch.linewidth": 0.6,
            "svg.hashsalt": name,  # the same ids at each drawing
        }
        with plt.rc_context(settings):
            figure = picture(theme)
            figure.savefig(IMAGES / f"{name}{theme.suffix}.svg", metadata={"Date": None}, bbox_inches="tight")
            plt.close(figure)


def running_mean(values: list[float], window: int = 15) -> list[float]:
    """Return the means of so many steps, centred, so that they do not lag."""
    half = window // 2
    windows = [values[max(0, step - half) : step + half + 1] for step in range(len(values))]
    return [sum(each) / len(each) for each in windows]
