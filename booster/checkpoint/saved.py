"""What a checkpoint says: its tree of names, and the tensors behind them that a load wants and reads.

Modules, loaded: the entries of a model or criterion out of a checkpoint.

Optimizers, loaded: states, masters and loss scale out of a checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from booster.checkpoint.agree import agree_on_success, first_failure
from booster.checkpoint.layout import Held, LoadPlanner, decode, empty_like_whole, placed_like, reference, references
from booster.checkpoint.manifest import CheckpointError, Tensor, check_sizes, read_manifest
from booster.checkpoint.storage import ManifestReader
from booster.checkpoint.tensor_file import dtype_of, fits
from booster.checkpoint.tree import read_tree
from booster.checkpoint.weights import ties_that_differ
from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper, updates_of
from booster.masters.keeps import LoadedWeights
from booster.model.modules import bare
from booster.model.tied import names_of
from booster.shards.divided import Divided
from booster.tensors.trees import HALF_DTYPES
from booster.update.checkpoint import PARAMETERS, STATE_KEY


class Saved:
    """A checkpoint, opened. tree: what is no tensor, by kind of object and name, with a reference in each tensor's place.

    First everything is wanted (`want`, `want_part`, `want_all`), then all of it is read at once, then `value` gives it.
    notes: what the user is to be told if the load succeeds. Raises OSError or CheckpointError if it cannot be
    opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        check_sizes(folder, self.manifest)
        self.tree: dict[str, Any] = read_tree(folder, self.manifest)
        self.notes: list[str] = []
        self._targets: dict[str, Held] = {}

    # ------------------------------------------------------------------ what there is

    @property
    def loaders(self) -> list[dict[str, Any]]:
        """What of each loader's state is each rank's own, by rank and name."""
        loaders: list[dict[str, Any]] = self.tree["loaders"]
        return loaders

    def entry(self, name: str | None) -> Tensor | None:
        """Return shape and dtype of a tensor of the checkpoint; None where it has none."""
        return self.manifest.tensors.get(name) if name is not None else None

    def masters(self, optimizer: str) -> dict[str, Any]:
        """Return what was kept of the masters of an optimizer: "weights" by parameter, "rounding"."""
        return self.tree["optimizers"][optimizer][STATE_KEY].get("masters") or {}

    def masters_behind(self, kind: str, module: str) -> dict[str, str]:
        """Return the tensors with the float32 numbers behind half weights of a module, by the weights' names in it."""
        told = self.tree.get("masters")
        if told is None:
            return self._masters_by_name(module) if kind == "models" else {}
        prefix = f"{kind}/{module}/"
        return {weight[len(prefix) :]: master for weight, master in told.items() if weight.startswith(prefix)}

    def whose_masters(self, model: str, weights: Iterable[str]) -> str:
        """Say that a checkpoint of an earlier version leaves open whether masters are those of `weights` of `model`."""
        if "masters" in self.tree:
            return ""
        others = {
            other
            for optimizer, owners in self._owners().items()
            if len(owners) > 1 and model in owners and not self.masters(optimizer)["weights"].keys().isdisjoint(weights)
            for other in owners
        }
        return (
            f"models {sorted(others)} have parameters of the same names, and this checkpoint, of an earlier version, does not "
            f"say whose masters are whose: those of {model!r} are its half weights"
            if others
            else ""
        )

    def masters_of_equals(self, model: str, masters: Mapping[str, str]) -> dict[str, str]:
        """Return more masters, by name, of weights of `model` that are to the bit those of a name in `masters`.

        Checkpoints of earlier versions tell no tied names: there a matrix without a master that equals one with a master, and
        is no constant, is taken for another name of it. Reads both. Of others nothing is left to find.
        """
        if "masters" in self.tree:
            return {}
        names = {key: reference(value) for key, value in self.tree["models"][model].items()}
        alike: dict[tuple[Any, ...], list[str]] = {}
        for key, name in names.items():
            entry = self.entry(name)
            if entry is not None and len(entry.shape) > 1:
                alike.setdefault((entry.shape, entry.dtype), []).append(key)
        pairs = [
            (key, other)
            for keys in alike.values()
            for key in keys
            if key not in masters
            for other in keys
            if other in masters
        ]
        for key in {key for pair in pairs for key in pair}:
            self.want(names[key], None)
        self.read(None)
        found = {}
        for key, other in pairs:
            one, two = (decode(self.tree["models"][model][each], self._targets) for each in (key, other))
            if torch.equal(one, two) and bool((one != one.flatten()[0]).any()):
                found[key] = masters[other]
        return found

    def _masters_by_name(self, model: str) -> dict[str, str]:
        """What checkpoints of earlier versions tell: no tied names, and nothing where two models could be meant."""
        return {
            key: name
            for optimizer, owners in self._owners().items()
            if owners == [model]
            for key, value in self.masters(optimizer).get("weights", {}).items()
            if (name := reference(value)) is not None
        }

    def _owners(self) -> dict[str, list[str]]:
        """By optimizer that keeps masters, the models that have all its names, in the same shapes."""
        found = {}
        for optimizer in self.tree["optimizers"]:
            masters = {key: self.entry(reference(v)) for key, v in self.masters(optimizer).get("weights", {}).items()}
            found[optimizer] = [
                model
                for model, tree in self.tree["models"].items()
                if all(
                    master is not None
                    and (weight := self.entry(reference(tree.get(key)))) is not None
                    and weight.shape == master.shape
                    for key, master in masters.items()
                )
            ]
        return {optimizer: owners for optimizer, owners in found.items() if self.masters(optimizer).get("weights")}

    def widest(self, param: str, optimizer: str, home: tuple[str, str] | None) -> str | None:
        """Return where the widest numbers of a parameter are: its master's, else those of its weight.

        home: the model of the job that has it, and its name there. Where none of them has, the only model that has the name.
        """
        master = reference(self.masters(optimizer).get("weights", {}).get(param))
        if master is not None:
            return master
        if home is not None and home[0] in self.tree["models"]:
            model, key = home
            return self.masters_behind("models", model).get(key) or reference(self.tree["models"][model].get(key))
        holders = [tree[param] for tree in self.tree["models"].values() if param in tree]
        return reference(holders[0]) if len(holders) == 1 else None

    # ------------------------------------------------------------------ what is wanted of it, and read

    def want(self, name: str | None, like: torch.Tensor | None) -> None:
        """Read the tensor `name`, where there is one, in the layout of `like`; whole where that is None."""
        entry = self.entry(name)
        if name is not None and entry is not None and name not in self._targets:
            self._targets[name] = empty_like_whole(entry.shape, dtype_of(entry), like)

    def want_part(self, name: str | None, param: torch.Tensor, optimizer: OptimizerWrapper) -> None:
        """Read what this rank steps of a state of `param`; all of it where it has another shape."""
        entry = self.entry(name)
        if name is not None and entry is not None and name not in self._targets and entry.shape == tuple(param.shape):
            (update,) = updates_of([optimizer])
            part = update.shards.part_to_read(param, dtype_of(entry))
            if part is not None:
                self._targets[name] = part
        self.want(name, param)

    def want_all(self, tree: Any) -> None:
        """Read, whole, every tensor that a part of the tree refers to."""
        for name in references(tree):
            self.want(name, None)

    def read(self, group: dist.ProcessGroup | None) -> None:
        """Read what was wanted, and compare every file with its hash; a collective. Nothing of the user's is touched.

        Raises CheckpointError on every rank if any of them finds damage, or cannot read.
        """
        rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        reader = ManifestReader(self.folder, self.manifest, rank, num_ranks)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                dcp.load(
                    self._targets,
                    storage_reader=reader,
                    planner=LoadPlanner(),
                    process_group=group,
                    no_dist=group is None,
                )
        except CheckpointException as error:
            raise CheckpointError(f"reading {self.folder} failed {first_failure(error)}; nothing was loaded") from error
        agree_on_success(CheckpointError("; ".join(reader.damage)) if reader.damage else None, group)

    def tensor(self, name: str | None) -> Held:
        """Return a tensor that was read."""
        return self._targets[str(name)]

    def value(self, tree: Any) -> Any:
        """Return what a part of the tree stands for, with the tensors that were read."""
        return decode(tree, self._targets)


