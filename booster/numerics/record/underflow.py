"""How close numbers are to the edges of the format that they were computed in: what underflowed, and the room above."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from booster.numerics.record.samples import Exponents

_FORMATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_STEEPEST = 0.85  # of a natural logarithm, an octave
_WIDTH = 0.25  # octaves, of a step of the sum
_FIELDS = """name of optimizer step group format scale zeros lost subnormal headroom largest norm stored still update_norm
weight_norm"""
_MARGIN = 1  # bits that the best scale leaves free above the largest magnitude seen


@dataclass(frozen=True)
class Underflow:
    """One tensor in one step, as the backward pass left it: times the loss scale. Shares are of all its elements.

    of: what the numbers are: "gradient" of a parameter, "activation" of a module, or "activation gradient". format: what they
    were computed in. largest: magnitude. norm: without the scale. still: share of weights that an applied step did not
    change although their gradient was not zero, None where it was not counted; stored: the format that keeps these weights.
    """

    name: str
    of: str
    optimizer: str
    step: int
    group: int | None
    format: str
    scale: float
    exponents: Exponents
    largest: float
    norm: float | None = None
    stored: str | None = None
    still: float | None = None
    update_norm: float | None = None
    weight_norm: float | None = None

    @property
    def label(self) -> str:
        """The name, and what the numbers are where they are no gradient of a parameter."""
        return self.name if self.of == "gradient" else f"{self.name} ({self.of})"

    @property
    def zeros(self) -> float:
        """The share of zeros."""
        return self.exponents.zeros / max(1, self.exponents.total)

    @property
    def wider(self) -> bool:
        """Whether there are numbers that the format cannot hold, so that they are kept, and were computed, in a wider one."""
        return self.exponents.below(_floor(self.format) - 1) > 0

    @property
    def lost(self) -> float:
        """The share of zeros that were not zero, estimated from how fast the numbers thin out towards the smallest.

        On normal, lognormal and exponential numbers the estimate is right within a factor of 3 where 0.1 % to 10 % of those
        that are not zero are lost.
        """
        # 0 where the numbers are kept in a wider format, which shows all of them.
        if self.wider or not self.exponents.zeros:
            return 0.0
        below = _thinning(self.exponents, _floor(self.format))
        return min(self.exponents.zeros, below) / self.exponents.total

    @property
    def subnormal(self) -> float:
        """The share of numbers with fewer bits than normal ones, because they are smaller than the smallest of those."""
        if self.wider:
            return 0.0
        smallest = int(math.log2(torch.finfo(_FORMATS[self.format]).smallest_normal))
        return self.exponents.below(smallest) / max(1, self.exponents.total)

    @property
    def headroom(self) -> float | None:
        """Bits between the largest magnitude and the largest number of the format; None where all is zero, or not finite."""
        if not 0 < self.largest < math.inf:
            return None
        return math.log2(torch.finfo(_FORMATS[self.format]).max) - math.log2(self.largest)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain numbers."""
        return {name: getattr(self, name) for name in _FIELDS.split()} | {"exponents": self.exponents.as_dict()}


def edges(format: str) -> tuple[int, int, int]:
    """The exponents of the smallest number of a format, of the smallest normal one, and of the largest."""
    info = torch.finfo(_FORMATS[format])
    return _floor(format), round(math.log2(info.smallest_normal)), math.floor(math.log2(info.max))


def best_scale(rows: Sequence[Underflow]) -> float | None:
    """The loss scale that would have lost least: the largest power of two that keeps all `rows` a bit below overflow.

    None where nothing bounds it.
    """
    known = [(row.scale, row.headroom) for row in rows if row.headroom is not None and 0 < row.scale < math.inf]
    bounds = [math.log2(scale) + headroom for scale, headroom in known]
    # A larger scale never underflows more.
    return 2.0 ** min(1023, math.floor(min(bounds) - _MARGIN)) if bounds else None


