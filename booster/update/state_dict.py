"""The state of an update as torch's state dict, of whole parameters, and what is kept besides."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import LBFGS, SGD, Optimizer

from booster.model.optimizers import OPTIMIZERS, granularity_of, info_of, makes_missing_states
from booster.model.params import params_of
from booster.shards.base import FlatShard

if TYPE_CHECKING:
    from booster.update.update import Update

STATE_KEY = "booster"  # of what is ours in a state dict
IN_MODEL = "in_model"  # of masters: names of those that are weights of the model
RELEASE, PREVIOUS_NORM = "release", "previous_norm"  # by which the next step clips, where release_gradients says so
PARAMETERS = "parameters"  # on a rank that has some layers: the names of its parameters, in the order of their numbers

# Entries of the parameter's shape, in torch's optimizers and those that follow their names; and those that are one number.
_SHAPED = {name for row in OPTIMIZERS.values() for name in row.states}
_SINGLE = {name for row in OPTIMIZERS.values() for name in row.counts}


def state_of(update: Update, *, divided: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Torch's state dict of the optimizer, and what `update` keeps besides. A collective where ranks hold flat shards.

    divided: have `FlatShard` tensors there, of what this rank holds, and no collective.
    """
    shards = update.shards
    # The groups hold shards here, by which states and masters are kept.
    with shards.local():
        convert = shards.states.sharded if divided else shards.states.full
        state, own = _converted(update, convert, *update.optimizer_state.state_dict())
    if "masters" in own:
        own["masters"][IN_MODEL] = update.optimizer_state.weights_in_model()
    if update.gradients.in_backward is not None and update.gradients.in_backward.previous is not None:
        own[RELEASE] = {PREVIOUS_NORM: float(update.gradients.in_backward.previous)}
    if shards.selection is not None:
        # A pipeline rank numbers its own layers from 0: names say which these are.
        own[PARAMETERS] = [name for names in _names(update) for name in names]
    return state, own


