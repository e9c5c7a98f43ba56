"""Pictures as SVG text: lines over steps, bars, and maps of shares. Colours are classes that the page's style gives values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from booster.common.text import raised, shortened

COLOURS = """:root { color-scheme: light dark; --paper: #fff; --ink: #1c2024; --soft: #606873; --grid: #e3e6ea;
  --accent: #1f6feb; --bad: #c62f2f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e6e8eb; --soft: #9aa4af; --grid: #2b3036; --accent: #6ea8fe; --bad: #ff7b72; }
}
"""
SHAPES = """svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--grid); } .edge { stroke: var(--soft); stroke-dasharray: 3 3; }
.line { fill: none; stroke: var(--accent); stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
.band { fill: var(--accent); fill-opacity: .22; }
.bar, .cell { fill: var(--accent); }
.mark { fill: none; stroke: var(--bad); stroke-width: 1.8; }
"""
_LETTER = 6.6  # pixels, of a letter of that size, about
_LEAST_LABEL = 140  # pixels, without which names of one block look alike


class Marks(NamedTuple):
    """Steps to mark by a small cross at the top. what: for the tooltip."""

    steps: Sequence[int]
    what: str


class Band(NamedTuple):
    """A stretch of a map's columns with a name above: from `start` to before `stop`, in units of columns."""

    start: float
    stop: float
    name: str


def standalone(picture: str) -> str:
    """`picture` as a file of its own."""
    style = f"<style>{COLOURS}{SHAPES}svg {{ background: var(--paper); }}</style>"
    return picture.replace(">", f">{style}", 1)


def lines(
    steps: Sequence[int],
    values: Sequence[float | None],
    *,
    width: int,
    height: int = 200,
    logarithm: int | None = None,
    marks: Marks | None = None,
    strip: Sequence[bool] | None = None,
    strip_name: str = "",
    corners: bool = False,
) -> str:
    """A line over steps: means of as many steps as a pixel has, in a band from the smallest to the largest of them.

    Values that are not finite, or not above zero on a logarithmic axis, are left out. logarithm: the base of the axis, 2 or
    10; None is a linear one. strip: for each step whether it counts in the strip below, whose strength is the share.
    corners: values hold until the next step, as a loss scale does.
    """
    known = [
        (step, value)
        for step, value in zip(steps, values, strict=True)
        if value is not None and math.isfinite(value) and (value > 0 or logarithm is None)
    ]
    left, right, top = 58, 10, 16 if marks and marks.steps else 8
    below = 26 + (22 if strip is not None else 0)
    first, last = steps[0], max(steps[-1], steps[0] + 1)
    low, high = _limits([value for _, value in known], logarithm)

    def x(step: float) -> float:
        return left + (step - first) / (last - first) * (width - left - right)

    def y(value: float) -> float:
        part = (_scaled(value, logarithm) - low) / (high - low)
        return top + (1 - part) * (height - top - below)

    body = []
    for tick, label in _ticks(low, high, logarithm):
        at = top + (1 - (tick - low) / (high - low)) * (height - top - below)
        body.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        body.append(_text(left - 6, at + 4, label, "end"))
    body += _step_ticks(first, last, x, height - below + 16, width)
    if corners:
        changes = [pair for pair, before in zip(known, [(0, None), *known], strict=False) if pair[1] != before[1]]
        if len(changes) > width:
            changes = [(round(s.step), s.mean) for s in _stretches(changes, first, last, width)]
        points = []
        for (step, value), following in zip(changes, [*changes[1:], (last, 0.0)], strict=True):
            points += [(x(step), y(value)), (x(following[0]), y(value))]
        body.append(f'<path class="line" d="{_path(points)}"/>')
    else:
        stretches = _stretches(known, first, last, max(1, (width - left - right) // 2))
        if any(stretch.high > stretch.low for stretch in stretches):
            outline = [(x(s.step), y(s.high)) for s in stretches] + [(x(s.step), y(s.low)) for s in reversed(stretches)]
            body.append(f'<path class="band" d="{_path(outline)}Z"/>')
        body.append(f'<path class="line" d="{_path([(x(s.step), y(s.mean)) for s in stretches])}"/>')
    if marks is not None:
        for step in _thinned(marks.steps, x):
            title = f"<title>step {step}: {escape(marks.what)}</title>"
            body.append(f'<path class="mark" d="M{x(step) - 3:.1f},3l6,6m0,-6l-6,6">{title}</path>')
    if strip is not None:
        body += _strip(steps, strip, x, height - 16, strip_name)
    return _svg(width, height, body)


def bars(rows: Sequence[tuple[str, float]], *, width: int) -> str:
    """A bar for each of `rows`, with its name above and its number behind."""
    pitch, body = 31, []
    largest = max((value for _, value in rows), default=1) or 1
    for index, (name, value) in enumerate(rows):
        top = index * pitch
        length = max(2.0, value / largest * (width - 60))
        body.append(_text(0, top + 12, _shortened(name, width)))
        body.append(f'<rect class="bar" x="0" y="{top + 17}" width="{length:.1f}" height="10" rx="2"/>')
        body.append(_text(length + 6, top + 26, f"{value:g}"))
    return _svg(width, max(1, len(rows)) * pitch, body)


def map_of(
    names: Sequence[str],
    columns: Sequence[str],
    shares: Sequence[Sequence[float | None]],
    *,
    width: int,
    bands: Sequence[Band] = (),
    axis: str = "",
    most: float = 1.0,
    says: Callable[[float], str] = lambda share: f"{share:.2%}",
) -> str:
    """A row of cells for each name; the stronger its colour, the larger a share, up to `most`. None leaves a cell empty.

    columns: what each column is, for tooltips and the axis below, which `axis` names. bands: named above, in two rows by turns
    where there is little room.
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
    body = []
    for index, name in enumerate(names):
        at = top + index * row
        body.append(
            f"<g><title>{escape(name)}</title>{_text(left - 8, at + 13, _shortened(name, label - 8), 'end')}</g>"
        )
        for place, share in enumerate(shares[index]):
            if share is None:
                continue
            # The eye tells small shares apart better if they are not drawn in proportion.
            opacity = math.sqrt(min(1.0, max(0.0, share / most)))
            if opacity < 0.02:
                continue
            title = f"{escape(name)}, {escape(columns[place])}: {escape(says(share))}"
            body.append(
                f'<rect class="cell" x="{left + place * cell:.1f}" y="{at + 1}" width="{max(1.0, cell - 0.5):.1f}" '
                f'height="{row - 2}" fill-opacity="{opacity:.2f}"><title>{title}</title></rect>'
            )
    for place, band in enumerate(bands):
        start = left + band.start * cell
        if band.start > 0:
            body.append(f'<line class="edge" x1="{start:.1f}" x2="{start:.1f}" y1="{top - 4}" y2="{bottom}"/>')
        body.append(_text(middles[place], 26 if crowded and place % 2 else 12, band.name, "middle"))
    shown = max(1, math.ceil(len(columns) / max(1, (width - left - right) / 60)))
    for place in range(0, len(columns), shown):
        middle = min(left + (place + 0.5) * cell, width - len(columns[place]) * _LETTER / 2)
        body.append(_text(middle, bottom + 15, columns[place], "middle"))
    body.append(_text(width - right, bottom + 31, axis, "end"))
    return _svg(width, bottom + 36, body)


# ---------------------------------------------------------------------- inside


class _Stretch(NamedTuple):
    step: float
    mean: float
    low: float
    high: float


def _svg(width: int, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    if len(points) == 1:  # a dot, drawn by the round end of a line
        points = [points[0], (points[0][0] + 0.1, points[0][1])]
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points) if points else ""


def _stretches(known: Sequence[tuple[int, float]], first: int, last: int, most: int) -> list[_Stretch]:
    """The values of stretches of steps, at most so many."""
    size = max(1, math.ceil((last - first + 1) / most))
    found: dict[int, list[tuple[int, float]]] = {}
    for step, value in known:
        found.setdefault((step - first) // size, []).append((step, value))
    return [
        _Stretch(
            sum(step for step, _ in own) / len(own),
            sum(value for _, value in own) / len(own),
            min(value for _, value in own),
            max(value for _, value in own),
        )
        for own in found.values()
    ]


def _strip(
    steps: Sequence[int], counted: Sequence[bool], x: Callable[[float], float], y: float, name: str
) -> list[str]:
    body, count = [_text(x(steps[0]) - 6, y + 9, name, "end")], min(60, len(steps))
    for place in range(count):
        own = range(place * len(steps) // count, (place + 1) * len(steps) // count)
        share = sum(counted[index] for index in own) / len(own)
        start, stop = x(steps[own[0]]), x(steps[min(own[-1] + 1, len(steps) - 1)])
        if share:
            title = f"steps {steps[own[0]]} to {steps[own[-1]]}: {share:.0%}"
            body.append(
                f'<rect class="cell" x="{start:.1f}" y="{y}" width="{max(1.0, stop - start):.1f}" height="10" '
                f'fill-opacity="{share:.2f}"><title>{title}</title></rect>'
            )
    return body


def _thinned(steps: Sequence[int], x: Callable[[float], float]) -> list[int]:
    """Of `steps` those whose marks do not lie on each other."""
    found: list[int] = []
    for step in steps:
        if not found or x(step) - x(found[-1]) >= 7:
            found.append(step)
    return found


def _scaled(value: float, logarithm: int | None) -> float:
    return value if logarithm is None else math.log(value, logarithm)


def _limits(values: Sequence[float], logarithm: int | None) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = _scaled(min(values), logarithm), _scaled(max(values), logarithm)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float, logarithm: int | None) -> list[tuple[float, str]]:
    """Places on the axis, as scaled, and their labels."""
    if logarithm is not None and high - low >= 2:
        step = math.ceil((high - low) / 5)
        whole = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
        return [(float(power), f"{logarithm}{raised(power)}") for power in whole]
    if logarithm is not None:
        inner = [tick for tick, _ in _ticks(logarithm**low, logarithm**high, None)]
        return [(math.log(tick, logarithm), f"{tick:.4g}") for tick in inner if tick > 0]
    rough = (high - low) / 4
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [
        (index * step, f"{index * step:.4g}") for index in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]


def _step_ticks(first: int, last: int, x: Callable[[float], float], y: float, width: int) -> list[str]:
    rough = max(1.0, (last - first) / (width / 110))
    unit = 10 ** math.floor(math.log10(rough))
    step = int(next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough))
    ticks = range(-(-first // step) * step, last + 1, step)
    # The last label would reach beyond the picture.
    return [_text(x(tick), y, f"{tick}", "end" if width - x(tick) < 20 else "middle") for tick in ticks]


def _shortened(name: str, width: float) -> str:
    return shortened(name, max(4, int(width / _LETTER)))
