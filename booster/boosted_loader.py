"""The boosted data loader: batches on the device, epochs counted, and what is known of the rows it yielded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from booster import arguments
from booster.trees import map_tensors


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
        iteration = _Iteration(self, self._epoch)
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
    """One pass over a loader. count: batches yielded; at_end: whether the last of them was the loader's last."""

    def __init__(self, owner: DataLoaderWrapper, epoch: int) -> None:
        self._owner = owner
        self._epoch = epoch
        self.count = 0
        self.at_end = False
        owner._announce(epoch)
        self._batches = iter(owner._loader)
        try:
            self._length: int | None = len(owner)
        except (TypeError, NotImplementedError):
            self._length = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.count == 0 and self._owner._announced != self._epoch:
            # Samplers draw their order when the first batch is asked for, and another iterator was made since.
            self._owner._announce(self._epoch)
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
