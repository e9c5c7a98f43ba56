"""Gradients of an optimizer before a step, and what the step did to its weights, counted by binary exponent.

A line of kind `sample` has, for one parameter, or this rank's part of one:

- `of` "gradient", `name`, `group`, `place` among all parameters of the optimizer, `copies` (ranks that hold the same), and
  `format`, in which the backward pass computed;
- `scale`: the loss scale of the backward pass; `zeros`, `nonfinite`, `low` and `counts` of the gradient times that scale, see
  `Exponents`; `largest`: its largest magnitude; `norm`: of the gradient without the scale;
- of an applied step `stored` (the format that keeps the weight), `weight_norm`, `update_norm`, and `still` of `looked`: of so
  many elements, evenly spread, with a gradient that is not zero, so many did not change at all.

Counts are taken on any device, without waiting for it. The second half of the file reads them: what underflowed in the format
that numbers were computed in, and the room above them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from booster.common.arguments import dtype_name
from booster.common.devices import HostCopy
from booster.masters.formats import Kahan, Nearest
from booster.masters.master_state import MasterState
from booster.tensors.flat import flat_like, is_dense
from booster.update.update import Update

_BIAS = 127  # of float32
_CHUNK = 2**22  # elements, of 8 bytes of scratch each; counts in float32 are exact up to 2**24
NUM_COUNTS = 257
"""Elements of what `count_exponents` returns: 256 exponents of float32, and the zeros."""


@dataclass(frozen=True)
class Exponents:
    """Counts of numbers by magnitude: `counts[i]` of them lie from 2**(low + i) to below 2**(low + i + 1).

    zeros and nonfinite ones are counted apart. Numbers below 2**-126 count as of 2**-127. Counts are whole unless ranks
    that hold copies were merged.
    """

    zeros: float = 0
    nonfinite: float = 0
    low: int = 0
    counts: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        return self.zeros + self.nonfinite + sum(self.counts)

    @property
    def highest(self) -> int | None:
        """The exponent of the largest finite number; None where all are zero."""
        return self.low + len(self.counts) - 1 if self.counts else None

    def below(self, bound: float) -> float:
        """How many are smaller than 2**bound and not zero. A bin that `bound` divides counts in proportion."""
        count_below = 0.0
        for place, count in enumerate(self.counts):
            count_below += count * min(1.0, max(0.0, bound - self.low - place))
        return count_below

    def __add__(self, other: Exponents) -> Exponents:
        if not self.counts or not other.counts:
            low, counts = (self.low, self.counts) if self.counts else (other.low, other.counts)
        else:
            low = min(self.low, other.low)
            summed = [0.0] * (max(self.low + len(self.counts), other.low + len(other.counts)) - low)
            for each in (self, other):
                for place, count in enumerate(each.counts):
                    summed[each.low - low + place] += count
            counts = tuple(summed)
        return Exponents(self.zeros + other.zeros, self.nonfinite + other.nonfinite, low, counts)

    def __mul__(self, weight: float) -> Exponents:
        if weight == 1:
            return self
        return Exponents(self.zeros * weight, self.nonfinite * weight, self.low, tuple(c * weight for c in self.counts))

    def as_dict(self) -> dict[str, Any]:
        """The fields, for a line of a record."""
        return {"zeros": self.zeros, "nonfinite": self.nonfinite, "low": self.low, "counts": list(self.counts)}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Exponents:
        """Read what `as_dict` gave."""
        return cls(line["zeros"], line["nonfinite"], line["low"], tuple(line["counts"]))


def count_exponents(values: torch.Tensor) -> torch.Tensor:
    """Count `values`, of any real floating dtype, by exponent as float32; shape (NUM_COUNTS,), int64, on their device.

    Cost: on CPU about 2 ns an element, on one core.
    """
    # Waits for no device.
    counts = torch.zeros(NUM_COUNTS, dtype=torch.int64, device=values.device)
    for chunk in values.detach().reshape(-1).split(_CHUNK):
        bits = chunk.float().view(torch.int32)
        exponents = (bits >> 23) & 0xFF
        if values.is_cpu:
            counts[:256] += torch.bincount(exponents, minlength=256)
        else:  # bincount would wait, to learn the largest
            counts[:256] += torch.histc(exponents.float(), 256, 0, 256).long()
        counts[256] += chunk.numel() - chunk.count_nonzero()
    return counts


def exponents_of(counts: list[float]) -> Exponents:
    """Return what the numbers of `count_exponents` say."""
    zeros = counts[256]
    by_exponent = [int(count) for count in counts[:255]]
    # A zero has the exponent field of the smallest numbers, so it was counted with them.
    by_exponent[0] -= int(zeros)
    present = [place for place, count in enumerate(by_exponent) if count]
    if not present:
        return Exponents(int(zeros), int(counts[255]))
    first, last = present[0], present[-1]
    return Exponents(int(zeros), int(counts[255]), first - _BIAS, tuple(by_exponent[first : last + 1]))


class PendingRows:
    """Rows of numbers on their way to the host. Neighbours on one device, which have one length, leave it as one copy."""

    def __init__(self, rows: Iterable[torch.Tensor]) -> None:
        self._copies = [HostCopy(torch.stack(list(own))) for _, own in groupby(rows, attrgetter("device"))]

    def ready(self) -> bool:
        """Whether `rows` would not wait for a device."""
        return all(copy.ready() for copy in self._copies)

    def rows(self) -> list[list[float]]:
        """Return the numbers, in the order in which they were given."""
        return [row for copy in self._copies for row in copy.tensor().tolist()]


Line = dict[str, Any]
_MOST_WEIGHTS = 2**16  # elements of a parameter that are compared before and after a step


class Sample:
    """Gradients of `update` as they are now, counted; then, by `after`, what the step did.

    format: says in which dtype the backward pass computed the gradient of a parameter, None for its own. Waits for no
    device; a collective is not needed: where ranks hold parts, each counts its own. Scratch: 8 bytes for each of at most
    2**22 elements, 4 for each element of the largest bucket of masters, and 8 for each weight that is compared.
    """

    @torch.no_grad()
    def __init__(self, update: Update, format: Callable[[torch.Tensor], torch.dtype]) -> None:
        self._update = update
        self._lines: list[Line] = []
        self._params: list[torch.Tensor] = []
        self._nonzero: dict[torch.Tensor, torch.Tensor] = {}
        current_scale, _, loss_scale = update.gradients.factors
        rows = []
        with update.shards.local():
            params, values = update.gradients.params(), update.gradients.values()
            held = [(param, i) for i, group in enumerate(update.optimizer.param_groups) for param in group["params"]]
            places = {param: {"group": group, "place": place} for place, (param, group) in enumerate(held)}
            for param, value in zip(params, values, strict=True):
                if not value.numel():
                    continue
                self._params.append(param)
                line: Line = {"kind": "sample", "of": "gradient", "name": update.name_of(param), **places[param]}
                (copies,) = update.shards.num_replicas([param])
                self._lines.append(
                    {**line, "copies": copies if copies != 1 else None, "format": dtype_name(format(param))}
                )
                # Counts, norm, largest magnitude, loss scale, and what brings the values to it; float64
                device = value.device
                finite = value.detach().reshape(-1)
                norm = torch.linalg.vector_norm(finite, dtype=torch.float32 if finite.dtype != torch.float64 else None)
                largest = torch.linalg.vector_norm(finite, math.inf)
                scale = torch.as_tensor(loss_scale, dtype=torch.float64, device=device)
                shift = scale / torch.as_tensor(current_scale, dtype=torch.float64, device=device)
                numbers = torch.stack([norm.double(), largest.double(), scale, shift])
                rows.append(torch.cat([count_exponents(value).double(), numbers]))
                if value.shape == param.shape and is_dense(param):
                    self._nonzero[param] = _spread_out(flat_like(value, param)) != 0
            self._before = _stored(update, self._nonzero)
        self._rows, self._after = PendingRows(rows), PendingRows([])

    @torch.no_grad()
    def after(self, decision: bool | torch.Tensor) -> None:
        """Look at the weights after the step. decision: whether it was applied, as `StepResult.decision`."""
        if decision is False:
            self._before, self._nonzero = {}, {}
            return
        rows = []
        update = self._update
        with update.shards.local():
            now = _stored(update, self._nonzero)
            for param in self._params:
                before, after = self._before.get(param), now.get(param)
                if before is None or after is None or before.values.shape != after.values.shape:
                    rows.append(torch.full((4,), math.nan, dtype=torch.float64, device=param.device))
                    continue
                nonzero = self._nonzero[param]
                change = after.values.double() - before.values.double()
                still = ((change == 0) & nonzero).sum()
                # Of the elements looked at; the others are taken to be like them.
                share = param.numel() / max(1, change.numel())
                moved = torch.linalg.vector_norm(change) * math.sqrt(share)
                weight = torch.linalg.vector_norm(after.values.double()) * math.sqrt(share)
                rows.append(torch.stack([still.double(), nonzero.sum().double(), moved, weight]))
        for line, param in zip(self._lines, self._params, strict=True):
            line["stored"] = now[param].format if param in now else None
        self._after = PendingRows(rows)
        self._before, self._nonzero = {}, {}

    def ready(self) -> bool:
        """Whether `lines` would not wait for a device."""
        return self._rows.ready() and self._after.ready()

    def lines(self, applied: bool) -> list[Line]:
        """The lines of the record, without optimizer and step."""
        after, lines = self._after.rows(), []
        for index, (line, row) in enumerate(zip(self._lines, self._rows.rows(), strict=True)):
            norm, largest, scale, shift = row[NUM_COUNTS:]
            spread = exponents_of(row[:NUM_COUNTS])
            # Gradients that were unscaled already are counted as they came out of the backward pass.
            moved = round(math.log2(shift)) if shift > 0 and math.isfinite(shift) else 0
            own = {**spread.as_dict(), "low": spread.low + moved, "scale": scale, "largest": largest * shift}
            own["norm"] = norm * shift / scale
            if applied and after and not math.isnan(after[index][1]):
                still, looked, update_norm, weight_norm = after[index]
                own |= {
                    "still": int(still),
                    "looked": int(looked),
                    "update_norm": update_norm,
                    "weight_norm": weight_norm,
                }
            else:
                line = {**line, "stored": None}
            lines.append({**line, **own})
        return lines


class _Stored(NamedTuple):
    """What keeps the weights of one parameter: the format's name, and evenly spread elements, float32 or wider."""

    format: str
    values: torch.Tensor


