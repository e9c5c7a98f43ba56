"""Pictures as SVG text, drawn by matplotlib: lines over steps, bars, and maps of shares.

Texts stay texts, and colours are variables of CSS that the page gives values, so that a page follows the reader's dark mode. A
picture refers to nothing, inside or outside of it: no clip paths, markers or images, which SVG writes as references.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from booster.common.arguments import raised, shortened

STYLE = """:root { color-scheme: light dark; --paper: #fff; --ink: #1c2024; --soft: #606873; --grid: #e3e6ea;
  --accent: #1f6feb; --bad: #c62f2f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e6e8eb; --soft: #9aa4af; --grid: #2b3036; --accent: #6ea8fe; --bad: #ff7b72; }
}
"""
_SOFT, _GRID, _ACCENT, _BAD = "#606873", "#e3e6ea", "#1f6feb", "#c62f2f"
_VARIABLES = {_SOFT: "var(--soft)", _GRID: "var(--grid)", _ACCENT: "var(--accent)", _BAD: "var(--bad)"}
_LETTER = 6.6  # pixels, about, of a letter of 12 pixels
_LEAST_LABEL = 140  # pixels; with fewer, names of one block look alike
_FAINTEST = 0.02  # opacity; fainter cells are left out


class Band(NamedTuple):
    """Columns of a map with a name above them: from `start` to before `stop`."""

    start: float
    stop: float
    name: str


def standalone(picture: str) -> str:
    """Return `picture` as a file."""
    return picture.replace(">", f"><style>{STYLE}svg {{ background: var(--paper); }}</style>", 1)


def lines(
    steps: Sequence[int],
    values: Sequence[float | None],
    *,
    width: int,
    height: int = 200,
    logarithm: int | None = None,
    marks: Sequence[int] = (),
    clipped: Sequence[bool] | None = None,
    corners: bool = False,
) -> str:
    """Return a line over steps: means of every two pixels' steps, in a band from the smallest to the largest of them.

    Values that are not finite, or not above zero on a logarithmic axis, are left out.

    logarithm: the base of the axis, 2 or 10; None is a linear one.
    marks: steps to mark by a small cross at the top.
    clipped: for each step whether it was, for a strip below; the stronger its colour, the more steps were.
    corners: values hold until the next step, as a loss scale does.
    """
    pairs = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    finite = [(step, value) for step, value in pairs if math.isfinite(value) and (value > 0 or logarithm is None)]
    logarithm = logarithm if finite else None  # an axis without values has no logarithm
    left, right, top = 58, 24, 16 if marks else 8
    below = 48 if clipped is not None else 26
    first, last = steps[0], max(steps[-1], steps[0] + 1)
    inner = width - left - right
    canvas = _Canvas(width, height)  # which says how to install matplotlib
    from matplotlib.ticker import LogLocator, MaxNLocator

    axes = canvas.figure.add_axes((left / width, below / height, inner / width, (height - top - below) / height))
    if corners:
        changes: list[Any] = [
            own for own, before in zip(finite, [(0, None), *finite], strict=False) if own[1] != before[1]
        ]
        points = changes if len(changes) <= width else _thinned(changes, first, last, width)
        points = [*points, *((last, *point[1:]) for point in points[-1:])]
        axes.step(*_columns(points)[:2], where="post", color=_ACCENT, linewidth=1.6)
    else:
        points = _thinned(finite, first, last, max(1, inner // 2))
        if len(points) == 1:  # a dot, drawn by the round ends of a line
            points.append((points[0][0] + (last - first) / 1000, *points[0][1:]))
        if any(point[2] < point[3] for point in points):
            outline = [(point[0], point[3]) for point in points] + [(point[0], point[2]) for point in points[::-1]]
            axes.fill(*_columns(outline), color=_ACCENT, alpha=0.22, linewidth=0)
        axes.plot(*_columns(points)[:2], color=_ACCENT, linewidth=1.6, solid_capstyle="round")
    axes.set_xlim(first, last)
    axes.xaxis.set_major_locator(MaxNLocator(max(1, width // 110), steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter("{x:.0f}")
    if logarithm is not None:
        axes.set_yscale("log", base=logarithm)
    low, high = axes.get_ylim()
    if logarithm is not None and high >= low * logarithm**2:
        axes.yaxis.set_major_locator(LogLocator(logarithm, numticks=6))
        axes.yaxis.set_major_formatter(lambda value, _: f"{logarithm}{raised(round(math.log(value, logarithm)))}")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter("{x:.4g}")
    axes.minorticks_off()
    axes.tick_params(length=0, pad=6, labelsize=12, labelcolor=_SOFT)
    axes.grid(axis="y", color=_GRID, linewidth=1)
    axes.spines[:].set_visible(False)

    def pixel(step: float) -> float:
        return left + (step - first) / (last - first) * inner

    crosses: list[float] = []
    for step in marks:
        if not crosses or pixel(step) - crosses[-1] >= 7:  # those that would cover each other are one
            crosses.append(pixel(step))
    for slope in (3, -3) if crosses else ():
        around = [(x + dx, 6 + dy) for x in crosses for dx, dy in ((-3, -slope), (3, slope), (math.nan, 0))]
        canvas.rule(around, _BAD, gid="mark", linewidth=1.8)
    if clipped is not None:
        canvas.text(left - 6, height - 7, "clipped", "right")
        count = min(60, len(steps))
        for place in range(count):
            own = range(place * len(steps) // count, (place + 1) * len(steps) // count)
            start, stop = pixel(steps[own[0]]), pixel(steps[min(own[-1] + 1, len(steps) - 1)])
            share = sum(clipped[index] for index in own) / len(own)
            canvas.cells([(start, height - 16, max(1.0, stop - start), 10, share)])
    return canvas.svg()


def bars(rows: Sequence[tuple[str, float]], *, width: int) -> str:
    """Return a bar for each of `rows`, with its name above and its number behind."""
    pitch = 31
    canvas = _Canvas(width, max(1, len(rows)) * pitch)
    largest = max((value for _, value in rows), default=1) or 1
    for index, (name, value) in enumerate(rows):
        top, length = index * pitch, max(2.0, value / largest * (width - 60))
        canvas.text(0, top + 12, _fitting(name, width))
        canvas.cells([(0, top + 17, length, 10, 1.0)])
        canvas.text(length + 6, top + 26, f"{value:g}")
    return canvas.svg()


def map_of(
    names: Sequence[str],
    columns: Sequence[str],
    shares: Sequence[Sequence[float | None]],
    *,
    width: int,
    bands: Sequence[Band] = (),
    axis: str = "",
    most: float = 1.0,
) -> str:
    """Return a row of cells for each name; the stronger its colour, the larger a share, up to `most`. None leaves a cell empty.

    columns: what each column is, for the axis below, which `axis` names.
    bands: named above, in two rows by turns where there is little room.
    """
    label = min(max(width // 3, _LEAST_LABEL), int(_LETTER * max(map(len, names), default=0)) + 10)
    left, right, row = label, 8, 18
    cell = (width - left - right) / max(1, len(columns))
    halves = [len(band.name) * _LETTER / 2 for band in bands]
    middles = [
        min(left + (band.start + band.stop) / 2 * cell, width - half) for band, half in zip(bands, halves, strict=True)
    ]
    crowded = any(middles[i + 1] - middles[i] < halves[i] + halves[i + 1] + _LETTER for i in range(len(bands) - 1))
    top = (34 if crowded else 20) if bands else 2
    bottom = top + row * len(names)
    canvas, cells = _Canvas(width, bottom + 36), []
    for index, name in enumerate(names):
        canvas.text(left - 8, top + index * row + 13, _fitting(name, label - 8), "right")
        for place, share in enumerate(shares[index]):
            # The eye tells small shares apart better if they are not drawn in proportion.
            opacity = math.sqrt(min(1.0, max(0.0, (share or 0.0) / most)))
            cells.append((left + place * cell, top + index * row + 1, max(1.0, cell - 0.5), row - 2, opacity))
    canvas.cells(cells)
    for place, band in enumerate(bands):
        if band.start > 0:
            x = left + band.start * cell
            canvas.rule([(x, top - 4), (x, bottom)], _SOFT, linestyle=(0, (3, 3)))
        canvas.text(middles[place], 26 if crowded and place % 2 else 12, band.name, "center")
    shown = max(1, math.ceil(len(columns) / max(1, (width - left - right) / 60)))
    for place in range(0, len(columns), shown):
        middle = min(left + (place + 0.5) * cell, width - len(columns[place]) * _LETTER / 2)
        canvas.text(middle, bottom + 15, columns[place], "center")
    canvas.text(width - right, bottom + 31, axis, "right")
    return canvas.svg()


class _Canvas:
    """A matplotlib figure that is drawn on in pixels, from the upper left corner.

    Raises ImportError, with the line that installs it, where matplotlib is missing.
    """

    def __init__(self, width: int, height: float) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "pictures of a record are drawn by matplotlib: pip install matplotlib, or pip install '.[report]' in a clone"
            ) from error
        # SVG's unit is a 72nd of an inch in matplotlib: at 72 dots an inch a pixel.
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        self.figure.patch.set_visible(False)
        self._size = f'width="{width}" height="{height:g}" role="img"'
        self._axes = self.figure.add_axes((0, 0, 1, 1))
        self._axes.set_axis_off()
        self._axes.set_xlim(0, width)
        self._axes.set_ylim(height, 0)

    def text(self, x: float, y: float, text: str, align: str = "left") -> None:
        # Names come from a file that anyone may have written: a dollar in one is no formula.
        self._axes.text(x, y, text, ha=align, va="baseline", fontsize=12, color=_SOFT, parse_math=False)

    def rule(self, points: Sequence[tuple[float, float]], color: str, **how: Any) -> None:
        """Draw a line through these points; NaN interrupts it."""
        self._axes.plot(*_columns(points), color=color, **{"linewidth": 1, "solid_capstyle": "butt", **how})

    def cells(self, cells: Iterable[tuple[float, float, float, float, float]]) -> None:
        """Draw rectangles, each (x, y, width, height, opacity)."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        # Those of one opacity are one path: a map has thousands, and SVG would have an element for each.
        alike: dict[float, list[Path]] = {}
        for x, y, width, height, opacity in cells:
            if opacity >= _FAINTEST:
                corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
                alike.setdefault(round(opacity, 2), []).append(Path(corners, closed=True))
        for opacity, paths in alike.items():
            path = Path.make_compound_path(*paths)
            self._axes.add_patch(PathPatch(path, facecolor=_ACCENT, alpha=opacity, linewidth=0))

    def svg(self) -> str:
        """Return the picture as text."""
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        drawn = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
            # A letter that matplotlib's font lacks is drawn by the reader's browser, in a font that has it.
            warnings.filterwarnings("ignore", "Glyph")
            FigureCanvasSVG(self.figure).print_svg(drawn, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        text = drawn.getvalue()
        text = text[text.index("<svg") :].replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
        text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', self._size, text, count=1)
        # Clip paths, to which nothing refers then, and a style, which would be that of the whole page.
        text = re.sub(r' clip-path="url\(#\w+\)"', "", re.sub(r"<defs>.*?</defs>", "", text, flags=re.DOTALL))
        # A page holds many pictures: their identifiers would not be unique.
        text = re.sub(r'<g id="(\w+)[^"]*"', lambda match: '<g class="mark"' if match[1] == "mark" else "<g", text)
        text = re.sub(r' d="[^"]*"', lambda match: re.sub(r"(\.\d)\d+", r"\1", match[0].replace("\n", "")), text)
        text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
        text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
        return re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], text)


def _columns(points: Sequence[tuple[float, ...]]) -> list[list[float]]:
    return [list(column) for column in zip(*points, strict=True)] or [[], []]


def _thinned(pairs: Sequence[tuple[float, float]], first: int, last: int, most: int) -> list[tuple[float, ...]]:
    """Return at most so many points for the values: mean step, mean, smallest and largest of neighbouring steps."""
    size = max(1, math.ceil((last - first + 1) / most))
    points: list[tuple[float, ...]] = []
    for _, own in itertools.groupby(pairs, lambda pair: (pair[0] - first) // size):
        steps, values = _columns(list(own))
        points.append((sum(steps) / len(steps), sum(values) / len(values), min(values), max(values)))
    return points


def _fitting(name: str, width: float) -> str:
    return shortened(name, max(4, int(width / _LETTER)))
