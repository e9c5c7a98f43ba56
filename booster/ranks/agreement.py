"""Decisions that all ranks of a group take alike: values of every rank, flags, extremes; all raise or none.

`group=None` means this rank alone: no collective. What a step decides by (`largest`, `on_overflow`, `all_reduce`) is one
collective of 8 bytes, and where a float is returned also a host sync on CUDA.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from booster.ranks.messages import gather_bytes, reduced

# ---------------------------------------------------------------------- values of every rank


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the value of each rank of `group`, in the order of ranks.

    value: what JSON can write, which keeps every float exactly; None where a rank has nothing to say.
    """
    if group is None:
        return [value]
    # JSON, not pickle: what another rank sends is read as data.
    sent = b"" if value is None else json.dumps(value).encode()
    # A small collective, and a second one unless all give None.
    return [json.loads(data) if data else None for data in gather_bytes(sent, group)]


def any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether `flag` is true on any rank of `group`; a collective of 4 bytes and a host read."""
    if group is None or dist.get_world_size(group) == 1:
        return flag
    return bool(reduced(torch.tensor(float(flag), dtype=torch.float32), dist.ReduceOp.MAX, group).item())


def all_names(names: tuple[str, ...], group: dist.ProcessGroup | None) -> tuple[str, ...]:
    """Return the names that any rank of `group` gives, each once, in the order of ranks. Collectives as of `gather`."""
    return tuple(dict.fromkeys(name for given in gather(list(names) or None, group) for name in given or () if name))


@contextmanager
def all_or_none(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """If the body raises on one rank of `group`, raise on all: there its own error, elsewhere ValueError with its text.

    what: what the body does, for that message. Collectives as of `gather`.
    """
    problem: Exception | None = None
    try:
        # The body makes no collective: a rank that raises before it would leave the others waiting.
        yield
    except Exception as error:
        problem = error  # raised once the others know
    texts = gather(None if problem is None else f"{type(problem).__name__}: {problem}", group)
    if problem is not None:
        raise problem
    failed = [f"rank {rank} of the group could not {what}: {text}" for rank, text in enumerate(texts) if text]
    if failed:
        raise ValueError(f"nothing was done on this rank either, because {'; '.join(failed)}")


def are_alike(text: str, group: dist.ProcessGroup | None) -> bool:
    """Return whether all ranks of `group` have the same `text`."""
    # Six bytes, which a float64 holds exactly: one message, however long the text.
    code = float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))
    least, most = min_and_max(code, group)
    return least == most


# ---------------------------------------------------------------------- numbers that a step decides by


def largest(value: float, group: dist.ProcessGroup | None) -> float:
    """Return the largest `value` of all ranks of `group`, none of which may be NaN."""
    if group is None:
        return value
    return float(reduced(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.MAX, group))


def min_and_max(value: float, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Return the smallest and the largest `value` of all ranks of `group`, none of which may be NaN."""
    if group is None:
        return value, value
    # A minimum is the maximum of the negatives, so that both are one collective.
    least, most = reduced(torch.tensor([-value, value], dtype=torch.float64), dist.ReduceOp.MAX, group).tolist()
    return -least, most


def all_reduce(value: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Return `value`, a 0-dim float64 tensor, reduced over the ranks of `group`, on its own device, which nothing waits for.

    A MAX must not be of NaN; in a SUM inf and NaN reach every rank.
    """
    if group is None:
        return value
    # A backend that cannot reduce there is given a copy.
    return reduced(value, op, group).to(value.device)


def on_overflow(found: bool, finite_loss: bool, group: dist.ProcessGroup | None) -> tuple[bool, bool]:
    """Return whether any rank found an inf or NaN in its gradients, and whether the losses of those that did were finite."""
    code = largest(0.0 if not found else 1.0 if finite_loss else 2.0, group)
    return code > 0.0, code < 2.0
