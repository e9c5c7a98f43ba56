"""Averages of unsharded gradients, in buckets that live no longer than the gradients, and modules that make them.

Besides torch's all-reduce there are sums by all-to-alls: exact ones on CPUs, and averages sent in float8 and summed in float32.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.common import arguments
from booster.common.snapshot import attributes
from booster.common.torch_internals.autograd_internals import graph_task
from booster.common.torch_internals.fsdp_internals import bucket_assignment
from booster.model.modules import PlacedModule, bare
from booster.number_formats.scaling import BLOCK, decode_blocks, encode_blocks
from booster.plugin.ddp.gradient_reducer import GradientReducer
from booster.ranks.agreement import all_gather_flat, broadcast
from booster.shards.zero_buckets import ModuleBuckets
from booster.tensors.flat import is_dense, shaped_like
from booster.tensors.trees import HALF_DTYPES, tensors

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
        self, named: Mapping[str, torch.Tensor], *, group: dist.ProcessGroup, bucket_bytes: int, finds_unused: bool
    ) -> None:
        super().__init__(named.values(), group)
        self._names = {param: name for name, param in named.items()}
        self._bytes = bucket_bytes
        self.agrees_at_once = finds_unused
        self._ratio = 1.0 / group.size()
        self._is_settled = finds_unused or group.size() == 2
        assignment = (
            bucket_assignment(self._all, bucket_bytes if self._is_settled else sys.maxsize) if self._all else []
        )
        self._divided = [[self._all[index] for index in indices] for indices in reversed(assignment)]
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
        assignment = bucket_assignment([self._all[index] for index in indices], self._bytes, indices)
        self._divided = [[self._all[index] for index in own] for own in assignment]
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
        grad: Any = self.local_gradient(param)
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
        for param, has_grad in zip(self._params[index], reached, strict=True):
            place = self._places.pop(param)
            if has_grad:
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
        if not self.agrees_at_once:  # every parameter has to be reached
            pairs = zip(self._all, self._reached, strict=True)
            # Parameters that were frozen since get none rightly.
            unreached = [p for p, reached in pairs if not (reached or self.has_local_gradient(p)) and p.requires_grad]
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


@dataclass(frozen=True)
class FP8Communication:
    """How gradients travel between ranks in float8: `TorchDDPPlugin(fp8_communication=FP8Communication(...))`.

    error_feedback: each rank keeps what rounding took from its gradients, and adds it to those of its next backward pass
    (Seide et al. 2014, "1-bit SGD"). Takes 4 bytes a parameter and rank, in checkpoints too. A pass in which an inf or NaN was
    averaged keeps nothing.
    """

    error_feedback: bool = False

    def __post_init__(self) -> None:
        arguments.flag("error_feedback", self.error_feedback)


class _Exchange:
    """One all-to-all: each rank sends every other its slice of `sent`, along the first dimension. `wait` is called once."""

    def __init__(self, sent: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        own = sizes[dist.get_rank(group)]
        received = sent.new_empty(len(sizes) * own, *sent.shape[1:])
        self._slices = received.view(len(sizes), own, *sent.shape[1:]).unbind()
        # The work holds what it sends until it is waited for.
        self._work: Any = dist.all_to_all_single(
            received, sent, [own] * len(sizes), list(sizes), group=group, async_op=True
        )

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return what the ranks sent, in their order."""
        self._work.wait()
        slices = self._slices
        del self._work, self._slices
        return slices


