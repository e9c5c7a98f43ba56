"""One look at the gradients of an optimizer before a step, and at what the step did to its weights.

A line of kind `sample` has, for one parameter, or this rank's part of one:

- `of` "gradient", `name`, `group`, `place` among all parameters of the optimizer, `copies` (ranks that hold the same), and
  `format`, in which the backward pass computed;
- `scale`: the loss scale of the backward pass; `zeros`, `nonfinite`, `low` and `counts` of the gradient times that scale, see
  `Exponents`; `largest`: its largest magnitude; `norm`: of the gradient without the scale;
- of an applied step `stored` (the format that keeps the weight), `weight_norm`, `update_norm`, and `still` of `looked`: of so
  many elements, evenly spread, with a gradient that is not zero, so many did not change at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from booster.device import HostCopy
from booster.flat import flat_like, is_dense
from booster.masters.formats import Kahan, Nearest
from booster.masters.keeps import KeepsMasters
from booster.numerics.exponents import NUM_COUNTS, count_exponents, exponents_of
from booster.update.base import Update

__all__ = ["Sample"]

Line = dict[str, Any]
_MOST_WEIGHTS = 2**16  # elements of a parameter whose weights are compared before and after


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
        carried, _, loss_scale = update.carried
        rows = []
        with update.shards.local():
            params, values = update.params(), update.gradients()
            held = [(param, i) for i, group in enumerate(update.optimizer.param_groups) for param in group["params"]]
            places = {param: {"group": group, "place": place} for place, (param, group) in enumerate(held)}
            for param, value in zip(params, values, strict=True):
                if not value.numel():
                    continue
                self._params.append(param)
                line: Line = {"kind": "sample", "of": "gradient", "name": update.name_of(param), **places[param]}
                copies = update.shards.copies(param)
                self._lines.append({**line, "copies": copies if copies != 1 else None, "format": _name(format(param))})
                rows.append(_row(value, carried, loss_scale))
                if value.shape == param.shape and is_dense(param):
                    self._nonzero[param] = _spread_out(flat_like(value, param)) != 0
            self._before = _stored(update, self._nonzero)
        self._rows = [HostCopy(packed) for packed in _stacked(rows)]
        self._after: list[HostCopy] = []

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
        self._after = [HostCopy(packed) for packed in _stacked(rows)]
        self._before, self._nonzero = {}, {}

    def ready(self) -> bool:
        """Whether `lines` would not wait for a device."""
        return all(copy.ready() for copy in (*self._rows, *self._after))

    def lines(self, applied: bool) -> list[Line]:
        """The lines of the record, without optimizer and step."""
        rows = [row for copy in self._rows for row in copy.tensor().tolist()]
        after = [row for copy in self._after for row in copy.tensor().tolist()]
        found = []
        for index, (line, row) in enumerate(zip(self._lines, rows, strict=True)):
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
            found.append({**line, **own})
        return found


class _Stored:
    """What keeps the weights of one parameter: the format's name, and evenly spread elements, float32 or wider."""

    def __init__(self, format: str, values: torch.Tensor) -> None:
        self.format = format
        self.values = values


def _stored(update: Update, wanted: Mapping[torch.Tensor, Any]) -> dict[torch.Tensor, _Stored]:
    """Evenly spread elements of what keeps each of the parameters `wanted`. Inside `local()`."""
    found: dict[torch.Tensor, _Stored] = {}
    if isinstance(update, KeepsMasters):
        update.masters.adopt()
        pieces: dict[torch.Tensor, list[tuple[int, torch.Tensor]]] = {}
        formats: dict[torch.Tensor, str] = {}
        for bucket in update.masters.buckets:
            if wanted.keys().isdisjoint(bucket.params):
                continue
            for piece, values in zip(bucket.pieces, bucket.pieces_of(bucket.joined()), strict=True):
                stride = _stride(piece.param.numel())
                own = values[-piece.start % stride :: stride].clone()
                pieces.setdefault(piece.param, []).append((piece.start, own))
                formats[piece.param] = _name_of_format(bucket.format, piece.param.dtype)
        for param, own_pieces in pieces.items():
            ordered = [values for _, values in sorted(own_pieces, key=lambda piece: piece[0])]
            found[param] = _Stored(formats[param], torch.cat(ordered))
    for param in wanted:
        if param not in found:
            found[param] = _Stored(_name(param.dtype), _spread_out(flat_like(param.detach(), param)).clone())
    return found


def _row(value: torch.Tensor, carried: Any, loss_scale: Any) -> torch.Tensor:
    """Counts, norm, largest magnitude, loss scale, and what brings the values to it; float64."""
    device = value.device
    finite = value.detach().reshape(-1)
    norm = torch.linalg.vector_norm(finite, dtype=torch.float32 if finite.dtype != torch.float64 else None)
    largest = torch.linalg.vector_norm(finite, math.inf)
    scale = torch.as_tensor(loss_scale, dtype=torch.float64, device=device)
    shift = scale / torch.as_tensor(carried, dtype=torch.float64, device=device)
    numbers = torch.stack([norm.double(), largest.double(), scale, shift])
    return torch.cat([count_exponents(value).double(), numbers])


def _stacked(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """`rows` in order, as few tensors, each of one device."""
    found: list[torch.Tensor] = []
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or rows[stop].device != rows[start].device:
            found.append(torch.stack(rows[start:stop]))
            start = stop
    return found


def _stride(size: int) -> int:
    return -(-size // _MOST_WEIGHTS)


def _spread_out(values: torch.Tensor) -> torch.Tensor:
    return values[:: _stride(values.numel())]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name_of_format(format: Any, dtype: torch.dtype) -> str:
    if isinstance(format, Kahan):
        return f"{_name(dtype)} and its error"
    return _name(dtype) if isinstance(format, Nearest) else "float32"
