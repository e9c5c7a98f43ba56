"""Host numbers that all ranks of a group agree on. Each is one collective of 8 bytes, and a host sync on CUDA."""

from __future__ import annotations

import torch
import torch.distributed as dist

from booster.collectives import communication_device


def largest(value: float, group: dist.ProcessGroup | None) -> float:
    """The largest `value` of all ranks of `group`, none of which may be NaN; None means this rank alone."""
    return _reduce(value, group, dist.ReduceOp.MAX)


def total(value: float, group: dist.ProcessGroup | None) -> float:
    """The sum of `value` over the ranks of `group`, in float64; inf and NaN reach every rank."""
    return _reduce(value, group, dist.ReduceOp.SUM)


def on_overflow(found: bool, finite_loss: bool, group: dist.ProcessGroup | None) -> tuple[bool, bool]:
    """(whether any rank found an inf or NaN in its gradients, whether the losses of those that did were finite)."""
    code = largest(0.0 if not found else 1.0 if finite_loss else 2.0, group)
    return code > 0.0, code < 2.0


def all_names(names: tuple[str, ...], group: dist.ProcessGroup | None) -> tuple[str, ...]:
    """The names that any rank of `group` gives, each once, in the order of ranks. Two small collectives."""
    if group is None:
        return names
    device = communication_device(torch.device("cpu"), group)
    mine = torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device), group=group)
    longest = max(int(size) for size in sizes)
    if not longest:
        return names
    everyone = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(everyone, torch.nn.functional.pad(mine, (0, longest - mine.numel())), group=group)
    texts = [bytes(text[: int(size)].tolist()).decode() for text, size in zip(everyone, sizes, strict=True)]
    return tuple(dict.fromkeys(name for text in texts for name in text.split("\n") if name))


def _reduce(value: float, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> float:
    if group is None:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=communication_device(torch.device("cpu"), group))
    dist.all_reduce(tensor, op=op, group=group)
    return float(tensor)