def _stored(update: Update, wanted: Mapping[torch.Tensor, Any]) -> dict[torch.Tensor, _Stored]:
    """Evenly spread elements of what keeps each of the parameters `wanted`. Inside `local()`."""
    stored: dict[torch.Tensor, _Stored] = {}
    if isinstance(update.optimizer_state, MasterState):
        masters = update.optimizer_state.masters
        masters.register_params()
        pieces: dict[torch.Tensor, list[tuple[int, torch.Tensor]]] = {}
        formats: dict[torch.Tensor, str] = {}
        for bucket in masters.buckets:
            if wanted.keys().isdisjoint(bucket.params):
                continue
            for piece, values in zip(bucket.pieces, bucket.pieces_of(bucket.masters()), strict=True):
                stride = _stride(piece.param.numel())
                # Places count from where the weight begins, whichever piece of it this bucket has.
                own = values[-piece.start % stride :: stride].clone()
                pieces.setdefault(piece.param, []).append((piece.start, own))
                formats[piece.param] = _name_of_format(bucket.format, piece.param.dtype)
        for param, own_pieces in pieces.items():
            ordered = [values for _, values in sorted(own_pieces, key=lambda piece: piece[0])]
            stored[param] = _Stored(formats[param], torch.cat(ordered))
    for param in wanted:
        if param not in stored:
            stored[param] = _Stored(dtype_name(param.dtype), _spread_out(flat_like(param.detach(), param)).clone())
    return stored


