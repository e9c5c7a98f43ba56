"""Optimizers in a checkpoint: states, masters and loss scale, by the names of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from booster.checkpoint.manifest import CheckpointError
from booster.checkpoint.objects import Objects, has_tensors, is_cut, may_refuse, user_module
from booster.checkpoint.parts.part import LoadContext, Part, SaveContext, Step
from booster.checkpoint.saved_checkpoint import SavedCheckpoint
from booster.checkpoint.state_tree import BESIDE, has_order, reference, references
from booster.common.arguments import listed
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.masters.masters import has_half_elements
from booster.model.modules import bare
from booster.model.optimizers import has_torch_form, inner_optimizers
from booster.model.params import local_shard
from booster.shards.base import FlatShard
from booster.tensors.trees import tensors
from booster.update.state_dict import IN_MODEL, PARAMETERS, STATE_KEY
from booster.update.state_loading import Reading, check_own

_INNER = "inner"


class Optimizers(Part):
    """Boosted optimizers, and which of their masters is behind which weight."""

    turn = 1

    @property
    def named(self) -> Mapping[str, Mapping[str, OptimizerWrapper]]:
        return {"optimizers": self.objects.optimizers}

    def collect(self, into: SaveContext) -> dict[str, Any]:
        said = {}
        for name, optimizer in self.objects.optimizers.items():
            try:
                said[name] = into.replicated(_loadable(name, optimizer), f"optimizers/{name}")
            except TypeError as error:
                raise TypeError(f"{type(optimizer.unwrap()).__name__} keeps more than its state: {error}") from error
        return {"optimizers": said, "masters": masters_behind(self.objects, said)}

    def compare(self, found: LoadContext) -> Iterator[str]:
        for each in self._entries(found):
            yield from each.differences()

    def prepare(self, found: LoadContext) -> None:
        for name in found.saved.late.masters_with_nan():
            raise CheckpointError(f"{name}, the master of a half weight here, holds NaN: the run has failed")
        self._states = [(each.what, each.optimizer, each.state()) for each in self._entries(found)]
        self._readings: list[Reading] = []
        self._late = found.saved.late

    def steps(self) -> Iterator[Step]:
        for what, optimizer, state in self._states:
            yield what, partial(self._read, optimizer, state)

    def _read(self, optimizer: OptimizerWrapper, state: dict[str, Any], undo: ExitStack) -> None:
        inner = state.pop(_INNER, {})
        self._readings.append(optimizer.read_state_dict(state, self._late.fill(optimizer)))
        undo.callback(self._readings[-1].undo)
        for name, each in inner_optimizers(optimizer.unwrap()).items():
            if name in inner:
                groups = each.param_groups  # which may be those of the optimizer around it
                each.load_state_dict(inner[name])
                each.param_groups = groups

    def finish(self) -> None:
        # What was read, and what was there before, is given up where buckets take it over: it is not in memory three times.
        adopt = [reading.adopt for reading in self._readings]
        self._states, self._readings = [], []
        while adopt:
            adopt.pop(0)()

    def _entries(self, found: LoadContext) -> list[_Entry]:
        homes: dict[torch.Tensor, tuple[str, str, bool]] = {
            param: (name, key, as_saved)
            for name, model in self.objects.models.items()
            for as_saved in (not may_refuse(model),)
            for key, param in bare(model.module).named_parameters()
        }
        return [_Entry(found.saved, name, each, homes) for name, each in self.objects.optimizers.items()]


class _Entry:
    """One boosted optimizer of the job, and its entry in the checkpoint.

    homes: by parameter, what `SavedCheckpoint.widest_source` is given.
    """

    def __init__(
        self,
        saved: SavedCheckpoint,
        name: str,
        optimizer: OptimizerWrapper,
        homes: Mapping[torch.Tensor, tuple[str, str, bool]],
    ) -> None:
        self._saved, self._name, self.optimizer, self._homes = saved, name, optimizer, homes
        self.what = f"optimizers {name!r}"

    def differences(self) -> Iterator[str]:
        """Say what differs between the two; note what is to be read."""
        if self._name not in self._saved.tree["optimizers"]:
            return
        optimizer, name = self.optimizer, self._name
        saved = self._saved.tree["optimizers"][name]
        own_class = type(optimizer.unwrap()).__name__
        if saved["class"] != own_class:
            yield f"{self.what}: the checkpoint is of {saved['class']}, this is {own_class}"
            return
        groups = optimizer.parameter_names()
        if len(groups) != len(saved["groups"]):
            yield f"{self.what}: the checkpoint has {len(saved['groups'])} parameter groups, this has {len(groups)}"
            return
        for index, (own, group) in enumerate(zip(groups, saved["groups"], strict=True)):
            unknown = [param for param, _ in own if param not in group["params"]]
            if unknown:
                yield f"{self.what}: {listed(unknown, 8)} of group {index} are not in that group of the checkpoint"
        params = _by_name(optimizer)
        self._saved.request_all(saved.get("own"))
        self._saved.request_all(saved.get(_INNER))
        for param_name, param in params.items():
            for key, value in (saved["state"].get(param_name) or {}).items():
                in_order = None if has_order(value) else key
                entry = reference(value)
                if entry is not None and not (in_order and self._saved.request_late(entry, param, optimizer, key)):
                    self._saved.request_shard(entry, param, optimizer, in_order)
                for nested in references(value) if entry is None else ():
                    self._saved.request(nested, param)
            if self._takes_master(param_name, param):
                source = self._saved.widest_source(param_name, name, self._homes.get(param))
                if not self._saved.request_late(source, param, optimizer, None):
                    self._saved.request_shard(source, param, optimizer)
        for key, value in saved[STATE_KEY].items():
            if key != "masters":
                self._saved.request_all(value)
        self._saved.request_all(self._saved.masters(name).get("rounding"))
        for group in saved["groups"]:
            self._saved.request_all(group["options"])
        self._saved.request_all(saved.get(BESIDE))

    def state(self) -> dict[str, Any]:
        """Return what was read as a state dict of the boosted optimizer."""
        optimizer, name = self.optimizer, self._name
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
        state |= self._saved.value(saved.get(BESIDE, {}))
        own = {key: self._saved.value(value) for key, value in saved[STATE_KEY].items() if key != "masters"}
        if not isinstance(own["loss_scaler"], Mapping):
            raise ValueError(f"the loss scale of optimizers {name!r} is {own['loss_scaler']!r}")
        update = update_of(optimizer)
        kept, scale = update.optimizer_state, update.gradients.scaler.state_dict()
        if set(own["loss_scaler"]) != set(scale):
            self._saved.notes.append(
                f"{self.what}: the loss scale is left as it is, because the precision that saved has another kind"
            )
            own["loss_scaler"] = scale
        rounding = self._saved.masters(name).get("rounding")
        if kept.has_masters:
            weights = {
                key: self._saved.widest_source(key, name, self._homes.get(param))
                for key, param in _by_name(optimizer).items()
                if self._takes_master(key, param)
            }
            own["masters"] = {
                "weights": {
                    key: held.with_values(held.values.float()) if isinstance(held, FlatShard) else held.float()
                    for key, source in weights.items()
                    if source is not None
                    for held in (self._saved.tensor(source),)
                },
                **({"rounding": self._saved.value(rounding)} if rounding else {}),
            }
        if update.shards.selection is not None:
            own[PARAMETERS] = list(numbers)
        as_torch = {"state": state, "param_groups": param_groups}
        return {**as_torch, **self._saved.value(saved.get("own", {})), STATE_KEY: own} | (
            {_INNER: self._saved.value(saved[_INNER])} if _INNER in saved else {}
        )

    def _takes_master(self, name: str, param: torch.Tensor) -> bool:
        """Whether float32 numbers stand behind `param` here, or did when it trained: one frozen since may train again."""
        kept = update_of(self.optimizer).optimizer_state
        if not kept.has_masters or kept.has_master(param):
            return kept.has_master(param)
        trained = name in self._saved.masters(self._name).get("weights", {})
        return has_half_elements(param) and (
            trained or bool(self._saved.tree["optimizers"][self._name]["state"].get(name))
        )


def _by_name(optimizer: OptimizerWrapper) -> dict[str, torch.Tensor]:
    """The parameters of `optimizer` by their whole names, in the order of its groups."""
    names = (name for group in optimizer.parameter_names() for name, _ in group)
    params = (param for group in optimizer.param_groups for param in group["params"])
    return dict(zip(names, params, strict=True))


def state_by_name(optimizer: OptimizerWrapper) -> dict[str, Any]:
    """Return the state dict of `optimizer` with whole parameter names for numbers, and each group's place for its names.

    "own": what torch's state dicts do not have, or all of one of another form, as optimizers around others write it. "inner":
    the states of such others, by attribute, where it has them not. Raises CheckpointError where no load could put them
    together.
    """
    state = optimizer.divided_state_dict()
    names = optimizer.parameter_names()
    plain = has_torch_form(state)
    own_form = {k: v for k, v in state.items() if k != STATE_KEY and not (plain and k in ("state", "param_groups"))}
    inner = _inner_states(optimizer.unwrap(), state)
    if not plain:
        update = update_of(optimizer)
        if update.optimizer_state.has_masters or update.shards.sharded or update.shards.selection is not None:
            raise CheckpointError(
                f"the state_dict() of {type(optimizer.unwrap()).__name__} has no states of parameters by their numbers, which "
                "masters, parts and stages of ranks need; use mixed_precision='fp32', 'bf16' or 'fp16' on one device or with "
                "TorchDDPPlugin. Nothing is written or removed"
            )
        groups = [{"params": [place for _, place in own]} for own in names]
        state = {"state": {}, "param_groups": groups, STATE_KEY: state[STATE_KEY]}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    flat = [entry for group in names for entry in group]
    name_of = {number: name for number, (name, _) in zip(numbers, flat, strict=True)}
    unnamed = {key: own for key, own in state["state"].items() if key not in name_of}
    # Without what names parameters of this rank alone: here everything goes by name.
    own_state = {key: value for key, value in state[STATE_KEY].items() if key != PARAMETERS}
    if "masters" in own_state:
        own_state["masters"] = {key: value for key, value in own_state["masters"].items() if key != IN_MODEL}
    return {
        "class": type(optimizer.unwrap()).__name__,
        "state": {name_of[number]: dict(own) for number, own in state["state"].items() if number in name_of},
        **({BESIDE: unnamed} if unnamed else {}),
        "groups": [
            {"options": {key: value for key, value in group.items() if key != "params"}, "params": dict(own)}
            for group, own in zip(state["param_groups"], names, strict=True)
        ],
        **({"own": own_form} if own_form else {}),
        **({_INNER: inner} if inner else {}),
        STATE_KEY: own_state,
    }


def _inner_states(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The states of the optimizers that `optimizer` is put around, of which `state`, what it writes itself, has no tensors."""
    found = {name: each for name, each in inner_optimizers(optimizer).items() if each.state is not optimizer.state}
    there = {tensor.data_ptr() for tensor in tensors(state)} if found else set()
    theirs = {name: each.state_dict() for name, each in found.items()}
    places = {name: {tensor.data_ptr() for tensor in tensors(own.get("state"))} for name, own in theirs.items()}
    return {
        name: own for name, own in theirs.items() if own.get("state") and not (places[name] and places[name] <= there)
    }


