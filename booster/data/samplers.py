"""What the samplers of any loader say: how it is dealt to ranks, its order, and its epoch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from booster.common.text import listed
from booster.ranks.agreement import gather

_TORCHS = ("torch.", "torchdata.")  # their samplers draw one order on all ranks
_logger = logging.getLogger(__name__)


def check_sharded(loader: Iterable[Any], world_size: int) -> None:
    """Raise ValueError if `loader` would give each of `world_size` ranks the same data, or the shares of another world."""
    if world_size <= 1:
        return
    # A loader with a sharding that cannot be seen, over an IterableDataset or not made of samplers at all, is accepted with a
    # logged warning.
    sampler = distributed_sampler(loader)
    if sampler is not None:
        if sampler.num_replicas != world_size:
            raise ValueError(
                f"the dataloader's {type(sampler).__name__} has num_replicas={sampler.num_replicas}, but {world_size} ranks "
                "see different data; make the loader with b.prepare_dataloader(dataset, batch_size)"
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
        "samples; make it with b.prepare_dataloader(dataset, batch_size), or give it a DistributedSampler"
    )


def check_dealt(loader: Any, *, place: int, num_places: int, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError, on all ranks of `group`, if their samplers do not deal one dataset among them. A small collective, two
    where any has a sampler that knows of ranks.

    loader: None where this rank has none. place: of this rank among `num_places` that read different samples; ranks that divide
    layers are in one place. Ranks without such a sampler are left out.
    """
    sampler = None if loader is None else distributed_sampler(loader)
    said = gather(None if sampler is None else _deal(sampler, place), group)
    deals = {rank: deal for rank, deal in enumerate(said) if deal is not None}
    reason = _misdealt(list(deals.values()), num_places)
    draws = {json.dumps(deal["order"]) for deal in deals.values()}
    # Where samplers draw by themselves, and not by torch's own way, orders that differ are a logged warning: they may be meant
    # to.
    if reason is None and len(draws) < 2:
        return
    had = [f"rank {rank} has {deal['shown']}" for rank, deal in deals.items()]
    text = (
        f"{reason or 'ranks draw different orders of the dataset, so that some samples are read twice and others never'}: "
        f"{listed(had, 4)}. Make the loader with "
        "b.prepare_dataloader(dataset, batch_size), or build the sampler alike on all ranks but for rank, which it finds itself"
    )
    if reason is not None or not all(deal["is_own"] for deal in deals.values()):
        raise ValueError(text)
    _logger.warning("%s", text)


def _deal(sampler: Any, place: int) -> dict[str, Any]:
    """Return by what `sampler` deals, in words that JSON has."""
    names = ("num_replicas", "rank", "shuffle", "seed", "epoch")
    numbers = {name: number for name in names if isinstance(number := getattr(sampler, name, None), int)}
    makers = (kind.__module__ for kind in type(sampler).__mro__ if "__iter__" in vars(kind))
    drawn = names[2:] if numbers.get("shuffle", True) else names[2:3]
    return {
        "place": place,
        "num_replicas": numbers.get("num_replicas"),
        "rank": numbers.get("rank"),
        "order": [numbers.get(name) for name in drawn],
        "is_own": not next(makers, "").startswith(_TORCHS),
        "shown": f"{type(sampler).__name__}({', '.join(f'{name}={value}' for name, value in numbers.items())})",
    }


def _misdealt(deals: Sequence[Mapping[str, Any]], num_places: int) -> str | None:
    """Return why ranks would read the same samples, or leave some out, whatever the order; None if they would not."""
    if any(deal["num_replicas"] != num_places for deal in deals if deal["num_replicas"] is not None):
        return f"{num_places} ranks see different data, and a sampler has another num_replicas"
    known = {(deal["place"], deal["rank"]) for deal in deals if deal["rank"] is not None}
    if len({rank for _, rank in known}) < len({place for place, _ in known}):
        return "ranks read the same samples, as samplers have the same rank"
    if len(known) > len({place for place, _ in known}):
        return "ranks that divide layers read different samples, as samplers have different ranks"
    return None


def distributed_sampler(loader: Any) -> Any | None:
    """Return the sampler of `loader` that knows of several ranks, or None."""
    return next(
        (s for s in samplers_of(loader) if isinstance(s, DistributedSampler) or hasattr(s, "num_replicas")), None
    )


def stride(loader: Any) -> int:
    """Return how many samples all ranks together read in a step; 0 where that is not known."""
    batch_size = getattr(loader, "batch_size", None)
    return batch_size * getattr(distributed_sampler(loader), "num_replicas", 1) if batch_size else 0


def order_source(loader: Any) -> dict[str, int] | None:
    """Return of how many samples, and by which seed where it has one, `loader` draws the order of an epoch, besides what random
    states say; empty where that is the order of the dataset, None where it is not known."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    if type(batches) is not BatchSampler or type(sampler) not in (SequentialSampler, RandomSampler, DistributedSampler):
        return None
    if type(sampler) is DistributedSampler and sampler.shuffle:
        return {"samples": len(sampler.dataset), "seed": sampler.seed}  # type: ignore[arg-type]
    if type(sampler) is RandomSampler:
        seed = getattr(loader, "seed_of_order", None)
        return {"samples": len(sampler.data_source)} | ({} if seed is None else {"seed": seed})
    return {}


def samplers_of(loader: Any) -> list[Any]:
    """Return the sampler of `loader`, its batch sampler, and the sampler of that, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def is_stateful(part: Any) -> bool:
    """Return whether a loader or a sampler keeps a state."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


class EpochSetter:
    """Sets the epoch of a loader, its sampler and its batch sampler, of those that have `set_epoch`.

    Attributes:
        epoch: what was set last, or what they had from the beginning; 0 where none says.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.epoch = next((epoch for epoch in self._held() if epoch is not None), 0)

    def set(self, epoch: int) -> None:
        """Call `set_epoch` of all."""
        for target in self._targets():
            target.set_epoch(epoch)
        self.epoch = epoch

    def changed(self) -> int | None:
        """Return the epoch that was set in one of them from elsewhere since; None where none was."""
        return next((epoch for epoch in self._held() if epoch not in (None, self.epoch)), None)

    def _targets(self) -> list[Any]:
        parts = [self._loader, *samplers_of(self._loader)]
        return [part for part in parts if callable(getattr(part, "set_epoch", None))]

    def _held(self) -> list[int | None]:
        held = [getattr(target, "epoch", None) for target in self._targets()]
        return [epoch if isinstance(epoch, int) else None for epoch in held]
