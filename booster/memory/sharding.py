"""What `fully_shard` gathers and reduces around the passes of a model, made of fake tensors at the times at which it does so.

Of a group of parameters that travels together, in the order of time::

    before its forward    a flat copy of the shard in the dtype that is gathered, where that is another; the flat result of the
                          all-gather, which the next group's frees; the whole weights, copied out of it
    after its forward     the whole weights are freed, but for those of the model's own group
    before its backward   as before its forward, but the flat result is freed at once, and that of the group which backward
                          wants next is made
    in a gather in fp8    also the rank's message, what came from all, and one weight on its way from that to the flat result
    after its backward    the whole weights are freed; gradients are copied into the flat input of the reduce-scatter, which the
                          next group's frees, and freed; the shard's gradient stays

As in torch 2.11 to 2.13, `torch/distributed/fsdp/_fully_shard`; gloo copies the input of a reduce-scatter once more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.memory.released import Arrivals, Complete, Sizes, Take
from booster.mixed_precision.policy import DtypePolicy, gathered_modules
from booster.model.modules import LinearProxy
from booster.number_formats import ScaledTensor, Scaling
from booster.plugin.fsdp.groups import Group, plan_groups
from booster.plugin.fsdp.shard_module import dtype_at_rest
from booster.plugin.fsdp.wrap_policy import block_names
from booster.shards.fp8_gather import pack, unpack
from booster.tensors import trees
from booster.tensors.trees import HALF_DTYPES


class Sharding(Arrivals):
    """Follows the passes of `model`, whose parameters are whole fake tensors in the dtypes that are computed in.

    gradients: the shards' gradients so far, unless each is taken as it comes. Made under the mode that tracks storages, or
    before it; `finish` after backward.
    """

    def __init__(self, model: nn.Module, policy: DtypePolicy, world_size: int, device: torch.device) -> None:
        self.gradients: list[torch.Tensor] = []
        groups = plan_groups(
            model,
            blocks=block_names(model, None),
            pinned=policy.keep_fp32,
            dtype_of=lambda param, pinned: dtype_at_rest(param, policy, pinned),
            gathered=gathered_modules(model, policy),
        )
        self._order: list[_Travelling] = []
        self._waiting: torch.Tensor | None = None  # of an all-gather in forward
        self._sent: torch.Tensor | None = None  # into a reduce-scatter
        self._backward = False
        self._take: Take | None = None
        self._world_size, self._device = world_size, device
        layers = [model.get_submodule(name) for name in policy.fp8_weights] if world_size > 1 else []
        low = {id(layer.weight) for layer in layers}
        self._groups = [_Travelling(group, policy, world_size, low) for group in groups]
        places = {id(param): (group, place) for group in self._groups for place, param in enumerate(group.params)}
        for layer in layers:
            if isinstance(layer, LinearProxy):
                layer.arrived = partial(self._arrived, *places[id(layer.weight)])
        for group in self._groups:
            for index, module in enumerate(group.modules):
                module.register_forward_pre_hook(self._before(group), with_kwargs=True)
                if index == len(group.modules) - 1:
                    module.register_forward_hook(self._after(group))

    @property
    def stored(self) -> list[tuple[torch.dtype, int, bool]]:
        """Of each parameter: the dtype at rest, the elements of its shard, and whether it is trained."""
        return [entry for group in self._groups for entry in group.sizes]

    @property
    def sizes(self) -> Sizes:
        return tuple((dtype, size) for dtype, size, trained in self.stored if trained)

    def begin(self, take: Take) -> None:
        self._take = take

    def end(self) -> None:
        self.finish()
        self._order.clear()  # a second pass gathers nothing ahead
        for group in self._groups:
            group.arrived, group.came, group.whole, group.wanted, group.reduced = None, [], [], False, False

    def finish(self) -> None:
        """Reduce what backward left, and free what waits."""
        for group in self._groups:
            self._reduce(group)
        self._sent = None

    def _before(self, group: _Travelling) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._backward:
                return None
            self._gather(group)
            self._copy_out(group, forward=True)
            given = [tensor for tensor in trees.tensors((args, kwargs)) if tensor.requires_grad]
            if not given or not torch.is_grad_enabled():
                return None
            same = dict(zip(map(id, given), _After.apply(lambda: self._reduce(group), *given), strict=True))
            return trees.map_tensors(lambda tensor: same.get(id(tensor), tensor), (args, kwargs))

        return hook

    def _after(self, group: _Travelling) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._backward:
                return
            self._order.append(group)
            if group.stays:
                self._waiting = None
            else:
                group.whole = []
            for tensor in trees.tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._want(group))

        return hook

    def _want(self, group: _Travelling) -> None:
        """Before the backward of `group`."""
        self._backward = True
        if group.wanted:
            return
        group.wanted = True
        self._gather(group)
        self._copy_out(group, forward=False)
        place = self._order.index(group) if group in self._order else 0
        if place:
            self._gather(self._order[place - 1])

    def _gather(self, group: _Travelling) -> None:
        if group.arrived is not None or group.whole:
            return
        copy = self._empty(group.elements, group.gathered) if group.gathered != group.rest else None
        if self._world_size > 1:
            group.arrived = self._empty(group.elements * self._world_size, group.gathered)
        else:
            group.arrived = self._empty(0, group.gathered)
        if any(group.low):
            self._send_low(group)
        del copy

    def _send_low(self, group: _Travelling) -> None:
        """What `FP8Gather` does, but for the collective."""
        places = group.arrived.view(self._world_size, -1).split(group.shards, dim=1)  # type: ignore[union-attr]
        largest = [self._empty(1, torch.float32).view(()) if low else None for low in group.low]
        dtypes = [group.gathered] * len(places)
        message, sizes = pack([place[0] for place in places], dtypes, largest)
        received = self._empty(self._world_size * len(message), torch.uint8).view(self._world_size, -1)
        group.came = unpack(received, sizes, places, dtypes, largest)

    def _copy_out(self, group: _Travelling, *, forward: bool) -> None:
        if group.arrived is None:
            return
        if forward:
            self._waiting = None
        group.whole = [self._empty(size * self._world_size, group.gathered) for size in group.shards]
        group.whole += group.came  # of which layers multiply
        if forward:
            self._waiting = group.arrived
        group.arrived, group.came = None, []

    def _arrived(self, group: _Travelling, place: int, weight: torch.Tensor) -> ScaledTensor | None:
        """What `FP8Gather.arrived` gives."""
        came = group.whole[len(group.params) + place] if group.whole else None
        if came is None:
            return None
        values = came.view(-1, weight.shape[1])[: len(weight)].view(torch.float8_e4m3fn)
        return ScaledTensor(values, self._empty(1, torch.float32).view(()), None, Scaling("tensor"))

    def _reduce(self, group: _Travelling) -> None:
        """After the backward of `group`."""
        if group.reduced:
            return
        group.reduced = True
        trained = [(p, size) for p, size in zip(group.params, group.shards, strict=True) if p.grad is not None]
        grads = [param.grad for param, _ in trained]
        for param, _ in trained:
            param.grad = None
        group.whole = []
        self._sent = None
        if not grads:
            return
        size = sum(size for _, size in trained)
        self._sent = self._empty(size * self._world_size, group.reduce)
        grads.clear()
        shard = self._empty(size, group.reduce)
        if self._world_size > 1 and self._device.type == "cpu":
            self._empty(size * self._world_size, group.reduce)  # gloo's own
        if group.reduce != group.rest:
            shard = self._empty(size, group.rest)
        if self._take is None:
            self.gradients.append(shard)
            return
        for _, own in trained:
            self._take(Complete(group.rest, own, [shard]))

    def _empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)


class _Travelling:
    """One group of parameters: elements of the shards, dtypes, which are sent in e4m3, and what of it is whole now."""

    def __init__(self, group: Group, policy: DtypePolicy, world_size: int, low: Collection[int]) -> None:
        own = {id(p): p for module in group.members for p in module.parameters(recurse=False)}
        self.modules, self.stays = group.modules, group.stays
        self.params = list(own.values())
        self.shards = [-(-p.shape[0] // world_size) * p.shape[1:].numel() for p in self.params]
        self.elements = sum(self.shards)
        self.low = [id(param) in low for param in self.params]
        trained = [p for p in self.params if p.requires_grad] or self.params
        computed = trained[0].dtype if trained else torch.float32
        self.rest = dtype_at_rest(trained[0], policy, group.pinned) if trained else computed
        gathered = torch.float32 if group.pinned else policy.gather if group.gathered else policy.param
        self.gathered = gathered or self.rest
        half = self.gathered in HALF_DTYPES or policy.store in HALF_DTYPES
        self.reduce = policy.reduce or (torch.float32 if half and not group.pinned else self.gathered)
        rests = [dtype_at_rest(p, policy, group.pinned) for p in self.params]
        trains = [p.requires_grad for p in self.params]
        self.sizes = list(zip(rests, self.shards, trains, strict=True))
        self.arrived: torch.Tensor | None = None
        self.came: Sequence[torch.Tensor | None] = []
        self.whole: list[torch.Tensor | None] = []  # weights, then what came of each in e4m3
        self.wanted = self.reduced = False


class _After(torch.autograd.Function):
    """Calls `run` once the gradients of all `tensors` are there."""

    @staticmethod
    def forward(ctx: Any, run: Any, *tensors: torch.Tensor) -> Any:
        ctx.run = run
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.run()
        return None, *grads
