"""What the update of one optimizer is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from booster.loss_scaler import LossScaler
from booster.shards import Shards
from booster.update.outcome import UpdateOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateContext:
    """What an update is made from.

    names: the name of each parameter, for reports. group: where ranks agree on found_inf; None means alone. shards: what
    this rank holds of the parameters; whatever touches gradients runs inside its `local()`. switched: the optimizer's fused
    kernel was not the user's choice.
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
