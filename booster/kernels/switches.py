"""Which Triton kernels are taken by default: each part that steps and rounded matrices are put together from.

`python -m benchmarks.gpu` prints lines for `DECIDED` after a run on a card. What is off there is done by torch, and an INFO
line says so; `fused_optimizer="triton"` steps by kernels all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSwitch:
    """on: whether kernels of this part are taken by default. card, date: of the run that decided it. why: what it found."""

    on: bool = True
    card: str = "never run on a card"
    date: str = ""
    why: str = ""


NAMES = (
    *(f"rule {name}" for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Lion")),
    *(f"weights {name}" for name in ("float32", "Same", "Float32Master", "SplitBFloat16", "SplitFloat16")),
    *(f"weights {name}" for name in ("Split24BFloat16", "Split24Float16", "Nearest", "Stochastic", "Kahan")),
    *("states bf16", "states 8bit", "release", "shards", "matrices delayed", "matrices e2m1 blocks"),
    *(f"matrices {kind} {over}" for kind in ("e4m3fn", "e5m2", "int8") for over in ("tensor", "row", "blocks")),
)
"""Names of all parts. Weights are named after the class of their format in `masters/formats.py`."""

DECIDED: Mapping[str, KernelSwitch] = {}
"""By name, what a run on a card decided. The others have run on none: they are on, behind a trial against torch."""


def off(*names: str) -> str | None:
    """Return which of `names` is off, and why; None where all are on."""
    for name in names:
        switch = DECIDED.get(name, KernelSwitch())
        if not switch.on:
            return f"{name!r} is off in booster/kernels/switches.py: {switch.why} ({switch.card}, {switch.date})"
    return None
