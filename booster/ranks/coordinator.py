"""Who am I in the job, and who goes first."""

from __future__ import annotations

import functools
import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.launch import environment_local_rank
from booster.ranks.agreement import gather_bytes

P = ParamSpec("P")
R = TypeVar("R")


def is_main() -> bool:
    """Say whether this process is rank 0 of the job, or a world of one; no collective."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def world() -> dist.ProcessGroup | None:
    """Return the group of all ranks of the job; None in a world of one, as everything here takes it."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None


def size_of(group: dist.ProcessGroup | None) -> int:
    """Return how many ranks `group` has; None is a world of one."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Return this process's rank in `group`; None is a world of one."""
    return 0 if group is None else dist.get_rank(group)


def wait_for_all() -> None:
    """Wait until every rank of the job has come here; nothing in a world of one."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


class DistCoordinator:
    """Rank, world size and the usual "only one process does this" patterns; without a process group, a world of one.

    Make it after `booster.launch`: rank and world size are read once. It is an ordinary object; make as many as you
    like. local_rank: index on this machine; None takes it from the launcher's environment. Only where no launcher
    announced it, the ranks exchange host names (two small collectives over the world).
    """

    def __init__(self, local_rank: int | None = None) -> None:
        launched = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if launched else 0
        self.world_size: int = dist.get_world_size() if launched else 1
        if local_rank is not None:
            arguments.count("local_rank", local_rank, least=0, also="None")
        if local_rank is None:
            local_rank = environment_local_rank() if launched else 0
        if local_rank is None:
            # Ranks of one machine are numbered in the order of the world, as launchers do.
            hosts = gather_bytes(socket.gethostname().encode(), dist.group.WORLD)
            local_rank = hosts[: self.rank].count(hosts[self.rank])
        self.local_rank: int = local_rank

    def is_master(self, group: dist.ProcessGroup | None = None) -> bool:
        """Say whether this process is rank 0 of `group` (None: of the world)."""
        return (self.rank if group is None else dist.get_rank(arguments.group("group", group))) == 0

    def is_node_master(self) -> bool:
        """Say whether this process is the first one on its machine."""
        return self.local_rank == 0

    def is_last_process(self, group: dist.ProcessGroup | None = None) -> bool:
        """Say whether this process is the last rank of `group` (None: of the world)."""
        if group is None:
            return self.rank == self.world_size - 1
        return dist.get_rank(arguments.group("group", group)) == dist.get_world_size(group) - 1

    def print_on_master(self, msg: str, group: dist.ProcessGroup | None = None) -> None:
        """Print `msg` on rank 0 of `group` (None: of the world); no collective."""
        if self.is_master(group):
            print(msg, flush=True)  # noqa: T201 - printing is what was asked for

    def print_on_node_master(self, msg: str) -> None:
        """Print `msg` once per machine; no collective."""
        if self.is_node_master():
            print(msg, flush=True)  # noqa: T201 - printing is what was asked for

    @contextmanager
    def priority_execution(self, executor_rank: int = 0, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Run the body on `executor_rank` first, then on the others (a download, then reads of its cache).

        executor_rank: a rank of the group, all ranks of which must enter.
        group: the ranks that do; None: the world.

        Cost: one broadcast of one number. If the body raises on the executor, the others raise RuntimeError instead
        of entering; if it raises on another rank, only that rank knows.
        """
        size = self.world_size if group is None else dist.get_world_size(arguments.group("group", group))
        if arguments.count("executor_rank", executor_rank, least=0) >= size:
            raise ValueError(
                f"executor_rank={executor_rank} is not a rank of this group; it must be from 0 to {size - 1}"
            )
        rank = self.rank if group is None else dist.get_rank(group)
        if rank != executor_rank:
            # The broadcast is the wait: it comes when the executor has left the body.
            if not self._told(True, executor_rank, group):
                raise RuntimeError(
                    f"priority_execution: rank {executor_rank} failed in the body, so rank {rank} did not enter it; "
                    f"see the error of rank {executor_rank}"
                )
            yield
            return
        # Sent also where the body raises, so that nobody waits for a rank that is gone.
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            if size > 1:
                self._told(succeeded, executor_rank, group)

    def block_all(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait until every rank of `group` (None: of the world) has come here; nothing in a world of one."""
        if group is not None:
            arguments.group("group", group)
        if dist.is_available() and dist.is_initialized():
            dist.barrier(group)

    def on_master_only(
        self, group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Decorate a function so that only rank 0 of `group` runs it; the others get None at once (no barrier)."""
        if group is not None:
            arguments.group("group", group)

        def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
            arguments.function("function", function)

            @functools.wraps(function)
            def run_on_master(*args: P.args, **kwargs: P.kwargs) -> R | None:
                return function(*args, **kwargs) if self.is_master(group) else None

            return run_on_master

        return decorate

    def destroy(self) -> None:
        """Leave the process group, if there is one; afterwards `booster.launch` may be called again."""
        if dist.is_available() and dist.is_initialized():
            # A DDP model that is garbage by now must go first: its reducer meeting the end of gloo's threads aborts.
            gc.collect()
            dist.destroy_process_group()

    def _told(self, succeeded: bool, executor_rank: int, group: dist.ProcessGroup | None) -> bool:
        device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
        flag = torch.tensor([float(succeeded)], dtype=torch.float32, device=device)
        dist.broadcast(flag, group=group, group_src=executor_rank)
        return bool(flag.item())
