"""Loading: everything is read, verified and compared with the job before any object is touched."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from booster.casting import HALF_DTYPES
from booster.checkpoint.agree import agree_on_success, exchange, first_failure, is_first
from booster.checkpoint.folder import checkpoints, damage, latest, standing
from booster.checkpoint.layout import Held, LoadPlanner, empty_like_whole, placed_like
from booster.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, Tensor, read_manifest
from booster.checkpoint.parts import Loaded, Parts, parts
from booster.checkpoint.plain import decode
from booster.checkpoint.saving import STATE
from booster.checkpoint.storage import ManifestReader, dtype_of
from booster.checkpoint.weights import weights_for
from booster.data import OWN_STATE, DataLoaderWrapper
from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper, updates_of
from booster.masters.loaded import LoadedWeights
from booster.modules import bare
from booster.randomness import set_random_state
from booster.shards.divided import Divided
from booster.trees import map_tensors
from booster.update.checkpoint import PARAMETERS, STATE_KEY
from booster.update.loading import Reading

_logger = logging.getLogger(__name__)


def find(root: str | os.PathLike[str], group: dist.ProcessGroup | None) -> Path:
    """Return the checkpoint that `root` is, or the newest valid one below it, the same on every rank; a collective.

    Raises CheckpointError on every rank if there is none, or if the one that was named is damaged.
    """
    found: str | None = None
    problem: BaseException | None = None
    if is_first(group):
        try:
            found = str(_find(Path(root)))
        except (OSError, CheckpointError) as error:
            problem = error
    agree_on_success(problem, group)
    return Path(exchange(found, group)[0])


def load(folder: Path, parts: Parts, *, strict: bool, group: dist.ProcessGroup | None) -> Loaded:
    """Load the checkpoint in `folder`, which `find` gave, into the objects of `parts`; a collective over `group`.

    If it raises, on any rank, it raises on all, and no object has changed.
    """
    rank = 0 if group is None else dist.get_rank(group)
    problem: BaseException | None = None
    reading: _Reading | None = None
    try:
        manifest = read_manifest(folder)
        tree = json.loads((folder / STATE).read_bytes())
        reading = _Reading(folder, manifest, tree, parts, rank)
        reading.compare(strict=strict)
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        problem = error
    agree_on_success(problem, group)
    assert reading is not None  # there was no problem
    try:
        reading.read(group)
    except CheckpointException as error:
        raise CheckpointError(f"reading {folder} failed {first_failure(error)}; nothing was loaded") from error
    try:
        reading.prepare()
    except (ValueError, KeyError, TypeError, CheckpointError) as error:
        problem = error
    agree_on_success(problem, group)
    return reading.apply(group)


def anything_in(root: Path, group: dist.ProcessGroup | None) -> bool:
    """Return whether `root` is a checkpoint or holds any, valid or not; the same on every rank, a collective."""
    there = is_first(group) and ((standing(root) / MANIFEST).exists() or any(True for _ in checkpoints(root)))
    return exchange(there, group)[0]


def load_model(model: ModelWrapper, path: Path, *, strict: bool, group: dist.ProcessGroup | None) -> None:
    """Load weights from plain files, or from a checkpoint, into a boosted model; see `Booster.load_model`. A collective."""
    if exchange((path / MANIFEST).exists(), group)[0]:
        load(find(path, group), parts(model, None, None, None, None, None), strict=strict, group=group)
        return
    problem: Exception | None = None
    state: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    try:
        state, left_out = weights_for(model, path, strict=strict)
    except (CheckpointError, OSError) as error:
        problem = error
    agree_on_success(problem, group)
    model.load_state_dict(state, strict=False)
    for text in left_out:
        _logger.warning("%s: %s", path, text)


class _Reading:
    """One load on one rank: `compare`, `read`, `prepare`, and only then `apply`."""

    def __init__(self, folder: Path, manifest: Manifest, tree: dict[str, Any], parts: Parts, rank: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tree = tree
        self.parts = parts
        self.rank = rank
        self.targets: dict[str, Held] = {}
        self.notes: list[str] = []

    # ------------------------------------------------------------------ before anything is read

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
            missing = sorted(found.keys() - self.tree.get(kind, {}).keys())
            if missing:
                different.append(f"{kind}: the checkpoint has {sorted(self.tree.get(kind, {}))}, not {missing}")
        for kind, modules in (("models", self.parts.models), ("criteria", self.parts.criteria)):
            for name, module in modules.items():
                different += self._compare_module(kind, name, module, strict=strict)
        for name, optimizer in self.parts.optimizers.items():
            if name in self.tree["optimizers"]:
                different += self._compare_optimizer(name, optimizer)
        for kind in ("dataloaders", "lr_schedulers"):
            for name in self._found(kind):
                self._want_all(self.tree[kind][name])
        for name in self._found("dataloaders"):
            different += self._compare_loader(name)
        self._want_all(self.tree["extra"])
        if self._same_ranks:
            self._want_all(self.tree["random"][self.rank])
        else:
            self.notes.append(
                f"random states are those of {len(self.tree['random'])} ranks and are left out; this job has another number"
            )
        if different:
            raise CheckpointError(
                f"{self.folder} does not fit this job:\n  " + "\n  ".join(different) + "\nBuild model and optimizer as "
                "they were when it was saved" + (", or pass strict=False to leave out entries of the model" * strict)
            )

    def _compare_module(self, kind: str, name: str, module: nn.Module, *, strict: bool) -> Iterator[str]:
        saved = self.tree[kind].get(name)
        if saved is None:
            return
        current = module.state_dict()
        sources = self._sources(kind, module, saved, current)
        missing = [key for key in current if key not in saved]
        # A rank of a pipeline holds some layers; what no rank wants cannot be seen from here.
        partial = getattr(getattr(module, "module", None), "is_partial", False)
        extra = [] if partial else [key for key in saved if key not in current]
        for keys, text in ((missing, "are not in the checkpoint"), (extra, "are not in this model")):
            if keys and strict:
                yield f"{kind} {name!r}: {_listed(keys)} {text}"
            elif keys:
                self.notes.append(f"{kind} {name!r}: {_listed(keys)} {text}")
        for key, value in current.items():
            reference = saved.get(key)
            if reference is None or not isinstance(value, torch.Tensor):
                self._want_all(reference)
                continue
            entry = self._entry(sources[key])
            if entry is None or entry.shape != tuple(value.shape):
                shape = "no tensor" if entry is None else f"shape {entry.shape}"
                yield f"{kind} {name!r}: {key} has {shape} in the checkpoint and shape {tuple(value.shape)} here"
                continue
            self._want(sources[key], value)

    def _compare_loader(self, name: str) -> Iterator[str]:
        if len(self._loaders) == self._world_size:
            self._want_all(self._loaders[self.rank].get(name))
        elif any(OWN_STATE in loaders.get(name, {}) for loaders in self._loaders):
            yield (
                f"dataloaders {name!r}: its state is that of {len(self._loaders)} ranks, each its own, and this job has "
                f"{self._world_size}; load on as many ranks, or leave the dataloader out, or train with one of "
                "b.prepare_dataloader, whose rest of the epoch is dealt to any number"
            )

    def _compare_optimizer(self, name: str, optimizer: OptimizerWrapper) -> Iterator[str]:
        saved = self.tree["optimizers"][name]
        own_class = type(optimizer.unwrap()).__name__
        if saved["class"] != own_class:
            yield f"optimizers {name!r}: the checkpoint is of {saved['class']}, this is {own_class}"
            return
        groups = optimizer.parameter_names()
        if len(groups) != len(saved["groups"]):
            yield f"optimizers {name!r}: the checkpoint has {len(saved['groups'])} parameter groups, this has {len(groups)}"
            return
        for index, (own, group) in enumerate(zip(groups, saved["groups"], strict=True)):
            unknown = [param for param, _ in own if param not in group["params"]]
            if unknown:
                yield f"optimizers {name!r}: {_listed(unknown)} of group {index} are not in that group of the checkpoint"
        params = dict(zip((n for g in groups for n, _ in g), _params(optimizer), strict=True))
        for param_name, param in params.items():
            for reference in (saved["state"].get(param_name) or {}).values():
                self._want_part(_reference(reference), param, optimizer)
            if optimizer.has_master(param):
                self._want_part(self._wide(param_name, name), param, optimizer)
        for key, value in saved[STATE_KEY].items():
            if key != "masters":
                self._want_all(value)
        self._want_all((saved[STATE_KEY].get("masters") or {}).get("rounding"))
        for group in saved["groups"]:
            self._want_all(group["options"])

    # ------------------------------------------------------------------ reading

    def read(self, group: dist.ProcessGroup | None) -> None:
        """Fill `targets` from the files; a collective. Nothing of the user's is touched."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(
                self.targets,
                storage_reader=ManifestReader(self.folder, self.manifest),
                planner=LoadPlanner(),
                process_group=group,
                no_dist=group is None,
            )

    def prepare(self) -> None:
        """Make of what was read the state dicts that the objects take."""
        self._module_states: list[tuple[nn.Module, dict[str, Any]]] = []
        for kind, modules in (("models", self.parts.models), ("criteria", self.parts.criteria)):
            for name, module in modules.items():
                saved, current, state = self.tree[kind][name], module.state_dict(), {}
                sources = self._sources(kind, module, saved, current)
                for key, value in current.items():
                    if key not in saved:
                        continue
                    if isinstance(value, torch.Tensor):
                        state[key] = placed_like(self.targets[str(sources[key])], value)  # type: ignore[arg-type]
                    else:
                        state[key] = decode(saved[key], self.targets)
                self._module_states.append((module, state))
        self._optimizer_states = [
            (optimizer, self._optimizer_state(name, optimizer)) for name, optimizer in self.parts.optimizers.items()
        ]
        self._other_states = [
            (loader, self._loader_state(name, loader)) for name, loader in self.parts.dataloaders.items()
        ]
        self._other_states += [
            (part, decode(self.tree["lr_schedulers"][name], self.targets))
            for name, part in self.parts.lr_schedulers.items()
        ]
        self._extra = decode(self.tree["extra"], self.targets)
        self._random = decode(self.tree["random"][self.rank], self.targets) if self._same_ranks else None

    def _loader_state(self, name: str, loader: Any) -> Any:
        position = decode(self.tree["dataloaders"][name], self.targets)
        if len(self._loaders) != self._world_size:
            return position
        own = decode(self._loaders[self.rank].get(name, {}), self.targets)
        return {**position, **own} if isinstance(loader, DataLoaderWrapper) else own[OWN_STATE]

    def _optimizer_state(self, name: str, optimizer: OptimizerWrapper) -> dict[str, Any]:
        saved = self.tree["optimizers"][name]
        groups = optimizer.parameter_names()
        numbers = {param: number for number, (param, _) in enumerate(entry for own in groups for entry in own)}
        param_groups = [
            {**decode(group["options"], self.targets), "params": [numbers[param] for param, _ in own]}
            for own, group in zip(groups, saved["groups"], strict=True)
        ]
        state = {
            number: decode(saved["state"][param], self.targets)
            for param, number in numbers.items()
            if param in saved["state"]
        }
        own = {key: decode(value, self.targets) for key, value in saved[STATE_KEY].items() if key != "masters"}
        if set(own["loss_scaler"]) != set(optimizer.scaler_state()):
            self.notes.append(
                f"optimizers {name!r}: the loss scale is left as it is, because the precision that saved has another kind"
            )
            own["loss_scaler"] = optimizer.scaler_state()
        rounding = (saved[STATE_KEY].get("masters") or {}).get("rounding")
        if any(map(optimizer.has_master, _params(optimizer))) or (rounding and optimizer.keeps_masters):
            held = dict(zip(numbers, _params(optimizer), strict=True))
            weights = {name_: self._wide(name_, name) for name_, param in held.items() if optimizer.has_master(param)}
            own["masters"] = {
                "weights": {param: _float(self.targets[key]) for param, key in weights.items() if key is not None},
                **({"rounding": decode(rounding, self.targets)} if rounding else {}),
            }
        if optimizer.is_partial:
            own[PARAMETERS] = list(numbers)
        return {"state": state, "param_groups": param_groups, STATE_KEY: own}

    # ------------------------------------------------------------------ applying

    def apply(self, group: dist.ProcessGroup | None) -> Loaded:
        """Hand every object its state: first those that may refuse it, and that can be undone; then what only copies."""
        readings: list[Reading] = []
        with ExitStack() as undo:
            for name, (optimizer, state) in zip(self.parts.optimizers, self._optimizer_states, strict=True):
                with self._agreed(f"optimizers {name!r}", group):
                    readings.append(optimizer.read_state_dict(state))
                    undo.callback(readings[-1].undo)
            with self._agreed("dataloaders, lr_schedulers or extra", group):
                for part, state in [*self._other_states, *_takers(self.parts.extra, self._extra)]:
                    undo.callback(_way_back(part))
                    part.load_state_dict(state)
            undo.pop_all()
        for module, state in self._module_states:
            module.load_state_dict(state, strict=False)
        for read in readings:
            read.take_over()
        if self._random is not None:
            set_random_state(self._random)
        for note in self.notes:
            _logger.warning("%s: %s", self.folder, note)
        return Loaded(self.manifest.step, self._extra, self.folder)

    # ------------------------------------------------------------------ inside

    @contextmanager
    def _agreed(self, what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
        """If the body raises on one rank, raise CheckpointError on all."""
        problem: CheckpointError | None = None
        try:
            yield
        except Exception as error:
            problem = CheckpointError(f"{self.folder} does not load into {what}, and nothing was loaded: {error}")
            problem.__cause__ = error
        agree_on_success(problem, group)

    @property
    def _loaders(self) -> list[dict[str, Any]]:
        """What of each loader's state is each rank's own, by rank and name."""
        loaders: list[dict[str, Any]] = self.tree["loaders"]
        return loaders

    @property
    def _same_ranks(self) -> bool:
        return len(self.tree["random"]) == self._world_size

    @property
    def _world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def _found(self, kind: str) -> list[str]:
        return [name for name in getattr(self.parts, kind) if name in self.tree.get(kind, {})]

    def _entry(self, name: str | None) -> Tensor | None:
        return self.manifest.tensors.get(name) if name is not None else None

    def _want(self, name: str | None, like: torch.Tensor | None) -> None:
        entry = self._entry(name)
        if name is not None and entry is not None and name not in self.targets:
            self.targets[name] = empty_like_whole(entry.shape, dtype_of(entry), like)

    def _want_part(self, name: str | None, param: torch.Tensor, optimizer: OptimizerWrapper) -> None:
        """Want what this rank steps of a state of `param`; all of it where it has another shape."""
        entry = self._entry(name)
        if name is not None and entry is not None and name not in self.targets and entry.shape == tuple(param.shape):
            (update,) = updates_of([optimizer])
            part = update.shards.part_to_read(param, dtype_of(entry))
            if part is not None:
                self.targets[name] = part
        self._want(name, param)

    def _want_all(self, tree: Any) -> None:
        for name in _references(tree):
            self._want(name, None)

    def _sources(
        self, kind: str, module: nn.Module, saved: Mapping[str, Any], current: Mapping[str, Any]
    ) -> dict[str, str | None]:
        """Which tensor of the checkpoint each entry of a module is read from: where float32 numbers stand behind it, these.

        Not if the module wants just the half weights that were saved: rounded anew, ties could become others.
        """
        sources = {key: _reference(value) for key, value in saved.items()}
        wide = self._masters_of_models() if kind == "models" else {}
        watched = LoadedWeights.watched(bare(module.module)) if isinstance(module, ModelWrapper) else set()
        for key in wide.keys() & sources.keys() & current.keys():
            entry = self._entry(sources[key])
            same = entry is not None and dtype_of(entry) in HALF_DTYPES and current[key].dtype == dtype_of(entry)
            if key in watched or not same:
                sources[key] = wide[key]
        return sources

    def _masters_of_models(self) -> dict[str, str]:
        """The float32 numbers behind half weights, by the model's key; where several models share a name, none."""
        if len(self.tree["models"]) != 1:
            return {}
        found: dict[str, str] = {}
        for saved in self.tree["optimizers"].values():
            weights = (saved[STATE_KEY].get("masters") or {}).get("weights", {})
            found |= {key: name for key, value in weights.items() if (name := _reference(value)) is not None}
        return found

    def _wide(self, param: str, optimizer: str) -> str | None:
        """Where the widest numbers of a parameter are: its master's, else those of its weight."""
        saved = self.tree["optimizers"][optimizer][STATE_KEY].get("masters") or {}
        master = _reference(saved.get("weights", {}).get(param))
        if master is not None:
            return master
        holders = [tree[param] for tree in self.tree["models"].values() if param in tree]
        return _reference(holders[0]) if len(holders) == 1 else None


def _find(root: Path) -> Path:
    root = standing(root)
    if (root / MANIFEST).exists():
        bad = damage(root)
        if bad:
            raise CheckpointError(f"{root} is damaged: " + "; ".join(bad))
        return root
    found = latest(root)
    if found is None:
        names = [path.name for _, path in checkpoints(root)]
        raise CheckpointError(
            f"there is no valid checkpoint in {root}: "
            + (f"{names} are damaged (see the warnings)" if names else "it holds no folder `step-...`")
        )
    return found


def _takers(extra: Any, state: Any) -> Iterator[tuple[Any, Any]]:
    """The objects of the user's `extra` that take a state, with theirs."""
    if callable(getattr(extra, "load_state_dict", None)):
        yield extra, state
    elif isinstance(extra, Mapping) and isinstance(state, Mapping):
        for key, value in extra.items():
            if key in state:
                yield from _takers(value, state[key])


def _way_back(part: Any) -> Callable[[], None]:
    """Return what gives `part` the state that it has now."""
    # Copied, and to host memory: loading writes into the tensors that are there.
    state = map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), part.state_dict(), copy_containers=True)
    attributes = dict(vars(part)) if isinstance(part, DataLoaderWrapper) else {}

    def back() -> None:
        part.load_state_dict(state)
        if attributes:  # its state says where to go on, and not that nobody had asked for that
            vars(part).update(attributes)

    return back


def _float(tensor: Held) -> Held:
    return tensor.with_values(tensor.values.float()) if isinstance(tensor, Divided) else tensor.float()


def _reference(value: Any) -> str | None:
    """The name of the tensor that an entry of the tree refers to."""
    return value["name"] if isinstance(value, dict) and value.get("__booster__") == "tensor" else None


def _references(tree: Any) -> Iterator[str]:
    name = _reference(tree)
    if name is not None:
        yield name
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _references(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _references(value)


def _params(optimizer: OptimizerWrapper) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
