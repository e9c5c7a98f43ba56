"""Averages of unsharded gradients, in buckets that live no longer than the gradients, and modules that make them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.common.snapshot import attributes
from booster.common.torch_internals.autograd_internals import graph_task
from booster.common.torch_internals.fsdp_internals import bucket_assignment
from booster.model.modules import PlacedModule, bare
from booster.plugin.ddp.gradient_reducer import GradientReducer
from booster.ranks.agreement import broadcast
from booster.shards.zero_buckets import ModuleBuckets
from booster.tensors.flat import is_dense, shaped_like
from booster.tensors.trees import tensors

SPARSE = (
    "{name} has a sparse gradient, which release_gradients does not average; build its module with sparse=False, or leave "
    "release_gradients False"
)
UNREACHED = (
    "backward reached no gradient of {names}; use find_unused_parameters=True, or let every parameter that trains take part in "
    "the loss"
)


class AverageReducer(GradientReducer):
    """Averages the gradients of `named` parameters over `group` as `DistributedDataParallel` does, with two differences: they
    may be used, and freed, as soon as their bucket is reduced, and no bucket outlives them.

    The buckets are those that torch would make, so that every sum rounds as there: the order in which ranks are added up
    depends on the place of an element in its bucket. Torch sends all in one bucket in the first pass, and then makes new ones
    in the order in which gradients came on rank 0. With finds_unused, and between two ranks, where any order gives the same
    sum, buckets are of bucket_bytes from the beginning.

    finds_unused: parameters may be left out of a loss; otherwise RuntimeError says so at the end of the pass. Collectives: one
    all-reduce a bucket, with finds_unused another small one, and once a broadcast of the order.
    """

    keeps_apart = True

    def __init__(
        self,
        named: Mapping[str, torch.Tensor],
        *,
        group: dist.ProcessGroup,
        bucket_bytes: int,
        finds_unused: bool,
    ) -> None:
        super().__init__(named.values(), group)
        self._names = {param: name for name, param in named.items()}
        self._bytes = bucket_bytes
        self.agrees_at_once = self._finds_unused = finds_unused
        self._ratio = 1.0 / group.size()
        self._is_settled = finds_unused or group.size() == 2
        found = bucket_assignment(self._all, bucket_bytes if self._is_settled else sys.maxsize) if self._all else []
        self._divided = [[self._all[index] for index in indices] for indices in reversed(found)]
        self._order: list[int] = []  # of the first pass
        self._coming: list[int] = []
        self._flat: dict[int, torch.Tensor] = {}
        self._places: dict[torch.Tensor, torch.Tensor] = {}

    def before_forward(self) -> None:
        super().before_forward()
        if self._is_settled or not self._order or not torch.is_grad_enabled():
            return
        # All ranks take rank 0's order: the order in which gradients come may differ between ranks.
        order = torch.tensor(self._order, dtype=torch.int64, device=self._all[0].device)
        dist.broadcast(order, group=self._group, group_src=0)
        indices = order.tolist()
        found = bucket_assignment([self._all[index] for index in indices], self._bytes, indices)
        self._divided = [[self._all[index] for index in own] for own in found]
        self._is_settled = True

    def abandon(self) -> None:
        super().abandon()
        self._flat.clear()
        self._places.clear()

    def buckets(self) -> Sequence[Sequence[torch.Tensor]]:
        self._coming = []
        return self._divided

    @torch.no_grad()
    def fill(self, index: int, param: torch.Tensor) -> None:
        grad: Any = self.gradient_here(param)
        if grad.is_sparse:
            raise RuntimeError(SPARSE.format(name=self._names[param]))
        self._coming.append(self._index[param])
        # Divided before the sum, as torch does: the sum of halves could overflow.
        torch.mul(grad, self._ratio, out=self._place(index, param))
        param.grad = None

    def send(self, index: int, params: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        for param, place in zip(params, self._members[index], strict=True):
            if not self._reached[place]:
                self._place(index, param).zero_()
        flat = self._flat.pop(index)
        work = dist.all_reduce(flat, group=self._group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return flat

        return wait

    def store_reduced(self, index: int, reduced: torch.Tensor, reached: list[bool]) -> None:
        for param, here in zip(self._params[index], reached, strict=True):
            place = self._places.pop(param)
            if here:
                param.grad = place

    def _place(self, index: int, param: torch.Tensor) -> torch.Tensor:
        """Return the memory in the bucket for the gradient of `param`, in its shape and memory order."""
        if index not in self._flat:
            members = self._params[index]
            size = sum(member.numel() for member in members)
            flat = self._flat[index] = torch.empty(size, dtype=param.dtype, device=param.device)
            start = 0
            for member in members:
                piece = flat[start : start + member.numel()]
                self._places[member] = shaped_like(piece, member) if is_dense(member) else piece.view(member.shape)
                start += member.numel()
        return self._places[param]

    def _finish(self) -> None:
        if not self._finds_unused:
            known = zip(self._all, self._reached, strict=True)
            # Parameters that were frozen since get none rightly.
            unreached = [p for p, reached in known if not (reached or self.has_gradient_here(p)) and p.requires_grad]
            if unreached:
                raise RuntimeError(UNREACHED.format(names=", ".join(self._names[p] for p in unreached[:5])))
        super()._finish()
        if not self._is_settled:
            self._order = self._order or self._coming


_OF_COPIES = 25 * 2**20  # bytes in a bucket of gradients, as DistributedDataParallel has it


class BucketedModule(nn.Module):
    """A module with its trainable parameters in the buckets of `layout`; None where they are not.

    It comes first among the bases of a wrapper, so that clearing gradients clears those of the buckets too.
    """

    layout: ModuleBuckets | None = None

    def wait_for_weights(self) -> None:
        """Wait for the all-gathers of weights that a step left pending."""
        if self.layout is not None:
            self.layout.pending_all_gathers.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.layout is not None:
            self.layout.clear_gradients(set_to_none)


class ReducedModule(BucketedModule, PlacedModule):
    """A module with gradients that `reducer` averages over `group`.

    layout: how ranks shard the parameters; None where they do not. synchronise_buffers: broadcast rank 0's buffers at every
    forward, except under `no_sync`. A deep copy averages whole gradients, which stay, as `DistributedDataParallel` does.
    """

    def __init__(
        self,
        module: nn.Module,
        reducer: GradientReducer,
        group: dist.ProcessGroup,
        *,
        layout: ModuleBuckets | None = None,
        synchronise_buffers: bool,
    ) -> None:
        super().__init__(module)
        self.reducer, self.layout = reducer, layout
        self._group = group
        self._synchronise_buffers = synchronise_buffers

    def __deepcopy__(self, memo: dict[int, Any]) -> ReducedModule:
        module = copy.deepcopy(self.module, memo)
        named = {name: param for name, param in bare(module).named_parameters() if param.requires_grad}
        reducer = AverageReducer(named, group=self._group, bucket_bytes=_OF_COPIES, finds_unused=True)
        clone = ReducedModule(module, reducer, self._group, synchronise_buffers=self._synchronise_buffers)
        clone.training = self.training
        memo[id(self)] = clone
        return clone

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if graph_task() == -1:  # not recomputed inside a backward
            self.reducer.before_forward()
            if self._synchronise_buffers and self.reducer.synchronises:
                for buffer in self.module.buffers():
                    broadcast(buffer.detach(), 0, self._group)
        with nullcontext() if self.layout is None else self.layout.pending_all_gathers.in_forward(self.module):
            outputs = self.module(*args, **kwargs)
        # The engine calls these hooks first, before any gradient: a rank that reaches no parameter must take part, too.
        for output in tensors(outputs):
            if output.requires_grad:
                output.register_hook(self.reducer.start_pass)
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context: its backward passes leave gradients in `.grad`, which a later pass averages with its own."""
        return attributes([self.reducer], synchronises=False)
