"""Host numbers that all ranks of a group agree on. Each is one collective of 8 bytes, and a host sync on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
    texts = _texts("\n".join(names), group)
    return tuple(dict.fromkeys(name for text in texts for name in text.split("\n") if name))


@contextmanager
def all_or_none(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """If the body raises on one rank of `group`, raise on all: there its own error, elsewhere ValueError that tells it.

    what: what the body does, for that message. A small collective, two if anybody raises; the body holds none of its own
    that a rank which raises would leave others waiting in.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error  # raised once the others know
    texts = _texts("" if problem is None else f"{type(problem).__name__}: {problem}", group)
    if problem is not None:
        raise problem
    told = [f"rank {rank} of the group could not {what}: {text}" for rank, text in enumerate(texts) if text]
    if told:
        raise ValueError(f"nothing was done on this rank either, because {'; '.join(told)}")


def _texts(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """The text of each rank; one small collective, and a second one unless all are empty."""
    if group is None:
        return [text]
    device = communication_device(torch.device("cpu"), group)
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device), group=group)
    longest = max(int(size) for size in sizes)
    if not longest:
        return [""] * len(sizes)
    everyone = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(everyone, torch.nn.functional.pad(mine, (0, longest - mine.numel())), group=group)
    return [bytes(data[: int(size)].tolist()).decode() for data, size in zip(everyone, sizes, strict=True)]


def _reduce(value: float, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> float:
    if group is None:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=communication_device(torch.device("cpu"), group))
    dist.all_reduce(tensor, op=op, group=group)
    return float(tensor)