def merge(lines: Sequence[Mapping[str, Any]]) -> Underflow:
    """One tensor from the sample lines of the ranks that hold parts of it; of parts that several hold each counts once."""
    first = lines[0]
    weights = [1.0 / (line.get("copies") or 1) for line in lines]
    spread = sum((Exponents.of(line) * weight for line, weight in zip(lines, weights, strict=True)), Exponents())
    looked = sum(line.get("looked", 0) * weight for line, weight in zip(lines, weights, strict=True))
    still = sum(line.get("still", 0) * weight for line, weight in zip(lines, weights, strict=True))
    return Underflow(
        name=first["name"],
        of=first["of"],
        optimizer=first["optimizer"],
        step=first["step"],
        group=first.get("group"),
        format=first["format"],
        scale=first["scale"],
        exponents=spread,
        largest=max(line["largest"] for line in lines),
        stored=next((line["stored"] for line in lines if "stored" in line), None),
        still=still / looked if looked else None,
        **{name: _root_of_squares(name, lines, weights) for name in ("norm", "update_norm", "weight_norm")},
    )


def _root_of_squares(name: str, lines: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> float | None:
    parts = [line[name] * math.sqrt(weight) for line, weight in zip(lines, weights, strict=True) if name in line]
    return math.hypot(*parts) if parts else None


def _thinning(spread: Exponents, floor: int) -> float:
    """How many numbers lie below half of 2**floor, the smallest number of a format to which `spread` was rounded.

    It must fall towards zero, and falls no faster than `_STEEPEST`: a density that is flat at zero, as of a normal
    distribution, falls by log 2 an octave.
    """
    places, densities, weights = [], [], []
    # The logarithm of the density, over that of the magnitude, is continued as the parabola through the four smallest
    # exponents: that of a lognormal distribution.
    for step in range(4):
        count = _count(spread, floor + step)
        low, high = 2.0**step - 0.5, 2.0 ** (step + 1) - 0.5  # what rounds to these numbers, in units of the smallest
        if count:
            places.append(math.log2(low * high) / 2)
            densities.append(math.log(count / math.log2(high / low)))
            # A count is as noisy as its root.
            weights.append(math.sqrt(min(count, 1e4)))
    # Nothing is at the edge of the format, so nothing can have been lost below it.
    if not _count(spread, floor):
        return 0.0
    if len(places) < 3:  # all numbers are at the edge of the format
        return math.inf
    curve, slope, level = _fitted(places, densities, weights)
    total, density, place = 0.0, curve - slope + level, -1.0
    while place > -60:
        here = max(0.0, min(2 * curve * (place - _WIDTH / 2) + slope, _STEEPEST))
        total += math.exp(density - here * _WIDTH / 2) * _WIDTH
        density, place = density - here * _WIDTH, place - _WIDTH
    return total


def _fitted(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float, float]:
    """The parabola through `y`, or the line where that would open upwards."""
    for degree in (2, 1):
        powers = torch.tensor([[place**power for power in range(degree, -1, -1)] for place in x], dtype=torch.float64)
        weigh = torch.tensor(weights, dtype=torch.float64)[:, None]
        found = torch.linalg.lstsq(powers * weigh, torch.tensor(y, dtype=torch.float64)[:, None] * weigh).solution
        if degree == 1 or found[0] <= 0:
            break
    numbers = found.flatten().tolist()
    return (0.0, numbers[0], numbers[1]) if len(numbers) == 2 else (numbers[0], numbers[1], numbers[2])


def _floor(format: str) -> int:
    """The exponent of the smallest number of a format; of float32 and wider that of the counts."""
    info = torch.finfo(_FORMATS[format])
    return max(-127, round(math.log2(info.smallest_normal) + math.log2(info.eps)))


def _count(spread: Exponents, exponent: int) -> float:
    place = exponent - spread.low
    return spread.counts[place] if 0 <= place < len(spread.counts) else 0.0
