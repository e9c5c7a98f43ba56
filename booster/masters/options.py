"""Which form of master weights a user asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer

from booster.common import arguments
from booster.masters.formats import (
    Format,
    Kahan,
    Nearest,
    Same,
    Separate,
    Split24BFloat16,
    Split24Float16,
    SplitBFloat16,
    SplitFloat16,
    Stochastic,
)
from booster.masters.quantized_state import StateQuantizer, States, StateSigns
from booster.masters.rounding import RoundingRNG
from booster.model.optimizers import kind_of, unknown

MasterWeights = Literal["auto", "fp32", "split", "split24", "none"]
Rounding = Literal["nearest", "stochastic", "kahan"]
_FORMS = ("auto", "fp32", "split", "split24", "none")
STATES = ("fp32", "bf16", "8bit")
_ROUNDINGS: dict[str, type[Format]] = {"nearest": Nearest, "stochastic": Stochastic, "kahan": Kahan}


@dataclass(frozen=True, kw_only=True)
class MasterOptions:
    """How masters and states of an optimizer are kept. All but "fp32" and "auto" are for elementwise optimizers.

    Attributes:
        master_weights: "fp32" keeps a separate float32 copy. "split" keeps only the bits that the weight lacks, to the same
            result (for float16: for magnitudes of at least 2**-14). "split24" keeps the upper 8 of those 16 bits and rounds
            stochastically, so that a master has 16 binary digits (19 with float16). "none" keeps nothing and rounds every
            update to the weight. "auto" is "split" for bfloat16 where the optimizer is elementwise, else "fp32".
        rounding: with "none": "nearest", "stochastic", or "kahan", which keeps the rounding error in half precision.
        states: "fp32" keeps states as they are, "bf16" in 2 bytes an element and "8bit" in 1.0625; see `quantized_state.py`.
        offload: states and residual bits are in the host's memory between steps; see `offload.py`.
    """

    master_weights: MasterWeights = "auto"
    rounding: Rounding = "nearest"
    states: States = "fp32"
    offload: bool = False

    def __post_init__(self) -> None:
        arguments.choice("master_weights", self.master_weights, _FORMS)
        arguments.choice("rounding", self.rounding, list(_ROUNDINGS))
        arguments.choice("states", self.states, STATES)
        arguments.flag("offload", self.offload)
        if self.rounding != "nearest" and self.master_weights != "none":
            raise ValueError(
                f"rounding={self.rounding!r} is for master_weights='none'; with {self.master_weights!r} masters keep "
                "float32 and nothing is lost to rounding"
            )

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError if `optimizer` cannot be stepped on masters of this form, or its states cannot be kept so."""
        kind, name = kind_of(optimizer), type(optimizer).__name__
        if kind == "elementwise":
            if self.states != "fp32":
                StateSigns(optimizer)
            return
        if self.states != "fp32":  # first: under a precision on float32 weights no user chose `master_weights`
            given, fix = f"states={self.states!r}", "use states='fp32'"
        elif self.master_weights not in ("auto", "fp32"):
            given, fix = f"master_weights={self.master_weights!r}", "use master_weights='fp32' or 'auto'"
        elif self.offload:
            given, fix = "offload_states=True", "leave it False"
        else:
            return
        if kind == "per tensor":
            raise ValueError(f"{given} steps flat buckets, but {name} needs whole tensors; {fix}")
        raise ValueError(unknown(optimizer, f"would be stepped on flat buckets by {given}", fix))

    def make_quantizer(self, optimizer: Optimizer, rng: RoundingRNG) -> StateQuantizer | None:
        """Return how states are kept, None for as they are. Raises ValueError where those of `optimizer` cannot be packed."""
        return None if self.states == "fp32" else StateQuantizer(optimizer, self.states, rng)

    def make_format(self, optimizer: Optimizer, dtype: torch.dtype, rng: RoundingRNG) -> Format:
        """Return the format for working weights of `dtype`."""
        form = self.master_weights
        if dtype == torch.float32:
            return Same()
        if form == "auto":
            # Split needs flat buckets; float16 masters lose bits below 2**-14 by it, so that is the user's choice.
            form = "split" if dtype == torch.bfloat16 and kind_of(optimizer) == "elementwise" else "fp32"
        if form == "none":
            return _ROUNDINGS[self.rounding]()
        if form == "split":
            return SplitBFloat16() if dtype == torch.bfloat16 else SplitFloat16()
        if form == "split24":
            return Split24BFloat16(rng) if dtype == torch.bfloat16 else Split24Float16(rng)
        return Separate()
