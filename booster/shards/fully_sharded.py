"""Parts of parameters that `fully_shard` placed: it gathers and frees them, and may hold their gradients back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from booster.shards.dtensor import DTensorShards


class FullyShardedShards(DTensorShards):
    """The shards of `modules`, which went through `fully_shard`. Options: those of `DTensorShards`."""

    def __init__(self, optimizer: Optimizer, modules: Iterable[nn.Module], **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._modules = [weakref.ref(module) for module in modules]

    def publish(self) -> None:
        super().publish()
        # A forward pass without a backward leaves gathered parameters behind; the next one would take the old values.
        self.forget_gathered()

    def forget_gathered(self) -> None:
        for module in self._alive():
            reshard(module)

    def clear_gradients(self, set_to_none: bool) -> None:
        super().clear_gradients(set_to_none)
        for module in self._alive():
            forget_unreduced_gradients(module)

    def _alive(self) -> list[nn.Module]:
        return [module for module in (ref() for ref in self._modules) if module is not None]


def reshard(module: nn.Module) -> None:
    """Free all gathered parameters in `module`, so that it holds the shards, as after a backward pass."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def forget_unreduced_gradients(module: nn.Module) -> None:
    """Drop the gradients that backward passes without synchronisation left with the gathered parameters."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            # torch has no public way: reset_iter_state() keeps them.
            for group in child._get_fsdp_state()._fsdp_param_groups:
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):
                        param._unsharded_param.grad = None
