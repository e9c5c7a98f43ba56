"""Loaders, schedulers and what else the user gives, gradients' rounding and random numbers in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch

from booster.checkpoint.manifest import dtype_of
from booster.checkpoint.objects import snapshot
from booster.checkpoint.parts.part import LoadContext, Part, SaveContext, Step
from booster.checkpoint.state_tree import reference
from booster.common.snapshot import SharedRandom, of_torch, random_state, set_random_state, shared_random
from booster.data import DRAWS, OWN_STATE, DataLoaderWrapper, is_stateful, skips
from booster.interface.scheduler import LRSchedulerWrapper, known_state
from booster.model.params import is_dtensor


class StatefulObjects(Part):
    """Loaders, schedulers and the user's `extra`: what takes its state by `load_state_dict`.

    The position of a loader is the same on all ranks; `loaders` holds what of its state is each rank's own.
    """

    of_ranks = ("loaders", "extras")
    turn = 2

    @property
    def named(self) -> Mapping[str, Mapping[str, Any]]:
        return {"dataloaders": self.objects.dataloaders, "lr_schedulers": self.objects.lr_schedulers}

    def collect(self, into: SaveContext) -> dict[str, Any]:
        positions = {name: split_state(loader) for name, loader in self.objects.dataloaders.items()}
        of_rank = {
            name: into.per_rank(state, f"dataloaders/{name}/{into.rank}")
            for name, (_, state) in positions.items()
            if state is not None
        }
        extra = self.objects.extra
        stateful = callable(getattr(extra, "state_dict", None))
        # Every rank collects: a state dict may run collectives, and DTensors are written by all ranks.
        extra = into.replicated(_states(extra.state_dict() if stateful else extra), "extra")
        if into.rank:
            return {"loaders": of_rank, "extras": extra}
        return {
            "loaders": of_rank,
            "extras": extra,
            "extra": extra,
            "dataloaders": {
                name: into.per_rank(position, f"dataloaders/{name}") for name, (position, _) in positions.items()
            },
            "lr_schedulers": {
                name: into.per_rank(part.state_dict(), f"lr_schedulers/{name}")
                for name, part in self.objects.lr_schedulers.items()
            },
        }

    def compare(self, found: LoadContext) -> Iterator[str]:
        saved = found.saved
        for kind, own in self.named.items():
            there = saved.tree.get(kind, {})
            for name in [name for name in own if name in there]:
                saved.request_all(there[name])
                if kind == "dataloaders":
                    yield from self._compare_loader(name, found)
        extra = extra_of(found)
        for path, like in _placed(self.objects.extra, "extra"):
            saved.request(path, like)
        saved.request_all(extra)
        # Another number of ranks: nobody can say whose state belongs to whom, so all begin with one.
        if "extras" in saved.tree and extra is saved.tree["extra"]:
            saved.notes.append(
                f"extra is that of {len(saved.tree['extras'])} ranks, each its own; this job has {found.world_size}, and all "
                "get the first rank's"
            )

    def _compare_loader(self, name: str, found: LoadContext) -> Iterator[str]:
        saved, loaders = found.saved, found.saved.tree["loaders"]
        if len(loaders) == found.world_size:
            saved.request_all(loaders[found.rank].get(name))
        # A stateful loader of another library deals its shards by itself, in a form that is its own.
        elif any(OWN_STATE in of_rank.get(name, {}) for of_rank in loaders):
            yield (
                f"dataloaders {name!r}: its state is that of {len(loaders)} ranks, each its own, and this job has "
                f"{found.world_size}; load on as many ranks, or leave the dataloader out, or train with one of "
                "b.prepare_dataloader, which deals the rest of the epoch to any number"
            )
        elif saved.tree["dataloaders"][name].get("batches") and not skips(self.objects.dataloaders[name].unwrap()):
            yield (
                f"dataloaders {name!r}: it is in the middle of an epoch of {len(loaders)} ranks, and this job has "
                f"{found.world_size}, which have another order; load on as many ranks, or leave the dataloader out, or train "
                "with one of b.prepare_dataloader, which deals the rest of the epoch to any number"
            )

    def prepare(self, found: LoadContext) -> None:
        saved = found.saved
        self._states = [(loader, self._state_of(name, found)) for name, loader in self.objects.dataloaders.items()]
        for name, part in self.objects.lr_schedulers.items():
            state = saved.value(saved.tree["lr_schedulers"][name])
            state, left_out = known_state(part.unwrap() if isinstance(part, LRSchedulerWrapper) else part, state)
            saved.notes += [f"lr_schedulers {name!r}: {left_out}"] * bool(left_out)
            self._states.append((part, state))
        # After loaders and schedulers: the user's own objects may read these as they load.
        self._states += _takers(self.objects.extra, saved.value(extra_of(found)))

    def _state_of(self, loader: str, found: LoadContext) -> Any:
        saved, loaders = found.saved, found.saved.tree["loaders"]
        position = saved.value(saved.tree["dataloaders"][loader])
        if len(loaders) != found.world_size:
            return position
        own = saved.value(loaders[found.rank].get(loader, {}))
        ours = isinstance(self.objects.dataloaders[loader], DataLoaderWrapper)
        # What is each rank's own wins over what all share.
        return {**position, **own} if ours else own[OWN_STATE]

    def steps(self) -> Iterator[Step]:
        yield "dataloaders, lr_schedulers or extra", self._hand_over

    def _hand_over(self, undo: ExitStack) -> None:
        for part, state in self._states:
            undo.callback(snapshot(part))
            part.load_state_dict(state)


def split_state(loader: Any) -> tuple[dict[str, Any], Any]:
    """Return the position of a loader, the same on all ranks, and what is each rank's own; None where nothing is."""
    state = loader.state_dict()
    if not isinstance(loader, DataLoaderWrapper):
        return {}, {OWN_STATE: state}
    own = {key: state[key] for key in (OWN_STATE, DRAWS) if key in state}
    return {key: value for key, value in state.items() if key not in own}, own or None