def cut(update: Update, state_dict: dict[str, Any], own: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Of what `state_of` gave, numbered, the part of this rank. Inside `local()`; a collective where parts are others'."""
    return _converted(update, update.shards.states.local, state_dict, own)


def _converted(
    update: Update, convert: Any, state_dict: dict[str, Any], own: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state dict and what is kept besides, with tensors as `convert`, a method of the states of shards, makes them."""
    states = update.shards.states
    if isinstance(state_dict.get("state"), dict):
        state_dict = {**state_dict, "state": states.of_params(convert, state_dict["state"])}
    own = dict(own)
    if "masters" in own:
        weights = states.of_weights(convert, own["masters"]["weights"], update.names)
        own["masters"] = {**own["masters"], "weights": weights}
    return state_dict, own


def numbered(update: Update, state_dict: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a torch state dict that is of this rank's parameters, which it calls by their numbers.

    Raises ValueError for the state of other layers than this rank's.
    """
    selection = update.shards.selection
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    names = own.get(PARAMETERS)
    if names is not None:
        if not _are_names(names) or len(names) != len(keys):
            count = len(names) if _are_names(names) else f"{names!r}, and not"
            raise ValueError(
                f"state[{STATE_KEY!r}][{PARAMETERS!r}] of the optimizer state is {count} different names for {len(keys)} "
                "parameters; where states of several pipeline ranks are put together, put these lists together too, in the "
                "order of the groups"
            )
        name_of = dict(zip(keys, names, strict=True))
        groups = [
            {**group, "params": [name_of[key] for key in group["params"]]} for group in state_dict["param_groups"]
        ]
        state = {name_of.get(key, key): value for key, value in state_dict["state"].items()}
        state_dict = {**state_dict, "state": state, "param_groups": groups}
        keys = list(names)
    names_here = _names(update)
    mine = {name for group in names_here for name in group}
    # By name, where the state calls parameters by the names that they have here, or says in `own` which numbers have which
    # names.
    if all(isinstance(key, str) for key in keys) and mine <= set(keys):
        foreign = set(keys) - mine - (selection.elsewhere if selection is not None else set())
        if foreign:
            raise ValueError(
                f"the optimizer state holds parameters {_few(foreign)}, which this optimizer does not have"
            )
        return _numbered(_by_name(state_dict, names_here))
    if names is not None:
        lacking = f"lacks {_few(mine - set(keys))}" if mine - set(keys) else "has all"
        raise ValueError(
            f"the optimizer state was written by a pipeline rank, of its layers alone: it has {_few(set(keys))}, and "
            f"{lacking} of this rank. Save on every rank, in a file each, and load on the same rank; or put the states of "
            "all ranks together by name, see docs/parallelism.md, Checkpoints"
        )
    # Without names, by their order.
    return _numbered(selection.of(state_dict) if selection is not None else state_dict)


def _names(update: Update) -> list[list[str]]:
    """The names of the parameters of each group, in order; one that is not of the model has none that a state could have."""
    groups = update.optimizer.param_groups
    return [[update.names.get(param, f"parameter {id(param)}") for param in group["params"]] for group in groups]


def _by_name(state_dict: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """The groups of a state with the parameters `names`, in their order, and the state of these."""
    groups = state_dict["param_groups"]
    if len(groups) != len(names):
        return state_dict
    for index, (group, own) in enumerate(zip(groups, names, strict=True)):
        missing = set(own) - set(group["params"])
        if missing:
            raise ValueError(
                f"the optimizer state has {_few(missing)} in another group than {index}, where they are here"
            )
    gone = {key for group in groups for key in group["params"]} - {name for own in names for name in own}
    state = {key: value for key, value in state_dict["state"].items() if key not in gone}
    own_groups = [{**group, "params": list(own)} for group, own in zip(groups, names, strict=True)]
    return {**state_dict, "state": state, "param_groups": own_groups}


def _are_names(names: Any) -> bool:
    return isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names) and len(set(names)) == len(names)


def _few(names: Collection[str]) -> str:
    return f"{sorted(names)[:3]}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_shapes(update: Update, state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError if a tensor in `state_dict`, where parameters are numbered, cannot be state of its parameter here.

    Not inside `local()`. What is no state dict at all is left to torch.
    """
    groups, states = state_dict.get("param_groups"), state_dict.get("state")
    optimizer = update.optimizer
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if not isinstance(states, Mapping) or not groups or [len(group["params"]) for group in groups] != sizes:
        return
    elementwise = granularity_of(optimizer) == "elementwise"
    # Only of torch's own optimizers is it known which entries are one number.
    single = _SINGLE if info_of(optimizer).reads_all else frozenset()
    for index, param in enumerate(params_of(optimizer)):
        state = states.get(index)
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if key in single:
                if not _is_count(value):
                    raise ValueError(
                        f"the optimizer state holds {key!r} of {update.name_of(param)} as {_shown(value)}, and it must be one "
                        "finite number of at least 0. Nothing was loaded"
                    )
                continue
            # Nearly all, without a closer look.
            if elementwise and isinstance(value, torch.Tensor) and value.shape == param.shape:
                continue
            is_tensor = isinstance(value, (torch.Tensor, FlatShard))
            needed = not _may_be_none(optimizer, key) if value is None else not is_tensor
            if needed and key in _SHAPED and elementwise:
                found = "None" if value is None else type(value).__name__
                raise ValueError(
                    f"the optimizer state holds {key!r} of {update.name_of(param)} as {found}, and it must be a tensor. "
                    "Nothing was loaded"
                )
            for tensor in _tensors(value):
                # Torch does not look at shapes, and its fused kernels read and write past the end of a state that is too small.
                legal = _legal_shape(optimizer, param, key, tensor)
                if tuple(tensor.shape) != legal:
                    raise ValueError(
                        f"the optimizer state is of another model: {key!r} of {update.name_of(param)}, a parameter of shape "
                        f"{tuple(param.shape)}, would be of shape {legal}, and is {tuple(tensor.shape)}. Nothing was loaded; "
                        "load a state of a model with the same parameters in the same order"
                    )


def check_complete(update: Update, state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError if `state_dict`, where parameters are numbered, holds a part of what a step of torch's reads of one."""
    row = info_of(update.optimizer)
    # Of optimizers not torch's this is not known.
    if not row.reads_all:
        return
    states, index = state_dict["state"], 0
    may_lack_all = makes_missing_states(type(update.optimizer))
    for group, given in zip(update.optimizer.param_groups, state_dict["param_groups"], strict=True):
        read = row.read(given)
        for param in group["params"]:
            state = states.get(index, {})
            is_stepped = param.requires_grad and not may_lack_all
            # What has no state at all begins anew, unless it would fail in its first step.
            missing = sorted(read - state.keys()) if state or is_stepped else []
            if missing:
                raise ValueError(
                    f"the optimizer state of {update.name_of(param)} lacks {missing}, which {type(update.optimizer).__name__} "
                    f"reads in every step; it holds {sorted(state)}. Nothing was loaded"
                )
            index += 1


def _is_count(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dim() > 1 or value.is_complex():
            return False
        value = value.item()
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)[:40]


def _may_be_none(optimizer: Optimizer, key: str) -> bool:
    """Return whether the entry `key` may be None: SGD's momentum before it begins; of an optimizer not torch's, any."""
    cls = type(optimizer)
    return not cls.__module__.startswith("torch.optim.") or (cls is SGD and key == "momentum_buffer")


def _legal_shape(optimizer: Optimizer, param: torch.Tensor, key: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape that the entry `key` of `param` must have; that of `tensor` itself where it is not known."""
    given, whole = tuple(tensor.shape), tuple(param.shape)
    if isinstance(optimizer, LBFGS):
        total = sum(p.numel() * (2 if p.is_complex() else 1) for p in params_of(optimizer))
        return (total,) if tensor.dim() and key in ("d", "prev_flat_grad", "old_dirs", "old_stps") else given
    shapes = next((OPTIMIZERS[cls].shapes(whole) for cls in type(optimizer).__mro__ if cls in OPTIMIZERS), {})
    if shapes:
        return shapes.get(key, given)
    if granularity_of(optimizer) == "elementwise":
        return given if key not in _SHAPED and given in ((), (1,)) else whole
    bases = (base for base in type(optimizer).__mro__ if issubclass(base, Optimizer) and base is not Optimizer)
    if key in _SHAPED and any(base.__module__.startswith("torch.optim.") for base in bases):
        return whole
    present = optimizer.state.get(param, {}).get(key)
    return whole if isinstance(present, torch.Tensor) and present.shape == param.shape else given


def _tensors(value: Any) -> Iterator[Any]:
    for entry in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(entry, (torch.Tensor, FlatShard)):
            yield entry


def _numbered(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Torch takes any keys for parameters, such as the names that `torch.distributed.checkpoint` writes."""
    # As numbers, they say which parameter is meant.
    keys = (key for group in state_dict["param_groups"] for key in group["params"])
    numbers = {key: number for number, key in enumerate(keys)}
    state = {numbers.get(key, key): value for key, value in state_dict["state"].items()}
    groups = [{**group, "params": [numbers[key] for key in group["params"]]} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}
