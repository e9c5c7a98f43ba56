"""Numbers that all ranks of a group agree on. Each is one collective of 8 bytes; where a float is returned, also a host sync
on CUDA."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from booster.ranks.communicate import communication_device, exchange

_logger = logging.getLogger(__name__)

PATIENCE = timedelta(seconds=60)  # before a rank says what it waits for
_AWAITED = (
    "the decision whether to step, which all ranks take together once gradients were clipped or under a loss scale. Every "
    "rank must call backward, clip_grad_by_norm, clip_grad_by_value, unscale_grads and step of its boosted optimizers alike: "
    "not inside `if rank == 0`, and equally often"
)


def largest(value: float, group: dist.ProcessGroup | None) -> float:
    """The largest `value` of all ranks of `group`, none of which may be NaN; None means this rank alone."""
    return _reduce(value, group, dist.ReduceOp.MAX)


def ends(value: float, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """The smallest and the largest `value` of all ranks of `group`, none of which may be NaN; None means this rank alone."""
    if group is None:
        return value, value
    both = torch.tensor([-value, value], dtype=torch.float64, device=communication_device(torch.device("cpu"), group))
    _all_reduce(both, dist.ReduceOp.MAX, group)
    least, most = both.tolist()
    return -least, most


def shared(value: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Reduce `value`, a 0-dim float64 tensor, over the ranks of `group`, where it is: nothing waits for a device.

    A backend that cannot reduce there is given a copy. A MAX must not be of NaN; in a SUM inf and NaN reach every rank.
    """
    if group is None:
        return value
    there = value.to(communication_device(value.device, group))
    _all_reduce(there, op, group)
    return there.to(value.device)


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


def require_alike(text: str, what: str, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on every rank of `group` unless all have the same `text`. what: what it tells, for the message."""
    if group is None:
        return
    code = float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))
    least, most = ends(code, group)
    if least != most:
        raise ValueError(f"ranks differ in {what}; pass states of one kind, saved under one layout, on every rank")


def _texts(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """The text of each rank; one small collective, and a second one unless all are empty."""
    return [data.decode() for data in exchange(text.encode(), group)]


def _reduce(value: float, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> float:
    if group is None:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=communication_device(torch.device("cpu"), group))
    _all_reduce(tensor, op, group)
    return float(tensor)


def _all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    if tensor.device.type != "cpu":  # whose watchdog tells what a rank waits for
        dist.all_reduce(tensor, op=op, group=group)
        return
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    try:
        _wait(work)
    except RuntimeError as error:
        raise RuntimeError(f"rank {dist.get_rank()} waited for {_AWAITED}. The backend says: {error}") from error


def _wait(work: dist.Work) -> None:
    try:
        work.wait(PATIENCE)
    except RuntimeError:
        if work.is_completed():  # it failed, rather than took long
            raise
        _logger.warning("rank %d has waited %g s for %s", dist.get_rank(), PATIENCE.total_seconds(), _AWAITED)
        work.wait()
