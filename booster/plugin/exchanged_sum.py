"""A reduce-scatter on CPU, by an all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


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