class ExchangedSum:
    """A reduce-scatter by an all-to-all: each rank sends every other its slice of `values`, and sums what it receives.

    gloo's own reduce-scatter is an all-reduce that drops the rest, and sends twice as much.

    values: 1-dim; sizes: lengths of the slices of all ranks of `group`, in their order. Asynchronous: `wait` returns this
    rank's slice of the sum, in its own memory. Half-precision numbers are summed in float32, ranks in their order, and rounded
    once. Collectives: one all-to-all. Memory until then: `values` once more.
    """

    def __init__(self, values: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        self._exchange = _Exchange(values, sizes, group)

    def wait(self) -> torch.Tensor:
        """Return the sum. Called once: what was sent is freed before, and what was received after."""
        first, second, *others = self._exchange.wait()
        total = (first.float() if first.dtype in HALF_DTYPES else first) + second
        for part in others:
            total += part
        return total.to(first.dtype)


class FP8Sum:
    """A reduce-scatter in float8: as `ExchangedSum`, with slices sent in e4m3, 129/128 bytes a number, and summed in float32.

    `wait` returns this rank's slice, filled up with zeros to whole blocks. sent: what the ranks were sent, as bytes.
    """

    def __init__(self, values: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        slices = [encode_blocks(part) for part in values.split(list(sizes))]
        self.sent = torch.cat(slices)
        self._exchange = _Exchange(self.sent, list(map(len, slices)), group)

    def wait(self) -> torch.Tensor:
        """Return the sum. Called once."""
        first, *others = self._exchange.wait()
        total = decode_blocks(first)
        for part in others:  # in the order of ranks
            total += decode_blocks(part)
        return total


class FP8Average:
    """Averages the gradient buckets of `DistributedDataParallel` as `FP8Communication` says.

    The sum of a bucket's slice is rounded once more and sent to all ranks, so every rank ends with the same bytes. Two
    buckets are in flight at one time. Collectives: one all-to-all and one all-gather a bucket, of 129/128 bytes a number
    each, which ranks call in one order: that of the buckets.

    Attributes:
        errors: under error feedback what rounding took from the gradient of each parameter: float32, 1-dim.
        feeds_back: whether there is error feedback.
    """

    def __init__(self, options: FP8Communication, group: dist.ProcessGroup) -> None:
        self.errors: dict[torch.Tensor, torch.Tensor] = {}
        self.feeds_back = options.error_feedback
        self._group = group
        self._summing: deque[_BucketSum] = deque()
        self._gathering: deque[_BucketSum] = deque()
        self._finite: list[torch.Tensor] = []

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average `bucket`, and continue with those before it; returns what will be its average, in its own memory."""
        if bucket.index() == 0:  # a backward pass begins; one that raised may have left buckets
            self._summing.clear()
            self._gathering.clear()
            self._finite = []
        begun = _BucketSum(bucket, self._group, self.errors if self.feeds_back else None)
        self._summing.append(begun)
        last = bucket.is_last()
        while len(self._summing) > (not last):
            self._summing[0].gather()
            self._gathering.append(self._summing.popleft())
        while len(self._gathering) > (not last):
            gathered = self._gathering.popleft()
            gathered.finish()
            if self.feeds_back:
                self._finite.append(torch.isfinite(gathered.buffer).all())
        if last and self.feeds_back:
            # A pass with an average that is not finite carries nothing over; decided on the device, without a sync.
            finite = torch.stack([each.to(self._finite[0].device) for each in self._finite]).all()
            for errors in self.errors.values():
                errors.copy_(torch.where(finite.to(errors.device), errors, 0.0))
        return begun.future


class _BucketSum:
    """One bucket in flight: summed, rounded again, gathered. errors: see `FP8Average`; None: none are kept."""

    def __init__(
        self, bucket: dist.GradBucket, group: dist.ProcessGroup, errors: dict[torch.Tensor, torch.Tensor] | None
    ) -> None:
        self.buffer = bucket.buffer()
        if self.buffer.is_sparse:
            raise RuntimeError(
                "fp8_communication does not average sparse gradients; build their module with sparse=False, or leave "
                "fp8_communication out"
            )
        self._group = group
        ranks = dist.get_world_size(group)
        self._params = bucket.parameters()
        blocks = sum(-(-param.numel() // BLOCK) for param in self._params)
        self._share = -(-blocks // ranks) * BLOCK
        values = torch.zeros(ranks * self._share, dtype=torch.float32, device=self.buffer.device)
        places = dict(_places(self._params, values))
        torch._foreach_copy_(list(places.values()), list(self._parts()))
        values /= ranks
        if errors is not None:
            for param, place in places.items():
                if param in errors:
                    place += errors[param]
        self._sum = FP8Sum(values, [self._share] * ranks, group)
        self._lost = None
        if errors is not None:
            self._lost = values.sub_(decode_blocks(self._sum.sent))
            errors.update(places)
        devices: list[int | str | torch.device] | None = [self.buffer.device] if self.buffer.is_cuda else None
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

    def gather(self) -> None:
        mean = self._sum.wait()
        own = encode_blocks(mean)
        if self._lost is not None:
            start = dist.get_rank(self._group) * self._share
            self._lost[start : start + self._share] += mean - decode_blocks(own)
        self._gathered = self._sum.sent  # its memory is free again
        self._work: Any = all_gather_flat(self._gathered, own, group=self._group, async_op=True)

    def finish(self) -> None:
        self._work.wait()
        came = dict(_places(self._params, decode_blocks(self._gathered)))
        torch._foreach_copy_(list(self._parts()), list(came.values()))
        self.future.set_result(self.buffer)

    def _parts(self) -> tuple[torch.Tensor, ...]:
        return self.buffer.split([param.numel() for param in self._params])


def _places(params: list[torch.Tensor], values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each of `params` and its part of `values`, which begins with a block."""
    start = 0
    for param in params:
        yield param, values[start : start + param.numel()]
        # So no two parameters share a scale, and rounding does not depend on which are in one bucket, nor on their order: after
        # its first pass DistributedDataParallel makes new buckets, in a resumed run too.
        start += -(-param.numel() // BLOCK) * BLOCK
