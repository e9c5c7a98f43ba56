"""The whole state of a run: tensors under whole names, and a JSON-like tree that refers to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.checkpoint.agree import agree_on_success, exchange
from booster.checkpoint.layout import Held, encode, reference, storable
from booster.checkpoint.manifest import CheckpointError
from booster.checkpoint.parts import Parts
from booster.data import DRAWS, OWN_STATE, DataLoaderWrapper
from booster.ground.randomness import random_state
from booster.interface.model import ModelWrapper, pins_of
from booster.interface.optimizer import OptimizerWrapper
from booster.model.modules import bare
from booster.update.checkpoint import IN_MODEL, PARAMETERS, STATE_KEY
from booster.update.loading import check_own

Tensors = dict[str, Held]


def collect(parts: Parts, run: Mapping[str, Any], group: dist.ProcessGroup | None) -> tuple[Tensors, dict[str, Any]]:
    """Return this rank's tensors by their names in the checkpoint, and the tree of all ranks; a collective.

    run: what is known of the run as a whole, JSON-like. Tensors are those of the running job, not copies.
    """
    tensors: Tensors = {}
    own: Tensors = {}
    tree: dict[str, Any] = {}
    problem: Exception | None = None
    try:
        tree = _tree(parts, run, 0 if group is None else dist.get_rank(group), tensors, own)
    except Exception as error:  # raised again once the others know
        problem = error
    agree_on_success(problem, group)
    tensors = {name: storable(tensor) for name, tensor in tensors.items()} | own
    return tensors, _merged(exchange(tree, group))


def _tree(parts: Parts, run: Mapping[str, Any], rank: int, tensors: Tensors, own: Tensors) -> dict[str, Any]:
    """What this rank says; tensors that ranks share go into `tensors`, and its own into `own`."""
    tree: dict[str, Any] = {
        "models": {
            name: encode(dict(model.state_dict()), f"models/{name}", tensors) for name, model in parts.models.items()
        },
        "criteria": {
            name: encode(dict(module.state_dict()), f"criteria/{name}", tensors)
            for name, module in parts.criteria.items()
        },
        "pins": {
            name: pins.state_dict() for name, model in parts.models.items() if (pins := pins_of(model)) is not None
        },
        "optimizers": {
            name: encode(_loadable(name, optimizer), f"optimizers/{name}", tensors)
            for name, optimizer in parts.optimizers.items()
        },
    }
    tree["masters"] = masters_behind(parts, tree["optimizers"])
    tree["random"] = encode(random_state(), f"random/{rank}", own)
    tree["carried"] = {
        name: encode(_by_parameter(parts.models[name], carried), f"carried/{name}/{rank}", own)
        for name, carried in parts.carried.items()
    }
    positions = {name: split_state(loader) for name, loader in parts.dataloaders.items()}
    tree["loaders"] = {
        name: encode(state, f"dataloaders/{name}/{rank}", own)
        for name, (_, state) in positions.items()
        if state is not None
    }
    if rank == 0:
        tree["dataloaders"] = {
            name: encode(position, f"dataloaders/{name}", own) for name, (position, _) in positions.items()
        }
        tree["lr_schedulers"] = {
            name: encode(part.state_dict(), f"lr_schedulers/{name}", own) for name, part in parts.lr_schedulers.items()
        }
        extra = parts.extra
        stateful = callable(getattr(extra, "state_dict", None))
        tree["extra"] = encode(_states(extra.state_dict() if stateful else extra), "extra", own)
        tree["run"] = dict(run)
    return tree


def split_state(loader: Any) -> tuple[dict[str, Any], Any]:
    """Return the position of a loader, the same on all ranks, and what is each rank's own; None where nothing is."""
    state = loader.state_dict()
    if not isinstance(loader, DataLoaderWrapper):
        return {}, {OWN_STATE: state}
    own = {key: state[key] for key in (OWN_STATE, DRAWS) if key in state}
    return {key: value for key, value in state.items() if key not in own}, own or None