def _stride(size: int) -> int:
    return -(-size // _MOST_WEIGHTS)


def _spread_out(values: torch.Tensor) -> torch.Tensor:
    return values[:: _stride(values.numel())]


def _name_of_format(format: Any, dtype: torch.dtype) -> str:
    if isinstance(format, Kahan):
        return f"{dtype_name(dtype)} and its error"
    return dtype_name(dtype) if isinstance(format, Nearest) else "float32"


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
    finite = [(row.scale, row.headroom) for row in rows if row.headroom is not None and 0 < row.scale < math.inf]
    bounds = [math.log2(scale) + headroom for scale, headroom in finite]
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
        slope_there = max(0.0, min(2 * curve * (place - _WIDTH / 2) + slope, _STEEPEST))
        total += math.exp(density - slope_there * _WIDTH / 2) * _WIDTH
        density, place = density - slope_there * _WIDTH, place - _WIDTH
    return total


def _fitted(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float, float]:
    """The parabola through `y`, or the line where that would open upwards."""
    for degree in (2, 1):
        powers = torch.tensor([[place**power for power in range(degree, -1, -1)] for place in x], dtype=torch.float64)
        weigh = torch.tensor(weights, dtype=torch.float64)[:, None]
        coefficients = torch.linalg.lstsq(
            powers * weigh, torch.tensor(y, dtype=torch.float64)[:, None] * weigh
        ).solution
        if degree == 1 or coefficients[0] <= 0:
            break
    numbers = coefficients.flatten().tolist()
    return (0.0, numbers[0], numbers[1]) if len(numbers) == 2 else (numbers[0], numbers[1], numbers[2])


def _floor(format: str) -> int:
    """The exponent of the smallest number of a format; of float32 and wider that of the counts."""
    info = torch.finfo(_FORMATS[format])
    return max(-127, round(math.log2(info.smallest_normal) + math.log2(info.eps)))


def _count(spread: Exponents, exponent: int) -> float:
    place = exponent - spread.low
    return spread.counts[place] if 0 <= place < len(spread.counts) else 0.0
