"""What plugins that shard with torch's `fully_shard` have in common."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from booster.mixed_precision.policy import DtypePolicy
from booster.model.modules import bare
from booster.plugin.base import Plugin, shared_mesh, world
from booster.plugin.fsdp.shard_module import change_dtypes, stays_sharded
from booster.plugin.fsdp.wrap_policy import WrapPolicy, block_names
from booster.ranks.messages import broadcast_from_first
from booster.shards import Shards
from booster.shards.dtensor import check_steps_shards
from booster.shards.fully_sharded import FullyShardedShards, UnshardedParams


class ShardingPlugin(Plugin):
    """Holds the meshes that it made, the models that it sharded on them, and which of these have unreduced gradients."""

    is_whole = False

    def __init__(self, wrap_policy: WrapPolicy, reduce_dtype: torch.dtype | None) -> None:
        self._wrap_policy = wrap_policy
        self._reduce_dtype = reduce_dtype
        self._meshes: dict[str, DeviceMesh] = {}
        self._placed: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
        self._unsynchronised: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._unreduced: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._unsharded = UnshardedParams()

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
            unsharded=self._unsharded,
            group=self.group,
            replica_group=self._replica_group,
            **self._pipeline_options(),
        )

    @property
    def _replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards as this one; None if no other rank does."""
        mesh = next(iter(self._meshes.values()), None)
        return (
            mesh["replicate"].get_group() if mesh is not None and self._mesh_sizes().get("replicate", 1) > 1 else None
        )

    def _pipeline_options(self) -> dict[str, Any]:
        """Return the options of `FullyShardedShards` that say how stages of pipelines hold parameters."""
        return {}

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        return self._without_reduction(bare(module))

    @contextmanager
    def _without_reduction(self, model: nn.Module) -> Iterator[None]:
        # A context inside another one must not switch reduction on when it ends.
        if not isinstance(model, FSDPModule) or model in self._unsynchronised:
            yield
            return
        self._unreduced.add(model)
        self._unsynchronised.add(model)
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
            self._unsynchronised.discard(model)

    def _dtypes_refusal(self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy) -> str | None:
        """Return why the shards of `placed` cannot get other dtypes, as `switch_refusal` does."""
        model = bare(placed)
        return stays_sharded(model, before, after, blocks=block_names(model, self._wrap_policy))

    def _change_dtypes(self, placed: nn.Module, after: DtypePolicy) -> nn.Module:
        """Give the shards of `placed` the dtypes of `after`, as `place_again` does."""
        model = bare(placed)
        self._unsharded.write_back_all(model)
        blocks = block_names(model, self._wrap_policy)
        self._placed[model] = change_dtypes(
            placed, after, self._placed[model], blocks=blocks, reduce_dtype=self._reduce_dtype
        )
        return placed
