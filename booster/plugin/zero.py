"""ZeRO 1 and 2: every rank holds all weights and one slice of masters, optimizer states and, in stage 2, gradients.

The idea: parameters are laid end to end in flat buckets, and each bucket is cut into one slice per rank. A rank steps its
slices and then sends the weights in them to all others. The layout and the step are in `booster/shards` (`zero_buckets.py`,
`zero.py`); this file averages gradients into it and wraps the model.

An example, two ranks, one bucket of the weights a (3 numbers) and b (5), so a slice is 4 numbers:

    bucket       a0 a1 a2 b0 | b1 b2 b3 b4
    stage 1      DistributedDataParallel averages all 8 on both ranks; rank 0 steps the first 4, rank 1 the others
    stage 2      a reduce-scatter gives rank 0 the average of the first 4; `.grad` of a and b is None afterwards
    after step   rank 0 sends a0..b0, rank 1 sends b1..b4; with overlap_allgather the next forward waits, not `step`

`LowLevelZeroPlugin` has the options and says which of the wrappers a stage needs: `SliceReducer` reduces by hooks of ours
(stage 2), `BucketReducer` takes what DistributedDataParallel filled (stage 1 with reduce_scatter) and `ZeroDDP` is that
module with pending all-gathers. Policies that would round weights on their way between ranks are refused (`check_gathers`),
because what arrives is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.torch_internals.autograd_internals import graph_task, when_backward_ends, without_function_modes
from booster.mixed_precision.policy import DtypePolicy
from booster.model.modules import bare
from booster.plugin.ddp.averaged_gradients import BucketedModule, ExchangedSum, FP8Communication, FP8Sum, ReducedModule
from booster.plugin.ddp.gradient_reducer import GradientReducer
from booster.plugin.ddp.plugin import TorchDDPPlugin
from booster.shards import Shards
from booster.shards.base import SPARSE
from booster.shards.replicated import GradSyncTracker
from booster.shards.zero import ZeroShards, check_shards
from booster.shards.zero_buckets import AllGatherHook, FlatParameters, ModuleBuckets

# torch 2.13 renamed the collective and warns about the old name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SliceReducer(GradientReducer):
    """Averages the gradients of `layout` over its group. `.grad` is None afterwards: this rank's slice of the sum is added to
    the bucket's `gradient`.

    dtype: of what is sent; None means that of the parameters. fp8: send e4m3 instead, see `FP8Sum`. Collectives: one
    reduce-scatter a bucket, or one reduce for each rank where parameters are not divided, or on CPU and in float8 one
    all-to-all, and one small all-reduce, of each bucket where gradients are used within backward; only a rank
    with an unreached parameter waits for its result.
    """

    def __init__(self, layout: ModuleBuckets, *, dtype: torch.dtype | None = None, fp8: bool = False) -> None:
        super().__init__(layout.params, layout.group)
        self._layout = layout
        self._fp8 = fp8
        self._dtype = dtype

    def buckets(self) -> Sequence[Sequence[torch.Tensor]]:
        self._layout.shard_remaining()
        return [bucket.params for bucket in self._layout.buckets]

    def send(self, index: int, params: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        bucket, group, world_size = self._layout.buckets[index], self._layout.group, self._layout.world_size
        values = torch.empty(bucket.size, dtype=self._dtype or bucket.dtype, device=bucket.device)
        # Divided before the sum, as DistributedDataParallel does: the sum of halves could overflow.
        ratio = 1.0 / world_size
        for position, (param, place) in enumerate(zip(params, bucket.zero_gaps(values), strict=True)):
            if not self._put(bucket, position, param, place, ratio):
                place.zero_()
        own = bucket.slice_of(values, self._layout.rank)
        if self._fp8 or values.device.type == "cpu":
            sizes = [stop - start for start, stop in itertools.pairwise(bucket.bounds)]
            length = len(own)  # not `own` itself, of which all that is sent would live on
            exchanged = (FP8Sum if self._fp8 else ExchangedSum)(values, sizes, group)
            return lambda: exchanged.wait()[:length].to(bucket.dtype)
        if bucket.by_elements:
            own = torch.empty(bucket.size // world_size, dtype=values.dtype, device=values.device)
            works = [_reduce_scatter(own, values, group=group, async_op=True)]
        else:
            parts = [(rank, bucket.slice_of(values, rank)) for rank in range(world_size)]
            works = [dist.reduce(p, group=group, group_dst=rank, async_op=True) for rank, p in parts if p.numel()]

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            works.clear()
            return own.to(bucket.dtype, copy=not bucket.by_elements)  # a copy: `own` is a view of the whole bucket

        return wait

    def _put(
        self, bucket: FlatParameters, position: int, param: torch.Tensor, values: torch.Tensor, ratio: float
    ) -> bool:
        """Write the gradient of `param` times `ratio` to its place in the bucket, `values`, 1-dim, and free it.

        Returns whether there is one.
        """
        grad = self.local_gradient(param)
        if grad is None:
            return False
        if grad.is_sparse:
            raise RuntimeError(SPARSE.format(name=f"a parameter of shape {tuple(param.shape)}"))
        place = bucket.shaped(values, position)
        if grad.dtype == place.dtype:
            torch.mul(grad, ratio, out=place)
        else:  # divided in the dtype that is sent, not rounded before
            place.copy_(grad).mul_(ratio)
        param.grad = None
        return True

    def store_reduced(self, index: int, reduced: torch.Tensor, reached: list[bool]) -> None:
        now = {position for position, is_reached in enumerate(reached) if is_reached}
        self._layout.buckets[index].add_gradient(reduced, now)


class BucketReducer(SliceReducer):
    """A `SliceReducer` that takes gradients from the buckets of `DistributedDataParallel`, as its communication hook.

    Those buckets keep what this rank alone has, and `.grad` is None after backward. finds_unused: a rank's backward may leave
    parameters out; ranks then agree by one small all-reduce.
    """

    def __init__(self, layout: ModuleBuckets, *, fp8: bool, finds_unused: bool) -> None:
        super().__init__(layout, fp8=fp8)
        self._finds_unused = finds_unused
        self._views: dict[torch.Tensor, torch.Tensor] = {}  # of what came and was not sent yet, flat

    def send_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Send what `bucket` fills of the layout's buckets; returns at once, and leaves the bucket as it is."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise RuntimeError(SPARSE.format(name=f"a parameter of shape {tuple(buffer.shape)}"))
        with without_function_modes():
            if self._task is None:
                self._task = graph_task()
                self._start()
            params = bucket.parameters()
            for param, values in zip(params, buffer.split_with_sizes([p.numel() for p in params]), strict=True):
                place = self._index.get(param)
                if place is not None:
                    self._views[param] = values
                    self._use_gradient(self._bucket[place], place, param)
                    self._mark_complete(self._bucket[place], place)
            self._send_full()
        if bucket.is_last():  # buckets of the layout that are not full yet are sent when backward ends
            when_backward_ends(self._wait_for_gradients)
        devices: Any = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def abandon(self) -> None:
        super().abandon()
        self._views.clear()

    def _register_hooks(self) -> None:
        pass  # the communication hook says when gradients are there

    def has_local_gradient(self, param: torch.Tensor) -> bool:
        return param in self._views and param.grad is not None  # otherwise the bucket has zeros

    def reached_anywhere(self) -> Callable[[], list[bool]]:
        return super().reached_anywhere() if self._finds_unused else lambda: [True] * len(self._index)

    def _put(
        self, bucket: FlatParameters, position: int, param: torch.Tensor, values: torch.Tensor, ratio: float
    ) -> bool:
        there = self.has_local_gradient(param)
        view = self._views.pop(param, None)
        if not there or view is None:
            return False
        torch.mul(view, ratio, out=values)
        return True

    def _wait_for_gradients(self) -> None:
        # torch's own callback, which puts what is in its buckets into `.grad`, is queued by now.
        when_backward_ends(self._finish)

    def _complete(self) -> None:
        super()._complete()
        for param in self._layout.params:
            param.grad = None


class ZeroDDP(BucketedModule, DistributedDataParallel):
    """`DistributedDataParallel` that waits for weights on their way, and may keep slices of gradients, see `set_layout`.

    A copy, by `copy` or pickle, is as `DistributedDataParallel` leaves it: gradients whole on every rank.
    """

    slices: BucketReducer | None = None

    def set_layout(self, layout: ModuleBuckets, reducer: BucketReducer | None) -> None:
        """Set the buckets of the trainable parameters. reducer: takes their gradients; None leaves them in `.grad`."""
        self.layout, self.slices = layout, reducer
        if reducer is not None:
            self.register_comm_hook(None, lambda _, bucket: reducer.send_bucket(bucket))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.layout is None or graph_task() != -1:  # recomputed inside a backward
            return super().forward(*inputs, **kwargs)
        if self.slices is not None:
            self.slices.abandon()  # what a backward pass that raised left
        with self.layout.pending_all_gathers.in_forward(self.module):
            return super().forward(*inputs, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "layout": None, "slices": None}


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
        divided = super().divides_as  # None where there are views of buckets, as under reduce_scatter
        return f"zero{self._stage}" if divided == "ddp" else divided

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if self.group is not None:  # a world of one divides nothing, so any optimizer will do
            check_shards(optimizer)

    def make_shards(self, optimizer: Optimizer) -> Shards:
        if self.group is None:
            return Shards(optimizer)
        # One optimizer may hold parameters of several placed models, and one model may have several optimizers.
        held = {param for group in optimizer.param_groups for param in group["params"]}
        layouts = [layout for layout in self._layouts.values() if not held.isdisjoint(layout.params)]
        if not layouts:  # it holds nothing that trains
            return super().make_shards(optimizer)
        return ZeroShards(
            optimizer,
            layouts,
            reduced=self._keeps_slices,
            overlaps=self._overlaps,
            **self._replica_options,
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
