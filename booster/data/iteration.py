"""One pass over a loader, from the beginning of an epoch or from a position in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from booster.data.position import OWN_STATE, RANDOM, skips
from booster.data.samplers import Announced, stride
from booster.randomness import random_state, set_random_state
from booster.torch_internals import end_workers


@dataclass
class Progress:
    """How far a pass over a loader is. It outlives the iterator, and does not keep it or its workers.

    epoch: of the pass. random: random states when the epoch began, from which a loader that is not ours may draw its order.
    count: batches yielded by this iterator; at_end: whether the last was the loader's last. start, before: samples over all
    ranks, and batches of this rank, that were yielded of the epoch before this iterator began. stride: samples that all
    ranks read in a step, 0 where that is not known.
    """

    epoch: int
    random: Any = None
    count: int = 0
    at_end: bool = False
    start: int = 0
    before: int = 0
    stride: int = 0

    @property
    def num_batches(self) -> int:
        """Of the epoch, whoever yielded them before a resume."""
        return self.before + self.count

    @property
    def num_samples(self) -> int:
        """Of the epoch's order over all ranks; 0 where that cannot be known."""
        return self.start + self.count * self.stride


class Iteration:
    """One pass over a loader. progress: how far it is; whoever asks for that later keeps it, and not the iteration.

    position: where to begin in the epoch; None means at its start. deliver: makes of each batch what is yielded.
    """

    def __init__(
        self,
        loader: Any,
        announced: Announced,
        epoch: int,
        position: Mapping[str, Any] | None,
        deliver: Callable[[Progress, Any], Any],
    ) -> None:
        self._loader = loader
        self._announced = announced
        self._deliver = deliver
        self.progress = progress = Progress(epoch, stride=stride(loader))
        announced.tell(epoch)
        try:
            self._length: int | None = len(loader)
        except (TypeError, NotImplementedError):
            self._length = None
        progress.random = None if skips(loader) else random_state() if position is None else position.get(RANDOM)
        if position is not None and OWN_STATE not in position:
            end_workers(loader)  # those that persist are of another time
        seen = position["batches"] if position is not None else 0
        if seen and skips(loader):
            assert position is not None  # it says what was seen
            progress.start, progress.before = position["samples"], seen
            loader.start_after(progress.start)
            self._length = loader.num_batches_after(progress.start)
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
        self.progress.count = position["batches"]
        if OWN_STATE not in position:
            for _ in range(self.progress.count):
                next(batches)
        set_random_state(before)
        return batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        progress = self.progress
        if progress.count == 0 and self._announced.epoch != progress.epoch:
            # Samplers draw their order when the first batch is asked for, and another iterator was made since.
            self._announced.tell(progress.epoch)
            if progress.start:
                self._loader.start_after(progress.start)
        try:
            batch = next(self._batches)
        except StopIteration:
            progress.at_end = True
            raise
        progress.count += 1
        progress.at_end = progress.count == self._length
        return self._deliver(progress, batch)
