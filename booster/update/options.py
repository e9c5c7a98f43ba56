"""How boosted optimizers step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """The arguments of the same names of `Booster`. Raises ValueError for one out of range."""

    fused_optimizer: bool | str = True
    clip_grad_norm: float = 0.0
    skip_nonfinite: bool = False
    max_consecutive_skips: int | None = 50

    def __post_init__(self) -> None:
        if self.fused_optimizer not in (True, False, "compile"):
            raise ValueError(f"fused_optimizer={self.fused_optimizer!r} is not legal; choose True, False or 'compile'")
        skips = self.max_consecutive_skips
        if skips is not None and (not isinstance(skips, int) or skips < 1):
            raise ValueError(f"max_consecutive_skips={skips} is not legal; it must be an int of at least 1, or None")
        if isinstance(self.clip_grad_norm, bool) or not 0 <= self.clip_grad_norm < math.inf:
            raise ValueError(
                f"clip_grad_norm={self.clip_grad_norm!r} is not legal; it must be a finite number, or 0 for off"
            )
