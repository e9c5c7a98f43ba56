"""StoreBarrier of ranks in the store of their process group: each says a word there and hears the others, by no collective."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from booster.common.untrusted_files import parse_json


class StoreBarrier:
    """Ranks, `size` of them, meet in `store`: in each meeting, numbered from 1, a rank says one word and hears all words.

    All words of a meeting are one value, to which the store itself appends: none overwrites another, and a rank speaks in one
    request and hears everybody in another. A meeting of W ranks is O(W) requests in all.

    name: of this series, no other's in `store`.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store, self._name = store, name
        self._count, self._closed = f"{name}/called", f"{name}/closed"
        self._series = 0  # how many groups of ranks have met by this name, this one included

    def begin(self) -> int:
        """Return the number of the last meeting that was called, for one who was not there yet.

        All ranks call it, before any of them calls it for another group that meets in the same store.
        """
        self._series = (self._store.add(f"{self._name}/come", 1) - 1) // self.size + 1
        self._store.add(self._closed, 0)
        return self._store.add(self._count, 0)

    def called(self) -> tuple[int, bool]:
        """Return the number of the last meeting that was called, and whether the store will close. `begin` comes first."""
        last, closed = self._store.multi_get([self._count, self._closed])
        return int(last), int(closed) == self._series

    def call(self, last: int) -> int:
        """Call the meeting after `last`, and return the number of the one to speak in; what was said before `last` is let go.

        Where several call at once, all are in the same meeting.
        """
        number = int(self._store.compare_set(self._count, str(last), str(last + 1)))
        self.forget(last - 1)
        return number

    def say(self, number: int, word: Any) -> None:
        """Say `word`, of what JSON can write, in the meeting `number`; a second one takes the place of the first."""
        self._store.append(self._key(number), json.dumps([self.rank, word]) + "\n")  # type: ignore[attr-defined]

    def heard(self, number: int) -> dict[int, Any]:
        """Return what was said in the meeting `number` up to now, by rank. This rank has spoken in it before.

        Who reaches the store can write there: a line that no rank says is passed over. What a word holds is not looked at.
        """
        found = {}
        for line in self._store.get(self._key(number)).splitlines():
            try:
                rank, word = parse_json(line)
            except (ValueError, TypeError):
                continue
            if type(rank) is int and 0 <= rank < self.size:
                found[rank] = word
        return found

    def gather(self, number: int, patience: timedelta | None = None) -> dict[int, Any]:
        """Return what was said once all have spoken, or after `patience`: as long as the store waits, where it is None.

        All ranks gather in all meetings of the series: they let go of the one before.
        """
        words = self.heard(number)
        if len(words) == self.size:  # the others wait for this
            self._store.set(self._whole(number), "")
            self.forget(number - 1)
            return words
        with suppress(RuntimeError):  # of ranks that come too late, or not at all
            self._store.wait([self._whole(number)], *([] if patience is None else [patience]))
        return self.heard(number)

    def forget(self, number: int) -> None:
        """Let go of what was said in the meeting `number`, if there was one."""
        self._store.delete_key(self._key(number))
        self._store.delete_key(self._whole(number))

    def leave(self) -> None:
        """Say that this rank asks nothing more."""
        gone = self._gone
        if self._store.add(gone, 1) == self.size:
            self._store.set(f"{gone}/all", "")

    def close(self, patience: timedelta) -> None:
        """Say that the store will close, and return when all have left, this rank among them, or after `patience`."""
        self._store.set(self._closed, str(self._series))
        until = time.monotonic() + patience.total_seconds()
        # Asked again and again, since torch warns of a wait of a store that was in vain.
        while not self._store.check([f"{self._gone}/all"]) and time.monotonic() < until:
            time.sleep(0.02)

    @property
    def _gone(self) -> str:
        return f"{self._name}/gone/{self._series}"

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"

    def _whole(self, number: int) -> str:
        return f"{self._name}/{number}/whole"
