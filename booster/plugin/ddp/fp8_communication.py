"""Sums of gradients over ranks by all-to-alls: exact ones on CPUs, and averages sent in float8 and summed in float32."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.number_formats.scaling import BLOCK, decode_blocks, encode_blocks
from booster.ranks.agreement import all_gather_flat


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
        if first.dtype not in (torch.float16, torch.bfloat16) or not others:
            total = first + second  # of two half-precision numbers the exact sum, rounded once
            for part in others:
                total += part
            return total
        total = first.float()
        for part in (second, *others):
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
        carried: under error feedback what rounding took from the gradient of each parameter: float32, 1-dim.
        feeds_back: whether there is error feedback.
    """

    def __init__(self, options: FP8Communication, group: dist.ProcessGroup) -> None:
        self.carried: dict[torch.Tensor, torch.Tensor] = {}
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
        begun = _BucketSum(bucket, self._group, self.carried if self.feeds_back else None)
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
            for carried in self.carried.values():
                carried.copy_(torch.where(finite.to(carried.device), carried, 0.0))
        return begun.future


class _BucketSum:
    """One bucket in flight: summed, rounded again, gathered. carried: see `FP8Average`; None: nothing is carried."""

    def __init__(
        self, bucket: dist.GradBucket, group: dist.ProcessGroup, carried: dict[torch.Tensor, torch.Tensor] | None
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
        if carried is not None:
            for param, place in places.items():
                if param in carried:
                    place += carried[param]
        self._sum = FP8Sum(values, [self._share] * ranks, group)
        self._lost = None
        if carried is not None:
            self._lost = values.sub_(decode_blocks(self._sum.sent))
            carried.update(places)
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
