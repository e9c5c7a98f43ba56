"""Models and criteria in a checkpoint, and what a precision keeps of a model besides its weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.checkpoint.manifest import CheckpointError, dtype_of
from booster.checkpoint.objects import load_module, makes_entries, may_refuse, read_by_torch, user_module
from booster.checkpoint.parts.part import LoadContext, Part, SaveContext, Step, leaves_out_frozen
from booster.checkpoint.saved_checkpoint import SavedCheckpoint
from booster.checkpoint.state_tree import reference, shard_like
from booster.checkpoint.weight_files import fits, ties_that_differ
from booster.common.arguments import is_whole, listed
from booster.common.untrusted_files import JsonForm, check_form
from booster.interface.model import ModelWrapper, extras_of
from booster.masters.master_state import LoadedWeights
from booster.model.modules import parameter_names, parents
from booster.model.params import local_shard
from booster.tensors.trees import HALF_DTYPES

_logger = logging.getLogger(__name__)


class Modules(Part):
    """Boosted models, and criteria that are modules."""

    turn = 4
    is_rehearsed = False  # it compares numbers

    @property
    def named(self) -> Mapping[str, Mapping[str, nn.Module]]:
        return {"models": self.objects.models, "criteria": self.objects.criteria}

    def collect(self, into: SaveContext) -> dict[str, Any]:
        return {
            kind: {
                name: into.replicated(_kept(kind, module, into), f"{kind}/{name}") for name, module in modules.items()
            }
            for kind, modules in self.named.items()
        }

    def compare(self, found: LoadContext) -> Iterator[str]:
        for each in self._entries(found):
            yield from each.differences(strict=found.strict)

    def prepare(self, found: LoadContext) -> None:
        states = [(each.what, each.module, each.state()) for each in self._entries(found)]
        self._states = sorted(states, key=lambda entry: not may_refuse(entry[1]))

    def steps(self) -> Iterator[Step]:
        while self._states:  # what was read is given up where it is loaded
            what, module, state = self._states.pop(0)
            yield what, partial(load_module, module, state)

    def _entries(self, found: LoadContext) -> list[_Entry]:
        return [
            _Entry(found.saved, kind, name, module) for kind, own in self.named.items() for name, module in own.items()
        ]


def _kept(kind: str, module: nn.Module, into: SaveContext) -> dict[str, Any]:
    left_out, state = (
        _frozen_names(module) if kind == "models" and not into.frozen else frozenset(),
        module.state_dict(),
    )
    trained = (name for name, param in user_module(module).named_parameters() if param.requires_grad)
    # What a hook renames or makes again as it loads is for that to say.
    if not makes_entries(module) and (lost := [name for name in trained if name not in state]):
        raise CheckpointError(
            f"{listed(lost, 8)} train, and the state_dict() of this model leaves them out, so that no load could give them "
            "back; keep them in it, or stop training them. Nothing is written or removed"
        )
    return {key: value for key, value in state.items() if not _is_of(key, left_out)}


def _frozen_names(module: nn.Module) -> frozenset[str]:
    """Return all names of parameters of `module` that do not train, as users know them."""
    return frozenset(
        name
        for param, names in parameter_names(user_module(module)).items()
        if not param.requires_grad
        for name in names
    )


def _is_of(key: str, params: frozenset[str]) -> bool:
    """Whether an entry of a state dict is one of `params`, or belongs to one, as scales of a packed weight under its name."""
    return any(name in params for name in (key, *parents(key)))


class _Entry:
    """One module of the job, and its entry in the checkpoint. kind: "models" or "criteria"."""

    def __init__(self, saved: SavedCheckpoint, kind: str, name: str, module: nn.Module) -> None:
        self._saved, self._kind, self._name, self.module = saved, kind, name, module
        self.what = f"{kind} {name!r}"

    def differences(self, *, strict: bool) -> Iterator[str]:
        """Say what differs between the two; note what is to be read."""
        saved = self._saved.tree[self._kind].get(self._name)
        if saved is None:
            return
        current = self.module.state_dict()
        sources = self._sources(saved, current)
        left_out = self._kind == "models" and leaves_out_frozen(self._saved.tree["run"])
        frozen = _frozen_names(self.module) if left_out else frozenset()
        missing = [key for key in current if key not in saved and not _is_of(key, frozen)]
        # A rank of a pipeline holds some layers; what no rank wants cannot be seen from here.
        in_parts = getattr(getattr(self.module, "module", None), "is_partial", False)
        extra = [] if in_parts else [key for key in saved if key not in current]
        for keys, text in ((missing, "are not in the checkpoint"), (extra, "are not in this model")):
            if keys and strict:
                yield f"{self.what}: {listed(keys, 8)} {text}"
            elif keys:
                self._saved.notes.append(f"{self.what}: {listed(keys, 8)} {text}")
        own, given = read_by_torch(self.module), self._given_by_masters(sources)
        for key, value in current.items():
            if key not in saved or not isinstance(value, torch.Tensor):
                self._saved.request_all(saved.get(key))
                continue
            entry = self._saved.entry(sources[key]) if reference(saved[key]) else None
            if entry is None or entry.shape != tuple(value.shape):
                shape = "no tensor" if entry is None else f"shape {entry.shape}"
                yield f"{self.what}: {key} has {shape} in the checkpoint and shape {tuple(value.shape)} here"
                continue
            if not fits(dtype_of(entry), value.dtype):
                yield f"{self.what}: {key} has dtype {dtype_of(entry)} in the checkpoint and {value.dtype} here"
                continue
            if key in given:
                continue
            # Values that a state dict made anew, as casts do, are not the memory that forward reads.
            in_place = key in own and local_shard(own[key]).data_ptr() == local_shard(value).data_ptr()
            if not in_place or not self._saved.request_in_place(
                sources[key], value, partial(torch.Tensor.detach, value)
            ):
                self._saved.request(sources[key], value)

    def state(self) -> dict[str, Any]:
        """Return what was read as the module takes it."""
        saved, current = self._saved.tree[self._kind][self._name], self.module.state_dict()
        sources, state = self._sources(saved, current), {}
        given = self._given_by_masters(sources)
        for key, value in current.items():
            if key not in saved or key in given:
                continue
            if isinstance(value, torch.Tensor) and self._saved.is_in_place(sources[key]):
                continue
            if isinstance(value, torch.Tensor):
                state[key] = shard_like(self._saved.tensor(sources[key]), value)  # type: ignore[arg-type]
            else:
                state[key] = self._saved.value(saved[key])
        if differing := list(ties_that_differ(self.module, state)):
            raise CheckpointError(f"{self.what}: {'; '.join(differing)}")
        return state

    def _sources(self, saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str | None]:
        """Return which tensor of the checkpoint each entry is read from: the float32 master where there is one."""
        sources = {key: reference(value) for key, value in saved.items()}
        wide = self._saved.masters_behind(self._kind, self._name)
        watched = LoadedWeights.names_with_masters(user_module(self.module))
        for key in wide.keys() & sources.keys() & current.keys():
            # Not if the module wants just the half weights that were saved: rounded anew, ties could become others.
            if key in watched or not self._is_half(sources[key], current[key]):
                sources[key] = wide[key]
        return sources

    def _given_by_masters(self, sources: Mapping[str, str | None]) -> set[str]:
        """The names of half weights that need not be read: their masters, which are read in the end, give them."""
        named = {} if may_refuse(self.module) else parameter_names(user_module(self.module))
        return {
            name
            for param, names in named.items()
            if all(self._saved.late.fills(param, sources.get(each)) for each in names)
            for name in names
        }

    def _is_half(self, source: str | None, current: Any) -> bool:
        """Whether an entry was saved in half precision, and is wanted in the same."""
        entry = self._saved.entry(source)
        return entry is not None and dtype_of(entry) in HALF_DTYPES and current.dtype == dtype_of(entry)


class _ModelState(Part):
    """What a precision keeps of a model besides its weights, by the model's name; other precisions have none.

    To add one: what it is and where it is found, as below, and its name in `parts.PARTS`.

    Attributes:
        key: of the tree.
        what: it, in words.
        absent: the note to the user where a checkpoint has none.
    """

    turn = 3
    key: str
    what: str
    absent: str

    @staticmethod
    def of(model: ModelWrapper) -> Any:
        """Return what `model` has of it, with `state_dict` and `load_state_dict`; None for nothing."""
        raise NotImplementedError

    def fault(self, state: Mapping[str, Any], found: LoadContext) -> str:
        """Return why a saved state is none, in words; empty where it is one."""
        raise NotImplementedError

    def _entries(self) -> list[tuple[str, Any]]:
        found = [(name, self.of(model)) for name, model in self.objects.models.items()]
        return [(name, each) for name, each in found if each is not None]

    def collect(self, into: SaveContext) -> dict[str, Any]:
        if into.rank:  # all ranks have the same
            return {}
        return {
            self.key: {name: into.per_rank(each.state_dict(), f"{self.key}/{name}") for name, each in self._entries()}
        }

    def compare(self, found: LoadContext) -> Iterator[str]:
        said = found.saved.tree.get(self.key, {})
        for name, _ in self._entries():
            if name not in said:
                found.saved.notes.append(f"models {name!r}: {self.absent}")
            elif fault := self.fault(said[name], found):
                yield f"models {name!r}: {fault}"
            else:
                found.saved.request_all(said[name])

    def prepare(self, found: LoadContext) -> None:
        said = found.saved.tree.get(self.key, {})
        self._states = [(name, each, found.saved.value(said.get(name, {}))) for name, each in self._entries()]

    def steps(self) -> Iterator[Step]:
        yield self.what, self._hand_over

    def _hand_over(self, undo: ExitStack) -> None:
        for name, each, state in self._states:
            undo.callback(each.load_state_dict, copy.deepcopy(each.state_dict()))
            if changed := each.load_state_dict(state):  # layers that were chosen by measuring
                _logger.info(
                    "models %r: %d layers multiply as in the checkpoint, where they were measured otherwise here",
                    name,
                    changed,
                )


class PinnedModules(_ModelState):
    """Modules that were pinned to float32 during the run, or had products made wide by an Autopilot."""

    key, what = "pins", "the modules pinned to float32"
    of = staticmethod(lambda model: extras_of(model).pins)

    def collect(self, into: SaveContext) -> dict[str, Any]:
        return {
            "pins": {name: pins.state_dict() for name, pins in self._entries()}
        }  # ranks of a pipeline pin their own

    def compare(self, found: LoadContext) -> Iterator[str]:
        for name, model in self.objects.models.items():
            state, pins = found.saved.tree["pins"].get(name, {}), extras_of(model).pins
            what, again = (
                ("were pinned to float32", "pass keep_fp32='auto' to have them so, or name them in keep_fp32")
                if "products" not in state
                else (
                    "had products in a wide dtype, as an Autopilot chose",
                    "give Booster an Autopilot to have them so, or name them in keep= of the precision",
                )
            )
            if pins is None and state.get("names"):
                found.saved.notes.append(
                    f"models {name!r}: modules {state['names']} {what} in the run that was saved, and are not here; {again}"
                )
            elif pins is not None and (missing := pins.missing(state)):
                yield f"models {name!r}: it has no modules {missing}, which {what}"


class LayerChoices(_ModelState):
    """Which layers were measured to gain by a low precision."""

    key, what = "chosen", "the choice of layers"
    absent = "no choice of layers was saved; those are in low precision that were faster so here"
    of = staticmethod(lambda model: extras_of(model).choice)

    def fault(self, state: Mapping[str, Any], found: LoadContext) -> str:
        # Features in and out, of layers in low precision and of those that are not.
        shape = JsonForm(
            lambda value: (
                isinstance(value, list) and len(value) == 2 and all(is_whole(each) and each > 0 for each in value)
            ),
            "two numbers of features",
        )
        try:
            check_form("what is saved of its choice of layers", state, {"low": [shape], "wide": [shape]})
        except ValueError as error:
            return str(error)
        return ""


class ScaleHistory(_ModelState):
    """What the scales of low-precision layers follow from: the largest magnitudes of earlier steps."""

    key, what = "scales", "the histories of scales"
    absent = "no history of scales was saved; delayed scaling begins anew"
    of = staticmethod(lambda model: extras_of(model).histories)

    def fault(self, state: Mapping[str, Any], found: LoadContext) -> str:
        names = state.get("names")
        entry = found.saved.entry(reference(state["history"])) if state.keys() == {"names", "history"} else None
        if (
            isinstance(names, list)
            and entry is not None
            and len(entry.shape) == 3
            and entry.shape[1:] == (len(names), 3)
        ):
            return ""
        return "what is saved of its scales is no history of them"
