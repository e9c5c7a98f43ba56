"""Ranks that tell each other whether they failed, by the store of the process group instead of a collective."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from booster.ground.torch_internals import default_store
from booster.ranks.communicate import exchange

PATIENCE = timedelta(seconds=60)  # of a rank that failed, for the others to come


class RanksApart(Exception):
    """This rank failed while others wait for it in a collective, which nothing but the end of this process ends."""


class Meeting:
    """Meetings of `size` ranks, one after another, each with a word from every rank. Nobody waits in a collective for it.

    name: of this series, no other's in `store`.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._number = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Meeting:
        """Return meetings of all ranks of `group`. A small collective."""
        name = exchange(os.urandom(16), group)[0].hex()
        return cls(default_store(), f"booster/meeting/{name}", dist.get_rank(group), dist.get_world_size(group))

    def any(self, failed: bool) -> bool:
        """Return whether any rank failed, once all have told. A rank that failed waits `PATIENCE` for them, others as long as
        the store does.

        Raises RanksApart where some have not come by then: where they wait for this rank in a collective, they would until
        the timeout of the process group.
        """
        self._number += 1
        keys = [f"{self._name}/{self._number}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], "failed" if failed else "done")
        try:
            self._store.wait(keys, *([PATIENCE] if failed else []))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RanksApart(
                f"a replay {'raised' if failed else 'ended'} on rank {self._rank} of the group, and ranks {missing} did not "
                "come to its end: they may wait for this rank in a collective, which the end of this process ends"
            ) from error
        return any(self._store.get(key) == b"failed" for key in keys)
