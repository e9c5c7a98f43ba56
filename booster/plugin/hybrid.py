"""Data, tensor, sequence, pipeline and expert parallelism at once."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from booster.common import arguments
from booster.common.snapshot import SharedRandom
from booster.launch import environment_world_size
from booster.mixed_precision.policy import (
    DtypePolicy,
    cast_parameters,
    cast_placed,
    gathered_modules,
    install_keep_fp32,
    store_parameters,
)
from booster.model.modules import bare, check_meta, materialise_on
from booster.plugin.base import Pipeline, shared_mesh
from booster.plugin.fsdp.groups import ShardLoaded, WrapPolicy, apply_policy, check_wrap_policy
from booster.plugin.fsdp.plugin import ShardingPlugin
from booster.plugin.fsdp.shard_module import check_hooks, keep_whole, shard_module
from booster.plugin.pipeline import PipelinePlan, StagePipeline
from booster.plugin.pipeline.pipeline import LayersLoaded
from booster.plugin.pipeline.schedule_runner import check_count, check_style
from booster.plugin.sequence_parallel import SequenceParallel, check_sizes
from booster.plugin.tensor_parallel import apply_tensor_parallel, check_tensor_parallel, fsdp_placement
from booster.plugin.tensor_parallel.tp_plan import TPPlan, check_tp_plan
from booster.ranks.agreement import broadcast, communication_device

PipelineStyle = Literal["gpipe", "1f1b", "interleaved", "zbv"]


class HybridParallelPlugin(ShardingPlugin):
    """Tensor, pipeline and data parallelism at once, also with sharding.

    tp_size: ranks that divide each layer (tensor parallelism).
    pp_size: stages that divide the chain of layers (pipeline parallelism); the rest of the ranks divide the batch.
    zero_stage: 0 keeps parameters, gradients and optimizer states whole on every data-parallel rank; 1 and 2 shard them:
        torch's `fully_shard` shards gradients and parameters at rest along with the states, so 1 saves what 2 saves. Under
        `fp16_naive` and `bf16_naive` the float32 shard is the master, as in `TorchFSDPPlugin`. Where the data-parallel size is
        1 nothing of it runs: forward reads the stored weights, and half-precision ones have masters, as on a single device.
    num_micro_batches: how many micro-batches `b.execute_pipeline` makes of a batch. None goes by microbatch_size; where both
        are None it is one micro-batch, in a pipeline as many as stages.
    num_microbatches: the same in its other spelling; None goes by the first.
    microbatch_size: samples of a micro-batch, in place of their number; None likewise.
    num_model_chunks: stages on each rank, for "interleaved"; "zbv" has 2.
    pp_style: the schedule of micro-batches.
    sp_size: ranks that share sequences, each with some of the tokens (context parallelism); b.shard_sequence cuts batches.
    sequence_parallelism_mode: how they do: "all_to_all" divides heads of attention, "ring_attn" sends keys and values round;
        "split_gather" is sequence_parallelism=True, among the ranks of tensor parallelism. None where sp_size is 1.
    sequence_parallelism: ranks of tensor parallelism keep a part of the sequence each between the branches of blocks.
    tp_plan: module name patterns to styles, a callable that makes them of the model, or None for the plan that is known for it.
    split_points: names of the modules that begin the second and later stages; None divides evenly.
    wrap_policy: what a block is: module classes, name patterns, a predicate `(name, module) -> bool`, or the number of
        parameters from which on a module is one; None means the repeated blocks of the model, see `groups.block_names`.
    reduce_dtype: dtype in which gradients are averaged; None means float32 for half-precision models, otherwise the dtype of
        the parameters.
    ep_size: deal whole experts of mixtures to so many of the ranks that share the batch, which send each other the tokens for
        them; see `booster.plugin.expert_parallel`. It divides the data-parallel size. Under tensor parallelism the layers of
        each expert are divided as well.

    Ranks are numbered with tensor parallelism innermost, then sequences, and stages outermost: neighbours share a layer. The
    world size is a multiple of tp_size * pp_size * sp_size; the quotient is the data-parallel size. Parameters, gradients and
    states lie on the ranks that share sequences as on data-parallel ones.

    Construct it after `booster.launch_from_torch()`. Raises ValueError for sizes that do not fit the world.
    """

    def __init__(
        self,
        tp_size: int,
        pp_size: int,
        *,
        zero_stage: Literal[0, 1, 2] = 0,
        num_micro_batches: int | None = None,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        num_model_chunks: int = 1,
        pp_style: PipelineStyle = "1f1b",
        sp_size: int = 1,
        sequence_parallelism_mode: Literal["split_gather", "all_to_all", "ring_attn"] | None = None,
        sequence_parallelism: bool = False,
        tp_plan: TPPlan = None,
        split_points: Iterable[str] | None = None,
        wrap_policy: WrapPolicy = None,
        reduce_dtype: torch.dtype | None = None,
        ep_size: int = 1,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                f"HybridParallelPlugin needs a process group, and there is none (WORLD_SIZE={environment_world_size()}); "
                "start the job with `booster run` and call booster.launch_from_torch() first"
            )
        world_size = dist.get_world_size()
        for name, value in (
            ("tp_size", tp_size),
            ("pp_size", pp_size),
            ("num_model_chunks", num_model_chunks),
            ("ep_size", ep_size),
        ):
            arguments.count(name, value)
        check_sizes(sp_size, sequence_parallelism_mode, tp_size)
        if sequence_parallelism_mode == "split_gather":
            sp_size, sequence_parallelism = 1, True
        named = f"tp_size={tp_size} times pp_size={pp_size}" + (f" times sp_size={sp_size}" if sp_size > 1 else "")
        if world_size % (tp_size * pp_size * sp_size):
            raise ValueError(
                f"{named} is {tp_size * pp_size * sp_size}, which does not divide the world size {world_size}; choose sizes "
                "with a product that does"
            )
        holders = world_size // (tp_size * pp_size)
        if holders % ep_size:
            raise ValueError(
                f"ep_size={ep_size} does not divide the {holders} ranks that share the batch; choose one that does"
            )
        arguments.choice("zero_stage", zero_stage, (0, 1, 2), fix="for 3 use TorchFSDPPlugin")
        stages_per_rank = check_style(pp_style, pp_size, num_model_chunks, name="pp_style")
        if pp_size == 1 and num_model_chunks > 1:
            raise ValueError(f"num_model_chunks={num_model_chunks} divide a pipeline, and pp_size is 1")
        num_micro_batches = _checked_number(num_micro_batches, num_microbatches, microbatch_size)
        if arguments.flag("sequence_parallelism", sequence_parallelism) and tp_size == 1:
            raise ValueError("sequence_parallelism=True divides the sequence among tp_size ranks, and tp_size is 1")
        if sequence_parallelism and sp_size > 1:
            raise ValueError(
                f"sequence_parallelism=True divides once more what sp_size={sp_size} ranks have divided; leave one of them out"
            )
        if split_points is not None:
            several = isinstance(split_points, Iterable) and not isinstance(
                split_points, (str, bytes, Mapping, torch.Tensor)
            )
            names = list(split_points) if several else []
            if not several or not all(isinstance(name, str) for name in names):
                legal = "a list of names of modules, one for each stage but the first"
                raise TypeError(arguments.refusal("split_points", split_points, legal, "None"))
            split_points = names
        if reduce_dtype is not None:
            arguments.floating_dtype("reduce_dtype", reduce_dtype)
        check_tp_plan(tp_plan)
        if num_micro_batches is not None and pp_size > 1:
            check_count(pp_style, pp_size, num_micro_batches)
        if split_points is not None and pp_size == 1:
            raise ValueError(f"split_points={split_points!r} divide a pipeline, and pp_size is 1")
        check_wrap_policy(wrap_policy)
        super().__init__(wrap_policy, reduce_dtype, ep_size)
        self.tp_size, self.pp_size, self.sp_size, self.zero_stage = tp_size, pp_size, sp_size, zero_stage
        self._sequence_mode: Any = sequence_parallelism_mode
        self._num_micro_batches = num_micro_batches
        self._microbatch_size = microbatch_size
        self._num_model_chunks = stages_per_rank
        self._pp_style = pp_style
        self._sequence_parallelism = sequence_parallelism
        self._tp_plan = tp_plan
        self._split_points = split_points
        self._pipelines: weakref.WeakKeyDictionary[StagePipeline, None] = weakref.WeakKeyDictionary()
        self.bind(torch.device("cuda" if "nccl" in dist.get_backend() else "cpu"))

    # ------------------------------------------------------------------ ranks

    @property
    def stores_float32(self) -> bool:  # type: ignore[override]
        return self.averaging_size > 1

    def bind(self, device: torch.device) -> None:
        super().bind(device)
        # All ranks construct the plugin, and the Booster, together: making a mesh is a collective.
        self._mesh(device.type)
        if self.sp_size > 1 and self.sequence_parallel is None:
            groups = self._data_mesh["sp"].get_group(), self.averaging_group
            self.sequence_parallel = SequenceParallel(self._sequence_mode, *groups)

    @property
    def averaging_size(self) -> int:
        return dist.get_world_size() // (self.tp_size * self.pp_size)

    @property
    def averaging_group(self) -> dist.ProcessGroup | None:
        mesh = next(iter(self._meshes.values()))
        return mesh["replicate" if self.zero_stage == 0 else "shard"].get_group() if self.averaging_size > 1 else None

    @property
    def _averaging_rank(self) -> int:
        return dist.get_rank() // self.tp_size % self.averaging_size

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        if self.sp_size == 1:
            return self.averaging_group
        return self._data_mesh["dp"].get_group() if self.averaging_size > self.sp_size else None

    @property
    def _data_mesh(self) -> DeviceMesh:
        """The ranks of `averaging_group` by what they share: a sequence, or its place in the batch."""
        data = self.averaging_size // self.sp_size
        sizes = {"pp": self.pp_size, "dp": data, "sp": self.sp_size, "tp": self.tp_size}
        return shared_mesh(next(iter(self._meshes)), sizes)

    @property
    def pipeline_rank(self) -> int:
        """Return this rank's place in the pipeline."""
        return dist.get_rank() // (self.tp_size * self.averaging_size)

    def _mesh_sizes(self) -> dict[str, int]:
        data = self.averaging_size
        copies, parts = (data, 1) if self.zero_stage == 0 else (1, data)
        # Outermost first: ranks of one layer are neighbours, and most often on one machine.
        return {"pp": self.pp_size, "replicate": copies, "shard": parts, "tp": self.tp_size}

    # ------------------------------------------------------------------ models

    @property
    def release_refusal(self) -> str | None:
        if self.pp_size == 1:
            return None
        return (
            "the gradients of a pipeline's micro-batches come one after another and are complete with the last one only; use "
            "pp_size=1"
        )

    def _pipeline_options(self) -> dict[str, Any]:
        pipelines = list(self._pipelines)

        def num_holders(param: torch.Tensor) -> int:
            return max((pipeline.num_copies(param) for pipeline in pipelines), default=1)

        options = {"num_stages": self.pp_size, "num_holders": num_holders}
        return {**options, "layer_ranks": self._layer_ranks} if self.tp_size > 1 else options

    @property
    def _layer_ranks(self) -> dist.ProcessGroup:
        return next(iter(self._meshes.values()))["tp"].get_group()

    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        mesh, model = self._mesh(device.type), bare(module)
        tensor_parallel: dict[str, Any] = {
            "mesh": mesh["tp"],
            "tp_plan": self._tp_plan,
            "sequence_parallelism": self._sequence_parallelism,
        }
        check_tensor_parallel(model, **tensor_parallel)
        check_meta(model)
        if self.sequence_parallel is not None:
            self.sequence_parallel.check(model, self.tp_size)
        if self.tp_size > 1:  # tensor parallelism drops hooks; without it `shard_module` checks them
            check_hooks(model)
        # Names of blocks are those of the whole model: found before any layer is replaced.
        blocks, gathered = self._blocks(model), gathered_modules(model, policy)
        experts = self._experts(model, device.type)
        plan = self._plan_pipeline(module, policy, device) if self.pp_size > 1 else None
        materialise_on(module, device)
        self.synchronise(model)
        shards = self._shards(policy)
        if not shards:
            store_parameters(model, policy)
        apply_tensor_parallel(
            model, **tensor_parallel, policy=policy
        )  # before the pipeline is cut, as its plan names all layers
        whole = list(model.state_dict())  # keys of all stages, while this rank still has them
        roots = [module] if plan is None else plan.cut(self.pipeline_rank)
        if self.tp_size > 1 or self.sp_size > 1:  # other tokens draw otherwise, also where all ranks were seeded alike
            for root in roots:
                SharedRandom(bare(root), device, self._share_bytes, copy=self._averaging_rank)
        for index, root in enumerate(roots):
            # Modules of other stages are fakes without parameters here.
            kept = policy.keep_fp32 if plan is None else _with_parameters(root, policy.keep_fp32)
            own = dataclasses.replace(
                policy, keep_fp32=frozenset(kept), fp8_weights=frozenset(_with_parameters(root, policy.fp8_weights))
            )
            if not shards:
                keep_whole(root, own)  # a group of one rank has nothing to gather or to reduce
                continue
            self._placed[bare(root)], before_reduction = shard_module(
                root,
                own,
                mesh=mesh["replicate", "shard"],
                device=device,
                blocks=_with_parameters(root, blocks),
                gathered=_with_parameters(root, gathered),
                reshard_after_forward=False,
                reduce_dtype=self._reduce_dtype,
                shard_placement=fsdp_placement,
                unsharded=self._unsharded if plan is None else None,
                experts=experts and experts.in_stage(_with_parameters(root, experts.names)),
            )
            if plan is not None:
                plan.stages[index].before_reduction = before_reduction
        if self.sequence_parallel is not None:
            self.sequence_parallel.install(roots, None if plan is None else plan.meta_model.module)
        if plan is None:
            return module
        model.register_load_state_dict_pre_hook(LayersLoaded(model.state_dict(), whole))
        if len(roots) > 1:  # users load into the model, and the roots are copies of it
            model.register_load_state_dict_pre_hook(ShardLoaded(policy))
        pipeline = StagePipeline(
            plan,
            group=mesh["pp"].get_group(),
            device=device,
            boundary=self._boundary if self._sequence_parallelism else None,
            sequences=self.sequence_parallel,
        )
        self._pipelines[pipeline] = None
        return pipeline

    def _share_bytes(self, values: torch.Tensor) -> None:
        """Broadcast bytes of the first rank that shards a layer to the others, in place."""
        there = values.to(communication_device(values.device, self._layer_ranks))
        broadcast(there, 0, self._layer_ranks)
        values.copy_(there)

    @property
    def fixed_dtypes(self) -> str | None:
        stages = "the stages of a pipeline send activations in dtypes that were settled at boost()"
        return stages if self.pp_size > 1 else None

    def switch_refusal(self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy) -> str | None:
        if self.fixed_dtypes is not None:
            return self.fixed_dtypes
        if self._shards(before) != self._shards(after):
            return "only one of the two precisions keeps float32 shards as masters here; leave master_weights as it is"
        return self._dtypes_refusal(placed, before, after) if self._shards(before) else None

    def place_again(
        self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy, device: torch.device
    ) -> nn.Module:
        if self._shards(after):
            return self._change_dtypes(placed, after)
        model = bare(placed)
        cast_placed(model, after)
        install_keep_fp32(model, after)
        apply_policy(model, after)
        return placed

    def _shards(self, policy: DtypePolicy) -> bool:
        """Return whether `fully_shard` is used: a group of one rank has nothing to gather or to reduce."""
        return self.averaging_size > 1 or policy.store not in (None, policy.param)

    def _plan_pipeline(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> PipelinePlan:
        # Stages compute in `param`, whatever their shards are stored in.
        computed = dataclasses.replace(policy, store=None)
        return PipelinePlan(
            module,
            pp_size=self.pp_size,
            style=self._pp_style,
            num_model_chunks=self._num_model_chunks,
            split_points=self._split_points,
            device=device,
            prepare=lambda copy: cast_parameters(copy, computed),
        )

    def _boundary(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an activation (batch, sequence, ...) that crosses between stages, divided along the sequence."""
        return shape if len(shape) < 3 else (shape[0], shape[1] // self.tp_size, *shape[2:])

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        if isinstance(module, StagePipeline):
            raise RuntimeError(
                "a pipeline accumulates the gradients of its micro-batches inside execute_pipeline, reduced at its end; "
                "instead of no_sync or accumulate, pass larger batches and HybridParallelPlugin(num_microbatches=...)"
            )
        return super().no_sync(module)

    # ------------------------------------------------------------------ micro-batches

    def num_micro_batches(self, batch_size: int) -> int:
        if self._microbatch_size is None:
            return self._num_micro_batches or self.pp_size
        if batch_size % self._microbatch_size:
            raise ValueError(
                f"a batch of {batch_size} samples does not divide into micro-batches of "
                f"microbatch_size={self._microbatch_size}; make the batch size a multiple of it, and drop the last, smaller "
                "batch of an epoch (drop_last=True)"
            )
        return batch_size // self._microbatch_size

    def pipeline(self, module: nn.Module) -> Pipeline | None:
        return module if isinstance(module, StagePipeline) else None


def _with_parameters(root: nn.Module, names: Iterable[str]) -> list[str]:
    model = bare(root)
    return [name for name in names if next(model.get_submodule(name).parameters(), None) is not None]


def _checked_number(num_micro_batches: int | None, num_microbatches: int | None, size: int | None) -> int | None:
    """Return the number of micro-batches in either spelling; raise ValueError if it is given twice, or with a size."""
    if num_micro_batches is not None and num_microbatches is not None:
        raise ValueError(
            f"num_micro_batches={num_micro_batches} and num_microbatches={num_microbatches} are one option in two spellings; "
            "give one of them"
        )
    name = "num_microbatches" if num_micro_batches is None else "num_micro_batches"
    number = num_microbatches if num_micro_batches is None else num_micro_batches
    if number is not None and size is not None:
        raise ValueError(f"{name}={number} and microbatch_size={size} say the same; give one of them")
    for each, value in ((name, number), ("microbatch_size", size)):
        if value is not None:
            arguments.count(each, value, also="None")
    return number
