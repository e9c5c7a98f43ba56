"""What plugins that shard by torch's `fully_shard` have in common."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from booster.plugin.base import Plugin, shared_mesh, world
from booster.plugin.fsdp.fully_sharded import without_reduction
from booster.ranks.messages import broadcast_from_first
from booster.shards import Shards
from booster.shards.dtensor import check_steps_shards
from booster.shards.fully_sharded import FullyShardedShards, UnshardedParams


class ShardingPlugin(Plugin):
    """Knows the meshes that it made, the models that it sharded on them, and whose gradients wait to be reduced."""

    is_whole = False

    def __init__(self) -> None:
        self._meshes: dict[str, DeviceMesh] = {}
        self._placed: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
        self._unsynchronised: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._unreduced: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._left = UnshardedParams()

    @abstractmethod
    def _mesh_sizes(self) -> dict[str, int]:
        """Return the dimensions of the mesh over the world, by name."""

    def _mesh(self, device_type: str) -> DeviceMesh:
        if device_type not in self._meshes:
            self._meshes[device_type] = shared_mesh(device_type, self._mesh_sizes())
        return self._meshes[device_type]

    @property
    def group(self) -> dist.ProcessGroup | None:
        return world()

    def synchronise(self, module: nn.Module) -> None:
        broadcast_from_first([*module.parameters(), *module.buffers()], self.group)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        check_steps_shards(optimizer)

    def make_shards(self, optimizer: Optimizer) -> Shards:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        roots = [module for module in self._placed if any(id(param) in held for param in module.parameters())]
        return FullyShardedShards(
            optimizer,
            roots,
            unreduced=self._unreduced,
            left=self._left,
            group=self.group,
            replica_group=self._replica_group,
            **self._of_pipelines(),
        )

    @property
    def _replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards as this one; None where it is alone."""
        mesh = next(iter(self._meshes.values()), None)
        return (
            mesh["replicate"].get_group() if mesh is not None and self._mesh_sizes().get("replicate", 1) > 1 else None
        )

    def _of_pipelines(self) -> dict[str, Any]:
        """Return the options of `FullyShardedShards` that tell how stages of pipelines hold parameters."""
        return {}

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        return without_reduction(module, self._unsynchronised, self._unreduced)
