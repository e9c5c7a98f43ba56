"""Parts of parameters that `fully_shard` placed: it gathers and frees them, and may hold their gradients back."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, MutableSet
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from booster.common.torch_internals.autograd_internals import without_function_modes
from booster.common.torch_internals.fsdp_internals import (
    all_gathered,
    drop_unreduced,
    end_iteration,
    fsdp_groups,
    fsdp_params,
    fsdp_states,
    gather_of,
    gathered,
    has_run,
    is_gathered,
    set_unreduced_grad,
    shard_of_full,
    unreduced_grad,
)
from booster.common.torch_internals.tensor_internals import writes
from booster.model.params import local_shard
from booster.shards.base import UNSYNCHRONISED
from booster.shards.dtensor import DTensorShards
from booster.shards.fp8_gather import FP8Gather

_SHARDED = attrgetter("sharded_param")


class FullyShardedShards(DTensorShards):
    """The shards of `modules`, which went through `fully_shard`. Options: those of `DTensorShards`.

    unreduced: modules that may hold gradients of passes inside `no_sync`; those that do not are taken out. left: what
    forward passes have left gathered in them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        modules: Iterable[nn.Module],
        *,
        unreduced: MutableSet[nn.Module],
        unsynchronised: Collection[nn.Module],
        unsharded: UnshardedParams,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, **options)
        self._modules = [weakref.ref(module) for module in modules]
        # Found once, as a walk over all modules costs more than what is done to these.
        self._fsdp_modules = [weakref.ref(child) for module in self._alive() for child in sharded_in(module)]
        self._scaled = any(isinstance(gather_of(group), FP8Gather) for group in fsdp_groups(_alive(self._fsdp_modules)))
        self._unreduced, self.unsynchronised = unreduced, unsynchronised
        self._unsharded = unsharded

    def check_gradients(self) -> None:
        if self._comparisons_left:
            self._compare_unsharded()
        # First: a step must see what was written to unsharded parameters.
        for module in self._alive():
            self._unsharded.write_back_all(module)
        if not self._unreduced:
            return
        for module in self._alive():
            if module in self._unreduced and has_unreduced_gradients(module):
                raise RuntimeError(UNSYNCHRONISED)
            self._unreduced.discard(module)

    @contextmanager
    def preserving_accumulated_grads(self) -> Iterator[None]:
        params = [param for param in self._records() if gathered(param) is not None]
        before = [(param, unreduced_grad(param), _grad_of_gathered(param)) for param in params]
        handles = [
            # Called before what comes is added, in place, so that there are copies of one group at a time.
            gathered(param).register_hook(partial(_copy_held_back, param))  # type: ignore[union-attr]
            for param, accumulated, grad in before
            if (accumulated is not None or grad is not None) and gathered(param).requires_grad  # type: ignore[union-attr]
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for param, accumulated, grad in before:
                set_unreduced_grad(param, accumulated)
                gathered(param).grad = grad  # type: ignore[union-attr]

    def abandon_backward(self) -> None:
        super().abandon_backward()
        for module in self._alive():
            recover(module)

    def sync_params(self, *, one_by_one: bool = False) -> None:
        # A forward pass without a backward leaves gathered parameters behind; the next one would take the old values.
        self.reshard()

    def reshard(self) -> None:
        sharded = _alive(self._fsdp_modules)
        reshard(sharded)
        if self._scaled:
            forget_scales(sharded)

    def sharded_params(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        shards = {id(whole): param.sharded_param for param in self._records() if (whole := gathered(param)) is not None}
        return [shards.get(id(param), param) for param in params]

    def clear_gradients(self, set_to_none: bool) -> None:
        drop_unreduced(self._records())

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        params = self._records()
        held = [(param, unreduced_grad(param), _grad_of_gathered(param)) for param in params]
        drop_unreduced(params)
        try:
            yield
        finally:
            for param, accumulated, grad in held:
                set_unreduced_grad(param, accumulated)
                if grad is not None:
                    gathered(param).grad = grad  # type: ignore[union-attr]

    def _alive(self) -> list[nn.Module]:
        return _alive(self._modules)

    def _records(self) -> list[Any]:
        return fsdp_params(_alive(self._fsdp_modules))


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    alive = []
    for reference in references:
        module = reference()
        if module is not None:
            alive.append(module)
    return alive


class UnshardedParams:
    """Whole parameters that a forward pass with gradients left in a model, for a backward pass that may never come.

    `model.parameters()` are these until then. Who writes to them, as a swap of averaged weights does, means the weights of the
    model, and not a copy that the next gathering writes over. The same holds for `requires_grad`.
    """

    def __init__(self) -> None:
        # By module: how often the shards of each group were written to, and whether each parameter trained.
        self._snapshots: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], list[Any]]] = weakref.WeakKeyDictionary()

    def snapshot(self, module: nn.Module) -> None:
        """Remember what `module`, which went through `fully_shard`, has gathered after a forward pass."""
        written: list[tuple[Any, int]] = []
        trains: list[tuple[Any, bool]] = []
        with without_function_modes():  # which would see every look at a tensor, as this runs within the forward pass
            for group in fsdp_groups(sharded_in(module)):
                if is_gathered(group):
                    written.append((group, writes(list(map(_SHARDED, group.fsdp_params)))))
                    for param, whole in zip(group.fsdp_params, all_gathered(group.fsdp_params), strict=True):
                        if whole is not None:
                            trains.append((param, whole.requires_grad))
        self._snapshots[module] = written, trains

    def write_back_all(self, module: nn.Module) -> None:
        """Write to the shards of `module` what was written since to its gathered parameters, wherever the bits differ, and
        freeze and unfreeze them as those were.
        """
        written, trains = self._snapshots.pop(module, ((), ()))
        # A backward pass may have freed it since; the tensor is the same.
        for (param, trained), whole in zip(trains, all_gathered(map(itemgetter(0), trains)), strict=True):
            if whole is not None and whole.requires_grad != trained and param.sharded_param.requires_grad == trained:
                param.sharded_param.requires_grad_(whole.requires_grad)
        # Nothing is gathered any more after a backward pass, so that this costs a look.
        for group, before in written:
            if not is_gathered(group):
                continue
            if writes(list(map(_SHARDED, group.fsdp_params))) != before:
                # Where somebody wrote to the shards themselves, those count, and what is gathered of them is freed.
                group.reshard()
                continue
            gather = gather_of(group)
            if isinstance(gather, FP8Gather):
                gather.forget_arrived()  # other ranks may hold what was written to
            for param in group.fsdp_params:
                if gathered(param) is not None:
                    shard, piece, same = compared(param, gather)
                    if not same.all():
                        write_back(shard, piece, same)


