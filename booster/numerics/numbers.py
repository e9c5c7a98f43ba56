"""What is in a tensor, in a few numbers that outlive it and travel between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Numbers:
    """The range of one tensor. low, high: of its finite elements, 0 where there are none. dtype: without "torch."."""

    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float
    num_nan: int
    num_inf: int

    @property
    def num_bad(self) -> int:
        return self.num_nan + self.num_inf

    def __str__(self) -> str:
        numel = 1
        for size in self.shape:
            numel *= size
        bad = [f"{count} {what}" for count, what in ((self.num_nan, "NaN"), (self.num_inf, "inf")) if count]
        finite = f"{self.low:.3g} to {self.high:.3g}" if self.num_bad < numel else "nothing finite"
        return f"{self.dtype} {list(self.shape)}: {', '.join([finite, *bad])}"

    @classmethod
    def read(cls, data: dict[str, Any]) -> Numbers:
        """Return the inverse of `dataclasses.asdict`, also after a passage through JSON."""
        return cls(**{**data, "shape": tuple(data["shape"])})


def numbers_of(tensor: torch.Tensor) -> Numbers:
    """Read all of a real floating `tensor`; waits for its device."""
    values = tensor.detach()
    finite = values.isfinite()
    good = values[finite].double()
    low, high = (float(good.min()), float(good.max())) if good.numel() else (0.0, 0.0)
    num_nan = int(values.isnan().sum())
    num_inf = int(values.numel() - int(finite.sum())) - num_nan
    return Numbers(tuple(tensor.shape), dtype_name(tensor.dtype), low, high, num_nan, num_inf)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bad_rows(tensor: torch.Tensor, most: int = 8) -> list[int]:
    """Return where along its first dimension `tensor` holds an inf or NaN, at most so many places; none where all do."""
    if tensor.dim() == 0 or tensor.shape[0] < 2:
        return []
    bad = tensor.detach().isfinite().logical_not().flatten(1).any(1) if tensor.dim() > 1 else ~tensor.isfinite()
    return [] if bool(bad.all()) else bad.nonzero().flatten()[:most].tolist()
