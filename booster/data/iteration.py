"""One pass over a loader, from the beginning of an epoch or from a position in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from booster.data.position import OWN_STATE, RANDOM, skips
from booster.data.samplers import Announced, stride
from booster.randomness import random_state, set_random_state


class Iteration:
    """One pass over a loader. count: batches yielded since `start_after`; at_end: whether the last was the loader's last.

    position: where to begin in the epoch; None means at its start. num_samples: of the epoch's order over all ranks, how
    many were yielded; 0 where that cannot be known. deliver: makes of each batch what is yielded.
    """

    def __init__(
        self,
        loader: Any,
        announced: Announced,
        epoch: int,
        position: Mapping[str, Any] | None,
        deliver: Callable[[Iteration, Any], Any],
    ) -> None:
        self._announced = announced
        self._deliver = deliver
        self.epoch = epoch
        self.count = 0
        self.at_end = False
        announced.tell(epoch)
        try:
            self._length: int | None = len(loader)
        except (TypeError, NotImplementedError):
            self._length = None
        self._stride = stride(loader)
        self._start, self._before = 0, 0
        # Random states when the epoch began, from which a loader that is not ours may draw its order.
        self.random = None if skips(loader) else random_state() if position is None else position.get(RANDOM)
        seen = position["batches"] if position is not None else 0
        if seen and skips(loader):
            assert position is not None  # it says what was seen
            self._start, self._before = position["samples"], seen
            loader.start_after(self._start)
            self._length = loader.num_batches_after(self._start)
            self._batches = iter(loader)
        elif position is None or skips(loader):
            self._batches = iter(loader)
        else:
            self._batches = self._begun_again(loader, position)

    def _begun_again(self, loader: Any, position: Mapping[str, Any]) -> Iterator[Any]:
        """Return the iterator as it was at `position`, without drawing a random number of the run's."""
        before = random_state()
        if RANDOM in position:
            set_random_state(position[RANDOM])
        batches = iter(loader)
        self.count = position["batches"]
        if OWN_STATE not in position:
            for _ in range(self.count):
                next(batches)
        set_random_state(before)
        return batches

    @property
    def num_batches(self) -> int:
        """Of the epoch, whoever yielded them before a resume."""
        return self._before + self.count

    @property
    def num_samples(self) -> int:
        return self._start + self.count * self._stride

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.count == 0 and self._announced.epoch != self.epoch:
            # Samplers draw their order when the first batch is asked for, and another iterator was made since.
            self._announced.tell(self.epoch)
        try:
            batch = next(self._batches)
        except StopIteration:
            self.at_end = True
            raise
        self.count += 1
        self.at_end = self.count == self._length
        return self._deliver(self, batch)
