"""Rounds in which ranks post a value each to the store of their process group and read those of the others: no collective."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from booster.common.untrusted_files import parse_json


class StoreBarrier:
    """Rounds of `size` ranks in `store`, numbered from 1.

    All values of a round are one value of the store, which appends by itself: none overwrites another, and a rank posts in
    one request and reads all in another. A round of W ranks is O(W) requests in all.

    name: of this series, unique in `store`.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store, self._name = store, name
        self._count, self._closed = f"{name}/called", f"{name}/closed"
        self._series = 0  # how many groups of ranks have joined under this name, this one included

    def join(self) -> int:
        """Return the number of the latest round; every rank calls it before any of them joins for another group."""
        self._series = (self._store.add(f"{self._name}/come", 1) - 1) // self.size + 1
        self._store.add(self._closed, 0)
        return self._store.add(self._count, 0)

    def latest(self) -> tuple[int, bool]:
        """Return the number of the latest round, and whether the store is about to close."""
        last, closed = self._store.multi_get([self._count, self._closed])
        return int(last), int(closed) == self._series

    def start(self, last: int) -> int:
        """Start the round after `last`, delete the one before it, and return the number of the round to post in."""
        # Where several ranks start one at once, all get the same number.
        number = int(self._store.compare_set(self._count, str(last), str(last + 1)))
        self.delete(last - 1)
        return number

    def post(self, number: int, value: Any) -> None:
        """Post `value`, which JSON can write, in round `number`; a second one replaces the first."""
        self._store.append(self._key(number), json.dumps([self.rank, value]) + "\n")  # type: ignore[attr-defined]

    def posted(self, number: int) -> dict[int, Any]:
        """Return what was posted in round `number` up to now, by rank, unchecked. This rank has posted in it before."""
        found = {}
        for line in self._store.get(self._key(number)).splitlines():
            try:
                rank, value = parse_json(line)
            # Whoever reaches the store can write there.
            except (ValueError, TypeError):
                continue
            if type(rank) is int and 0 <= rank < self.size:
                found[rank] = value
        return found

    def wait(self, number: int, timeout: timedelta | None = None) -> dict[int, Any]:
        """Return what was posted once all ranks have, or after `timeout`; None: after the store's own."""
        values = self.posted(number)
        if len(values) == self.size:  # the others wait for this
            self._store.set(self._whole(number), "")
            # All ranks wait in all rounds of the series, since each deletes the round before.
            self.delete(number - 1)
            return values
        with suppress(RuntimeError):  # of ranks that come too late, or not at all
            self._store.wait([self._whole(number)], *([] if timeout is None else [timeout]))
        return self.posted(number)

    def delete(self, number: int) -> None:
        """Delete what was posted in round `number`, if there was one."""
        self._store.delete_key(self._key(number))
        self._store.delete_key(self._whole(number))

    def give_reason(self, text: str) -> None:
        """Keep `text` as why ranks of this series cannot go on; of several, the last."""
        self._store.set(f"{self._name}/reason/{self._series}", text)

    def reason(self) -> str:
        """Return what `give_reason` kept; empty if nothing."""
        key = f"{self._name}/reason/{self._series}"
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""

    def withdraw(self) -> None:
        """Say that this rank asks nothing more."""
        if self._store.add(self._gone, 1) == self.size:
            self._store.set(f"{self._gone}/all", "")

    def close(self, timeout: timedelta) -> None:
        """Say that the store will close, and return when all ranks have left, this one among them, or after `timeout`."""
        self._store.set(self._closed, str(self._series))
        until = time.monotonic() + timeout.total_seconds()
        # Polled: torch warns of a wait that a store answers too late.
        while not self._store.check([f"{self._gone}/all"]) and time.monotonic() < until:
            time.sleep(0.02)

    @property
    def _gone(self) -> str:
        return f"{self._name}/gone/{self._series}"

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"

    def _whole(self, number: int) -> str:
        return f"{self._name}/{number}/whole"
