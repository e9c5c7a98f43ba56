"""Parameters of a sharded model that its own forward pass writes to, as that of a momentum encoder does."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from booster.common.text import listed
from booster.common.torch_internals.fsdp_internals import (
    fsdp_groups,
    gather_of,
    gathered,
    is_gathered_in_place,
    name_of,
    restore_gather_buffer,
    unsharded_versions,
)
from booster.common.torch_internals.tensor_internals import storage_key
from booster.model.dtensors import is_dtensor, local_shard
from booster.shards.fully_sharded import compared, write_back

_COMPARED = 4  # first passes of training in which all bits are compared, as writes through `.data` leave no other trace
_SUM = 2**62 - 1
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_FOUND, _LATE, _LOW, _DROPPED = 1, 2, 3, 4
_REFUSED = {
    _DROPPED: "another tensor was put into {names} by `.data = ...`: of a parameter that is sharded, torch drops it without a "
    "word, and the weight stays what it was. Write in place, as by `.data.copy_(...)`",
    _LOW: "forward writes to {names}, frozen and float32, but fully_shard gathers a copy of fewer bits, and what is written "
    "there is rounded every time, so that an average stops. Name the module whose forward writes in keep_fp32, which "
    "has it gathered in float32, or write in the training loop, between passes",
    _LATE: "forward writes to {names} through .data, and did not in the first passes: fully_shard gathers copies, and what was "
    "written to them by now may be lost. Write in place inside torch.no_grad(), which leaves a trace, or in the training "
    "loop, between passes",
}
_APART = (
    "forward writes other numbers to {names} on each rank, as those are that follow a rank's own batch, but each rank keeps a "
    "part of the one weight. Average over the ranks what is written, or make it a buffer"
)


class WatchedGroup:
    """Gathered parameters of `modules` that are freed together; `torch_internals` calls `compare` before torch frees them."""

    def __init__(self, owner: ForwardWrites, modules: Sequence[nn.Module]) -> None:
        self._owner: ForwardWrites = weakref.proxy(owner)  # the owner holds this
        self.groups = {param: group for group in fsdp_groups(modules[:1]) for param in group.fsdp_params}
        self.params = [param for param in self.groups if is_gathered_in_place(param) and param.sharded_param.numel()]
        self.versions: list[int] = []
        self.always = True
        self._hooks = [
            module.register_forward_pre_hook(torch.compiler.disable(self._before_forward))
            for module in modules
            if self.params
        ]

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """In the first pass, after torch's own hook, which gathers."""
        self.versions = unsharded_versions(self.params)
        self._owner.gathered_first(self.params)
        for hook in self._hooks:
            hook.remove()

    def compare(self) -> None:
        """A module of theirs has computed, and what it gathered is about to be freed."""
        self._owner.compare(self)


