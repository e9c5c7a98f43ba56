"""ZeRO: parameters are whole on all ranks, and each rank steps its slice of the flat buckets that they are views of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.common.torch_internals.tensor_internals import version
from booster.model.optimizers import Granularity, check_attributes, granularity_of, not_elementwise
from booster.shards.base import FROZEN, SPARSE, UNSYNCHRONISED, GradUse
from booster.shards.replicated import ReplicatedShards
from booster.shards.zero_buckets import FlatParameters, ModuleBuckets, flat_slice
from booster.shards.zero_states import BucketSlot, GroupShards, ZeroStates
from booster.tensors.flat import flat_like, shaped_like


class ZeroShards(ReplicatedShards):
    """This rank's slices of the flat buckets of `layouts`, which hold the parameters of `optimizer`.

    A shard is a 1-dim view of the elements of a parameter that are in the slice, or, where parameters are dealt whole, of the
    parameter's shape. Where this rank has nothing of a parameter, an empty tensor without gradient keeps its place. A
    frozen parameter is its own shard.

    Arguments:
        reduced: whether gradients are kept as slices in the buckets (ZeRO-2); else `.grad` is whole on all ranks (ZeRO-1).
        overlaps: `sync_params` does not wait; readers wait in the layouts' `pending_all_gathers`.
        options: those of `ReplicatedShards`.

    Raises ValueError for an optimizer that cannot step shards.
    """

    sharded = True

    def __init__(
        self,
        optimizer: Optimizer,
        layouts: Sequence[ModuleBuckets],
        *,
        reduced: bool,
        overlaps: bool,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, **options)
        kind = check_shards(optimizer)
        self._stepped_in_backward: set[torch.Tensor] = set()  # of the step that is made within backward
        self._layouts = list(layouts)
        for layout in self._layouts:
            layout.shard_params(set(self.held_params()), whole=kind == "per tensor")
        self._reduced, self._overlaps = reduced, overlaps
        self._slots: dict[torch.Tensor, BucketSlot] = {}
        self._groups: list[GroupShards] = []  # when `local` was last entered
        self._versions: dict[FlatParameters, list[int]] = {}  # of parameters, when `local` was last entered
        # What this rank's elements of unsharded gradients were divided by, and the others were not.
        self._divisor: Any = 1.0
        self._held: list[list[torch.Tensor]] | None = None  # the groups' parameters while `local` is entered
        self._flatten_params()

    @contextmanager
    def local(self) -> Iterator[None]:
        if self._held is not None:
            yield
            return
        self.wait_for_weights()
        if not self._reduced:
            for tracker in self.sync_trackers.values():
                # Laid down, it would have its order again, and its gradient, averaged in the other, would go unnoticed.
                if any(param.grad is not None for param in tracker.with_new_layout().values()):
                    tracker.check_order()
        self._flatten_params()
        lists: list[list[Any]] = [group["params"] for group in self.optimizer.param_groups]
        self._held = [list(params) for params in lists]
        given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]] = []
        try:
            # Groups change seldom: a group was added, or a parameter taken out or unfrozen.
            if len(self._groups) != len(self._held) or not all(map(GroupShards.holds, self._groups, self._held)):
                self._groups = [GroupShards(params, self.shard_of, self.slot_of) for params in self._held]
            groups = self._groups
            buckets = self._buckets()
            self._versions = {bucket: list(map(version, bucket.params)) for bucket in buckets}
            preserved = {bucket: bucket.grad_shards() for bucket in buckets} if self._reduced else {}
            brought = set(map(id, self.optimizer.state))
            for params, group in zip(lists, groups, strict=True):
                params[:] = group.shards
                self._shard_states(group, brought)
                for param, shard, slot, shaped in group.stepped:
                    if shard.requires_grad != param.requires_grad:
                        shard.requires_grad_(param.requires_grad)
                    if self._reduced:
                        grad = preserved[slot.bucket].get(slot.position)
                        grad = shaped_like(grad, param) if shaped and grad is not None else grad
                    else:
                        grad = self._gradient(param, shard, slot)
                    shard.grad = grad
                    # With the address, by which a shard whose data was replaced is found afterwards.
                    given.append((param, shard, grad, shard.data_ptr()))
            yield
        finally:
            for params, held in zip(lists, self._held, strict=True):
                params[:] = held
            self._held = None
            for param, shard, grad, address in given:
                # An optimizer, or a hook of one, put another gradient there: it goes where the true one is.
                if shard.grad is not grad:
                    self._replace_gradient(param, grad, shard.grad)
                shard.grad = None
                if shard.data_ptr() != address:  # by `shard.data = ...`
                    with torch.no_grad():
                        shard.data = self.local_slice(param, param).detach().copy_(shard)

    @contextmanager
    def local_shards(self, params: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        shards = [self.shard_of(param) for param in params]
        own = [
            (param, shard) for param, shard in zip(params, shards, strict=True) if shard is not param and shard.numel()
        ]
        for param, shard in own:
            shard.requires_grad_(param.requires_grad)
            shard.grad = self._gradient(param, shard)
        self._stepped_in_backward.update(params)
        try:
            yield shards
        finally:
            for _, shard in own:
                shard.grad = None

    def register_grad_hooks(self, use: GradUse) -> list[Any]:
        divided = [param for param in use.params if param.numel()]  # others are in no bucket
        return super().register_grad_hooks(replace(use, params=divided))

    def has_gradient(self, param: torch.Tensor) -> bool:
        if not self._reduced:
            return param.grad is not None
        slot = self.slot_of(param)
        return slot is not None and slot.position in slot.bucket.reduced

    def drop_gradient(self, param: torch.Tensor) -> None:
        param.grad = None
        slot = self.slot_of(param) if self._reduced else None
        if slot is not None:
            slot.bucket.clear_gradient(slot.position)

    def shard_of(self, param: torch.Tensor) -> torch.Tensor:
        if param not in self.by_param:
            slot = self.slot_of(param)
            if slot is None:
                return param
            bucket, index = slot
            if bucket.data is None:  # of parameters that no optimizer had when this one came
                torch.autograd.graph.increment_version(bucket.flatten_params())
            start, stop = slot.span
            if start == stop:
                # It keeps the place in the group; optimizers skip it, as it never has a gradient.
                shard = torch.empty(0, dtype=param.dtype, device=param.device)
            elif bucket.by_elements and param.dim():
                # Detached: writes to it leave no trace in the version of the parameter, see `sync_params`.
                shard = nn.Parameter(flat_slice(param, start, stop))
            else:
                shard = nn.Parameter(param.detach())
            self.by_param[param], self.by_shard[shard] = shard, param
        return self.by_param[param]

    def replicated_params(self) -> list[tuple[dist.ProcessGroup, list[torch.Tensor]]]:
        # Within backward each rank has stepped its own shards, and those of others have not come yet.
        return [(ranks, [] if self._stepped_in_backward else params) for ranks, params in super().replicated_params()]

    def check_gradients(self) -> None:
        super().check_gradients()
        # Reduced gradients are in buckets: one in `.grad` is of this rank alone.
        if self._reduced and any(param.grad is not None for layout in self._layouts for param in layout.params):
            raise RuntimeError(UNSYNCHRONISED)

    def num_replicas(self, shards: Sequence[torch.Tensor]) -> list[int]:
        alone = set(map(id, self.by_shard))
        return [1 if id(shard) in alone else self._layouts[0].world_size for shard in shards]

    def grad_holders(self) -> list[torch.Tensor]:
        params = [param for params in self._held or [] for param in params]
        return [*super().grad_holders(), *(p for p in params if self.shard_of(p) is not p)] if self._reduced else params

    def grad_targets(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        params = [param for params in self._held or [] for param in params if param.grad is not None]
        if not self._reduced:
            return params
        return shards + [param for param in params if self.shard_of(param) is not param]  # those not yet reduced

    def local_slice(self, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        slot, shard = self.slot_of(param), self.shard_of(param)
        if slot is None:
            return value
        if not shard.numel():
            return value.new_empty(0)
        start, stop = slot.span
        return flat_like(value.detach(), param)[start:stop] if slot.bucket.by_elements and param.dim() else value

    def sync_params(self, *, one_by_one: bool = False) -> None:
        changed: list[torch.Tensor] = []
        # By id: hashing a tensor is a Python call, and every step asks this of every parameter.
        owned = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        in_backward = set(map(id, self._stepped_in_backward))
        for layout in self._layouts:
            for bucket in reversed(layout.buckets):  # the last one is what forward wants first
                before = self._versions.get(bucket)
                if not owned.isdisjoint(map(id, bucket.params)):
                    layout.pending_all_gathers.add(bucket.data, bucket.gather(layout.group))  # type: ignore[arg-type]
                if one_by_one:
                    self.wait_for_weights()
                for place, param in enumerate(bucket.params) if before is not None else ():
                    used = place in bucket.reduced if self._reduced else param.grad is not None
                    if (used or id(param) in in_backward) and id(param) in owned and version(param) == before[place]:  # type: ignore[index]
                        changed.append(param)
        self._stepped_in_backward.clear()
        if not self._overlaps:
            self.wait_for_weights()
        # A graph that was kept over the step is stale on all ranks, whether or not it was this one's step that wrote here.
        torch.autograd.graph.increment_version(changed)

    def wait_for_weights(self) -> None:
        for layout in self._layouts:
            layout.pending_all_gathers.wait()

    def mark_divided(self, divisor: float | torch.Tensor) -> None:
        if not self._reduced:
            self._divisor *= divisor

    def rescale_unsharded_grads(self) -> None:
        self._stepped_in_backward.clear()
        divisor, self._divisor = self._divisor, 1.0
        if not isinstance(divisor, torch.Tensor) and divisor == 1.0:
            return
        for param in self.held_params():
            shard = self.shard_of(param)
            if param.grad is None or shard is param:
                continue
            own = self._gradient(param, shard)
            # This rank's elements were divided by the step already, the others not.
            preserved = None if own is None else own.clone()
            param.grad.div_(divisor)
            if own is not None and preserved is not None:
                own.copy_(preserved)

    def clear_gradients(self, set_to_none: bool) -> None:
        self._divisor = 1.0
        super().clear_gradients(set_to_none)
        if not self._reduced:
            return
        owned = self.held_params()
        if set_to_none:
            ids = set(map(id, owned))
            for bucket in self._buckets():
                bucket.clear_gradients_of(ids)
            return
        for param in owned:
            shard = self._grad_shard(param)
            if shard is not None:
                shard.zero_()

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        buckets = self._buckets()
        held = [(bucket, bucket.gradient, bucket.reduced) for bucket in buckets]
        for bucket in buckets:
            bucket.gradient, bucket.reduced = None, set()
        try:
            with super().without_gradients():
                yield
        finally:
            for bucket, gradient, reduced in held:
                bucket.gradient, bucket.reduced = gradient, reduced

    # ------------------------------------------------------------------ checkpoints

    @property
    def states(self) -> ZeroStates:
        return ZeroStates(self, group=self._layouts[0].group, reduced=self._reduced)

    def accept_zero_grads(self) -> None:
        for param in self.held_params():
            slot = self.slot_of(param)
            if self._reduced and slot is not None and param.grad is not None:
                slot.bucket.start_gradient(slot.position)
                param.grad = None

    # ------------------------------------------------------------------ inside

    def _buckets(self) -> list[FlatParameters]:
        return [bucket for layout in self._layouts for bucket in layout.buckets]

    def _flatten_params(self) -> None:
        for bucket in self._buckets():
            moved = bucket.flatten_params()
            if moved:
                torch.autograd.graph.increment_version(moved)

    def slot_of(self, param: torch.Tensor) -> BucketSlot | None:
        """Return the slot of `param`; None if it is not sharded."""
        if param in self._slots:
            return self._slots[param]
        # Looked for once for each parameter; layouts do not change while shards live.
        located = next((place for layout in self._layouts if (place := layout.locate(param)) is not None), None)
        if located is not None:
            self._slots[param] = BucketSlot(*located)
        return self._slots.get(param)

    def _shard_states(self, group: GroupShards, brought: set[int]) -> None:
        """Cut the state that the optimizer has of whole parameters of `group`. brought: the ids of what it has any of.

        Raises RuntimeError for a gradient that cannot be stepped.
        """
        for param in group.frozen:
            if param.requires_grad and param.grad is not None and param.numel():  # empty ones are in no bucket
                raise RuntimeError(FROZEN.format(name=self.name_of(param)))
        for param, _ in group.divided:
            if param.grad is not None and param.grad.is_sparse:
                raise RuntimeError(SPARSE.format(name=self.name_of(param)))
        state = self.optimizer.state
        # Nearly always: states begin with the first step, which is of shards.
        if brought.isdisjoint(map(id, group.params)):
            return
        states = self.states
        for param, shard in group.divided:
            if param in state:
                own = state.pop(param)
                # A rank without elements of the parameter steps nothing of it.
                if shard.numel():
                    state[shard] = {key: states.shard_entry(value, param) for key, value in own.items()}

    def _gradient(
        self, param: torch.Tensor, shard: torch.Tensor, slot: BucketSlot | None = None
    ) -> torch.Tensor | None:
        if self._reduced:
            grad = self._grad_shard(param, slot)
            return grad if grad is None or shard.dim() == 1 else shaped_like(grad, param)
        if param.grad is None:
            return None
        if param.grad.stride() != param.stride() and not (param.grad.is_contiguous() and param.is_contiguous()):
            # Flat slices of gradient and parameter name the same elements only in one memory order.
            param.grad = torch.empty_like(param, requires_grad=False).copy_(param.grad)
        return self.local_slice(param.grad, param).detach()

    def _grad_shard(self, param: torch.Tensor, slot: BucketSlot | None = None) -> torch.Tensor | None:
        slot = slot or self.slot_of(param)
        return None if slot is None else slot.bucket.grad_shard(slot.position)

    def _replace_gradient(self, param: torch.Tensor, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        """Write `new`, which a shard was given as its gradient, to `old`, the view of the true gradient of `param`."""
        if new is None:
            self.drop_gradient(param)
            return
        if old is None:
            slot = self.slot_of(param)
            if not self._reduced or slot is None:
                raise RuntimeError(
                    f"this rank's shard of a parameter of shape {tuple(param.shape)} alone got a gradient"
                )
            slot.bucket.start_gradient(slot.position)
            old = self._gradient(param, self.shard_of(param))
        old.copy_(new)  # type: ignore[union-attr]


def check_shards(optimizer: Optimizer) -> Granularity:
    """Return the kind of `optimizer`; raise ValueError if it cannot be stepped on shards, or on some tensors of a group."""
    kind = granularity_of(optimizer)
    if kind == "whole":
        would = "would be stepped on each rank's part of the parameters"
        raise ValueError(not_elementwise(optimizer, would, "use TorchDDPPlugin, which keeps optimizer states whole"))
    params = (param for group in optimizer.param_groups for param in group["params"])
    check_attributes(optimizer, params, "would be stepped on tensors of this rank's parts")
    return kind
