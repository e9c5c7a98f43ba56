"""What a loader draws its order from: its samplers, the generators that it holds, the global ones, and when it drew from each.

A loader that cannot skip resumes by making its pass again, from the random states of the pass's beginning, and dropping the
batches that were seen. `EpochRandomness` keeps these states, and finds passes that cannot be made again: those in which
others drew from a generator between two draws of the loader. `SamplerCounters` finds samplers with plain attributes that a new
process lacks.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from booster.common.arguments import listed
from booster.common.snapshot import of_python, of_torch, random_state, set_random_state
from booster.common.torch_internals.tensor_internals import has_workers
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
    """Return whether `part`, a loader, a sampler or another object, gives a state and takes one."""
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


_MANY = 64  # of more entries in a container none is looked at: it holds samples
_LOADER_PARTS = ("sampler", "batch_sampler", "dataset", "loader")
# They draw all that they take of a global generator before the first index.
_DRAW_AT_FIRST = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

States = dict[str, Any]


# ---- the generators of a loader, and their states ----


def generators_of(loader: Any) -> dict[str, Any]:
    """Return the generators of `loader`, its samplers and datasets, whatever holds them, by the attributes that lead there.

    Generators are those of torch, of python and of numpy; samplers with `state_dict` and `load_state_dict` count as one.
    """
    # A loader that keeps a state has none here.
    found: dict[str, Any] = {}
    seen: set[int] = set()
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))

    def visit(value: Any, place: str, name: str) -> None:
        if isinstance(value, kinds):
            if value is not torch.default_generator and not isinstance(value, random.SystemRandom):
                found[place] = value
        elif isinstance(value, (Sampler, Dataset, DataLoader)) or name in _LOADER_PARTS:
            if id(value) in seen:
                return
            seen.add(id(value))
            if is_stateful(value) and (isinstance(value, Sampler) or name in ("sampler", "batch_sampler")):
                found[place] = value
            for key, inner in list(getattr(value, "__dict__", {}).items()):
                visit(inner, f"{place}.{key}", key)
        elif isinstance(value, (list, tuple, dict)) and len(value) <= _MANY:
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                visit(inner, f"{place}.{key}", "")

    for key, value in [] if is_stateful(loader) else list(getattr(loader, "__dict__", {}).items()):
        seen.clear()  # a generator has a place below each attribute that leads there
        seen.add(id(loader))
        visit(value, key, key)
    return found


def states_of(generators: Mapping[str, Any]) -> States:
    """Return the state of each, of what `booster.checkpoint.state_tree` encodes."""
    return {place: _state(generator) for place, generator in generators.items()}


def set_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Give each generator that `states` names the state from there."""
    for place, state in states.items():
        generator = generators[place]
        if hasattr(generator, "load_state_dict"):
            generator.load_state_dict(copy.deepcopy(state))
        elif isinstance(generator, torch.Generator):
            generator.set_state(of_torch(state))
        elif isinstance(generator, random.Random):
            generator.setstate(of_python(state))
        elif hasattr(generator, "set_state"):
            generator.set_state(_arrays(state, generator.get_state(legacy=False)))
        else:
            generator.bit_generator.state = _arrays(state, generator.bit_generator.state)


def _state(generator: Any) -> Any:
    """Return the state of a generator, which differs after a draw. Modules may be given, `random` and `numpy.random`."""
    if hasattr(generator, "load_state_dict"):
        return copy.deepcopy(generator.state_dict())
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "getstate"):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}
    if hasattr(generator, "get_state"):
        return _tensors(generator.get_state(legacy=False))
    return _tensors(generator.bit_generator.state)


def _tensors(state: Any) -> Any:
    """Return a state of numpy's with tensors for arrays."""
    if isinstance(state, Mapping):
        return {key: _tensors(value) for key, value in state.items()}
    return torch.from_numpy(state.astype("int64")) if hasattr(state, "astype") and state.ndim else state


def _arrays(state: Any, like: Any) -> Any:
    """Return what `_tensors` was given; raises ValueError where words would be cut to the width of those of `like`."""
    if isinstance(state, Mapping):
        return {key: _arrays(value, like[key]) for key, value in state.items()}
    if not isinstance(state, torch.Tensor):
        return state
    words = state.cpu().numpy()
    cut = words.astype(like.dtype)
    if (cut.astype(words.dtype) != words).any():
        raise ValueError(f"words of a generator of numpy are not all {like.dtype}")
    return cut


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return not torch.equal(one, other)
    if isinstance(one, Mapping):
        return any(_differs(value, other[key]) for key, value in one.items())
    return bool(one != other)


@contextmanager
def preserve_rng(generators: Mapping[str, Any]) -> Iterator[None]:
    """A context after which the global generators and `generators` are where they were."""
    own, global_states = states_of(generators), random_state()
    try:
        yield
    finally:
        set_random_state(global_states)
        set_states(generators, own)


