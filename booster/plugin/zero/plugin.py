"""Data parallelism that divides optimizer states, masters and, in stage 2, gradients among the ranks."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from booster.common import arguments
from booster.mixed_precision.policy import DtypePolicy
from booster.model.modules import bare
from booster.plugin.ddp.averaged_gradients import ReducedModule
from booster.plugin.ddp.fp8_communication import FP8Communication
from booster.plugin.ddp.plugin import TorchDDPPlugin
from booster.plugin.zero.sliced_gradients import BucketReducer, SliceReducer, ZeroDDP
from booster.shards import Shards
from booster.shards.pending_all_gathers import AllGatherHook
from booster.shards.replicated import GradSyncTracker
from booster.shards.zero import ZeroShards, check_shards
from booster.shards.zero_buckets import ModuleBuckets


class LowLevelZeroPlugin(TorchDDPPlugin):
    """ZeRO 1 and 2: every rank holds all weights and a share of the batch; of optimizer states and masters it holds its part.

    stage: 1 leaves gradients whole on every rank, as `DistributedDataParallel` does; 2 leaves each rank its part of them, and
        `.grad` None after backward: clear them by `optimizer.zero_grad()`.
    bucket_cap_mb: MiB of parameters; gradients of such a bucket are sent together, and so are its updated weights.
    broadcast_buffers: give rank 0's buffers to all at every forward.
    find_unused_parameters: search each forward for parameters that get no gradient; stage 2 finds them always.
    gradient_as_bucket_view: gradients are views of the buckets that they travel in; stage 1 only.
    static_graph: the same parameters are used in every step; stage 1 only.
    sync_batchnorm: make BatchNorm statistics global (CUDA only).
    fp8_communication: as `TorchDDPPlugin`, of gradients alone; in stage 2 they are rounded once, by those who send them, and
        error_feedback is not legal.
    reduce_scatter: stage 1 sends what stage 2 does. `DistributedDataParallel` still collects gradients, in buckets that stay,
        and each rank keeps its part of the average; `.grad` is None after backward, as in stage 2, where this is always so.
        error_feedback is not legal, and `gradient_as_bucket_view` is True.
    overlap_allgather: `step` does not wait for the weights that other ranks stepped. The next forward of the boosted model
        does, for each when it is first used; so do the optimizer, all else that is asked of the boosted model or of `Booster`,
        and forward, state dicts and loading of the user's own module. Who kept a parameter, or a module inside, and reads it
        between `step` and forward, calls `optimizer.wait_for_weights()` first: until then it may be as before the step. A
        compiled model waits for all when forward begins.

    After a step each rank sends the weights that it stepped to all others, in the dtype they have. In a step stage 1 sends 1.5
    times what `TorchDDPPlugin` does, and stage 2, which reduce-scatters gradients, as much.

    Optimizers that treat every element by itself are divided by elements, those that need whole tensors by tensors; others
    raise ValueError in `boost` (see `booster.register_elementwise`). In a world of one nothing is divided.
    Raises ValueError for an option that the stage cannot honour, RuntimeError as `TorchDDPPlugin`.
    """

    is_whole = False
    _FP8_FIX = "leave it False, or use stage=2"

    def __init__(
        self,
        *,
        stage: int = 1,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        sync_batchnorm: bool = False,
        fp8_communication: bool | FP8Communication = False,
        reduce_scatter: bool = False,
        overlap_allgather: bool = False,
    ) -> None:
        if not (arguments.is_whole(stage) and stage in (1, 2)):
            raise ValueError(
                f"stage={arguments.shown(stage)} is not legal; choose 1 (optimizer states and masters are divided) or 2 "
                "(gradients too). To divide the weights as well, use TorchFSDPPlugin"
            )
        of_ddp = {"gradient_as_bucket_view": gradient_as_bucket_view, "static_graph": static_graph}
        given = [name for name, value in of_ddp.items() if arguments.flag(name, value)]
        if stage == 2 and given:
            raise ValueError(
                f"{given[0]}=True is an option of DistributedDataParallel, which stage=2 does not use; leave it False, or "
                "use stage=1"
            )
        scatters = arguments.flag("reduce_scatter", reduce_scatter) and stage == 1
        super().__init__(
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view or scatters,
            static_graph=static_graph,
            sync_batchnorm=sync_batchnorm,
            fp8_communication=fp8_communication,
        )
        self._keeps_slices = stage == 2 or scatters
        if self._keeps_slices and self._fp8 is not None and self._fp8.error_feedback:
            raise ValueError(
                "FP8Communication(error_feedback=True) keeps 4 bytes of every parameter on every rank, which is what stage=2 "
                "is there to avoid, and is not known where gradients are reduce-scattered; leave error_feedback False, or use "
                "stage=1 without reduce_scatter"
            )
        self._stage, self.passes_together = stage, stage == 2
        self._overlaps = arguments.flag("overlap_allgather", overlap_allgather)
        if scatters or overlap_allgather:
            self._wrapper = ZeroDDP
        self._bucket_bytes = bucket_cap_mb * 2**20
        self._broadcast_buffers = broadcast_buffers
        # Optimizers made later find their parameters here; an entry lives as long as the placed module.
        self._layouts: WeakKeyDictionary[nn.Module, ModuleBuckets] = WeakKeyDictionary()
        self._waiting: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()  # hooks

    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        check_gathers(policy)
        if self._stage == 1 or self.group is None:
            placed = super().place(module, policy, device)
        else:
            placed = self._prepare(module, policy, device)
            self.synchronise(placed)
        if self.group is None:
            return placed
        # Only now, because `super().place` cast the parameters, and buckets have one dtype.
        layout = ModuleBuckets(bare(placed).parameters(), group=self.group, bucket_bytes=self._bucket_bytes)
        if self._stage == 2 and layout.params:
            slices = SliceReducer(layout, dtype=policy.reduce, fp8=self._fp8 is not None)
            placed = ReducedModule(
                placed, slices, self.group, layout=layout, synchronise_buffers=self._broadcast_buffers
            )
            self._reducers[placed] = slices
        elif isinstance(placed, ReducedModule):
            placed.layout = layout
        elif isinstance(placed, ZeroDDP):
            options = self._ddp_options
            finds_unused = options["find_unused_parameters"] or options["static_graph"]
            reducer = BucketReducer(layout, fp8=self._fp8 is not None, finds_unused=finds_unused)
            placed.set_layout(layout, reducer if self._keeps_slices else None)
        if self._overlaps:
            self._waiting[placed] = AllGatherHook(layout.pending_all_gathers).register(bare(placed))
        self._layouts[placed] = layout
        if placed not in self._sync_trackers:
            self._sync_trackers[placed] = GradSyncTracker(placed)
        return placed

    def place_again(
        self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy, device: torch.device
    ) -> nn.Module:
        self._layouts.pop(placed, None)
        for handle in self._waiting.pop(placed, ()):
            handle.remove()
        return super().place_again(placed, before, after, device)

    def switch_refusal(self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy) -> str | None:
        try:
            check_gathers(after)
        except ValueError as error:
            return str(error)
        return super().switch_refusal(placed, before, after)

    @property
    def release_refusal(self) -> str | None:
        if self.group is None or self._stage == 2:
            return None
        if self._keeps_slices:
            return "reduce_scatter=True takes gradients from buckets that outlive them; use stage=2"
        return super().release_refusal

    @property
    def divides_as(self) -> str | None:
        known = super().divides_as  # None where there are views of buckets, as under reduce_scatter
        return f"zero{self._stage}" if known == "ddp" else known

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if self.group is not None:  # a world of one divides nothing, so any optimizer will do
            check_shards(optimizer)

    def make_shards(self, optimizer: Optimizer) -> Shards:
        if self.group is None:
            return Shards(optimizer)
        # One optimizer may hold parameters of several placed models, and one model may have several optimizers.
        held = {param for group in optimizer.param_groups for param in group["params"]}
        layouts = [layout for layout in self._layouts.values() if not held.isdisjoint(layout.params)]
        return ZeroShards(
            optimizer,
            layouts,
            reduced=self._keeps_slices,
            overlaps=self._overlaps,
            sync_trackers=self._sync_trackers,
            reducers=self._reducers,
            ranks=self._replica_ranks,
        )

    def _register_comm_hook(self, placed: DistributedDataParallel, device: torch.device) -> None:
        if not self._keeps_slices:  # otherwise `place` gives it slices to fill
            super()._register_comm_hook(placed, device)


def check_gathers(policy: DtypePolicy) -> None:
    """Raise ValueError for a policy by which weights would be rounded on their way between ranks, and kept so."""
    option, fix = None, ""
    if policy.gather not in (None, policy.store or policy.param):
        option, fix = f"gather={policy.gather}", "leave it None (gather_in_half=False)"
    elif policy.fp8_weights:
        option, fix = "gather_in_fp8=True", "leave it False"
    if option is not None:
        raise ValueError(
            f"LowLevelZeroPlugin gathers updated weights once a step and keeps what it gathered, so {option} "
            f"would round the weights themselves; {fix}, or use TorchFSDPPlugin"
        )