def _loadable(name: str, optimizer: OptimizerWrapper) -> dict[str, Any]:
    """Return `state_by_name` of `optimizer`. Raises CheckpointError if no load would take it."""
    state = state_by_name(optimizer)
    if nested := _cut_within_containers(optimizer, state["state"]):
        raise CheckpointError(
            f"optimizers {name!r}: the state of {listed(nested, 4)} is a container of tensors, of which this rank or a "
            f"bucket of masters has a part, as {type(optimizer.unwrap()).__name__} is stepped element by element; such "
            "states must be tensors, or the optimizer not registered as elementwise. Nothing is written or removed"
        )
    kept = state[STATE_KEY].get("masters") or {"weights": {}}
    # A load makes masters of half weights that have none.
    has_master = update_of(optimizer).optimizer_state.has_master
    weights = {key: param for key, param in _by_name(optimizer).items() if has_master(param)} | kept["weights"]
    try:
        check_own({STATE_KEY: {**state[STATE_KEY], "masters": {**kept, "weights": weights}}})
    except ValueError as error:
        raise CheckpointError(
            f"optimizers {name!r}: {error.__cause__ or error}. No load would take that, so nothing is written or removed"
        ) from error
    return state


def _cut_within_containers(optimizer: OptimizerWrapper, states: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The parameters that are stepped in parts, and have tensors in containers, which no load could put together."""
    return [
        name
        for name, param in _by_name(optimizer).items()
        if is_cut(optimizer, param) and any(map(has_tensors, states.get(name, {}).values()))
    ]


def masters_behind(objects: Objects, optimizers: Mapping[str, Any]) -> dict[str, str]:
    """Return which master is behind which weight, by the names of both tensors in the checkpoint."""
    # Several models may have parameters of one name, and a tied weight has several names.
    masters: dict[torch.Tensor, str] = {}
    for name, optimizer in objects.optimizers.items():
        kept = (optimizers[name][STATE_KEY].get("masters") or {}).get("weights", {})
        for own, param in _by_name(optimizer).items():
            if own in kept:
                # Of two optimizers of one parameter, with masters that both round to it, the first counts.
                masters.setdefault(param, reference(kept[own]))  # type: ignore[arg-type]
    return {
        f"{kind}/{name}/{key}": masters[param]
        for kind, modules in (("models", objects.models), ("criteria", objects.criteria))
        for name, module in modules.items()
        for state in (module.state_dict(),)
        for key, param in user_module(module).named_parameters(remove_duplicate=False)
        # What a hook makes other numbers of is to be given back to its own load.
        if param in masters and isinstance(state.get(key), torch.Tensor)
        if _same_numbers(local_shard(state[key]), local_shard(param).detach())
    }


def _same_numbers(entry: torch.Tensor, param: torch.Tensor) -> bool:
    """Return whether `entry` of a state dict is `param`, or its numbers in another dtype, as apex's hook for O2 makes them."""
    if entry.data_ptr() == param.data_ptr():
        return True
    return entry.shape == param.shape and torch.equal(entry.to(param.device, param.dtype), param)