class ForwardWrites:
    """Copies what the forward pass of `model` writes to gathered parameters into this rank's shards.

    Torch frees gathered parameters after the pass, with what was written. Writes in place raise a version counter and are found
    in every pass; others, through `.data`, in the first passes and in rare later ones. RuntimeError, on all ranks, by name, for
    what cannot be copied. Costs in those passes: a comparison of this rank's shards, with copies of one at a time, and one
    small collective, for which a GPU is waited for.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        self._model = weakref.ref(model)
        self._ranks = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        self._device = device
        self._groups: list[WatchedGroup] = []
        self._passes_left, self._late = _COMPARED, False
        self._known: set[Any] = set()
        self._untraced: set[Any] = set()  # those that were written to through `.data`, without a version
        self._places: dict[Any, list[tuple[Any, int]]] = {}
        # In this pass: one of the numbers above or 0, and the sum of all bits.
        self._seen: dict[Any, tuple[int, int]] = {}

    def add_group(self, modules: Sequence[nn.Module]) -> WatchedGroup:
        """Watch `modules`, to which `fully_shard` was just applied together; the last call is for the model itself."""
        self._groups.append(WatchedGroup(self, modules))
        self._places.update((param, _places(param)) for param in self._groups[-1].params)
        return self._groups[-1]

    def gathered_first(self, params: Sequence[Any]) -> None:
        for param in params:
            self._places[param] += _places(param)[1:]

    def before_end(self, number: int) -> None:
        """Before the model's own group is compared: if due, compare all bits until the next pass of training ends."""
        if number > _COMPARED:
            self._passes_left = max(self._passes_left, 2)
            for group in self._groups:
                group.always = True

    @torch.no_grad()
    def compare(self, group: WatchedGroup) -> None:
        versions, last = unsharded_versions(group.params), self._groups[-1]
        if not group.versions:
            group.versions = versions
        for param, now, before in zip(group.params, versions, group.versions, strict=True):
            if self._passes_left or now != before or param in self._untraced:
                restore_gather_buffer(param)
                shard, piece, same = compared(param, gather_of(group.groups[param]))
                if self._passes_left or param not in self._known:
                    last.always = True
                    if self._record(param, now != before, shard.dtype != piece.dtype, bool(same.all())):
                        continue
                write_back(shard, piece, same)
        group.versions = unsharded_versions(group.params)
        group.always = self._passes_left > 0 or not self._untraced.isdisjoint(group.params)
        if group is last:
            self._end()

    def _record(self, param: Any, traced: bool, rounded: bool, same: bool) -> bool:
        what = 0
        if not same:
            what = _FOUND
            if rounded and not param.sharded_param.requires_grad:
                what = _LOW
            elif not traced and self._late and param not in self._untraced:
                what = _LATE
            if not traced:
                self._untraced.add(param)
        before, self._places[param] = self._places[param], _places(param)
        if _replaced(before, self._places[param]):
            what = _DROPPED
        whole = local_shard(gathered(param)).contiguous()  # type: ignore[arg-type]
        bits = int(whole.view(_BITS[whole.element_size()]).sum(dtype=torch.int64)) & _SUM
        self._seen[param] = max(what, self._seen.get(param, (0, 0))[0]), bits
        return same

    def _end(self) -> None:
        """The pass ends: exchange what this rank found, in a collective, if anything was compared."""
        if not self._seen:
            return
        params = [param for group in self._groups for param in group.params]
        found, bits = zip(*(self._seen.get(param, (0, 0)) for param in params), strict=True)
        # The maximum of a sum and of its negative: ranks agree if both are one number.
        sums = torch.tensor([*found, *bits, *(-each for each in bits)], dtype=torch.int64, device=self._device)
        for ranks in self._ranks:
            dist.all_reduce(sums, dist.ReduceOp.MAX, group=ranks)
        anywhere = sums.view(3, -1).tolist()
        self._seen.clear()
        if self._passes_left and self._model().training:  # type: ignore[union-attr]
            self._passes_left -= 1
            self._late = not self._passes_left
        for group in self._groups:
            group.always = self._passes_left > 0 or not self._untraced.isdisjoint(group.params)
        for what, reason in _REFUSED.items():
            if names := [name_of(param) for param, each in zip(params, anywhere[0], strict=True) if each == what]:
                raise RuntimeError(reason.format(names=listed(names, 5)))
        written = [(param, most == -least) for param, each, most, least in zip(params, *anywhere, strict=True) if each]
        self._known.update(param for param, _ in written)
        if apart := [name_of(param) for param, alike in written if not alike]:
            raise RuntimeError(_APART.format(names=listed(apart, 5)))


class RefuseReplaced:
    """Raises RuntimeError in the first passes of a tensor-parallel `model`, if its DTensors got another tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._places = {
            name: [(param, storage_key(param))] for name, param in model.named_parameters() if is_dtensor(param)
        }
        self._passes_left = _COMPARED
        self._hook = model.register_forward_hook(torch.compiler.disable(self))

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._passes_left -= module.training
        if not self._passes_left:
            self._hook.remove()
        names = []
        for name, before in self._places.items():
            self._places[name] = [(param, storage_key(param)) for param, _ in before]
            if _replaced(before, self._places[name]):
                names.append(name)
        if names:
            raise RuntimeError(_REFUSED[_DROPPED].format(names=listed(names, 5)))


def _places(param: Any) -> list[tuple[Any, int]]:
    """Return the tensors of a parameter with their storage, which `.data = ...` replaces."""
    standing = (param.sharded_param, gathered(param))
    return [(each, storage_key(each)) for each in standing if each is not None and is_dtensor(each)]


def _replaced(before: list[tuple[Any, int]], now: list[tuple[Any, int]]) -> bool:
    return any(old is new and was != key for (old, was), (new, key) in zip(before, now, strict=False))
