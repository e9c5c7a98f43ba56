"""What `fully_shard` gathers and reduces around the passes of a model, as fake tensors made and freed when it does so.

Of a group of parameters that is gathered at once, in the order of time::

    before its forward    a flat copy of the shard in the dtype that is gathered, where that is another; the flat result of the
                          all-gather, which the next group's frees; the unsharded weights, copied out of it
    after its forward     the unsharded weights are freed, but for those of the model's own group
    before its backward   as before its forward, but the flat result is freed at once, and that of the group which backward
                          wants next is made
    in a gather in fp8    also the rank's message, what came from all, and one weight on its way from that to the flat result
    after its backward    the unsharded weights are freed; gradients are copied into the flat input of the reduce-scatter, which
                          the next group's frees, and freed; the shard's gradient stays

As in torch 2.11 to 2.13, `torch/distributed/fsdp/_fully_shard`; gloo copies the input of a reduce-scatter once more. The real
wrapping is not run, because it frees by resizing storages, which no tracker of fake tensors sees, and needs a process group.

Gradients that are stepped on within backward have another life: `GradientArrivals` says when each is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster.mixed_precision.policy import DtypePolicy, gathered_modules
from booster.model.modules import LinearProxy
from booster.number_formats.scaling import ScaledTensor, Scaling
from booster.plugin.ddp.gradient_reducer import MOST_IN_FLIGHT
from booster.plugin.expert_parallel import check_experts
from booster.plugin.fsdp.groups import Group, block_names, plan_groups
from booster.plugin.fsdp.shard_module import dtype_at_rest
from booster.shards.fp8_gather import pack, unpack
from booster.shards.zero_buckets import bucketed
from booster.tensors import trees
from booster.tensors.grads import PIECE
from booster.tensors.trees import HALF_DTYPES

if TYPE_CHECKING:
    from booster.memory.measured_memory import StepMemory

Sizes = tuple[tuple[torch.dtype, int], ...]


@dataclass
class CompleteGradient:
    """A gradient that all ranks have added to.

    Attributes:
        dtype, size: of this rank's shard of it.
        memory: the tensors that keep it alive.
        free: drops what else does.
    """

    dtype: torch.dtype
    size: int
    memory: list[torch.Tensor]
    free: Callable[[], None] = lambda: None


OnComplete = Callable[[CompleteGradient], None]


class GradientArrivals(ABC):
    """When the gradients of a backward pass are complete on all ranks."""

    @property
    @abstractmethod
    def sizes(self) -> Sizes:
        """Dtype and elements of this rank's shard of each trained parameter."""

    @abstractmethod
    def calling(self, on_complete: OnComplete) -> AbstractContextManager[None]:
        """A context of one backward pass, in which `on_complete` is called with each gradient once it is complete."""


