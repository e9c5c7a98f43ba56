"""What fits into a given memory: which of several estimates, how large a batch, and what to change first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from booster.memory.estimate import Estimate
from booster.tensors import trees

_MIB = 2**20
_LARGEST = 2**24  # samples
_REMEDIES = {
    "states": "keep them in 8 bits (states='8bit'), or divide them among ranks (zero1)",
    "masters": "keep one byte of them (master_weights='split24'), or divide them among ranks (zero1)",
    "gradients": "divide them among ranks (zero2), or train in a naive precision, whose gradients are half",
    "weights": "divide them among ranks (fsdp)",
    "communication": "let gradients be views of DDP's buckets, or divide them among ranks (zero2)",
    "temporaries": "take a smaller batch and accumulate, or recompute activations (torch.utils.checkpoint)",
    "inputs": "take a smaller batch and accumulate",
}


def resized(batch: Any, size: int) -> Any:
    """Return `batch` with tensors of `size` samples, without memory; what has another first dimension stays."""
    # The size of a batch is the first dimension of its first tensor.
    old = samples(batch)
    if old is None:
        raise ValueError("the batch holds no tensor with a batch dimension, so its size cannot be changed")

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != old:
            return tensor
        # On the meta device: sizes are all that an estimate reads.
        return torch.empty(size, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

    return trees.map_tensors(part, batch)


def samples(batch: Any) -> int | None:
    """Return the size of `batch`: the first dimension of its first tensor that has any; None where none has."""
    return next((int(tensor.shape[0]) for tensor in trees.tensors(batch) if tensor.dim()), None)


def largest_batch(
    peak_of: Callable[[int], int], limit: int, start: int = 1, *, known: Mapping[int, int] | None = None
) -> int:
    """Return the largest batch with a peak of at most `limit` bytes, 0 if not even one sample fits; at most 2**24.

    peak_of: bytes at the peak for a batch size, which grows with it.
    limit: bytes.
    start: a size to begin with.
    known: peaks that are known already, by size, which are not asked for again; None are none.

    Cost: some six calls, since peaks grow nearly linearly, and at most twice as many as bisection takes.
    """
    points: dict[int, int] = {}
    given = dict(known or {})
    low, high, size, halves = 0, _LARGEST + 1, start if not given else min(given), False
    while high - low > 1:
        points[size] = given[size] if size in given else peak_of(size)
        width = high - low
        low, high = (size, high) if points[size] <= limit else (low, size)
        # A line that cuts off little on one side is followed by a cut in the middle.
        halves = not halves and high <= _LARGEST and 2 * (high - low) > width
        size = (low + high) // 2 if halves else _on_line(points, limit)
        # As long as no size is known that does not fit, sizes grow by an eighth at least.
        step = low // 8 if high > _LARGEST else 0
        size = min(max(size, low + 1 + step), high - 1)
    return low


def _on_line(points: dict[int, int], limit: int) -> int:
    """Return the size at which the line through the two points nearest to `limit` meets it."""
    if len(points) < 2:
        ((size, peak),) = points.items()
        return int(size * min(limit / max(peak, 1), 64.0))
    one, two = sorted(points, key=lambda size: abs(points[size] - limit))[:2]
    if points[one] == points[two]:
        return 2 * max(points)
    # Half a sample further than the line, so that both sides are met.
    return round(one + (limit - points[one]) * (two - one) / (points[two] - points[one]) + 0.5)


def what_to_change(estimates: Sequence[Estimate], limit: int) -> str:
    """Return one sentence: whether the first of `estimates` fits into `limit` bytes, else the first that does, else where its
    peak is largest and what makes that smaller."""
    wanted = estimates[0]
    if wanted.peak <= limit:
        return f"{wanted.name} fits: {_mib(limit - wanted.peak)} are left at the peak"
    fitting = [each for each in estimates if each.peak <= limit]
    short = f"{wanted.name} lacks {_mib(wanted.peak - limit)}"
    if fitting:
        return f"{short}; {fitting[0].name} fits"
    least = min(estimates, key=lambda each: each.peak)
    part = max(_REMEDIES, key=lambda name: getattr(least, name))
    share = getattr(least, part) / least.peak
    nearest = "" if least is wanted else f"; {least.name} lacks {_mib(least.peak - limit)}"
    return f"{short}{nearest}; {share:.0%} of its peak are {part}: {_REMEDIES[part]}"


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"
