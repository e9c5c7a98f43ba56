"""Which form of master weights a user asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer

from booster import arguments
from booster.masters.formats import Format, Kahan, Nearest, Separate, SplitBFloat16, SplitFloat16, Stochastic
from booster.optimizer_kinds import kind_of, unknown

MasterWeights = Literal["auto", "fp32", "split", "none"]
Rounding = Literal["nearest", "stochastic", "kahan"]
_FORMS = ("auto", "fp32", "split", "none")
_ROUNDINGS: dict[str, type[Format]] = {"nearest": Nearest, "stochastic": Stochastic, "kahan": Kahan}


@dataclass(frozen=True, kw_only=True)
class MasterOptions:
    """master_weights: "fp32" keeps a separate float32 copy; "split" keeps only the bits that the half weight lacks, to the
    same result (for float16: for magnitudes of at least 2**-14); "none" keeps nothing and rounds every update to the half
    weight; "auto" is "split" for bfloat16 where the optimizer is elementwise, else "fp32".
    rounding: with "none": "nearest", "stochastic", or "kahan", which keeps the rounding error in half precision.
    """

    master_weights: MasterWeights = "auto"
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        arguments.choice("master_weights", self.master_weights, _FORMS)
        arguments.choice("rounding", self.rounding, list(_ROUNDINGS))
        if self.rounding != "nearest" and self.master_weights != "none":
            raise ValueError(
                f"rounding={self.rounding!r} is for master_weights='none'; with {self.master_weights!r} masters keep "
                "float32 and nothing is lost to rounding"
            )

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError if `optimizer` cannot be stepped on masters of this form."""
        kind, name = kind_of(optimizer), type(optimizer).__name__
        if kind == "elementwise" or self.master_weights in ("auto", "fp32"):
            return
        if kind == "per tensor":
            raise ValueError(
                f"master_weights={self.master_weights!r} steps flat buckets, but {name} needs whole tensors; "
                "use master_weights='fp32' or 'auto'"
            )
        would = f"would be stepped on flat buckets by master_weights={self.master_weights!r}"
        raise ValueError(unknown(optimizer, would, "use master_weights='fp32' or 'auto'"))

    def make_format(self, optimizer: Optimizer, dtype: torch.dtype) -> Format:
        """Return the format for working weights of `dtype`."""
        form = self.master_weights
        if form == "auto":
            form = "split" if dtype == torch.bfloat16 and kind_of(optimizer) == "elementwise" else "fp32"
        if form == "none":
            return _ROUNDINGS[self.rounding]()
        if form == "split":
            return SplitBFloat16() if dtype == torch.bfloat16 else SplitFloat16()
        return Separate()