def listed(names: list[str], most: int = 8) -> str:
    """Return `names` in a sentence, so many of them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class SavedModule:
    """One module of the job, and its entry in the checkpoint. kind: "models" or "criteria"."""

    def __init__(self, saved: Saved, kind: str, name: str, module: nn.Module) -> None:
        self._saved, self._kind, self._name, self._module = saved, kind, name, module

    def differences(self, *, strict: bool) -> Iterator[str]:
        """Say what differs between the two; note what is to be read."""
        saved = self._saved.tree[self._kind].get(self._name)
        if saved is None:
            return
        current = self._module.state_dict()
        sources = self._sources(saved, current)
        rounded = [key for key, value in current.items() if not self._is_half(sources.get(key), value)]
        if self._kind == "models" and (untold := self._saved.whose_masters(self._name, rounded)):
            self._saved.notes.append(untold)
        missing = [key for key in current if key not in saved]
        # A rank of a pipeline holds some layers; what no rank wants cannot be seen from here.
        partial = getattr(getattr(self._module, "module", None), "is_partial", False)
        extra = [] if partial else [key for key in saved if key not in current]
        for keys, text in ((missing, "are not in the checkpoint"), (extra, "are not in this model")):
            if keys and strict:
                yield f"{self._kind} {self._name!r}: {listed(keys)} {text}"
            elif keys:
                self._saved.notes.append(f"{self._kind} {self._name!r}: {listed(keys)} {text}")
        for key, value in current.items():
            if key not in saved or not isinstance(value, torch.Tensor):
                self._saved.want_all(saved.get(key))
                continue
            entry = self._saved.entry(sources[key]) if reference(saved[key]) else None
            if entry is None or entry.shape != tuple(value.shape):
                shape = "no tensor" if entry is None else f"shape {entry.shape}"
                yield f"{self._kind} {self._name!r}: {key} has {shape} in the checkpoint and shape {tuple(value.shape)} here"
                continue
            if not fits(dtype_of(entry), value.dtype):
                yield f"{self._kind} {self._name!r}: {key} has dtype {dtype_of(entry)} in the checkpoint and {value.dtype} here"
                continue
            self._saved.want(sources[key], value)

    def state(self) -> dict[str, Any]:
        """Return what was read as the module takes it."""
        saved, current = self._saved.tree[self._kind][self._name], self._module.state_dict()
        sources, state = self._sources(saved, current), {}
        for key, value in current.items():
            if key not in saved:
                continue
            if isinstance(value, torch.Tensor):
                state[key] = placed_like(self._saved.tensor(sources[key]), value)  # type: ignore[arg-type]
            else:
                state[key] = self._saved.value(saved[key])
        if differing := list(ties_that_differ(self._module, state)):
            raise CheckpointError(f"{self._kind} {self._name!r}: {'; '.join(differing)}")
        return state

    def _sources(self, saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str | None]:
        """Return which tensor of the checkpoint each entry is read from: where float32 numbers stand behind it, these.

        Not if the module wants just the half weights that were saved: rounded anew, ties could become others.
        """
        sources = {key: reference(value) for key, value in saved.items()}
        wide = self._saved.masters_behind(self._kind, self._name)
        module = bare(self._module.module) if isinstance(self._module, ModelWrapper) else self._module
        for names in names_of(module).values() if "masters" not in self._saved.tree else ():
            behind = [wide[name] for name in names if name in wide]
            wide |= dict.fromkeys(names, behind[0]) if behind else {}
        watched = LoadedWeights.watched(module)
        for key in wide.keys() & sources.keys() & current.keys():
            if key in watched or not self._is_half(sources[key], current[key]):
                sources[key] = wide[key]
        return sources

    def _is_half(self, source: str | None, current: Any) -> bool:
        """Whether an entry was saved in half precision, and is wanted in the same."""
        entry = self._saved.entry(source)
        return entry is not None and dtype_of(entry) in HALF_DTYPES and current.dtype == dtype_of(entry)


class SavedOptimizer:
    """One boosted optimizer of the job, and its entry in the checkpoint.

    homes: by parameter, the model of the job that has it, and its name in there.
    """

    def __init__(
        self, saved: Saved, name: str, optimizer: OptimizerWrapper, homes: Mapping[torch.Tensor, tuple[str, str]]
    ) -> None:
        self._saved, self._name, self._optimizer, self._homes = saved, name, optimizer, homes

    def differences(self) -> Iterator[str]:
        """Say what differs between the two; note what is to be read."""
        if self._name not in self._saved.tree["optimizers"]:
            return
        optimizer, name = self._optimizer, self._name
        saved = self._saved.tree["optimizers"][name]
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
                yield f"optimizers {name!r}: {listed(unknown)} of group {index} are not in that group of the checkpoint"
        params = dict(zip((n for g in groups for n, _ in g), _params(optimizer), strict=True))
        for param_name, param in params.items():
            for value in (saved["state"].get(param_name) or {}).values():
                self._saved.want_part(reference(value), param, optimizer)
            if optimizer.has_master(param):
                self._saved.want_part(self._saved.widest(param_name, name, self._homes.get(param)), param, optimizer)
        for key, value in saved[STATE_KEY].items():
            if key != "masters":
                self._saved.want_all(value)
        self._saved.want_all(self._saved.masters(name).get("rounding"))
        for group in saved["groups"]:
            self._saved.want_all(group["options"])

    def state(self) -> dict[str, Any]:
        """Return what was read as a state dict of the boosted optimizer."""
        optimizer, name = self._optimizer, self._name
        saved = self._saved.tree["optimizers"][name]
        groups = optimizer.parameter_names()
        numbers = {param: number for number, (param, _) in enumerate(entry for own in groups for entry in own)}
        param_groups = [
            {**self._saved.value(group["options"]), "params": [numbers[param] for param, _ in own]}
            for own, group in zip(groups, saved["groups"], strict=True)
        ]
        state = {
            number: self._saved.value(saved["state"][param])
            for param, number in numbers.items()
            if param in saved["state"]
        }
        own = {key: self._saved.value(value) for key, value in saved[STATE_KEY].items() if key != "masters"}
        if not isinstance(own["loss_scaler"], Mapping):
            raise ValueError(f"the loss scale of optimizers {name!r} is {own['loss_scaler']!r}")
        if set(own["loss_scaler"]) != set(optimizer.scaler_state()):
            self._saved.notes.append(
                f"optimizers {name!r}: the loss scale is left as it is, because the precision that saved has another kind"
            )
            own["loss_scaler"] = optimizer.scaler_state()
        rounding = self._saved.masters(name).get("rounding")
        if any(map(optimizer.has_master, _params(optimizer))) or (rounding and optimizer.keeps_masters):
            held = dict(zip(numbers, _params(optimizer), strict=True))
            weights = {
                key: self._saved.widest(key, name, self._homes.get(param))
                for key, param in held.items()
                if optimizer.has_master(param)
            }
            own["masters"] = {
                "weights": {
                    key: _float(self._saved.tensor(source)) for key, source in weights.items() if source is not None
                },
                **({"rounding": self._saved.value(rounding)} if rounding else {}),
            }
        if optimizer.is_partial:
            own[PARAMETERS] = list(numbers)
        return {"state": state, "param_groups": param_groups, STATE_KEY: own}


def _float(tensor: Held) -> Held:
    return tensor.with_values(tensor.values.float()) if isinstance(tensor, Divided) else tensor.float()


def _params(optimizer: OptimizerWrapper) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
