"""Data loaders for ranks that share a dataset: made, checked, and boosted, with batches on the device and epochs counted."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler

from booster import arguments
from booster.randomness import random_state, set_random_state
from booster.trees import map_tensors

__all__ = [
    "OWN_STATE",
    "RANDOM",
    "DataLoaderWrapper",
    "SeededDataLoader",
    "Share",
    "check_sharded",
    "prepare_dataloader",
    "to_device",
]

_logger = logging.getLogger(__name__)

# In the state of a boosted loader, what is each rank's own: the state that the loader inside keeps, and random states at the
# beginning of the epoch, from which the order may follow.
OWN_STATE, RANDOM = "loader", "random"

_RESERVED = {
    "sampler": "pass shuffle, or distributed_sampler_cls; or build a torch DataLoader yourself and give it to boost()",
    "batch_sampler": "build a torch DataLoader yourself, over a distributed sampler, and give it to boost()",
    "generator": "pass seed",
}


class SeededDataLoader(DataLoader[Any]):
    """A torch DataLoader whose shuffling and worker seeds follow from (seed, rank, epoch).

    Until `set_epoch` is called they go on from one epoch to the next.
    """

    def __init__(self, dataset: Dataset[Any], *, seed: int, rank: int, shuffle: bool, **options: Any) -> None:
        self._seed = seed
        self._rank = rank
        self._consumed = 0  # samples over all ranks that the next iteration leaves out
        # Two generators: the order of the samples must not depend on whether there are workers to seed.
        self._order = torch.Generator().manual_seed(seed)
        if shuffle:
            options["sampler"] = RandomSampler(dataset, generator=self._order)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(_mix(seed, rank, 0))
        super().__init__(dataset, generator=generator, **options)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`; `booster.data.DataLoaderWrapper` calls it by itself."""
        self._order.manual_seed(self._seed + epoch)
        self.generator.manual_seed(_mix(self._seed, self._rank, epoch))
        self._consumed = 0

    def start_after(self, num_samples: int) -> None:
        """Make the next iteration leave out the first `num_samples` of the epoch's order over all ranks, unread.

        What is left is dealt to the ranks that there are now, in batches as ever; call it after `set_epoch`.
        """
        self._consumed = num_samples

    def num_batches_after(self, num_samples: int) -> int:
        """Return how many batches this rank has left after the first `num_samples` of the order over all ranks."""
        sampler: Any = self.sampler
        total = len(getattr(sampler, "dataset", sampler)) if hasattr(sampler, "num_replicas") else len(sampler)
        return len(list(self._batches_after(range(total), num_samples)))

    @property
    def _index_sampler(self) -> Any:  # what DataLoader's iterators draw batches of indices from
        if not self._consumed:
            return super()._index_sampler
        consumed, self._consumed = self._consumed, 0
        return self._batches_after(self._whole_order(), consumed)

    def _whole_order(self) -> list[int]:
        """The indices of the epoch over all ranks."""
        sampler: Any = self.sampler
        if not isinstance(sampler, DistributedSampler):
            return list(sampler)
        whole: DistributedSampler[Any] = DistributedSampler(
            sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=False
        )
        whole.set_epoch(sampler.epoch)
        return list(whole)

    def _batches_after(self, order: Sequence[int], consumed: int) -> Iterator[list[int]]:
        sampler: Any = self.sampler
        replicas, rank = getattr(sampler, "num_replicas", 1), getattr(sampler, "rank", 0)
        rest = list(order)[consumed:]
        if rest and len(rest) % replicas:
            if self.drop_last:
                rest = rest[: len(rest) // replicas * replicas]
            else:  # repeated, as DistributedSampler does, so that all ranks have equally many
                rest += [rest[index % len(rest)] for index in range(replicas - len(rest) % replicas)]
        own = iter(rest[rank::replicas])
        while batch := list(islice(own, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch


def prepare_dataloader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    rank: int,
    world_size: int,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    distributed_sampler_cls: type[Sampler[Any]] | None = None,
    **dataloader_options: Any,
) -> DataLoader[Any]:
    """A DataLoader over the share of `dataset` that rank `rank` of `world_size` has; `batch_size` is per rank.

    seed: of the shuffling, the same on all ranks; workers are seeded from it, the rank, the epoch and their id.
    drop_last: drop the tail that does not divide among ranks or fill a batch; without it the sampler repeats samples, so
    that all ranks have equally many. distributed_sampler_cls: called as cls(dataset, num_replicas=, rank=, shuffle=,
    seed=, drop_last=); None means torch's DistributedSampler. dataloader_options: other arguments of the DataLoader.

    Raises ValueError for `sampler`, `batch_sampler` and `generator`, and for an iterable dataset that would have to be
    sharded or shuffled; TypeError or ValueError for arguments that are not legal, and options that DataLoader does not know.
    """
    _check_dataset(dataset)
    arguments.count("batch_size", batch_size)
    arguments.flag("shuffle", shuffle)
    arguments.count("seed", seed, least=0, most=2**63 - 1)
    arguments.flag("drop_last", drop_last)
    arguments.flag("pin_memory", pin_memory)
    arguments.count("num_workers", num_workers, least=0)
    if distributed_sampler_cls is not None:
        arguments.function("distributed_sampler_cls", distributed_sampler_cls, "a class of samplers", also="None")
    for name in _RESERVED.keys() & dataloader_options.keys():
        raise ValueError(f"prepare_dataloader got {name}, which it makes itself; {_RESERVED[name]}")
    if isinstance(dataset, IterableDataset) and (world_size > 1 or shuffle or distributed_sampler_cls is not None):
        raise ValueError(
            f"{type(dataset).__name__} is an IterableDataset, which has no indices to shard among {world_size} ranks or to "
            "shuffle; do both inside the dataset, build a torch DataLoader over it and give that to boost()"
        )
    if world_size > 1 or distributed_sampler_cls is not None:
        dataloader_options["sampler"] = _sampler_of(
            distributed_sampler_cls or DistributedSampler,
            dataset,
            num_replicas=world_size,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        shuffle = False
    return SeededDataLoader(
        dataset,
        seed=seed,
        rank=rank,
        shuffle=shuffle,
        batch_size=batch_size,
        drop_last=drop_last,
        pin_memory=pin_memory,
        num_workers=num_workers,
        **dataloader_options,
    )


def _check_dataset(dataset: Any) -> None:
    legal = "a Dataset: an object with a length and items by index, or an IterableDataset"
    if isinstance(dataset, IterableDataset):
        return
    if isinstance(dataset, (str, bytes, type)) or not all(
        hasattr(dataset, name) for name in ("__getitem__", "__len__")
    ):
        raise TypeError(arguments.refusal("dataset", dataset, legal))
    try:
        length = len(dataset)
    except TypeError as error:  # as of a 0-dim tensor
        raise TypeError(arguments.refusal("dataset", dataset, legal, fix=str(error))) from None
    if length == 0:
        raise ValueError("dataset is empty, so there is nothing to load; give it samples")


def _sampler_of(make: Any, dataset: Any, **options: Any) -> Any:
    try:
        sampler = make(dataset, **options)
    except TypeError as error:
        called = "cls(dataset, num_replicas=, rank=, shuffle=, seed=, drop_last=)"
        raise TypeError(f"distributed_sampler_cls={make!r} failed as it was called, {called}: {error}") from error
    if not hasattr(sampler, "__iter__"):
        raise TypeError(f"distributed_sampler_cls={make!r} made a {type(sampler).__name__}, which is no sampler")
    return sampler


def check_sharded(loader: Iterable[Any], world_size: int) -> None:
    """Raise ValueError if `loader` would give each of `world_size` ranks the same data, or the shares of another world.

    A loader whose sharding cannot be seen, over an IterableDataset or not made of samplers at all, is accepted with a
    logged warning.
    """
    if world_size <= 1:
        return
    sampler = distributed_sampler(loader)
    if sampler is not None:
        if sampler.num_replicas != world_size:
            raise ValueError(
                f"the dataloader's {type(sampler).__name__} has num_replicas={sampler.num_replicas}, but {world_size} ranks "
                "see different data; make the loader with booster.prepare_dataloader(dataset, batch_size)"
            )
        return
    opaque = not hasattr(loader, "sampler") and not isinstance(loader, Sequence)
    if opaque or isinstance(getattr(loader, "dataset", None), IterableDataset):
        _logger.warning(
            "booster cannot see whether this %s is sharded: make sure that each of the %d ranks reads different data",
            type(loader).__name__,
            world_size,
        )
        return
    raise ValueError(
        f"this {type(loader).__name__} has no distributed sampler, so all {world_size} ranks would train on the same "
        "samples; make it with booster.prepare_dataloader(dataset, batch_size), or give it a DistributedSampler"
    )


def _mix(seed: int, rank: int, epoch: int) -> int:
    """A seed that no other (seed, rank, epoch) is likely to have, as sums of the three would."""
    digest = hashlib.blake2b(f"{seed}/{rank}/{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class Share:
    """What is known of the rows that a loader has yielded, which is the same on every rank.

    num_replicas: ranks to which the sampler deals in turn. num_padded: repeated samples at the end of what all ranks
    together have yielded (0 before the last batch). rows: the row counts of the last batch and of the epoch so far on
    each rank; empty where the batch size is not known.
    """

    num_replicas: int
    num_padded: int
    rows: frozenset[int]


class DataLoaderWrapper:
    """Any iterable of batches, with the batches on `device` and the epochs announced to its samplers.

    Each `iter()` calls `set_epoch` of the loader, its sampler and its batch sampler, where they have it, with `epoch`,
    and counts on. Who sets `epoch` (as after loading a checkpoint), calls `set_epoch` here, or gives the sampler
    another epoch by its own `set_epoch`, is followed. Several iterators may be alive; each is of its own epoch. Other
    attributes are the loader's.
    """

    def __init__(self, loader: Iterable[Any], device: str | torch.device) -> None:
        if isinstance(loader, DataLoaderWrapper):
            raise TypeError("this dataloader is boosted already; pass it on as it is")
        iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
        if not iterable or isinstance(loader, (str, bytes, Mapping, type)) or getattr(loader, "ndim", 1) == 0:
            raise TypeError(f"dataloader must be an iterable of batches, got {arguments.described(loader)}")
        self._loader = loader
        self.device = torch.device(device)
        self._epoch = next((epoch for target in self._targets() if (epoch := _epoch_of(target)) is not None), 0)
        self._chosen = False  # whether the user has set the next epoch here
        self._announced = self._epoch  # what the samplers still hold, unless the user has told them otherwise
        self._current: _Iteration | None = None  # the one that yielded last
        self._newest: _Iteration | None = None  # the one that was made last
        self._position: dict[str, Any] | None = None  # that the next iteration goes on from

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` starts."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = arguments.count("epoch", epoch, least=0)
        self._chosen = True

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` that of `epoch`; counting goes on from there."""
        self.epoch = epoch

    @property
    def share(self) -> Share | None:
        """What is known of the rows yielded so far; None unless a torch DistributedSampler deals them.

        Raises RuntimeError before the first batch.
        """
        sampler = distributed_sampler(self._loader)
        if not isinstance(sampler, DistributedSampler):
            return None
        if self._current is None:
            raise RuntimeError("this dataloader has not yielded a batch yet, so there are no rows of it")
        batches = getattr(self._loader, "batch_sampler", None)
        batch_size = getattr(batches, "batch_size", None)
        left_over, rows = 0, frozenset[int]()
        if isinstance(batch_size, int):
            left_over = sampler.num_samples % batch_size if getattr(batches, "drop_last", False) else 0
            count = self._current.count
            epoch_rows = min(count * batch_size, sampler.num_samples - left_over)
            rows = frozenset({epoch_rows - (count - 1) * batch_size, epoch_rows})
        padded = sampler.total_size - len(sampler.dataset) - left_over * sampler.num_replicas  # type: ignore[arg-type]
        return Share(sampler.num_replicas, max(0, padded) if self._current.at_end else 0, rows)

    def unwrap(self) -> Iterable[Any]:
        """The user's loader."""
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, how many of its batches were yielded, and the loader's own state if it has one.

        It is that of the iterator that was made last; batches that workers have read ahead do not count.
        """
        if self._position is not None:
            return dict(self._position)
        newest = self._newest
        inside = newest is not None and not newest.at_end and newest.epoch + 1 == self._epoch
        state: dict[str, Any] = {"epoch": self._epoch, "batches": 0, "samples": 0}
        if inside and newest is not None:
            state |= {"epoch": newest.epoch, "batches": newest.num_batches, "samples": newest.num_samples}
            if newest.random is not None:
                state[RANDOM] = newest.random
        if _is_stateful(self._loader):
            state[OWN_STATE] = self._loader.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next `iter()` go on where `state` was taken, in the same order.

        A loader of `prepare_dataloader` leaves out what was seen without reading it, and deals the rest to the ranks that
        there are now; one with `load_state_dict` of its own is given its state; any other reads what was seen and drops it,
        from the random states that the epoch began with. Raises ValueError for what `state_dict` did not write, and where
        that other loader now reads another number of samples at a time over all ranks.
        """
        try:
            position: dict[str, Any] = {key: int(state[key]) for key in ("epoch", "batches", "samples")}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of a boosted dataloader ({error!r}): {state!r}") from error
        if min(position.values()) < 0:
            raise ValueError(f"a dataloader's position counts from 0, got {position}")
        seen, samples = position["batches"], position["samples"]
        stride = _stride(self._loader)
        if (
            OWN_STATE not in state
            and not _skips(self._loader)
            and seen
            and stride
            and samples
            and samples != seen * stride
        ):
            raise ValueError(
                f"this {type(self._loader).__name__} reads {stride} samples in a step over all ranks, and {samples // seen} "
                "when the state was taken; load on as many ranks and with the same batch size, or train with a loader of "
                "booster.prepare_dataloader, whose rest of the epoch is dealt to any number of ranks"
            )
        if RANDOM in state:
            position[RANDOM] = state[RANDOM]
        if OWN_STATE in state:
            if not _is_stateful(self._loader):
                raise ValueError(
                    f"the state is that of a loader with load_state_dict(), which {type(self._loader).__name__} has not"
                )
            self._loader.load_state_dict(state[OWN_STATE])  # type: ignore[attr-defined]
            position[OWN_STATE] = state[OWN_STATE]
        self.epoch = position["epoch"]
        self._position = position
        self._newest = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # while being copied it has no loader yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # without a length: the loader's own TypeError

    def __iter__(self) -> Iterator[Any]:
        if not self._chosen:
            held = (_epoch_of(target) for target in self._targets())
            self._epoch = next((epoch for epoch in held if epoch not in (None, self._announced)), self._epoch)
        self._chosen = False
        position, self._position = self._position, None
        if position is not None and position["epoch"] != self._epoch:
            position = None  # the user has chosen another epoch since
        self._newest = iteration = _Iteration(self, self._epoch, position)
        self._epoch += 1
        return iteration

    def _targets(self) -> list[Any]:
        parts = [self._loader, *_samplers(self._loader)]
        return [part for part in parts if callable(getattr(part, "set_epoch", None))]

    def _announce(self, epoch: int) -> None:
        for target in self._targets():
            target.set_epoch(epoch)
        self._announced = epoch


class _Iteration:
    """One pass over a loader. count: batches yielded since `start_after`; at_end: whether the last was the loader's last.

    position: where to begin in the epoch; None means at its start. num_samples: of the epoch's order over all ranks, how
    many were yielded; 0 where that cannot be known.
    """

    def __init__(self, owner: DataLoaderWrapper, epoch: int, position: dict[str, Any] | None) -> None:
        self._owner = owner
        self.epoch = epoch
        self.count = 0
        self.at_end = False
        owner._announce(epoch)
        loader: Any = owner._loader
        try:
            self._length: int | None = len(owner)
        except (TypeError, NotImplementedError):
            self._length = None
        self._stride = _stride(loader)
        self._start, self._before = 0, 0
        # Random states when the epoch began, from which a loader that is not ours may draw its order.
        self.random = None if _skips(loader) else random_state() if position is None else position.get(RANDOM)
        seen = position["batches"] if position is not None else 0
        if seen and _skips(loader):
            assert position is not None  # it says what was seen
            self._start, self._before = position["samples"], seen
            loader.start_after(self._start)
            self._length = loader.num_batches_after(self._start)
            self._batches = iter(loader)
        elif position is None or _skips(loader):
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
        if self.count == 0 and self._owner._announced != self.epoch:
            # Samplers draw their order when the first batch is asked for, and another iterator was made since.
            self._owner._announce(self.epoch)
        try:
            batch = next(self._batches)
        except StopIteration:
            self.at_end = True
            raise
        self.count += 1
        self.at_end = self.count == self._length
        self._owner._current = self
        return to_device(batch, self._owner.device)


def distributed_sampler(loader: Any) -> Any | None:
    """The sampler of `loader` that knows of several ranks, or None."""
    return next((s for s in _samplers(loader) if isinstance(s, DistributedSampler) or hasattr(s, "num_replicas")), None)


def _skips(loader: Any) -> bool:
    """Return whether `loader` leaves out what was seen without reading it."""
    return callable(getattr(loader, "start_after", None))


def _stride(loader: Any) -> int:
    """Return how many samples all ranks together read in a step; 0 where that is not known."""
    batch_size = getattr(loader, "batch_size", None)
    return batch_size * getattr(distributed_sampler(loader), "num_replicas", 1) if batch_size else 0


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _samplers(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def _epoch_of(target: Any) -> int | None:
    epoch = getattr(target, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor on `device`, in containers of the same types, all of them new.

    batch: see `booster.trees`; an object with a method `to(device)` (such as a tokenizer's output, which moves itself in
    place) moves itself. A tensor that is there already is not copied. Copies from pinned memory do not block; others wait
    for the copy.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=device.type == "cuda" and tensor.is_pinned())

    def move_itself(value: Any) -> Any:
        return (
            value.to(device) if callable(getattr(value, "to", None)) and not isinstance(value, type) else NotImplemented
        )

    return map_tensors(move, batch, instead=move_itself, copy_containers=True)
