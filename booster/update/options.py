"""How boosted optimizers step."""

from __future__ import annotations

from dataclasses import dataclass

from booster import arguments


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """The arguments of the same names of `Booster`. Raises TypeError or ValueError for one that is not legal."""

    fused_optimizer: bool | str = True
    clip_grad_norm: float = 0.0
    skip_nonfinite: bool = False
    max_consecutive_skips: int | None = 50
    release_gradients: bool | str = False

    def __post_init__(self) -> None:
        arguments.choice("fused_optimizer", self.fused_optimizer, (True, False, "compile"))
        if self.max_consecutive_skips is not None:
            arguments.count("max_consecutive_skips", self.max_consecutive_skips, also="None for no limit")
        arguments.number("clip_grad_norm", self.clip_grad_norm, least=0, fix="0 is off")
        arguments.flag("skip_nonfinite", self.skip_nonfinite)
        arguments.choice("release_gradients", self.release_gradients, (False, "exact", "previous_norm"))