@dataclass(frozen=True)
class StepsInBackward:
    """How parameters are stepped within backward.

    Attributes:
        twice: the graph is gone through for the norm of the gradients before.
        step_of: what stepping parameters of these dtypes and sizes takes.
        arrivals_of: when gradients of these parameters are complete, where `fully_shard` does not shard them.
    """

    twice: bool
    step_of: Callable[[Sizes], StepMemory]
    arrivals_of: Callable[[Sequence[torch.Tensor]], GradientArrivals]

    def run(self, loss: torch.Tensor, arrivals: GradientArrivals, device: torch.device) -> None:
        """Go through the graph of `loss`, on fake tensors, and free each gradient when training would."""
        step = self.step_of(arrivals.sizes)
        waiting: list[CompleteGradient] = []

        def empty(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        def add_to_norm(gradient: CompleteGradient) -> None:
            is_cast = gradient.dtype in HALF_DTYPES and gradient.size > 0
            scratch = empty(min(gradient.size, PIECE) * 4 * is_cast)
            gradient.free()
            gradient.memory.clear()
            del scratch

        def step_when_enough(gradient: CompleteGradient) -> None:
            waiting.append(gradient)
            nbytes = gradient.size * gradient.dtype.itemsize
            if sum(each.size for each in waiting) >= step.at_once:
                step_all()
            elif any(memory.untyped_storage().nbytes() > nbytes for memory in gradient.memory):
                # It shares memory with other gradients: a copy lets that memory go.
                gradient.memory[:] = [empty(nbytes)]
                gradient.free()

        def step_all() -> None:
            scratch = empty(step.temporaries)
            for each in waiting:
                each.free()
                each.memory.clear()
            waiting.clear()
            del scratch

        for action in (add_to_norm, step_when_enough) if self.twice else (step_when_enough,):
            with arrivals.calling(action):
                loss.backward(retain_graph=action is add_to_norm)
        step_all()


@contextmanager
def _called_when_filled(params: Sequence[torch.Tensor], filled: Callable[[torch.Tensor], None]) -> Iterator[None]:
    handles = [param.register_post_accumulate_grad_hook(filled) for param in params]
    yield
    for handle in handles:
        handle.remove()


class Unsharded(GradientArrivals):
    """On one rank: a gradient is complete when autograd has it."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = [param for param in params if param.requires_grad]

    @property
    def sizes(self) -> Sizes:
        return tuple((param.dtype, param.numel()) for param in self._params)

    @contextmanager
    def calling(self, on_complete: OnComplete) -> Iterator[None]:
        def filled(param: torch.Tensor) -> None:
            on_complete(CompleteGradient(param.dtype, param.numel(), [], lambda: setattr(param, "grad", None)))

        with _called_when_filled(self._params, filled):
            yield


class Bucketed(GradientArrivals):
    """On ranks that average gradients bucket by bucket, as `GradientReducer` does.

    params: in the order of the model.
    shards: over how many ranks what is stepped is sharded.
    reduce_scatter: each rank keeps its shard of an average only (ZeRO-2), else all of it.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], *, world_size: int, shards: int, reduce_scatter: bool, bucket_bytes: float
    ) -> None:
        self._params = [param for param in params if param.requires_grad and param.numel()]
        self._world_size, self._shards, self._reduce_scatter = world_size, shards, reduce_scatter
        self._buckets = bucketed(self._params, bucket_bytes)

    @property
    def sizes(self) -> Sizes:
        return tuple((param.dtype, self._shard_size(param)) for param in self._params)

    def _shard_size(self, param: torch.Tensor) -> int:
        return -(-param.numel() // self._shards)

    @contextmanager
    def calling(self, on_complete: OnComplete) -> Iterator[None]:
        self._on_complete = on_complete
        self._bucket_of = {id(param): index for index, bucket in enumerate(self._buckets) for param in bucket}
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0
        self._flat: dict[int, torch.Tensor] = {}
        self._in_flight: deque[tuple[int, list[torch.Tensor]]] = deque()
        with _called_when_filled(self._params, self._filled):
            yield
        while self._next < len(self._buckets):
            self._send()
        self._wait(0)

    def _filled(self, param: torch.Tensor) -> None:
        index = self._bucket_of[id(param)]
        if not self._reduce_scatter:  # gradients are written into the bucket as they come
            self._flat_bucket(index)
            param.grad = None
        self._missing[index] -= 1
        # Buckets are sent in one order on all ranks, so a full one waits for those before it.
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._send()

    def _flat_bucket(self, index: int) -> torch.Tensor:
        if index not in self._flat:
            bucket = self._buckets[index]
            size = sum(param.numel() for param in bucket)
            self._flat[index] = torch.empty(size, dtype=bucket[0].dtype, device=bucket[0].device)
        return self._flat[index]

    def _send(self) -> None:
        self._wait(MOST_IN_FLIGHT - 1)
        index, self._next = self._next, self._next + 1
        flat = self._flat_bucket(index)
        for param in self._buckets[index]:
            param.grad = None
        sent = [self._flat.pop(index)]
        if self._reduce_scatter and flat.device.type == "cpu":  # what the other ranks send of this rank's shard
            sent.append(torch.empty_like(flat))
        elif self._reduce_scatter:
            sent.append(flat.new_empty(-(-flat.numel() // self._world_size)))
        self._in_flight.append((index, sent))

    def _wait(self, most: int) -> None:
        """Wait until at most so many buckets are in flight, and give their gradients away."""
        while len(self._in_flight) > most:
            index, sent = self._in_flight.popleft()
            if self._reduce_scatter:
                sent = [sent[0].new_empty(-(-sent[0].numel() // self._world_size))]
            complete = [
                CompleteGradient(param.dtype, self._shard_size(param), list(sent)) for param in self._buckets[index]
            ]
            # From here on only the gradients keep the bucket alive, each until it is stepped on.
            sent.clear()
            while complete:
                self._on_complete(complete.pop(0))


class FullySharded(GradientArrivals):
    """Follows the passes of `model`. Its parameters are unsharded fake tensors in the dtypes that are computed in.

    Made under the mode that tracks storages, or before it; `reduce_all` comes after backward.

    Attributes:
        gradients: of the shards so far, unless each is taken as it comes.
    """

    def __init__(
        self, model: nn.Module, policy: DtypePolicy, world_size: int, device: torch.device, ep_size: int = 1
    ) -> None:
        self.gradients: list[torch.Tensor] = []
        experts = check_experts(model, ep_size) if ep_size > 1 else []
        groups = plan_groups(
            model,
            blocks=[*block_names(model, None), *experts],
            pinned=policy.keep_fp32,
            dtype_of=lambda param, pinned: dtype_at_rest(param, policy, pinned),
            gathered=gathered_modules(model, policy),
        )
        self._forward_order: list[_ParamGroup] = []
        self._all_gather_result: torch.Tensor | None = None  # of the last group in forward
        self._reduce_scatter_input: torch.Tensor | None = None  # of the last group in backward
        self._in_backward = False
        self._on_complete: OnComplete | None = None
        self._world_size, self._device = world_size, device
        layers = [model.get_submodule(name) for name in policy.fp8_weights] if world_size > 1 else []
        in_fp8 = {id(layer.weight) for layer in layers}
        dealt = {model.get_submodule(name) for name in experts}
        self._groups = [
            _ParamGroup(group, policy, world_size, ep_size if group.modules[0] in dealt else 1, in_fp8)
            for group in groups
        ]
        places = {id(param): (group, place) for group in self._groups for place, param in enumerate(group.params)}
        for layer in layers:
            if isinstance(layer, LinearProxy):
                layer.arrived = partial(self._fp8_weight, *places[id(layer.weight)])
        for group in self._groups:
            for module in group.modules:
                module.register_forward_pre_hook(partial(self._before_forward, group), with_kwargs=True)
            # A group of several modules is gathered before its first, and freed after its last.
            for module in group.modules[-1:]:
                module.register_forward_hook(partial(self._after_forward, group))

    @property
    def weights(self) -> int:
        """The bytes of this rank's shards."""
        return sum(dtype.itemsize * size for group in self._groups for dtype, size, _ in group.stored)

    @property
    def sizes(self) -> Sizes:
        return tuple((dtype, size) for group in self._groups for dtype, size, trained in group.stored if trained)

    @contextmanager
    def calling(self, on_complete: OnComplete) -> Iterator[None]:
        self._on_complete = on_complete
        yield
        self.reduce_all()
        self._forward_order.clear()  # a second pass prefetches nothing
        for group in self._groups:
            group.all_gather_result, group.fp8_received, group.unsharded = None, [], []
            group.gathered_in_backward = group.reduced = False

    def reduce_all(self) -> None:
        """Reduce what backward left, and free what waits."""
        for group in self._groups:
            self._reduce(group)
        self._reduce_scatter_input = None

    def _before_forward(self, group: _ParamGroup, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._in_backward:  # activations are computed again, with weights that are there
            return None
        self._all_gather(group)
        self._copy_out(group, in_forward=True)
        given = [tensor for tensor in trees.tensors((args, kwargs)) if tensor.requires_grad]
        if not given or not torch.is_grad_enabled():
            return None
        # Gradients of the inputs come last in a module's backward: torch reduces its group then.
        same = dict(zip(map(id, given), _AfterBackward.apply(lambda: self._reduce(group), *given), strict=True))
        return trees.map_tensors(lambda tensor: same.get(id(tensor), tensor), (args, kwargs))

    def _after_forward(self, group: _ParamGroup, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_backward:
            return
        self._forward_order.append(group)
        if group.stays:
            self._all_gather_result = None
        else:
            group.unsharded = []
        for tensor in trees.tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self._before_backward(group))

    def _before_backward(self, group: _ParamGroup) -> None:
        self._in_backward = True
        if group.gathered_in_backward:
            return
        group.gathered_in_backward = True
        self._all_gather(group)
        self._copy_out(group, in_forward=False)
        # What forward used before is what backward wants next.
        place = self._forward_order.index(group) if group in self._forward_order else 0
        if place:
            self._all_gather(self._forward_order[place - 1])

    def _all_gather(self, group: _ParamGroup) -> None:
        if group.all_gather_result is not None or group.unsharded:
            return
        # Kept until the end of this call only: torch frees it when the collective is done.
        shard_copy = self._empty(group.elements, group.gather) if group.gather != group.store else None
        received = group.elements * group.ranks if group.ranks > 1 else 0
        group.all_gather_result = self._empty(received, group.gather)
        if any(group.in_fp8):  # as `FP8Gather` does, but for the collective
            places = group.all_gather_result.view(self._world_size, -1).split(group.shards, dim=1)
            largest = [self._empty(1, torch.float32).view(()) if in_fp8 else None for in_fp8 in group.in_fp8]
            dtypes = [group.gather] * len(places)
            message, sizes = pack([place[0] for place in places], dtypes, largest)
            messages = self._empty(self._world_size * len(message), torch.uint8).view(self._world_size, -1)
            group.fp8_received = unpack(messages, sizes, places, dtypes, largest)
        del shard_copy

    def _copy_out(self, group: _ParamGroup, *, in_forward: bool) -> None:
        if group.all_gather_result is None:
            return
        if in_forward:
            self._all_gather_result = None  # that of the group before
        group.unsharded = [self._empty(size * group.ranks, group.gather) for size in group.shards]
        group.unsharded += group.fp8_received  # which layers multiply as they are
        if in_forward:
            self._all_gather_result = group.all_gather_result
        group.all_gather_result, group.fp8_received = None, []

    def _fp8_weight(self, group: _ParamGroup, place: int, weight: torch.Tensor) -> ScaledTensor | None:
        """Return what `FP8Gather.arrived` does."""
        received = group.unsharded[len(group.params) + place] if group.unsharded else None
        if received is None:
            return None
        values = received.view(-1, weight.shape[1])[: len(weight)].view(torch.float8_e4m3fn)
        return ScaledTensor(values, self._empty(1, torch.float32).view(()), None, Scaling("tensor"))

    def _reduce(self, group: _ParamGroup) -> None:
        """Reduce the gradients of `group`, after its backward."""
        if group.reduced:
            return
        group.reduced = True
        trained = [(p, size) for p, size in zip(group.params, group.shards, strict=True) if p.grad is not None]
        grads = [param.grad for param, _ in trained]
        for param, _ in trained:
            param.grad = None
        group.unsharded = []
        self._reduce_scatter_input = None
        if not grads:
            return
        size = sum(size for _, size in trained)
        self._reduce_scatter_input = self._empty(size * group.ranks, group.reduce)
        grads.clear()  # copied into it
        shard = self._empty(size, group.reduce)
        if group.ranks > 1 and self._device.type == "cpu":
            self._empty(size * group.ranks, group.reduce)  # gloo's copy
        if group.reduce != group.store:
            shard = self._empty(size, group.store)
        if self._on_complete is None:
            self.gradients.append(shard)
            return
        for _, own in trained:
            self._on_complete(CompleteGradient(group.store, own, [shard]))

    def _empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)


class _ParamGroup:
    """Parameters that one all-gather brings.

    Attributes:
        params, shards: the parameters, and the elements of this rank's shard of each.
        stored: of each, the dtype of the shard, its elements, and whether it is trained.
        ranks: among which it is sharded: all, and of experts those that have the same.
        store, gather, reduce: dtypes of the shards, of the all-gather and of the reduce-scatter.
        in_fp8: of each parameter, whether it is gathered in e4m3.
        unsharded: weights that are gathered now, then what was received of each in e4m3.
    """

    def __init__(
        self, group: Group, policy: DtypePolicy, world_size: int, ep_size: int, in_fp8: Collection[int]
    ) -> None:
        own = {id(p): p for module in group.members for p in module.parameters(recurse=False)}
        self.modules, self.stays = group.modules, group.stays
        self.params = list(own.values())
        # fully_shard divides the first dimension, and fills up the shards of the last ranks.
        self.ranks = world_size // ep_size
        self.shards = [-(-p.shape[0] // world_size) * p.shape[1:].numel() for p in self.params]
        if ep_size > 1:  # experts are divided along a dimension that divides
            self.shards = [-(-p.numel() // world_size) for p in self.params]
        self.elements = sum(self.shards)
        self.in_fp8 = [id(param) in in_fp8 for param in self.params]
        trained = [p for p in self.params if p.requires_grad] or self.params
        self.store = dtype_at_rest(trained[0], policy, group.pinned) if trained else torch.float32
        self.gather = (
            torch.float32 if group.pinned else policy.gather if group.gathered else policy.param
        ) or self.store
        half = self.gather in HALF_DTYPES or policy.store in HALF_DTYPES
        self.reduce = policy.reduce or (torch.float32 if half and not group.pinned else self.gather)
        self.stored = [
            (dtype_at_rest(param, policy, group.pinned), size, param.requires_grad)
            for param, size in zip(self.params, self.shards, strict=True)
        ]
        self.all_gather_result: torch.Tensor | None = None
        self.fp8_received: Sequence[torch.Tensor | None] = []
        self.unsharded: list[torch.Tensor | None] = []
        self.gathered_in_backward = self.reduced = False


class _AfterBackward(torch.autograd.Function):
    """Calls `run` once the gradients of all `tensors` are there."""

    @staticmethod
    def forward(ctx: Any, run: Any, *tensors: torch.Tensor) -> Any:
        ctx.run = run
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.run()
        return None, *grads
