"""Loading: everything is read, verified and compared with the job before any object is touched."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from booster.checkpoint.agree import agree_on_success, exchange, is_first
from booster.checkpoint.folder import checkpoints, damage, manifest_now, standing
from booster.checkpoint.hashing import new_hash
from booster.checkpoint.layout import reference
from booster.checkpoint.manifest import MANIFEST, CheckpointError
from booster.checkpoint.parts import Loaded, Parts, parts
from booster.checkpoint.saved import Saved, SavedModule, SavedOptimizer, listed
from booster.checkpoint.tensor_file import dtype_of
from booster.checkpoint.way_back import load_module, may_refuse, way_back
from booster.checkpoint.weights import weights_for
from booster.data import OWN_STATE, DataLoaderWrapper, skips
from booster.ground.foreign_files import printable
from booster.ground.randomness import random_state, set_random_state
from booster.interface.model import ModelWrapper, Pinned, pins_of
from booster.interface.scheduler import LRSchedulerWrapper, known_state
from booster.model.modules import bare
from booster.update.loading import Reading

_logger = logging.getLogger(__name__)


def load(root: Path, parts: Parts, *, strict: bool, group: dist.ProcessGroup | None) -> Loaded:
    """Load the checkpoint that `root` is, or the newest valid one below it, into the objects of `parts`; a collective.

    Files are compared with their hashes as they are read. If it raises, on any rank, it raises on all, and no object has
    changed.
    """
    new_hash()  # raises on every rank where xxhash is missing
    passed_over: list[str] = []
    while True:
        folder = _candidate(root, passed_over, group)
        before = manifest_now(folder)
        try:
            loading = _read(folder, parts, strict=strict, group=group)
            break
        except (OSError, CheckpointError) as error:
            # What the first rank sees counts: another process may be replacing the folder.
            found = damage(folder) if is_first(group) else []
            bad, replaced, named = exchange([found, before != manifest_now(folder), folder == standing(root)], group)[0]
            if bad and named:
                raise CheckpointError(f"{folder} is damaged: {'; '.join(bad)}") from error
            if bad:
                if is_first(group):
                    _logger.warning("checkpoint %s is passed over: %s", folder, printable("; ".join(bad)))
                passed_over.append(folder.name)
            elif not replaced:  # by a newer one of this name, while it was read
                raise
    return loading.apply(group)


def _candidate(root: Path, passed_over: list[str], group: dist.ProcessGroup | None) -> Path:
    """Return the checkpoint to try, the same on every rank; a collective. Raises CheckpointError if none is left."""
    found: str | None = None
    problem: BaseException | None = None
    if is_first(group):
        try:
            found = str(_next(root, passed_over))
        except (OSError, CheckpointError) as error:
            problem = error
    agree_on_success(problem, group)
    return Path(exchange(found, group)[0])


def _next(root: Path, passed_over: list[str]) -> Path:
    named = standing(root)
    if (named / MANIFEST).exists():
        return named
    below = [path for _, path in checkpoints(named)]
    left = [path for path in below if path.name not in passed_over]
    if not left:
        names = [path.name for path in below]
        raise CheckpointError(
            f"there is no valid checkpoint in {root}: "
            + (f"{names} are damaged (see the warnings)" if names else "it holds no folder `step-...`")
        )
    return left[0]


def _read(folder: Path, parts: Parts, *, strict: bool, group: dist.ProcessGroup | None) -> _Loading:
    """Read and verify a checkpoint, and compare it with the job; touches no object. Raises on all ranks, or on none."""
    found: list[_Loading] = []
    with _agreed(f"{folder} cannot be compared with this job", group):
        found.append(_Loading(Saved(folder), parts, 0 if group is None else dist.get_rank(group)))
        found[0].compare(strict=strict)
    (loading,) = found
    loading.saved.read(group)
    with _agreed(f"{folder} does not say what save() writes", group):
        loading.prepare()
    return loading


@contextmanager
def _agreed(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """If the body raises on one rank, raise on all: an OSError as it is, anything else as a CheckpointError."""
    problem: BaseException | None = None
    try:
        yield
    except (OSError, CheckpointError) as error:
        problem = error
    except Exception as error:  # whatever a wrong file or a wrong job leads to
        problem = CheckpointError(f"{what}: {type(error).__name__}: {error}")
        problem.__cause__ = error
    agree_on_success(problem, group)


def anything_in(root: Path, group: dist.ProcessGroup | None) -> bool:
    """Return whether `root` is a checkpoint or holds any, valid or not; the same on every rank, a collective."""
    there = is_first(group) and ((standing(root) / MANIFEST).exists() or any(True for _ in checkpoints(root)))
    return exchange(there, group)[0]


def load_model(model: ModelWrapper, path: Path, *, strict: bool, group: dist.ProcessGroup | None) -> None:
    """Load weights from plain files, or from a checkpoint, into a boosted model; see `Booster.load_model`. A collective."""
    if exchange((path / MANIFEST).exists(), group)[0]:
        load(path, parts(model, None, None, None, None, None), strict=strict, group=group)
        return
    problem: Exception | None = None
    state: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    try:
        state, left_out = weights_for(model, path, strict=strict)
    except (CheckpointError, OSError) as error:
        problem = error
    agree_on_success(problem, group)
    with ExitStack() as undo:
        with _refusable(f"{path} does not load into this model", group):
            load_module(model, state, undo)
        undo.pop_all()
    if left_out:
        _logger.warning("%s: %s", path, printable(listed(left_out)))


@contextmanager
def _refusable(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """As `_agreed`, for an object of the user's: whatever it raises, nothing was loaded."""
    problem: CheckpointError | None = None
    try:
        yield
    except Exception as error:
        problem = CheckpointError(f"{what}, and nothing was loaded: {error}")
        problem.__cause__ = error
    agree_on_success(problem, group)


