"""What an update is made from, what it is asked to do, and who hears of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from booster.common import arguments
from booster.loss_scaler import LossScaler
from booster.shards import Shards


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """The arguments of the same names of `Booster`. Raises TypeError or ValueError for one that is not legal."""

    fused_optimizer: bool | str = True
    clip_grad_norm: float = 0.0
    skip_nonfinite: bool = False
    max_consecutive_skips: int | None = 50
    release_gradients: bool | str = False

    def __post_init__(self) -> None:
        arguments.choice("fused_optimizer", self.fused_optimizer, (True, False, "compile", "triton"))
        if self.max_consecutive_skips is not None:
            arguments.count("max_consecutive_skips", self.max_consecutive_skips, also="None for no limit")
        arguments.number("clip_grad_norm", self.clip_grad_norm, least=0, fix="0 is off")
        arguments.flag("skip_nonfinite", self.skip_nonfinite)
        arguments.choice("release_gradients", self.release_gradients, (False, "exact", "previous_norm"))


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateContext:
    """What an update is made from.

    Attributes:
        optimizer: the user's.
        scaler: the loss scale.
        names: the name of each parameter, for reports.
        group: the ranks that agree on found_inf; None means alone.
        shards: what this rank holds of the parameters; whatever touches gradients runs inside its `local()`.
        options: the arguments of `Booster`.
        switched: whether the optimizer's fused kernel was not the user's choice.
    """

    optimizer: Optimizer
    scaler: LossScaler
    names: Mapping[torch.Tensor, str] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None
    shards: Shards = None  # type: ignore[assignment]
    options: UpdateOptions = UpdateOptions()
    switched: bool = False

    def __post_init__(self) -> None:
        if self.shards is None:
            object.__setattr__(self, "shards", Shards(self.optimizer))


class StepListener:
    """Hears of backward passes and steps; override what is of use. It changes nothing that trains, and waits for no device."""

    def after_backward(self, loss: torch.Tensor | None) -> None:
        """A pass is complete. loss: detached, of one element, not scaled; None where another pipeline stage has it."""

    def before_step(self, update: Any, number: int) -> None:
        """Gradients are there, as `Gradients.carried` says, and nothing is decided yet. Not before a step with a closure."""

    def after_step(self, update: Any, number: int, result: Any) -> None:
        """The step is made or skipped. number: of the step, from 1; a checkpoint keeps count. result: a `StepResult`."""
