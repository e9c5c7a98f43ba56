"""The plugin of torch's `fully_shard` (FSDP2), and the base that it shares with `HybridParallelPlugin`."""

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

from booster.common import arguments
from booster.common.snapshot import SharedRandom
from booster.mixed_precision.policy import DtypePolicy, cast_parameters, gathered_modules
from booster.model.modules import bare, materialise_on
from booster.model.params import local_shard
from booster.plugin.base import Plugin, check_joined, shared_mesh
from booster.plugin.expert_parallel import ExpertSharding, check_experts, find_experts
from booster.plugin.fsdp.groups import WrapPolicy, block_names, check_wrap_policy
from booster.plugin.fsdp.shard_module import change_dtypes, dtypes_refusal, shard_module
from booster.plugin.sequence_parallel import CutMode, SequenceParallel, check_sizes
from booster.ranks.agreement import broadcast_from_first, world
from booster.shards import Shards
from booster.shards.dtensor import check_steps_shards
from booster.shards.fully_sharded import FullyShardedShards, UnshardedParams

_REDUCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ShardingPlugin(Plugin):
    """Holds the meshes that it made, the models that it sharded on them, and which of these have unreduced gradients."""

    is_whole, passes_together = False, True

    def __init__(self, wrap_policy: WrapPolicy, reduce_dtype: torch.dtype | None, ep_size: int) -> None:
        self._wrap_policy = wrap_policy
        self._reduce_dtype = reduce_dtype
        self.ep_size = ep_size
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

    def _experts(self, model: nn.Module, device_type: str) -> ExpertSharding | None:
        """Return how the experts of `model` are divided; None with ep_size=1. Raises ValueError where they cannot be."""
        if self.ep_size == 1:
            return None
        # A collective, the first time.
        names = check_experts(model, self.ep_size)
        return ExpertSharding(device_type, self._mesh_sizes(), self.ep_size, names)

    def _blocks(self, model: nn.Module) -> list[str]:
        """Return the names of the modules that are gathered by themselves."""
        blocks = block_names(model, self._wrap_policy)
        return blocks if self.ep_size == 1 else [*blocks, *(name for name in find_experts(model) if name not in blocks)]

    @property
    def group(self) -> dist.ProcessGroup | None:
        return world()

    def synchronise(self, module: nn.Module) -> None:
        broadcast_from_first([*module.parameters(), *module.buffers()], self.group)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        check_steps_shards(optimizer)

    def make_shards(self, optimizer: Optimizer) -> Shards:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        # One plugin may have placed several models, and an optimizer steps some of them.
        roots = [module for module in self._placed if any(id(param) in held for param in module.parameters())]
        return FullyShardedShards(
            optimizer,
            roots,
            unreduced=self._unreduced,
            unsynchronised=self._unsynchronised,
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
        return dtypes_refusal(model, before, after, blocks=self._blocks(model))

    def _change_dtypes(self, placed: nn.Module, after: DtypePolicy) -> nn.Module:
        """Give the shards of `placed` the dtypes of `after`, as `place_again` does."""
        model = bare(placed)
        self._unsharded.write_back_all(model)
        blocks = self._blocks(model)
        self._placed[model] = change_dtypes(
            placed, after, self._placed[model], blocks=blocks, reduce_dtype=self._reduce_dtype
        )
        return placed


class TorchFSDPPlugin(ShardingPlugin):
    """FSDP (torch's `fully_shard`): every rank holds a share of each parameter, gradient and optimizer state, and of the batch.

    reshard_after_forward: free a block's gathered parameters after its forward and gather them again in backward; False keeps
        them, which is faster and takes memory as ZeRO-2 does; a whole number keeps them sharded over that many ranks.
    wrap_policy: what a block is: module classes, name patterns, a predicate `(name, module) -> bool`, or the number of
        parameters from which on a module is one; None means the repeated blocks of the model, see `groups.block_names`.
    cpu_offload: shards, gradients and optimizer states stay in the CPU's memory.
    reduce_dtype: dtype in which gradients are averaged; None means float32 for half-precision models, otherwise the dtype of
        the parameters.
    replicate_size: keep this many copies of the model, each sharded over the world size divided by it; neighbouring ranks share
        a copy.
    sp_size: neighbouring ranks that share sequences, each with some of the tokens (context parallelism); b.shard_sequence cuts
        batches. Parameters are sharded over them as over the others.
    sequence_parallelism_mode: how they do: "all_to_all" divides heads of attention, "ring_attn" sends keys and values round;
        None where sp_size is 1.
    ep_size: deal whole experts of mixtures to so many neighbouring ranks, which send each other the tokens for them; see
        `booster.plugin.expert_parallel`. Parameters of experts are sharded over the rest of the ranks of a copy.

    Parameters are gathered block by block in the dtype that the precision computes in. Under `fp16_naive` and `bf16_naive`
    the float32 shard is the master, unless they ask for split or no masters.

    All ranks start from rank 0's weights. Parameters on the meta device get theirs from `reset_parameters()`. Construct
    it after `booster.launch_from_torch()`; raises RuntimeError in a launched job that has no process group yet. Without a
    process group, outside a launched job, the model is trained whole, as on a single device.
    """

    def __init__(
        self,
        *,
        reshard_after_forward: bool | int = True,
        wrap_policy: WrapPolicy = None,
        cpu_offload: bool = False,
        reduce_dtype: torch.dtype | None = None,
        replicate_size: int = 1,
        sp_size: int = 1,
        sequence_parallelism_mode: CutMode | None = None,
        ep_size: int = 1,
    ) -> None:
        check_joined("TorchFSDPPlugin")
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        check_sizes(sp_size, sequence_parallelism_mode)
        if world_size % sp_size:
            raise ValueError(f"sp_size={sp_size} does not divide the world size, which is {world_size}")
        check_wrap_policy(wrap_policy)
        arguments.flag("cpu_offload", cpu_offload)
        if cpu_offload and not dist.is_initialized():
            raise RuntimeError(
                "cpu_offload=True needs a process group, also for a single process; start the job with "
                "`booster run --nproc_per_node 1` and call booster.launch_from_torch() first, or leave it False"
            )
        if reduce_dtype is not None and reduce_dtype not in _REDUCE_DTYPES:
            raise ValueError(
                f"reduce_dtype={reduce_dtype!r} is not legal; choose one of {list(_REDUCE_DTYPES)}, or None"
            )
        if not arguments.is_whole(replicate_size) or replicate_size < 1 or world_size % replicate_size:
            raise ValueError(
                f"replicate_size={replicate_size!r} is not legal; it must be a whole number that divides the world size, "
                f"which is {world_size}"
            )
        shard_size = world_size // replicate_size
        if not arguments.is_whole(ep_size) or ep_size < 1 or shard_size % ep_size:
            raise ValueError(
                f"ep_size={ep_size!r} is not legal; it must be a whole number that divides the {shard_size} ranks over which a "
                "parameter is sharded"
            )
        if ep_size > 1 and not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward} keeps gathered weights divided over fewer ranks, which torch "
                f"does not do for experts that ep_size={ep_size} deals to ranks; pass True or False"
            )
        if not isinstance(reshard_after_forward, bool) and not (
            arguments.is_whole(reshard_after_forward)
            and 1 < reshard_after_forward < shard_size
            and shard_size % reshard_after_forward == 0
        ):
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward!r} is not legal; choose True, False, or a whole number above 1 "
                f"that divides the {shard_size} ranks over which a parameter is sharded and is less than them"
            )
        # Without a process group nothing is sharded, and half-precision models need separate masters.
        self.stores_float32 = dist.is_initialized()
        if hasattr(wrap_policy, "__iter__") and not isinstance(wrap_policy, (type, str)):
            wrap_policy = list(wrap_policy)  # type: ignore[arg-type] # a generator yields its entries once
        super().__init__(wrap_policy, reduce_dtype, ep_size)
        self._options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward, "cpu_offload": cpu_offload}
        self._replicate_size = replicate_size
        self._sp_size = sp_size
        if sequence_parallelism_mode is not None:
            groups = self._data_mesh["sp"].get_group(), dist.group.WORLD
            self.sequence_parallel = SequenceParallel(sequence_parallelism_mode, *groups)

    @property
    def _data_mesh(self) -> DeviceMesh:
        """All ranks by what they share: a sequence, or its place in the batch."""
        device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
        return shared_mesh(device_type, {"dp": dist.get_world_size() // self._sp_size, "sp": self._sp_size})

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        if self.sequence_parallel is None:
            return self.group
        return self._data_mesh["dp"].get_group() if dist.get_world_size() > self._sp_size else None

    @property
    def averaging_group(self) -> dist.ProcessGroup | None:
        return self.group

    release_refusal = None

    @property
    def divides_as(self) -> str | None:
        if not self.stores_float32:
            return "single"
        plain = self._options == {"reshard_after_forward": True, "cpu_offload": False} and self._reduce_dtype is None
        return "fsdp" if plain and self._wrap_policy is None and self._replicate_size == 1 else None

    def check_device(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            raise ValueError(
                f"fully_shard works on the current CUDA device, which is cuda:{torch.cuda.current_device()}, not on {device}; "
                "call booster.launch_from_torch(), or torch.cuda.set_device, first"
            )

    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        model = bare(module)
        blocks = self._blocks(model)
        if not self.stores_float32:  # no process group: trained as on a single device
            return cast_parameters(materialise_on(module, device), policy)
        if self.sequence_parallel is not None:
            self.sequence_parallel.check(model)
        self._placed[model], _ = shard_module(
            module,
            policy,
            mesh=self._mesh(device.type),
            device=device,
            blocks=blocks,
            gathered=gathered_modules(model, policy),
            reduce_dtype=self._reduce_dtype,
            synchronise=lambda tensors: broadcast_from_first(map(local_shard, tensors), self.group),
            **self._options,
            unsharded=self._unsharded,
            experts=self._experts(model, device.type),
        )
        if self.sequence_parallel is not None:
            SharedRandom(model, device, lambda values: None, copy=dist.get_rank())  # other tokens draw otherwise
            self.sequence_parallel.install([module])
        return module

    def switch_refusal(self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy) -> str | None:
        return self._dtypes_refusal(placed, before, after) if self.stores_float32 else None

    def place_again(
        self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy, device: torch.device
    ) -> nn.Module:
        return self._change_dtypes(placed, after) if self.stores_float32 else self.place(placed, after, device)

    def make_shards(self, optimizer: Optimizer) -> Shards:
        return super().make_shards(optimizer) if self.stores_float32 else Shards(optimizer)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if self.stores_float32:
            super().check_optimizer(optimizer)

    def _mesh_sizes(self) -> dict[str, int]:
        sizes = {"replicate": self._replicate_size, "shard": dist.get_world_size() // self._replicate_size}
        return {name: size for name, size in sizes.items() if name == "shard" or size > 1}
