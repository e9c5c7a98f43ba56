"""The loader made here: over the share of a dataset that one rank has, in an order that follows from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from booster.common import arguments

_RESERVED = {
    "sampler": "pass shuffle, or distributed_sampler_cls; or build a torch DataLoader yourself and give it to boost()",
    "batch_sampler": "build a torch DataLoader yourself, over a distributed sampler, and give it to boost()",
    "generator": "pass seed",
}


class SeededDataLoader(DataLoader[Any]):
    """A torch DataLoader with shuffling and worker seeds that follow from (seed, rank, epoch).

    dataset: the whole of it, or this rank's sampler among the options.
    seed: the same on all ranks.
    rank: of those that share the dataset, from 0.
    shuffle: draw the order of each epoch anew.
    options: any other argument of the DataLoader.

    Until `set_epoch` is called they go on from one epoch to the next.
    """

    def __init__(self, dataset: Dataset[Any], *, seed: int, rank: int, shuffle: bool, **options: Any) -> None:
        self._seed = seed
        self._rank = rank
        # Two generators: the order of the samples must not depend on whether there are workers to seed.
        self._order = torch.Generator().manual_seed(seed)
        if shuffle:
            options["sampler"] = RandomSampler(dataset, generator=self._order)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(_mix(seed, rank, 0))
        super().__init__(dataset, generator=generator, **options)
        self._rest = RemainingBatches(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`; `booster.data.DataLoaderWrapper` calls it by itself."""
        self._order.manual_seed(self._seed + epoch)
        # Of the workers: each rank's draw otherwise, while the order above is the same on all.
        self.generator.manual_seed(_mix(self._seed, self._rank, epoch))
        self._rest.consumed = 0

    @property
    def seed_of_order(self) -> int:
        """What the order of the samples follows from, besides the epoch."""
        return self._seed

    @property
    def can_start_after(self) -> bool:
        """Whether the whole order over all ranks is known here, as it is not of a stream or of samplers of the user's own."""
        return type(self.sampler) in (RandomSampler, SequentialSampler, DistributedSampler)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, over all ranks; for loaders that can start after some of them."""
        sampler: Any = self.sampler
        return len(getattr(sampler, "dataset", sampler))

    def start_after(self, num_samples: int) -> None:
        """Make the next iteration leave out the first `num_samples` of the epoch's order, unread; call it after `set_epoch`."""
        # What is left is dealt to the ranks that there are now, in batches as ever.
        self._rest.consumed = num_samples

    def num_batches_after(self, num_samples: int) -> int:
        """Return how many batches this rank has left after the first `num_samples` of the order over all ranks."""
        return len(list(self._rest.after(range(self.num_samples), num_samples)))

    @property
    def _index_sampler(self) -> Any:  # what DataLoader's iterators draw batches of indices from
        return self._rest


class RemainingBatches:
    """The batches of indices that are left of an epoch.

    batches: those of a whole epoch on this rank. consumed: samples over all ranks that the next iteration leaves out. Workers
    that persist ask it anew for each epoch; it does not keep the loader, which would keep them for ever.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.consumed = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, since an iterator with workers makes one that it drops: this runs when the first batch is drawn.
        consumed, self.consumed = self.consumed, 0
        yield from self.after(self._whole_order(), consumed) if consumed else self._batches

    def after(self, order: Sequence[int], consumed: int) -> Iterator[list[int]]:
        """Yield what this rank reads, in batches, after the first `consumed` of the order over all ranks."""
        sampler: Any = self._batches.sampler
        batch_size, drop_last = self._batches.batch_size, self._batches.drop_last
        replicas, rank = getattr(sampler, "num_replicas", 1), getattr(sampler, "rank", 0)
        rest = list(order[consumed:])
        if rest and len(rest) % replicas:
            if drop_last:
                rest = rest[: len(rest) // replicas * replicas]
            else:  # the epoch's first ones again, as DistributedSampler does, so that all ranks have equally many
                rest += islice(cycle(order), replicas - len(rest) % replicas)
        own = iter(rest[rank::replicas])
        while batch := list(islice(own, batch_size)):
            if len(batch) == batch_size or not drop_last:
                yield batch

    def _whole_order(self) -> list[int]:
        """The indices of the epoch over all ranks."""
        sampler: Any = self._batches.sampler
        if not isinstance(sampler, DistributedSampler):
            return list(sampler)
        whole: DistributedSampler[Any] = DistributedSampler(
            sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=False
        )
        whole.set_epoch(sampler.epoch)
        return list(whole)


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
    """A DataLoader over the share of `dataset` that rank `rank` of `world_size` has.

    batch_size: samples of one rank in a step.
    shuffle: draw the order of each epoch anew.
    seed: of the shuffling, the same on all ranks; workers are seeded from it, the rank, the epoch and their id.
    drop_last: drop the tail that does not divide among ranks or fill a batch; without it the sampler repeats samples, so that
        all ranks have equally many.
    pin_memory: batches in pinned host memory, from which copies to a GPU do not wait.
    num_workers: processes that read; 0 reads in this one.
    distributed_sampler_cls: called as cls(dataset, num_replicas=, rank=, shuffle=, seed=, drop_last=); None means torch's
        DistributedSampler.
    dataloader_options: other arguments of the DataLoader.

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


def _mix(seed: int, rank: int, epoch: int) -> int:
    """A seed that no other (seed, rank, epoch) is likely to have, as sums of the three would."""
    digest = hashlib.blake2b(f"{seed}/{rank}/{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
