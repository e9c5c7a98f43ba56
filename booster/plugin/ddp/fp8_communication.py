"""Averages of gradients over ranks that travel as 8-bit numbers and are summed in float32.

A reduce-scatter on CPU, by an all-to-all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.number_formats import BLOCK, BLOCK_BYTES, decode_blocks, encode_blocks

# torch 2.13 renamed the collective and warns about the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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


class FP8Sum:
    """A reduce-scatter: each rank gives every other its slice of `values` in e4m3, and sums what it gets, in float32.

    values: 1-dim; sizes: lengths of the slices of all ranks of `group`, in their order. Asynchronous: `wait` returns this
    rank's slice, filled up with zeros to whole blocks. sent: what the ranks were given, as bytes. Collectives: one all-to-all,
    129/128 bytes a number.
    """

    def __init__(self, values: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        slices = [encode_blocks(part) for part in values.split(list(sizes))]
        blocks = [len(part) for part in slices]
        self.sent = torch.cat(slices)
        self._ranks = len(blocks)
        own = blocks[dist.get_rank(group)]
        self._received = self.sent.new_empty(self._ranks * own, BLOCK_BYTES)
        self._work: Any = dist.all_to_all_single(
            self._received, self.sent, [own] * self._ranks, blocks, group=group, async_op=True
        )

    def wait(self) -> torch.Tensor:
        """Return the sum. Called once."""
        self._work.wait()
        parts = self._received.chunk(self._ranks) if len(self._received) else [self._received]
        del self._work, self._received
        total = decode_blocks(parts[0])
        for part in parts[1:]:  # in the order of ranks
            total += decode_blocks(part)
        return total


class FP8Average:
    """Averages the gradient buckets of `DistributedDataParallel` as `FP8Communication` says.

    The sum of a bucket's slice is rounded once more and given to all ranks, so every rank ends with the same bytes. Two
    buckets are under way at one time. Collectives: one all-to-all and one all-gather a bucket, of 129/128 bytes a number
    each, which ranks call in one order: that of the buckets.
    """

    def __init__(self, options: FP8Communication, group: dist.ProcessGroup) -> None:
        self.carried: dict[torch.Tensor, torch.Tensor] = {}
        """Under error feedback what rounding took from the gradient of each parameter: float32, 1-dim."""
        self.feeds_back = options.error_feedback
        self._group = group
        self._summing: deque[_BucketSum] = deque()
        self._gathering: deque[_BucketSum] = deque()
        self._finite: list[torch.Tensor] = []

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to average `bucket`, and go on with those before it; returns what will be its average, in its own memory."""
        if bucket.index() == 0:  # a backward pass begins; of one that raised there may be a rest
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
            self._finish(self._gathering.popleft())
        if last and self.feeds_back:
            self._forget_if_skipped()
        return begun.future

    def _finish(self, bucket: _BucketSum) -> None:
        bucket.finish()
        if self.feeds_back:
            self._finite.append(torch.isfinite(bucket.buffer).all())

    def _forget_if_skipped(self) -> None:
        """Carry nothing over from a pass in which any average is not finite; no host sync."""
        finite = torch.stack([each.to(self._finite[0].device) for each in self._finite]).all()
        for carried in self.carried.values():
            carried.copy_(torch.where(finite.to(carried.device), carried, 0.0))


class _BucketSum:
    """One bucket on its way: summed, rounded again, gathered. carried: see `FP8Average`; None: nothing is carried."""

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
        self._whole = self._sum.sent  # whose memory is free again
        self._work: Any = _all_gather(self._whole, own, group=self._group, async_op=True)

    def finish(self) -> None:
        self._work.wait()
        came = dict(_places(self._params, decode_blocks(self._whole)))
        torch._foreach_copy_(list(self._parts()), list(came.values()))
        self.future.set_result(self.buffer)

    def _parts(self) -> tuple[torch.Tensor, ...]:
        return self.buffer.split([param.numel() for param in self._params])


def _places(params: list[torch.Tensor], values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each of `params`, and the part of `values` that stands for it, which begins with a block.

    So no two of them share a scale, and what is rounded does not depend on which lie in one bucket, nor in what order: after
    its first pass DistributedDataParallel divides them anew, in a resumed run too.
    """
    start = 0
    for param in params:
        yield param, values[start : start + param.numel()]
        start += -(-param.numel() // BLOCK) * BLOCK


class ExchangedSum:
    """Each rank gives every other its slice of `values`, and sums what it gets.

    gloo's own reduce-scatter is an all-reduce that drops what is not asked for, and sends twice as much.

    values: 1-dim; sizes: lengths of the slices of all ranks of `group`, in their order. Asynchronous: `wait` returns this
    rank's slice of the sum, in memory of its own. Half numbers are summed in float32, ranks in their order, and rounded once.
    Collectives: one all-to-all. Memory until then: `values` once more.
    """

    def __init__(self, values: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        own = sizes[dist.get_rank(group)]
        received = values.new_empty(len(sizes) * own)
        self._parts = received.view(len(sizes), own).unbind()
        self._work: Any = dist.all_to_all_single(  # holds `values` until it is sent
            received, values, [own] * len(sizes), list(sizes), group=group, async_op=True
        )

    def wait(self) -> torch.Tensor:
        """Return the sum. Called once: what was sent is let go of before, and what was received after."""
        self._work.wait()
        first, second, *others = self._parts
        del self._work, self._parts
        if first.dtype not in (torch.float16, torch.bfloat16) or not others:
            total = first + second  # of two halves the exact sum, rounded once
            for part in others:
                total += part
            return total
        total = first.float()
        for part in (second, *others):
            total += part
        return total.to(first.dtype)
