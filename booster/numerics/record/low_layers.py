"""What rounding to a low precision does to the numbers that a layer multiplies, counted while a sampled step computes them.

A line of kind `low` has, for one operand of one product of one layer, `product` ("forward", "input_grad" or "weight_grad"),
`operand` ("input", "weight" or "gradient"), `format`, and of `total` numbers how many became zero and were not (`underflow`),
were cut off by the largest number of the format under their scale (`saturated`), and became that number (`top`), as many do in
a block before training in it diverges.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from booster.common.devices import HostCopy
from booster.interface.model import ModelWrapper
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.operands import low, padded_and_rotated
from booster.mixed_precision.low_precision.recipes import CastConfig, GemmConfig, HighPrecision
from booster.numerics.record.activations import Labels

Line = dict[str, Any]
_OPERANDS = {
    "forward": ("input", "weight"),
    "input_grad": ("gradient", "weight"),
    "weight_grad": ("gradient", "input"),
}
_COUNTS = ("total", "underflow", "saturated", "top")
_ABOVE = 1 + 2.0**-20  # the largest number of a block divided by its scale may be off by a rounding


class LowLayers:
    """Watches low-precision layers; counts while `on`. What several passes of a step bring is added up. Waits for no device."""

    def __init__(self) -> None:
        self.on = True
        self._rows: dict[tuple[str, str, str, str], torch.Tensor] = {}
        self._watched: list[tuple[weakref.ref[LowPrecisionLinear], Any]] = []
        self._labels = Labels()

    def attach(self, model: ModelWrapper) -> None:
        """Watch the low-precision layers that a boosted model has now."""
        label = self._labels.of(model.unwrap())
        for name, module in model.unwrap().named_modules():
            if isinstance(module, LowPrecisionLinear) and not module.in_high_precision:
                watcher = partial(self._count, f"{label}{name}", module.recipe)
                module.watchers = (*module.watchers, watcher)
                self._watched.append((weakref.ref(module), watcher))

    def close(self) -> None:
        """Watch no longer."""
        for reference, watcher in self._watched:
            module = reference()
            if module is not None:
                module.watchers = tuple(each for each in module.watchers if each is not watcher)
        self._watched, self._labels = [], Labels()

    def take(self) -> TakenLow:
        """Return what was counted since the last call."""
        rows, self._rows = self._rows, {}
        return TakenLow(rows)

    @torch.no_grad()
    def _count(
        self,
        name: str,
        recipe: Any,
        role: str,
        a: torch.Tensor,
        b: torch.Tensor,
        how: GemmConfig | HighPrecision,
        result: torch.Tensor,
    ) -> None:
        if not self.on or isinstance(how, HighPrecision) or not (a.numel() and b.numel()):
            return
        matrices = [padded_and_rotated(each.float(), how, recipe) for each in (a, b)]
        for matrix, operand, what in zip(matrices, (how.left, how.right), _OPERANDS[role], strict=True):
            key = (name, role, what, str(operand.format))
            row = _row(matrix, operand)
            self._rows[key] = self._rows[key] + row if key in self._rows else row


def _row(x: torch.Tensor, operand: CastConfig) -> torch.Tensor:
    rounded = low(x, operand)
    scale = rounded.scale_of_each() if rounded.outer is None else rounded.scale_of_each() * rounded.outer
    size, largest = rounded.values.float().abs(), operand.format.largest
    counts = (
        ((size == 0) & (x != 0)).sum(),
        (x.abs() > scale * (largest * _ABOVE)).sum(),
        (size == largest).sum(),
    )
    return torch.stack([torch.full((), x.numel(), dtype=torch.int64, device=x.device), *counts])


class TakenLow:
    """Counts of one step, on their way to the host."""

    def __init__(self, rows: Mapping[tuple[str, str, str, str], torch.Tensor]) -> None:
        self._rows = {key: HostCopy(row) for key, row in rows.items()}

    def ready(self) -> bool:
        """Whether `lines` would not wait for a device."""
        return all(row.ready() for row in self._rows.values())

    def lines(self) -> list[Line]:
        """The lines of the record, without optimizer and step."""
        return [
            {"kind": "low", "name": name, "product": role, "operand": what, "format": form}
            | dict(zip(_COUNTS, map(int, copy.tensor().tolist()), strict=True))
            for (name, role, what, form), copy in self._rows.items()
        ]
