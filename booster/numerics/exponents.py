"""How the magnitudes of numbers are spread: counts by binary exponent, taken on any device without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["NUM_COUNTS", "Exponents", "count_exponents", "exponents_of"]

_BIAS = 127  # of float32
_CHUNK = 2**22  # elements; what is needed besides is 8 bytes for each, and counts of float32 are exact up to 2**24
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
        found = 0.0
        for place, count in enumerate(self.counts):
            found += count * min(1.0, max(0.0, bound - self.low - place))
        return found

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

    Waits for no device. Cost: on CPU about 2 ns an element, on one core.
    """
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
    by_exponent[0] -= int(zeros)
    present = [place for place, count in enumerate(by_exponent) if count]
    if not present:
        return Exponents(int(zeros), int(counts[255]))
    first, last = present[0], present[-1]
    return Exponents(int(zeros), int(counts[255]), first - _BIAS, tuple(by_exponent[first : last + 1]))
