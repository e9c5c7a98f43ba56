"""Ranks that save and load together also fail together: what one raises, all raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from booster.checkpoint.manifest import CheckpointError
from booster.ranks.agreement import gather


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Return whether this process is the one that does what one process does for all."""
    return group is None or dist.get_rank(group) == 0


def agree_on_success(problem: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if any rank has a `problem`: its own where it has one, else CheckpointError with the first other."""
    texts = gather(None if problem is None else f"{type(problem).__name__}: {problem}", group)
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text is not None:
            raise CheckpointError(f"on rank {rank}: {text}")


@contextmanager
def agreed(
    group: dist.ProcessGroup | None, instead: Callable[[Exception], Exception] = lambda error: error
) -> Iterator[None]:
    """If the body raises on one rank, raise on all, as `agree_on_success`. instead: what is raised for what it raised."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = instead(error)  # raised once the others know
        if problem is not error:
            problem.__cause__ = error
    agree_on_success(problem, group)


def first_failure(error: Any) -> str:
    """Return where and how a checkpoint of `torch.distributed.checkpoint` failed first, in words."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"on rank {rank}: {type(cause).__name__}: {cause}"
