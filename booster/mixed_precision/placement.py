"""What a precision asks of a parallelism."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.mixed_precision.policy import DtypePolicy, cast_parameters
from booster.shards import Shards


@runtime_checkable
class Placement(Protocol):
    """What a strategy asks of a parallelism, which it knows by nothing else. Every `booster.plugin.Plugin` is one."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds and steps all of every parameter."""

    @property
    def stores_float32(self) -> bool:
        """Whether placed parameters stay in their dtype where `policy.store` is None, as shards that serve as masters do."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that must skip a step together; None means no collective, also inside a launched job."""

    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        """Put `module` on `device` in the dtypes of `policy` and return what is to be called; may run collectives."""

    def synchronise(self, module: nn.Module) -> None:
        """Give `module` the parameters and buffers that all ranks are to start from, before a precision casts them; may
        run collectives."""

    def make_shards(self, optimizer: Optimizer) -> Shards:
        """Return what this rank holds and steps of the parameters of `optimizer`, which are those of a placed module."""


class InProcess:
    """No parallelism: a model is cast where it is."""

    is_whole = True
    stores_float32 = False
    group: dist.ProcessGroup | None = None

    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        return cast_parameters(module, policy)

    def synchronise(self, module: nn.Module) -> None:
        pass

    def make_shards(self, optimizer: Optimizer) -> Shards:
        return Shards(optimizer)
