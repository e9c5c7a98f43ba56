"""Ranks that tell each other whether they failed, by the store of the process group instead of a collective."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from booster.common.store_barrier import StoreBarrier
from booster.common.torch_internals.tensor_internals import default_store
from booster.ranks.messages import gather_bytes

PATIENCE = timedelta(seconds=60)  # of a rank that failed, for the others to come


class RanksApart(Exception):
    """This rank failed while others wait for it in a collective, which nothing but the end of this process ends."""


class Meeting:
    """StoreBarrier of ranks, one after another, each with a word from every rank. Nobody waits in a collective for it."""

    def __init__(self, meetings: StoreBarrier) -> None:
        self._meetings, self._number = meetings, 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Meeting:
        """Return meetings of all ranks of `group`. A small collective."""
        name = f"booster/meeting/{gather_bytes(os.urandom(16), group)[0].hex()}"
        return cls(StoreBarrier(default_store(), name, dist.get_rank(group), dist.get_world_size(group)))

    def any(self, failed: bool) -> bool:
        """Return whether any rank failed, once all have told. A rank that failed waits `PATIENCE` for them, others as long as
        the store does.

        Raises RanksApart where some have not come by then: where they wait for this rank in a collective, they would until
        the timeout of the process group.
        """
        self._number += 1
        self._meetings.post(self._number, failed)
        told = self._meetings.wait(self._number, PATIENCE if failed else None)
        missing = [rank for rank in range(self._meetings.size) if rank not in told]
        if missing:
            raise RanksApart(
                f"a replay {'raised' if failed else 'ended'} on rank {self._meetings.rank} of the group, and ranks {missing} "
                "did not come to its end: they may wait for this rank in a collective, which the end of this process ends"
            )
        return any(told.values())
