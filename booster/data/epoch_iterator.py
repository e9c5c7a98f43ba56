"""One pass over a loader, from the beginning of an epoch or from a position in it; and what a position says.

`position_of` checks a state dict of a boosted loader against the loader that goes on from it. `EpochIterator` begins there: a
loader that can skip leaves out the samples that were seen; any other makes its pass again, from the random states of its
beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from booster.common import arguments
from booster.common.torch_internals.tensor_internals import end_workers
from booster.data.epoch_randomness import (
    EpochRandomness,
    EpochSetter,
    SamplerCounters,
    generators_of,
    is_stateful,
    order_source,
    preserve_rng,
    stride,
)

# In the state of a boosted loader, what is each rank's own: the state that the loader inside keeps, and the random states
# from which its order follows; see `EpochRandomness.state_dict`.
OWN_STATE, DRAWS = "loader", "draws"
ORDER = "order"  # what `order_source` says of a loader in the middle of an epoch
_MOST = 2**53  # with a seed it still is one of torch's


def position_of(state: Mapping[str, Any], loader: Any) -> dict[str, Any]:
    """Return the position that `state`, a state dict of a boosted loader, is for `loader`.

    "epoch" counts from 0; "batches" and "samples" are what was yielded of it, on this rank and over all ranks. Raises
    ValueError for another state, and where `loader` cannot go on from it.
    """
    names = ("epoch", "batches", "samples")
    if not isinstance(state, Mapping) or not all(arguments.is_whole(state.get(name)) for name in names):
        raise ValueError(f"this is no state of a boosted dataloader, with whole numbers {', '.join(names)}: {state!r}")
    position: dict[str, Any] = {name: int(state[name]) for name in names}
    if min(position.values()) < 0:
        raise ValueError(f"a dataloader's position counts from 0, got {position}")
    if max(position.values()) > _MOST:
        raise ValueError(f"a dataloader's position counts to {_MOST} at most; the state has one beyond")
    seen, samples, width = position["batches"], position["samples"], stride(loader)
    read_again = OWN_STATE not in state and not skips(loader)
    if read_again and seen and width and samples and samples != seen * width:
        raise ValueError(
            f"this {type(loader).__name__} reads {width} samples in a step over all ranks, and {samples // seen} "
            "when the state was taken; load on as many ranks and with the same batch size, or train with a loader of "
            "b.prepare_dataloader, which deals the rest of the epoch to any number of ranks"
        )
    if skips(loader) and samples > loader.num_samples:
        raise ValueError(
            f"{samples} samples were seen of this epoch, and this {type(loader).__name__} has {loader.num_samples}; go on with "
            "the same data"
        )
    if OWN_STATE not in state and seen and state.get(ORDER) is not None:
        _check_order(state[ORDER], loader)
    if OWN_STATE in state and not is_stateful(loader):
        raise ValueError(f"the state is that of a loader with load_state_dict(), which {type(loader).__name__} has not")
    if DRAWS in state:
        _check_draws(state[DRAWS], loader)
    return position | {key: state[key] for key in (DRAWS, OWN_STATE, ORDER) if key in state}


def _check_order(saved: Any, loader: Any) -> None:
    """Raise ValueError where `loader` draws the order of an epoch of other samples than `saved`, see `order_source`."""
    if not isinstance(saved, Mapping) or not all(map(arguments.is_whole, saved.values())):
        raise ValueError("this is no state of a boosted dataloader: its order is not given by whole numbers")
    here = order_source(loader)
    if here is None or dict(saved) == here:
        return
    before, now = (
        f"drawn of {each.get('samples')} samples" + (f" by seed={each['seed']}" if "seed" in each else "")
        if each
        else "that of the dataset"
        for each in (saved, here)
    )
    raise ValueError(
        f"the order of this epoch was {before}, and this {type(loader).__name__} has one {now}, so that samples would be seen "
        "twice and others never; go on with the same data, seed and shuffle, or leave the dataloader out, which begins an "
        "epoch anew"
    )


def _check_draws(draws: Any, loader: Any) -> None:
    """Raise ValueError where a pass over `loader` cannot be made again from what `EpochRandomness.state_dict` said."""
    try:
        places, workers = sorted(draws["now"]), draws["num_workers"]
        passes = [] if "begin" not in draws else [each for each in (draws["begin"], draws["first"]) if each is not None]
        complete = isinstance(draws["warm"], bool) and all(sorted(each["generators"]) == places for each in passes)
        complete = complete and (not passes or all(isinstance(place, str) for place in draws["apart"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no state of a boosted dataloader ({error!r})") from error
    if not complete:
        raise ValueError(f"this is no state of a boosted dataloader: of what it drew there is {sorted(draws)}")
    if places != (here := sorted(generators_of(loader))):
        raise ValueError(
            f"the state is that of a dataloader with generators, or samplers with a state, at {places or 'no place'}, and "
            f"this {type(loader).__name__} has them at {here or 'no place'}; make the dataloader as it was"
        )
    if workers not in (None, getattr(loader, "num_workers", None)):
        raise ValueError(
            f"a stream that {workers} workers read comes in another order with {getattr(loader, 'num_workers', None)}; make "
            f"the dataloader with num_workers={workers}"
        )


def skips(loader: Any) -> bool:
    """Return whether `loader` leaves out what was seen without reading it."""
    return getattr(loader, "can_start_after", False) is True


@dataclass
class Progress:
    """How far a pass over a loader is. It outlives the iterator, and does not keep it or its workers.

    Attributes:
        epoch: of the pass.
        draws: what it drew from; None for loaders that can skip.
        counts: those of samplers when it began, see `SamplerCounters`.
        count: batches yielded by this iterator.
        at_end: whether the last was the loader's last.
        over: whether the iterator said so.
        start: samples of the epoch, over all ranks, that were yielded before this iterator began.
        before: batches of this rank that were.
        stride: samples that all ranks read in a step; 0 where that is not known.
    """

    epoch: int
    draws: EpochRandomness | None = None
    counts: Mapping[str, Any] = field(default_factory=dict)
    count: int = 0
    at_end: bool = False
    over: bool = False
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


class EpochIterator:
    """One pass over a loader. progress: how far it is; whoever asks for that later keeps it, and not the iteration.

    position: where to begin in the epoch; None means at its start. deliver: makes of each batch what is yielded.
    """

    def __init__(
        self,
        loader: Any,
        epochs: EpochSetter,
        counts: SamplerCounters,
        epoch: int,
        position: Mapping[str, Any] | None,
        deliver: Callable[[Progress, Any], Any],
    ) -> None:
        self._loader = loader
        self._epochs = epochs
        self._counts = counts
        self._deliver = deliver
        self._ahead: list[Any] = []  # read after what should have been the last batch
        self._end: list[Exception] = []  # how the loader ended, until that is raised
        self.progress = progress = Progress(epoch, counts=counts.now(), stride=stride(loader))
        epochs.set(epoch)
        try:
            self._length: int | None = len(loader)
        except (TypeError, NotImplementedError):
            self._length = None
        seen = 0 if position is None else position["batches"]
        draws = None if position is None else position.get(DRAWS)
        if position is not None and OWN_STATE not in position:
            end_workers(loader)  # those that persist are of another time
            if draws is not None and draws["warm"]:
                with preserve_rng(generators_of(loader)):
                    iter(loader)  # starts them; an epoch that is not their first draws less
        if seen and skips(loader):
            assert position is not None  # it says what was seen
            progress.start, progress.before = position["samples"], seen
            loader.start_after(progress.start)
            self._length = loader.num_batches_after(progress.start)
        # Its order follows from the epoch alone, so nothing is kept of what it draws.
        if skips(loader):
            self._batches = iter(loader)
        elif position is not None and (seen or (draws is not None and "begin" in draws)):
            self._batches = self._begun_again(position)
        else:
            progress.draws = EpochRandomness(loader)
            with progress.draws.drawing(), counts.drawing():
                self._batches = iter(loader)

    def _begun_again(self, position: Mapping[str, Any]) -> Iterator[Any]:
        """Return the iterator as it was at `position`, without drawing a random number of the run's."""
        progress, count = self.progress, position["batches"]
        progress.count = count
        progress.draws = draws = EpochRandomness(self._loader, position.get(DRAWS))
        with draws.replaying():
            batches = iter(self._loader)
            if OWN_STATE not in position:
                for number in range(count):
                    if number == 0:
                        draws.restore_first()
                    try:
                        next(batches)
                    except StopIteration:
                        raise RuntimeError(
                            f"the dataloader ended after {number} batches, and {count} were seen of this epoch before; go on "
                            "with the same data and the same batch size"
                        ) from None
        return batches

    @property
    def num_batches(self) -> int | None:
        """Of the whole epoch, those before a resume too; None where that is not known."""
        return None if self._length is None else self.progress.before + self._length

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        progress = self.progress
        if progress.count == 0 and self._epochs.epoch != progress.epoch:
            # Samplers draw their order when the first batch is asked for, and another iterator was made since.
            self._epochs.set(progress.epoch)
            if progress.start:
                self._loader.start_after(progress.start)
        if self._end:
            raise self._end.pop()
        try:
            batch = self._ahead.pop() if self._ahead else self._drawn()
        except StopIteration:
            progress.at_end = progress.over = True
            raise
        progress.count += 1
        progress.at_end = progress.count == self._length
        if progress.at_end and progress.draws is not None and not is_stateful(self._loader):
            self._finish()
        return self._deliver(progress, batch)

    def _drawn(self) -> Any:
        draws, is_first = self.progress.draws, self.progress.count == 0
        if draws is None:
            return next(self._batches)
        with ExitStack() as stack:
            stack.enter_context(draws.drawing(is_first=is_first))
            if is_first or self.progress.at_end:
                stack.enter_context(self._counts.drawing())
            return next(self._batches)

    def _finish(self) -> None:
        """Ask for the end now: what samplers draw there belongs to this epoch, also where it is saved before the loop's end."""
        try:
            self._ahead.append(self._drawn())
            self.progress.at_end = False  # its length was not true
        except Exception as end:
            self._end.append(end.with_traceback(None))  # which keeps this frame, and with it workers
            self._batches = iter(())
