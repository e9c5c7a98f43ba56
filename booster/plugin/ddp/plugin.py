"""Data parallelism with torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.torch_internals.fsdp_internals import ignored_by_ddp, remove_reducer_hooks
from booster.mixed_precision.policy import DtypePolicy, cast_parameters
from booster.model.modules import bare, materialise_on, unwrap_placed
from booster.plugin.base import Plugin, check_joined
from booster.plugin.ddp.averaged_gradients import AverageReducer, FP8Average, FP8Communication, ReducedModule
from booster.plugin.ddp.gradient_reducer import GradientReducer
from booster.ranks.agreement import broadcast, broadcast_from_first, is_sendable, world
from booster.shards import Shards
from booster.shards.replicated import GradSyncTracker, ReplicatedShards

# torch 2.13 renamed the option and warns about the old name.
_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
CommHook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


class TorchDDPPlugin(Plugin):
    """Data parallelism (DistributedDataParallel): every rank holds the whole model and a share of the batch.

    broadcast_buffers: give rank 0's buffers to all at every forward.
    bucket_cap_mb: MiB of gradients that travel together.
    find_unused_parameters: search each forward for parameters that get no gradient.
    gradient_as_bucket_view: gradients are views of the buckets that they travel in, which saves a copy of them.
    static_graph: the same parameters are used in every step.
    sync_batchnorm: make BatchNorm statistics global (CUDA only).
    comm_hook: a DDP communication hook `(state, bucket) -> Future`, called with the process group as its state, or a pair
        (state, hook); None averages in the dtype of the gradients.
    fp8_communication: send gradients as 8-bit numbers with a scale for each 128, and sum them in float32 (True, or an
        `FP8Communication`, which has options).

    Gradients are averaged during backward; the first five options are those of `DistributedDataParallel`. Under
    fp8_communication a number of an average is off by at most 1/16 of itself plus 17/256 of the mean of what ranks bring to it,
    or 2**-17 of the largest of its 128 for each of the two roundings where that is more. An inf or NaN arrives as NaN. 2.02
    bytes a parameter are sent for 4 of bfloat16 or 8 of float32; see `docs/low_precision.md`.

    In a world of one, with or without a process group, the model is left unwrapped. Construct it after
    `booster.launch_from_torch()`; raises RuntimeError in a launched job that has no process group yet.
    """

    _wrapper: type[DistributedDataParallel] = DistributedDataParallel
    _FP8_FIX = "leave it False"

    def __init__(
        self,
        *,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        sync_batchnorm: bool = False,
        comm_hook: CommHook | tuple[Any, CommHook] | None = None,
        fp8_communication: bool | FP8Communication = False,
    ) -> None:
        check_joined("TorchDDPPlugin")
        if isinstance(fp8_communication, bool):
            self._fp8 = FP8Communication() if fp8_communication else None
        else:
            legal = "True, False or an FP8Communication"
            self._fp8 = arguments.instance("fp8_communication", fp8_communication, FP8Communication, legal)
        if self._fp8 is not None and comm_hook is not None:
            raise ValueError("fp8_communication and comm_hook both say how gradients travel; pass one of them")
        hook = comm_hook[1] if isinstance(comm_hook, tuple) and len(comm_hook) == 2 else comm_hook
        if hook is not None and not callable(hook):
            raise TypeError(
                f"comm_hook must be a DDP hook or a pair (state, hook), got {arguments.described(comm_hook)}"
            )
        self._ddp_options: dict[str, Any] = {
            "bucket_cap_mb": arguments.number("bucket_cap_mb", bucket_cap_mb, above=0),
            "find_unused_parameters": arguments.flag("find_unused_parameters", find_unused_parameters),
            "gradient_as_bucket_view": arguments.flag("gradient_as_bucket_view", gradient_as_bucket_view),
            "static_graph": arguments.flag("static_graph", static_graph),
        }
        if not arguments.flag("broadcast_buffers", broadcast_buffers):
            self._ddp_options[_BUFFERS] = False  # True is DDP's default under either name
        self._sync_batchnorm = arguments.flag("sync_batchnorm", sync_batchnorm)
        # One of each placed module, as long as that lives.
        self._sync_trackers: WeakKeyDictionary[nn.Module, GradSyncTracker] = WeakKeyDictionary()
        self._reducers: WeakKeyDictionary[nn.Module, GradientReducer] = WeakKeyDictionary()
        self._averages: WeakKeyDictionary[nn.Module, FP8Average] = WeakKeyDictionary()
        self._comm_hook = None if hook is None else (comm_hook[0] if isinstance(comm_hook, tuple) else None, hook)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return world()

    @property
    def bucket_cap_mb(self) -> float:
        return float(self._ddp_options["bucket_cap_mb"])

    @property
    def release_refusal(self) -> str | None:
        if self.group is None:
            return None
        if self._ddp_options["gradient_as_bucket_view"]:
            return "gradient_as_bucket_view=True keeps gradients in buckets that outlive them; leave it False"
        if self._ddp_options["static_graph"]:
            return "static_graph=True averages gradients after the first backward pass, all at once; leave it False"
        if self._comm_hook is not None:
            return "a comm_hook is called by DistributedDataParallel, and its buckets outlive gradients; leave it out"
        if self._fp8 is not None:
            return f"fp8_communication is a hook of DistributedDataParallel, and its buckets outlive gradients; {self._FP8_FIX}"
        return None

    @property
    def divides_as(self) -> str | None:
        if self.group is None:
            return "single"
        return None if self._ddp_options["gradient_as_bucket_view"] or self._fp8 is not None else "ddp"

    def check_device(self, device: torch.device) -> None:
        if self._sync_batchnorm and device.type != "cuda":
            raise ValueError(
                f"sync_batchnorm=True needs CUDA, where torch implements it; the device is {device}. "
                "Use sync_batchnorm=False"
            )

    def synchronise(self, module: nn.Module) -> None:
        broadcast_from_first([*module.parameters(), *module.buffers()], self.group)

    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        stored = policy.store or policy.param
        dtypes = {stored or param.dtype for param in module.parameters() if param.requires_grad}
        if policy.keep_fp32 and stored:
            dtypes.add(torch.float32)
        if policy.reduce is not None and dtypes and dtypes != {policy.reduce}:
            raise ValueError(
                f"DistributedDataParallel reduces gradients in the dtype of the parameters, {sorted(map(str, dtypes))}, "
                f"not in reduce={policy.reduce}; leave it None, or use comm_hook"
            )
        module = self._prepare(module, policy, device)
        if self.group is None:
            return module
        if not dtypes:  # DistributedDataParallel refuses a model with nothing to train
            self.synchronise(module)
            self._sync_trackers[module] = GradSyncTracker(module)
            return module
        if policy.release:
            return self._place_released(module)
        # DistributedDataParallel broadcasts all weights and buffers; those that the backend cannot send are aligned here.
        index = None if device.type == "cpu" else [device]
        tensors = (*module.named_parameters(), *module.named_buffers())
        unsent = {name: each for name, each in tensors if not (each.requires_grad or is_sendable(each))}
        broadcast_from_first(unsent.values(), self.group)
        with ignored_by_ddp(module, list(unsent)):
            placed = self._wrapper(module, device_ids=index, process_group=self.group, **self._ddp_options)
        if _BUFFERS not in self._ddp_options and not all(map(is_sendable, module.buffers())):
            placed.register_forward_pre_hook(_send_buffers)
        self._register_comm_hook(placed, device)
        self._sync_trackers[placed] = GradSyncTracker(placed)
        return placed

    def switch_refusal(self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy) -> str | None:
        return None

    def place_again(
        self, placed: nn.Module, before: DtypePolicy, after: DtypePolicy, device: torch.device
    ) -> nn.Module:
        error_feedback = self.error_feedback(placed)  # error feedback survives a change of precision
        reducer = self._reducers.pop(placed, None)
        if reducer is not None:
            reducer.remove_hooks()
        if isinstance(placed, DistributedDataParallel):
            remove_reducer_hooks(placed)  # its hooks would go on averaging the parameters
        for by_module in (self._sync_trackers, self._averages):
            by_module.pop(placed, None)
        again = self.place(unwrap_placed(placed), after, device)
        if error_feedback:
            self.error_feedback(again).update(error_feedback)  # type: ignore[union-attr]
        return again

    def _place_released(self, module: nn.Module) -> nn.Module:
        """Return `module` with gradients that are averaged as DistributedDataParallel does, and used within backward."""
        self.synchronise(module)
        reducer = AverageReducer(
            {name: param for name, param in bare(module).named_parameters() if param.requires_grad},
            group=self._ranks,
            bucket_bytes=int(self._ddp_options["bucket_cap_mb"] * 2**20),
            finds_unused=self._ddp_options["find_unused_parameters"],
        )
        placed = ReducedModule(module, reducer, self._ranks, synchronise_buffers=_BUFFERS not in self._ddp_options)
        self._reducers[placed], self._sync_trackers[placed] = reducer, GradSyncTracker(placed)
        return placed

    @property
    def _ranks(self) -> dist.ProcessGroup:
        return dist.group.WORLD  # type: ignore[return-value]

    def make_shards(self, optimizer: Optimizer) -> Shards:
        if self.group is None:
            return Shards(optimizer)
        return ReplicatedShards(optimizer, **self._replica_options)

    @property
    def _replica_options(self) -> dict[str, Any]:
        """The options of `ReplicatedShards`."""
        # After a hook of the user gradients may differ, as in local SGD, and so weights.
        ranks = self._ranks if self._comm_hook is None else None
        return {"sync_trackers": self._sync_trackers, "reducers": self._reducers, "ranks": ranks}

    def _register_comm_hook(self, placed: DistributedDataParallel, device: torch.device) -> None:
        """Register the hook by which gradients of `placed` are averaged, if torch's own way is not used."""
        if self._comm_hook is not None:
            state, hook = self._comm_hook
            # Under another name on a CPU: torch refuses its bfloat16 hooks by name without NCCL, though gloo reduces bfloat16.
            named = hook if device.type == "cuda" else lambda state, bucket: hook(state, bucket)
            placed.register_comm_hook(self.group if state is None else state, named)
        if self._fp8 is not None and self.group is not None:
            average = self._averages[placed] = FP8Average(self._fp8, self.group)
            placed.register_comm_hook(None, lambda _, bucket: average.average(bucket))

    def error_feedback(self, module: nn.Module) -> dict[torch.Tensor, torch.Tensor] | None:
        average = self._averages.get(module)
        return average.errors if average is not None and average.feeds_back else None

    def _prepare(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        """Return `module` on `device` in the dtypes of `policy`, not yet synchronised."""
        module = materialise_on(module, device)
        if self._sync_batchnorm:  # first, because it replaces modules, which the policy may keep in float32
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return cast_parameters(module, policy)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        tracker = self._sync_trackers.get(module)
        # Torch learns a static graph in a first pass that averages; later passes without sync are averaged along as well.
        learns = self._ddp_options["static_graph"] and tracker is not None and not tracker.averaged
        if learns or not isinstance(module, (DistributedDataParallel, ReducedModule)):
            return nullcontext()
        return module.no_sync()


def _send_buffers(placed: Any, args: Any) -> None:
    """Broadcast the buffers of dtypes that `DistributedDataParallel` cannot send."""
    if placed.require_forward_param_sync:  # not after passes inside no_sync
        for buffer in placed.module.buffers():
            if not is_sendable(buffer):
                broadcast(buffer.detach(), 0, placed.process_group)