def _states(extra: Any) -> Any:
    """What the user gave, with the state of every object in it that has one."""
    if isinstance(extra, Mapping):
        return {key: _states(value) for key, value in extra.items()}
    if type(extra) in (list, tuple):
        return type(extra)(map(_states, extra))
    return extra.state_dict() if is_stateful(extra) else extra


def extra_of(found: LoadContext) -> Any:
    """What the tree says of this rank's `extra`: its own where ranks gave others and as many load, else the first rank's."""
    extras = found.saved.tree.get("extras", [])
    own = extras[found.rank] if len(extras) == found.world_size else None
    return found.saved.tree["extra"] if own is None else own


def _placed(extra: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the job's own `extra` that ranks hold parts of, by their names in a checkpoint."""
    if is_dtensor(extra):
        yield path, extra
    elif is_stateful(extra):
        yield from _placed(extra.state_dict(), path)
    elif isinstance(extra, Mapping):
        for key, value in extra.items():
            yield from _placed(value, f"{path}/{key}")
    elif type(extra) in (list, tuple):
        for index, value in enumerate(extra):
            yield from _placed(value, f"{path}/{index}")


def _takers(extra: Any, state: Any) -> Iterator[tuple[Any, Any]]:
    """The objects of the user's `extra` that take a state, with theirs."""
    if callable(getattr(extra, "load_state_dict", None)):
        yield extra, state
    elif isinstance(extra, Mapping) and isinstance(state, Mapping):
        for key, value in extra.items():
            if key in state:
                yield from _takers(value, state[key])
    elif isinstance(extra, (list, tuple)) and isinstance(state, (list, tuple)):
        for value, own in zip(extra, state, strict=False):
            yield from _takers(value, own)


class ErrorFeedback(Part):
    """What each rank alone carries from step to step, see `Plugin.error_feedback`."""

    of_ranks = ("carried",)

    def collect(self, into: SaveContext) -> dict[str, Any]:
        return {
            "carried": {
                name: into.per_rank(
                    {key: errors[p] for key, p in self.objects.models[name].named_parameters() if p in errors},
                    f"carried/{name}/{into.rank}",
                )
                for name, errors in self.objects.error_feedback.items()
            }
        }

    def compare(self, found: LoadContext) -> Iterator[str]:
        for name in self.objects.error_feedback:
            yield from self._compare(name, found)

    def _compare(self, name: str, found: LoadContext) -> Iterator[str]:
        saved, ranks = found.saved, found.saved.tree.get("carried", [])
        # Rounding errors belong to a rank's own sends; another number of ranks has other ones, and an error is no reason to
        # stop.
        if len(ranks) != found.world_size or name not in ranks[found.rank]:
            those = f"it is that of {len(ranks)} ranks" if ranks and len(ranks) != found.world_size else "there is none"
            saved.notes.append(
                f"models {name!r}: what rounding took from gradients (error_feedback=True) is left out, since {those}; it "
                "begins anew"
            )
            return
        params = dict(self.objects.models[name].named_parameters())
        for key, value in ranks[found.rank][name].items():
            entry = saved.entry(reference(value))
            fits = key in params and entry is not None and entry.shape == (params[key].numel(),)
            if not fits or not dtype_of(entry).is_floating_point:  # type: ignore[arg-type]
                yield f"models {name!r}: what is carried of {key} fits no parameter here"
            else:
                saved.request(reference(value), params[key])  # on its device

    def prepare(self, found: LoadContext) -> None:
        ranks = found.saved.tree.get("carried", [])
        own = ranks[found.rank] if len(ranks) == found.world_size else {}
        self._values: dict[str, dict[torch.Tensor, torch.Tensor]] = {}
        for name in self.objects.error_feedback:
            params = dict(self.objects.models[name].named_parameters())
            self._values[name] = {params[key]: value for key, value in found.saved.value(own.get(name, {})).items()}

    def finish(self) -> None:
        for name, errors in self.objects.error_feedback.items():
            # In place: the plugin's hooks hold this very dict.
            errors.clear()
            errors.update(self._values[name])


class Random(Part):
    """Random states, each rank's own. What other loads draw is undone: they are set before all others, and once more after."""

    of_ranks = ("random",)

    def collect(self, into: SaveContext) -> dict[str, Any]:
        models = {name: [each.state for each in shared] for name, shared in self._shared().items()}
        return {"random": into.per_rank({**random_state(), "models": models}, f"random/{into.rank}")}

    def _shared(self) -> dict[str, list[SharedRandom]]:
        """By the name of a model, what ranks that divide its layers draw by."""
        return {name: shared_random(model.module) for name, model in self.objects.models.items()}

    def compare(self, found: LoadContext) -> Iterator[str]:
        ranks = found.saved.tree["random"]
        if found.same_ranks:
            found.saved.request_all(ranks[found.rank])
        else:
            found.saved.notes.append(
                f"random states are of a job with world_size {len(ranks)} and are left out; this one has {found.world_size}"
            )
        return iter(())

    def prepare(self, found: LoadContext) -> None:
        ranks = found.saved.tree["random"]
        self._state: Any = found.saved.value(ranks[found.rank]) if found.same_ranks else None

    def steps(self) -> Iterator[Step]:
        yield "the random states", self._hand_over

    def _hand_over(self, undo: ExitStack) -> None:
        undo.callback(set_random_state, random_state())
        for each in chain.from_iterable(self._shared().values()):
            undo.callback(setattr, each, "state", each.state)
        # Before other objects load, since some draw as they do; `finish` sets them once more after all.
        self.finish()

    def finish(self) -> None:
        if self._state is not None:
            set_random_state(self._state)
            for name, shared in self._shared().items():
                for each, state in zip(shared, self._state.get("models", {}).get(name, ()), strict=False):
                    each.state = state if state is None else list(map(of_torch, state))
