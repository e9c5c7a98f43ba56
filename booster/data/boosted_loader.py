"""The boosted loader: batches on the device, the epoch set in its samplers, and a position that checkpoints keep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset

from booster.common import arguments
from booster.common.torch_internals.tensor_internals import has_workers
from booster.data.epoch_iterator import DRAWS, ORDER, OWN_STATE, EpochIterator, Progress, position_of, skips
from booster.data.epoch_randomness import (
    EpochSetter,
    SamplerCounters,
    distributed_sampler,
    generators_of,
    is_stateful,
    order_source,
    set_states,
    states_of,
    try_states,
)
from booster.tensors.trees import map_tensors


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor on `device`, in containers of the same types, all of them new.

    batch: see `booster.tensors.trees`; an object with a method `to(device)` (such as a tokenizer's output, which moves itself
    in place) moves itself. A tensor that is there already is not copied. Copies that are not from pinned memory block.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        # Copies from pinned memory do not block.
        return tensor.to(device, non_blocking=device.type == "cuda" and tensor.is_pinned())

    def move_itself(value: Any) -> Any:
        return (
            value.to(device) if callable(getattr(value, "to", None)) and not isinstance(value, type) else NotImplemented
        )

    return map_tensors(move, batch, instead=move_itself, copy_containers=True)


@dataclass(frozen=True)
class YieldedRows:
    """What is known of the rows that a loader has yielded, the same on every rank.

    Attributes:
        num_replicas: ranks to which the sampler deals in turn.
        num_padded: repeated samples at the end of what all ranks together have yielded; 0 before the last batch.
        rows: the row counts of the last batch and of the epoch so far on each rank; empty where the batch size is not known.
    """

    num_replicas: int
    num_padded: int
    rows: frozenset[int]


class DataLoaderWrapper:
    """`loader`, any iterable of batches, with the batches on `device` and the epochs announced to its samplers.

    Each `iter()` calls `set_epoch` of the loader, its sampler and its batch sampler, where they have it, with `epoch`,
    and counts on. Who sets `epoch` (as after loading a checkpoint), calls `set_epoch` here, or gives the sampler
    another epoch by its own `set_epoch`, is followed. Several iterators may be alive, each of one epoch. Other
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
        self._epochs = EpochSetter(loader)
        self._counts = SamplerCounters(loader)
        self._epoch = self._epochs.epoch
        self._chosen = False  # whether the user has set the next epoch here
        # Of iterators no more is kept than how far they are: their workers end with the loop that is left.
        self._current: Progress | None = None  # of the one that yielded last
        self._newest: Progress | None = None  # of the one that was made last
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
    def share(self) -> YieldedRows | None:
        """What is known of the rows yielded so far; None unless a torch DistributedSampler deals them."""
        sampler = distributed_sampler(self._loader)
        if not isinstance(sampler, DistributedSampler):
            return None
        if self._current is None:
            # Which rows a batch has follows from the position alone.
            raise RuntimeError("this dataloader has not yielded a batch yet, so there are no rows of it")
        batches = getattr(self._loader, "batch_sampler", None)
        batch_size = getattr(batches, "batch_size", None)
        num_samples, size = sampler.num_samples, len(sampler.dataset)  # type: ignore[arg-type]
        if self._current.start:  # what was left of the epoch was dealt anew
            size -= self._current.start
            num_samples = size // sampler.num_replicas if sampler.drop_last else -(-size // sampler.num_replicas)
        left_over, rows = 0, frozenset[int]()
        if isinstance(batch_size, int):
            left_over = num_samples % batch_size if getattr(batches, "drop_last", False) else 0
            count = self._current.count
            epoch_rows = min(count * batch_size, num_samples - left_over)
            rows = frozenset({epoch_rows - (count - 1) * batch_size, epoch_rows})
        padded = (num_samples - left_over) * sampler.num_replicas - size
        return YieldedRows(sampler.num_replicas, max(0, padded) if self._current.at_end else 0, rows)

    def unwrap(self) -> Iterable[Any]:
        """The user's loader."""
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, how many of its batches were yielded, and the loader's own state if it has one.

        It is that of the iterator that was made last. Of a loader that is read again on loading, it has the states of
        generators of the loader, its samplers and datasets, and the global ones when the epoch began. Raises RuntimeError,
        which says why, where reading again would not come to the same batches.
        """
        if self._position is not None and self._position["epoch"] == self._epoch:
            return dict(self._position)
        # Batches that workers have read ahead do not count.
        inside = self._newest
        if inside is not None and inside.epoch + 1 != self._epoch:
            inside = None
        # What a loader says of itself is of the epoch that it began, until its iterator has ended.
        if inside is not None and (inside.over if is_stateful(self._loader) else inside.at_end):
            inside = None
        state: dict[str, Any] = {"epoch": self._epoch, "batches": 0, "samples": 0}
        if inside is not None:
            state |= {"epoch": inside.epoch, "batches": inside.num_batches, "samples": inside.num_samples}
            order = None if is_stateful(self._loader) else order_source(self._loader)
            if inside.num_batches and order is not None:
                state[ORDER] = order
        if is_stateful(self._loader):
            state[OWN_STATE] = self._loader.state_dict()  # type: ignore[attr-defined]
        elif reason := self._no_way_back(inside):
            raise RuntimeError(f"the position of this {type(self._loader).__name__} cannot be kept: {reason}")
        if not skips(self._loader):
            state |= self._draws(inside)
        return state

    def _draws(self, inside: Progress | None) -> dict[str, Any]:
        """What the rest of an epoch, or the next one, is drawn from; nothing where the global states alone say it."""
        stream = isinstance(getattr(self._loader, "dataset", None), IterableDataset)
        workers = getattr(self._loader, "num_workers", None) if stream and inside is not None else None
        if inside is not None and inside.draws is not None:
            return {DRAWS: inside.draws.state_dict() | {"num_workers": workers}}
        now, warm = states_of(generators_of(self._loader)), has_workers(self._loader)
        return {DRAWS: {"now": now, "warm": warm, "num_workers": workers}} if now or warm else {}

    def _no_way_back(self, inside: Progress | None) -> str | None:
        """Why a new process would not come to what follows here."""
        loader: Any = self._loader
        instead = "Or leave the dataloader out of what is saved, or train with one of b.prepare_dataloader"
        if (
            inside is not None
            and inside.count
            and getattr(loader, "in_order", True) is False
            and loader.num_workers > 1
        ):
            return (
                "in_order=False yields batches as workers finish them, in another order each time. Save between epochs"
            )
        if skips(loader):
            return None
        if inside is not None and inside.draws is not None and inside.draws.mixed:
            return (
                f"this epoch is drawn, batch by batch, from {' and '.join(sorted(inside.draws.mixed))}, which others drew from "
                "in between. Give its sampler or dataset a generator that nothing else uses, or save between epochs"
            )
        warm = has_workers(loader) if inside is None or inside.draws is None else inside.draws.warm
        if warm and isinstance(getattr(loader, "dataset", None), IterableDataset):
            return (
                "persistent_workers=True keeps the state of an IterableDataset in workers from epoch to epoch, where it "
                f"cannot be read. Use persistent_workers=False, or torchdata's StatefulDataLoader. {instead}"
            )
        if lost := self._counts.lost(self._counts.now() if inside is None else inside.counts):
            return (
                f"{', '.join(lost)} changed as the sampler was iterated, and a new process begins without that. Give the "
                f"sampler set_epoch(epoch), or state_dict() and load_state_dict(). {instead}"
            )
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next `iter()` go on where `state` was taken, in the same order.

        A loader of `prepare_dataloader` leaves out what was seen without reading it, and deals the rest to the ranks that
        there are now; one that has `load_state_dict` is given its state; any other reads what was seen and drops it,
        from the random states that the epoch began with. Raises ValueError for a state that `state_dict` did not
        write; if a loader that must read again now has another global batch size; and, in the middle of an epoch, if seed,
        shuffling or the number of samples differ.
        """
        position = position_of(state, self._loader)
        if OWN_STATE in position:
            self._loader.load_state_dict(position[OWN_STATE])  # type: ignore[attr-defined]
        elif DRAWS in position:
            try_states(self._loader, position[DRAWS])
            set_states(generators_of(self._loader), position[DRAWS]["now"])
        self.epoch = position["epoch"]
        self._position = position
        self._newest = None

    def snapshot(self) -> Callable[[], None]:
        """Return what undoes a `load_state_dict` that follows."""
        attributes, generators = vars(self).copy(), generators_of(self._loader)
        states = states_of(generators)
        own = copy.deepcopy(self._loader.state_dict()) if is_stateful(self._loader) else None  # type: ignore[attr-defined]

        def back() -> None:
            if own is not None:
                self._loader.load_state_dict(own)  # type: ignore[attr-defined]
            set_states(generators, states)
            vars(self).update(attributes)

        return back

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # while being copied it has no loader yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # without a length: the loader's own TypeError

    def __iter__(self) -> Iterator[Any]:
        if not self._chosen:
            said = self._epochs.changed()
            self._epoch = self._epoch if said is None else said
        self._chosen = False
        position, self._position = self._position, None
        if position is not None and position["epoch"] != self._epoch:
            position = None  # the user has chosen another epoch since
        iteration = EpochIterator(self._loader, self._epochs, self._counts, self._epoch, position, self._deliver)
        self._newest = iteration.progress
        # Counted on before the first batch, so that a second iter() at once is the next epoch.
        self._epoch += 1
        return iteration

    def _deliver(self, progress: Progress, batch: Any) -> Any:
        self._current = progress
        return to_device(batch, self.device)