class _Loading:
    """One load on one rank: `compare`, then `saved.read`, `prepare`, and only then `apply`."""

    def __init__(self, saved: Saved, parts: Parts, rank: int) -> None:
        self.saved = saved
        self.parts = parts
        self.rank = rank
        self._modules = [
            (f"{kind} {name!r}", module, SavedModule(saved, kind, name, module))
            for kind, modules in (("models", parts.models), ("criteria", parts.criteria))
            for name, module in modules.items()
        ]
        homes: dict[torch.Tensor, tuple[str, str]] = {
            param: (name, key)
            for name, model in parts.models.items()
            for key, param in bare(model.module).named_parameters()
        }
        self._optimizers = [
            (name, optimizer, SavedOptimizer(saved, name, optimizer, homes))
            for name, optimizer in parts.optimizers.items()
        ]

    def compare(self, *, strict: bool) -> None:
        """Raise CheckpointError that lists all that differs between the checkpoint and the job; note what is to be read."""
        different: list[str] = []
        for kind, found in (
            ("models", self.parts.models),
            ("criteria", self.parts.criteria),
            ("optimizers", self.parts.optimizers),
            ("dataloaders", self.parts.dataloaders),
            ("lr_schedulers", self.parts.lr_schedulers),
        ):
            missing = sorted(found.keys() - self.saved.tree.get(kind, {}).keys())
            if missing:
                different.append(f"{kind}: the checkpoint has {sorted(self.saved.tree.get(kind, {}))}, not {missing}")
        for _, _, saved_module in self._modules:
            different += saved_module.differences(strict=strict)
        different += self._compare_pins()
        for _, _, saved_optimizer in self._optimizers:
            different += saved_optimizer.differences()
        for kind in ("dataloaders", "lr_schedulers"):
            for name in self._found(kind):
                self.saved.want_all(self.saved.tree[kind][name])
        for name in self._found("dataloaders"):
            different += self._compare_loader(name)
        for name in self.parts.carried:
            different += self._compare_carried(name)
        self.saved.want_all(self.saved.tree["extra"])
        if self._same_ranks:
            self.saved.want_all(self.saved.tree["random"][self.rank])
        else:
            ranks = len(self.saved.tree["random"])
            self.saved.notes.append(
                f"random states are those of {ranks} ranks and are left out; this job has another number"
            )
        if different:
            raise CheckpointError(
                f"{self.saved.folder} does not fit this job:\n  "
                + "\n  ".join(different)
                + "\nBuild model and optimizer as "
                "they were when it was saved" + (", or pass strict=False to leave out entries of the model" * strict)
            )

    def _compare_pins(self) -> Iterator[str]:
        for name, model in self.parts.models.items():
            state, pins = self._pins(name), pins_of(model)
            if pins is None and state.get("names"):
                self.saved.notes.append(
                    f"models {name!r}: modules {state['names']} were pinned to float32 in the run that was saved, and are not "
                    "here; pass keep_fp32='auto' to have them so, or name them in keep_fp32"
                )
            elif pins is not None and (missing := pins.missing(state)):
                yield f"models {name!r}: it has no modules {missing}, which were pinned to float32"

    def _pins(self, model: str) -> dict[str, Any]:
        """What was pinned in a model when it was saved; nothing in checkpoints of other precisions, and older ones."""
        found: dict[str, Any] = self.saved.tree.get("pins", {}).get(model, {})
        return found

    def _compare_loader(self, name: str) -> Iterator[str]:
        if len(self.saved.loaders) == self._world_size:
            self.saved.want_all(self.saved.loaders[self.rank].get(name))
        elif any(OWN_STATE in loaders.get(name, {}) for loaders in self.saved.loaders):
            yield (
                f"dataloaders {name!r}: its state is that of {len(self.saved.loaders)} ranks, each its own, and this job has "
                f"{self._world_size}; load on as many ranks, or leave the dataloader out, or train with one of "
                "b.prepare_dataloader, whose rest of the epoch is dealt to any number"
            )
        elif self.saved.tree["dataloaders"][name].get("batches") and not skips(self.parts.dataloaders[name].unwrap()):
            yield (
                f"dataloaders {name!r}: it is in the middle of an epoch of {len(self.saved.loaders)} ranks, and this job has "
                f"{self._world_size}, whose order is another; load on as many ranks, or leave the dataloader out, or train "
                "with one of b.prepare_dataloader, whose rest of the epoch is dealt to any number"
            )

    def _compare_carried(self, name: str) -> Iterator[str]:
        ranks = self.saved.tree.get("carried", [])  # older checkpoints have nothing of it
        if len(ranks) != self._world_size or name not in ranks[self.rank]:
            found = f"it is that of {len(ranks)} ranks" if ranks and len(ranks) != self._world_size else "there is none"
            self.saved.notes.append(
                f"models {name!r}: what rounding took from gradients (error_feedback=True) is left out, since {found}; it "
                "begins anew"
            )
            return
        params = dict(self.parts.models[name].named_parameters())
        for key, value in ranks[self.rank][name].items():
            entry = self.saved.entry(reference(value))
            fits = key in params and entry is not None and entry.shape == (params[key].numel(),)
            if not fits or not dtype_of(entry).is_floating_point:  # type: ignore[arg-type]
                yield f"models {name!r}: what is carried of {key} fits no parameter here"
        self.saved.want_all(ranks[self.rank][name])

    def prepare(self) -> None:
        """Make of what was read the state dicts that the objects take."""
        self._module_states = [(what, module, saved_module.state()) for what, module, saved_module in self._modules]
        self._optimizer_states = [
            (name, optimizer, saved_optimizer.state()) for name, optimizer, saved_optimizer in self._optimizers
        ]
        self._other_states = [
            (loader, self._loader_state(name, loader)) for name, loader in self.parts.dataloaders.items()
        ]
        for name, part in self.parts.lr_schedulers.items():
            state = self.saved.value(self.saved.tree["lr_schedulers"][name])
            state, left_out = known_state(part.unwrap() if isinstance(part, LRSchedulerWrapper) else part, state)
            self.saved.notes += [f"lr_schedulers {name!r}: {left_out}"] * bool(left_out)
            self._other_states.append((part, state))
        ranks = self.saved.tree.get("carried", [])
        own = ranks[self.rank] if len(ranks) == self._world_size else {}
        self._carried = {
            name: self._by_parameter(name, self.saved.value(own.get(name, {}))) for name in self.parts.carried
        }
        self._extra = self.saved.value(self.saved.tree["extra"])
        self._random: Any = self.saved.value(self.saved.tree["random"][self.rank]) if self._same_ranks else None

    def _by_parameter(self, model: str, carried: Mapping[str, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        params = dict(self.parts.models[model].named_parameters())
        return {params[key]: value.to(params[key].device) for key, value in carried.items()}

    def _loader_state(self, name: str, loader: Any) -> Any:
        position = self.saved.value(self.saved.tree["dataloaders"][name])
        if len(self.saved.loaders) != self._world_size:
            return position
        own = self.saved.value(self.saved.loaders[self.rank].get(name, {}))
        return {**position, **own} if isinstance(loader, DataLoaderWrapper) else own[OWN_STATE]

    def apply(self, group: dist.ProcessGroup | None) -> Loaded:
        """Hand every object its state: whatever may refuse it, so that it can be undone; then what only copies."""
        readings: list[Reading] = []
        modules = sorted(self._module_states, key=lambda entry: not may_refuse(entry[1]))
        refuses = f"{self.saved.folder} does not load into "
        with ExitStack() as undo:
            with _refusable(f"{refuses}the random states", group):
                undo.callback(set_random_state, random_state())  # what loads may draw numbers, too
                if self._same_ranks:
                    set_random_state(self._random)
            for name, optimizer, state in self._optimizer_states:
                with _refusable(f"{refuses}optimizers {name!r}", group):
                    readings.append(optimizer.read_state_dict(state))
                    undo.callback(readings[-1].undo)
            with _refusable(f"{refuses}dataloaders, lr_schedulers or extra", group):
                for part, state in [*self._other_states, *_takers(self.parts.extra, self._extra)]:
                    undo.callback(way_back(part))
                    part.load_state_dict(state)
            with _refusable(f"{refuses}the modules pinned to float32", group):
                for name, pins in self._pins_here():
                    undo.callback(pins.load_state_dict, copy.deepcopy(pins.state_dict()))
                    pins.load_state_dict(self._pins(name))
            for what, module, state in modules:
                with _refusable(f"{refuses}{what}", group):
                    load_module(module, state, undo)
            undo.pop_all()
        for read in readings:
            read.take_over()
        for name, carried in self.parts.carried.items():
            carried.clear()
            carried.update(self._carried[name])
        if self._same_ranks:
            set_random_state(self._random)
        if self.saved.notes:
            _logger.warning("%s: %s", self.saved.folder, printable("; ".join(self.saved.notes)))
        return Loaded(self.saved.manifest.step, self._extra, self.saved.folder)

    def _pins_here(self) -> Iterator[tuple[str, Pinned]]:
        for name, model in self.parts.models.items():
            if (pins := pins_of(model)) is not None:
                yield name, pins

    @property
    def _same_ranks(self) -> bool:
        return len(self.saved.tree["random"]) == self._world_size

    @property
    def _world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def _found(self, kind: str) -> list[str]:
        return [name for name in getattr(self.parts, kind) if name in self.saved.tree.get(kind, {})]


def _takers(extra: Any, state: Any) -> Iterator[tuple[Any, Any]]:
    """The objects of the user's `extra` that take a state, with theirs."""
    if callable(getattr(extra, "load_state_dict", None)):
        yield extra, state
    elif isinstance(extra, Mapping) and isinstance(state, Mapping):
        for key, value in extra.items():
            if key in state:
                yield from _takers(value, state[key])