def compared(param: Any, gather: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, of an unsharded parameter of `fsdp_params`: this rank's shard, its elements as gathered, and where
    that is what `gather` made of the shard, to the bit."""
    shard = local_shard(param.sharded_param)
    piece = shard_of_full(param, local_shard(gathered(param).detach())).to(shard.device)  # type: ignore[union-attr]
    # Only what differs from the gathered bits was written by the user; rounding alone must not reach the shard.
    came = shard.to(piece.dtype)
    if isinstance(gather, FP8Gather):
        came = gather.as_gathered(param, came)
    if piece.dtype.is_floating_point and piece.dtype.itemsize == 1:  # nothing compares those
        return shard, piece, came.view(torch.uint8) == piece.view(torch.uint8)
    return shard, piece, (came == piece) | (came.isnan() & piece.isnan())


def write_back(shard: torch.Tensor, piece: torch.Tensor, same: torch.Tensor) -> None:
    """Write `piece` to `shard`, but where they are the `same`: there a shard may have more bits."""
    shard.copy_(torch.where(same, shard, piece.to(shard.dtype)))


def reshard(sharded: Iterable[Any]) -> None:
    """Free all gathered parameters of what `sharded_in` returned, so that it holds the shards, as after a backward pass."""
    for module in sharded:
        module.reshard()


def forget_scales(sharded: Iterable[Any]) -> None:
    """Take note that weights of what `sharded_in` returned changed, for those that are gathered in float8."""
    for group in fsdp_groups(sharded):
        gather = gather_of(group)
        if isinstance(gather, FP8Gather):
            gather.scales.forget()


def recover(module: nn.Module) -> None:
    """Bring `module`, of which a forward or backward pass raised, to what it is between passes."""
    # Before the first pass torch's own way raises, and would hide what the user is to see.
    if isinstance(module, FSDPModule) and has_run(*fsdp_states([module])):
        end_iteration(module)
    reshard(sharded_in(module))


def has_unreduced_gradients(module: nn.Module) -> bool:
    """Return whether backward passes without synchronisation left gradients with the gathered parameters."""
    return any(
        unreduced_grad(param) is not None or _grad_of_gathered(param) is not None for param in _fsdp_params(module)
    )


def _copy_held_back(param: Any, grad: torch.Tensor) -> None:
    """Let the gradient that comes to the gathered `param` be added to a copy of what it holds back."""
    whole: Any = gathered(param)
    accumulated = unreduced_grad(param)
    if accumulated is not None:
        set_unreduced_grad(param, accumulated.clone())
    if whole.grad is not None:
        whole.grad = whole.grad.clone()


def clear_unsharded_grads(module: nn.Module, set_to_none: bool = True) -> None:
    """Clear the gradients that a `zero_grad` of `module` does not meet."""
    params = _fsdp_params(module)
    for param in params:
        # While gathered parameters show, as between forward and backward, `zero_grad` does not meet the shards.
        grad = param.sharded_param.grad
        if grad is not None and set_to_none:
            param.sharded_param.grad = None
        elif grad is not None:
            grad.detach_().zero_()
    # Those of passes without synchronisation, which torch adds to the next reduction.
    drop_unreduced(params)


def _grad_of_gathered(param: Any) -> torch.Tensor | None:
    whole = gathered(param)
    return None if whole is None else whole.grad


def _fsdp_params(module: nn.Module) -> list[Any]:
    # torch has no public way: reset_iter_state() keeps what they hold.
    return fsdp_params(sharded_in(module))


def sharded_in(module: nn.Module) -> list[Any]:
    """The modules in `module` that went through `fully_shard`."""
    sharded: list[Any] = []
    for child in module.modules():
        if isinstance(child, FSDPModule):
            sharded.append(child)
    return sharded