def by_name(optimizer: OptimizerWrapper) -> dict[str, Any]:
    """Return the state dict of `optimizer` with whole parameter names for numbers, and each group's place for its names."""
    state = optimizer.divided_state_dict()
    names = optimizer.parameter_names()
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    flat = [entry for group in names for entry in group]
    name_of = {number: name for number, (name, _) in zip(numbers, flat, strict=True)}
    return {
        "class": type(optimizer.unwrap()).__name__,
        "state": {name_of[number]: dict(own) for number, own in state["state"].items()},
        "groups": [
            {"options": {key: value for key, value in group.items() if key != "params"}, "params": dict(own)}
            for group, own in zip(state["param_groups"], names, strict=True)
        ],
        STATE_KEY: _without_names(state[STATE_KEY]),
    }


def _loadable(name: str, optimizer: OptimizerWrapper) -> dict[str, Any]:
    """Return `by_name` of `optimizer`. Raises CheckpointError if no load would take it."""
    state = by_name(optimizer)
    kept = state[STATE_KEY].get("masters") or {"weights": {}}
    params = (param for group in optimizer.param_groups for param in group["params"])
    named = zip((own for names in optimizer.parameter_names() for own, _ in names), params, strict=True)
    # A load makes masters of half weights that have none.
    weights = {key: param for key, param in named if optimizer.has_master(param)} | kept["weights"]
    try:
        check_own({STATE_KEY: {**state[STATE_KEY], "masters": {**kept, "weights": weights}}})
    except ValueError as error:
        raise CheckpointError(
            f"optimizers {name!r}: {error.__cause__ or error}. No load would take that, so nothing is written or removed"
        ) from error
    return state


def masters_behind(parts: Parts, optimizers: Mapping[str, Any]) -> dict[str, str]:
    """Return which master is behind which weight, by the names of both tensors in the checkpoint.

    By the parameters themselves: several models may have parameters of one name, and a tied weight has several names. Of two
    optimizers of one parameter, whose masters both round to it, the first counts.
    """
    masters: dict[torch.Tensor, str] = {}
    for name, optimizer in parts.optimizers.items():
        kept = (optimizers[name][STATE_KEY].get("masters") or {}).get("weights", {})
        params = (param for group in optimizer.param_groups for param in group["params"])
        for param, (own, _) in zip(params, (n for names in optimizer.parameter_names() for n in names), strict=True):
            if own in kept:
                masters.setdefault(param, reference(kept[own]))  # type: ignore[arg-type]
    return {
        f"{kind}/{name}/{key}": masters[param]
        for kind, modules in (("models", parts.models), ("criteria", parts.criteria))
        for name, module in modules.items()
        for key, param in _named_as_users_do(module)
        if param in masters
    }


def _named_as_users_do(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    own = bare(module.module) if isinstance(module, ModelWrapper) else module
    return own.named_parameters(remove_duplicate=False)


def _by_parameter(model: ModelWrapper, carried: Mapping[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: carried[param] for name, param in model.named_parameters() if param in carried}


def _without_names(own: Mapping[str, Any]) -> dict[str, Any]:
    """What names parameters of this rank alone: here everything goes by name."""
    kept = {key: value for key, value in own.items() if key != PARAMETERS}
    if "masters" in kept:
        kept["masters"] = {key: value for key, value in kept["masters"].items() if key != IN_MODEL}
    return kept


def _states(extra: Any) -> Any:
    """What the user gave, with the state of every object in it that has one."""
    if isinstance(extra, Mapping):
        return {key: _states(value) for key, value in extra.items()}
    stateful = callable(getattr(extra, "state_dict", None)) and callable(getattr(extra, "load_state_dict", None))
    return extra.state_dict() if stateful else extra


def _merged(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """One tree: what the first rank says, more keys where others hold other layers, and what is each rank's own."""
    of_ranks = {key: [tree.pop(key) for tree in trees] for key in ("random", "loaders", "carried")}
    merged = trees[0]
    for tree in trees[1:]:
        _add_keys(merged, tree)
    return {**merged, **of_ranks}


def _add_keys(tree: Any, other: Any) -> None:
    if isinstance(tree, dict) and isinstance(other, dict):
        for key, value in other.items():
            if key in tree:
                _add_keys(tree[key], value)
            else:
                tree[key] = value
    elif isinstance(tree, list) and isinstance(other, list):
        for one, two in zip(tree, other, strict=True):
            _add_keys(one, two)