def try_states(loader: Any, saved: Mapping[str, Any]) -> None:
    """Raise what restoring the states of `saved`, a state dict of `EpochRandomness`, would raise; keeps none."""
    generators = generators_of(loader)
    with preserve_rng(generators):
        for states in (saved.get("begin"), saved.get("first")):
            if states is not None:
                _restore(generators, states)


def _restore(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    set_random_state(states["random"])
    set_states(generators, states["generators"])


# ---- one pass ----


class EpochRandomness:
    """The random numbers of one pass over a loader: from which states it began, and whether they lead there again.

    Attributes:
        generators: of the loader, by place.
        begin: `{"random", "generators"}`, the global states and those of `generators` when the pass began.
        first: the same when the first batch was asked for; None before.
        warm: the pass began with workers of the one before.
        mixed: generators that the loader drew from after somebody else had done so during the pass, which no second pass
            does in that order.
    """

    def __init__(self, loader: Any, saved: Mapping[str, Any] | None = None) -> None:
        self.generators = generators_of(loader)
        self._watched = {place: each for place, each in self.generators.items() if not hasattr(each, "load_state_dict")}
        if not order_is_known(loader):
            self._watched |= {"torch's global generator": torch.default_generator, "the module random": random}
            if "numpy" in sys.modules:
                self._watched["numpy.random"] = sys.modules["numpy"].random
        self.begin = self._now() if saved is None else saved["begin"]
        self.first = None if saved is None else saved["first"]
        self.warm = has_workers(loader) if saved is None else saved["warm"]
        self._drawn_by_others: set[str] = set() if saved is None else set(saved["apart"])
        self.mixed: set[str] = set()
        self._last = states_of(self._watched)

    @contextmanager
    def drawing(self, *, is_first: bool = False) -> Iterator[None]:
        """A context in which the loader draws. is_first: it asks for the first batch."""
        if is_first:
            self.first = self._now()
        before = states_of(self._watched)
        if not is_first:
            self._drawn_by_others |= {place for place in before if _differs(before[place], self._last[place])}
        try:
            yield
        finally:
            self._last = states_of(self._watched)
            drawn = {place for place in before if _differs(before[place], self._last[place])}
            self.mixed |= drawn & self._drawn_by_others

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """A context in which the pass is made again, from where it began; afterwards the run's own numbers go on."""
        with preserve_rng({place: self.generators[place] for place in self._drawn_by_others & self.generators.keys()}):
            _restore(self.generators, self.begin)
            yield
        self._last = states_of(self._watched)

    def restore_first(self) -> None:
        """While replaying: what follows is the first batch."""
        if self.first is not None:
            _restore(self.generators, self.first)

    def state_dict(self) -> dict[str, Any]:
        """Return what a pass is made again from."""
        return {
            "begin": self.begin,
            "first": self.first,
            "warm": self.warm,
            "apart": sorted(self._drawn_by_others),
            "now": states_of(self.generators),
        }

    def _now(self) -> dict[str, Any]:
        return {"random": random_state(), "generators": states_of(self.generators)}


class SamplerCounters:
    """Plain numbers and words that samplers change by themselves as they are iterated, such as a count of their rounds.

    A new process begins without them: nothing sets them, as `set_epoch` sets the epoch.
    """

    def __init__(self, loader: Any) -> None:
        self._samplers = [
            each
            for each in samplers_of(loader)
            if not hasattr(each, "set_epoch")
            and not hasattr(each, "load_state_dict")
            and type(each) not in _DRAW_AT_FIRST
        ]
        self._at_first = self.now()
        self._moved: set[str] = set()

    def now(self) -> dict[str, Any]:
        """Return them all, by class and attribute."""
        return {
            f"{type(each).__name__}.{key}": value
            for each in self._samplers
            for key, value in getattr(each, "__dict__", {}).items()
            if value is None or isinstance(value, (bool, int, float, str))
        }

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """A context in which samplers are iterated."""
        before = self.now()
        try:
            yield
        finally:
            after = self.now()
            self._moved |= {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}

    def lost(self, values: Mapping[str, Any]) -> list[str]:
        """Return which of `values`, those when an epoch began, samplers of a new process would begin it without."""
        return sorted(key for key in self._moved if values.get(key) != self._at_first.get(key))


def order_is_known(loader: Any) -> bool:
    """Return whether `loader` takes from global generators, for its order, nothing but what it draws before the first batch."""
    if isinstance(loader, (list, tuple)) or is_stateful(loader):
        return True
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    if isinstance(loader.dataset, IterableDataset):
        return loader.num_workers > 0  # workers draw from seeds of their own
    # Samplers with `set_epoch` are taken at their word: their order follows from the epoch.
    return all(type(each) in _DRAW_AT_FIRST or hasattr(each, "set_epoch") for each in samplers_of(loader))
