"""How far the gradients of one precision are from those of another: as a whole, and layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_FLOOR = 1e-6  # of the norm of all gradients: a layer whose own norm is below it has gradients of rounding alone


@dataclass(frozen=True)
class LayerError:
    """The gradients of the parameters that one module holds itself, taken together.

    relative: the norm of the difference over that of the reference; inf where one is not finite. cosine: of the angle between
    them. norm: of the reference.
    """

    name: str
    relative: float
    cosine: float
    norm: float


@dataclass(frozen=True)
class GradientError:
    """The same of all gradients together; layers: the worst first."""

    relative: float
    cosine: float
    layers: tuple[LayerError, ...]


def gradient_error(
    found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], *, whole: str = "model"
) -> GradientError:
    """Compare gradients by the names of their parameters; one that is missing is zero. whole: the name of the model itself.

    Sums are in float64. The error of a layer with hardly any gradient is taken relative to a millionth of all.
    """
    sums: dict[str, list[float]] = {}
    for name in reference.keys() | found.keys():
        mine, exact = found.get(name), reference.get(name)
        layer = sums.setdefault(name.rpartition(".")[0] or whole, [0.0, 0.0, 0.0, 0.0])
        for place, value in enumerate(_sums(mine, exact)):
            layer[place] += value
    total = [math.fsum(layer[place] for layer in sums.values()) for place in range(4)]
    floor = _FLOOR * math.sqrt(total[1])
    layers = [LayerError(name, *_ratios(layer, floor), math.sqrt(layer[1])) for name, layer in sums.items()]
    layers.sort(key=lambda layer: (-layer.relative, layer.name))
    return GradientError(*_ratios(total, 0.0), tuple(layers))


def _sums(mine: torch.Tensor | None, exact: torch.Tensor | None) -> tuple[float, float, float, float]:
    """Sums of squares of the difference, of the reference, of what was found, and of the product of the last two."""
    known = mine if mine is not None else exact
    assert known is not None
    a = torch.zeros_like(known, dtype=torch.float64) if mine is None else mine.double()
    b = torch.zeros_like(known, dtype=torch.float64) if exact is None else exact.double()
    return tuple(float(value) for value in ((a - b).square().sum(), b.square().sum(), a.square().sum(), (a * b).sum()))  # type: ignore[return-value]


def _ratios(sums: list[float], floor: float) -> tuple[float, float]:
    difference, exact, found, product = sums
    if not math.isfinite(difference):
        return math.inf, math.nan
    if difference == 0.0:
        return 0.0, 1.0
    below = max(math.sqrt(exact), floor)
    lengths = math.sqrt(exact * found)
    return (math.sqrt(difference) / below if below else math.inf), (product / lengths if lengths else 0.0)
