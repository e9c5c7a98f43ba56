"""Loading the state of a boosted optimizer: read whole, agreed on by all ranks, then taken over, or nothing changes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from booster.common.snapshot import StateSnapshot
from booster.model.optimizers import state_differences
from booster.model.params import local_shard, params_of
from booster.ranks import agreement
from booster.shards.base import FlatShard
from booster.tensors.trees import HALF_DTYPES
from booster.update.choice import implementation, keep_implementation
from booster.update.context import Fill
from booster.update.decision import StepHistory, read_counters
from booster.update.state_dict import PREVIOUS_NORM, RELEASE, STATE_KEY, check_complete, check_shapes, cut, numbered

if TYPE_CHECKING:
    from booster.model.params import Selection
    from booster.update.update import Update

_WIDE = (torch.float32, torch.float64)
_KEEP_SCALE = f"to keep the scale that there is, set state[{STATE_KEY!r}]['loss_scaler'] = {{}}"


class _Own(NamedTuple):
    """What is ours in a state dict. counts, scale: None and empty where it was not written."""

    counts: dict[str, int] | None
    scale: dict[str, Any]
    rest: Mapping[str, Any]


class Reading(NamedTuple):
    """A state that is read and fits, of which containers of the optimizer and the loss scale are changed, and no tensor.

    One of the two is called next. adopt: do the rest; it does not fail. undo: have everything as it was before.
    """

    adopt: Callable[[], None]
    undo: Callable[[], None]


def read_state(update: Update, history: StepHistory, state_dict: Any, fill: Fill | None = None) -> Reading:
    """Read what `OptimizerWrapper.state_dict` gave, or a plain torch state dict. A collective of every rank of the update's
    group."""
    optimizer, scaler = update.optimizer, update.gradients.scaler
    # First all that can be seen without touching the optimizer, on all ranks; then its own load, which may still refuse.
    # If it raises on one rank, on none has anything changed, and all raise: else the others would wait in the next collective.
    with agreement.all_or_none(update.gradients.group, "load its optimizer state"):
        own = _read_own(state_dict)
        state = _plain(optimizer, state_dict)
        if has_torch_format(optimizer):
            state = numbered(update, state, own.rest)
        _check_entries(optimizer, state)
        check_shapes(update, state)
        if has_torch_format(optimizer):
            check_complete(update, state)
        rest = dict(own.rest)
        values: dict[torch.Tensor, torch.Tensor] = {}
        if "masters" in rest:
            rest["masters"], values = update.optimizer_state.read_masters(
                _local_masters(update.shards.selection, rest["masters"])
            )
        # Weights of the model may be written between reading and taking over.
        moved = _moved(update, state, rest)
    if not agreement.are_alike(repr(moved), update.gradients.group):
        raise ValueError("ranks differ in the tensors that change their layout; pass states of one kind on every rank")
    before, scale = implementation(optimizer), scaler.state_dict()
    # The optimizer's own load may refuse half-way.
    snapshot = StateSnapshot([optimizer], numbers=False, random=False)

    def undo() -> None:
        snapshot.restore()
        scaler.load_state_dict(scale)

    try:
        with agreement.all_or_none(update.gradients.group, "load its optimizer state"), update.shards.local():
            if own.scale:
                try:
                    scaler.load_state_dict(own.scale)
                except ValueError as error:
                    raise ValueError(
                        f"the loss scale in the optimizer state, state[{STATE_KEY!r}]['loss_scaler'], does not load: {error}; "
                        f"{_KEEP_SCALE}"
                    ) from error
            groups = [dict(group) for group in optimizer.param_groups]
            adopt_states = update.optimizer_state.read_state_dict(*cut(update, state, rest), fill)
            weights = {param: update.shards.distribute(value, param) for param, value in values.items()}
            keep_implementation(optimizer, before)
            for index, (old, new) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
                missing = sorted(old.keys() - new.keys() - _OF_SCHEDULERS)
                if missing:
                    raise ValueError(
                        f"param_groups[{index}] of the optimizer state lacks {missing}, which this optimizer has"
                    )
    except BaseException:
        undo()
        raise

    counts, previous_norm = own.counts, own.rest.get(RELEASE, {}).get(PREVIOUS_NORM)

    def adopt() -> None:
        with update.shards.local():
            adopt_states()
        if update.optimizer_state.has_masters:  # which round the weights of their own part anew
            update.shards.sync_params(one_by_one=True)  # of which a backend holds copies while they are sent
        with torch.no_grad():
            for param, weight in weights.items():
                param.copy_(weight)
        update.shards.reshard()
        if update.gradients.in_backward is not None:
            update.gradients.in_backward.reset(previous_norm)
        if counts is not None:
            history.load_state_dict(counts)

    return Reading(adopt, undo)


# ---------------------------------------------------------------------- what can be seen without the optimizer


def check_own(state_dict: Any) -> None:
    """Raise ValueError for what of `state_dict` is ours and no load would take, as masters that hold NaN."""
    # Masters may be half weights, of which a load makes float32 ones.
    _read_own(state_dict, (*_WIDE, *HALF_DTYPES))


def _read_own(state_dict: Any, of_masters: tuple[torch.dtype, ...] = _WIDE) -> _Own:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"load_state_dict takes the mapping that optimizer.state_dict() gave, got {type(state_dict).__name__}"
        )
    if STATE_KEY not in state_dict:
        return _Own(None, {}, {})
    own = state_dict[STATE_KEY]
    try:
        if not isinstance(own, Mapping):
            raise ValueError(f"it is {own!r}")
        counts = read_counters(own)
        scale = own.get("loss_scaler")
        if not isinstance(scale, Mapping):
            raise ValueError(f"loss_scaler is {scale!r}, and no mapping")
        if "masters" in own:
            _check_masters(own["masters"], of_masters)
        if RELEASE in own:
            in_backward = own[RELEASE]
            norm = in_backward.get(PREVIOUS_NORM) if isinstance(in_backward, Mapping) else None
            if not isinstance(norm, float) or not 0 <= norm < math.inf:
                raise ValueError(f"{RELEASE} is {in_backward!r}, and must hold the norm of a step as {PREVIOUS_NORM!r}")
    except ValueError as error:
        raise ValueError(
            f"the optimizer state's entry {STATE_KEY!r} is not what state_dict() wrote: {error}. Delete that entry to load "
            "states and groups alone; counters, loss scale and masters then stay as they are"
        ) from error
    return _Own(counts, dict(scale), own)


def _check_masters(masters: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    weights = masters.get("weights") if isinstance(masters, Mapping) else None
    if not isinstance(weights, Mapping) or not isinstance(masters.get("rounding", {}), Mapping):
        found = sorted(map(str, masters)) if isinstance(masters, Mapping) else repr(masters)
        raise ValueError(f"masters hold no mapping 'weights', or another 'rounding' than a mapping, but {found}")
    for name, weight in weights.items():
        wrong = _why_no_master(weight, dtypes)
        if wrong:
            raise ValueError(f"the master of {name} {wrong}")


def _why_no_master(weight: Any, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if not isinstance(weight, (torch.Tensor, FlatShard)):
        return f"is of type {type(weight).__name__}, and must be a tensor"
    if weight.dtype not in dtypes:
        return f"is of {weight.dtype}, and must be of float32"
    local = local_shard(weight.values if isinstance(weight, FlatShard) else weight)
    return "holds NaN: the run has failed" if not local.is_meta and holds_nan(local) else None


def holds_nan(values: torch.Tensor) -> bool:
    """Return whether any of `values` is NaN; a host sync. Mostly a sum, a twentieth of the time, says that none is."""
    return bool(values.sum().isnan()) and bool(values.isnan().any())


def _plain(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `state_dict` that is torch's, checked as far as torch's own format goes."""
    plain = {key: value for key, value in state_dict.items() if key != STATE_KEY}
    if not has_torch_format(optimizer):
        return plain
    missing = [key for key in ("state", "param_groups") if key not in plain]
    if missing:
        raise ValueError(
            f"the optimizer state lacks {missing}; it holds {sorted(map(str, plain))[:8]}. Pass what optimizer.state_dict() "
            "gave"
        )
    states, groups = plain["state"], plain["param_groups"]
    if not isinstance(states, Mapping):
        raise ValueError(f"the optimizer state's 'state' is of type {type(states).__name__}, and must be a mapping")
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f"the optimizer state's 'param_groups' is of type {type(groups).__name__}, and must be a list")
    for index, group in enumerate(groups):
        params = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(params, (list, tuple)):
            raise ValueError(
                f"param_groups[{index}] of the optimizer state is no mapping with a list 'params', as state_dict() writes"
            )
    keys = [key for group in groups for key in group["params"]]
    twice = sorted({str(key) for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else []
    if twice:
        raise ValueError(
            f"the optimizer state lists parameters {twice[:8]} more than once. Every rank of a pipeline numbers its own from "
            "0: load each rank's state on that rank, or put states together by name, see docs/parallelism.md, Checkpoints"
        )
    return plain


def has_torch_format(optimizer: Optimizer) -> bool:
    """Return whether the state dict of `optimizer` is torch's: it may have its own, which it alone can read."""
    return type(optimizer).load_state_dict is Optimizer.load_state_dict


# ---------------------------------------------------------------------- what must fit the optimizer


def _check_entries(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError if groups or states are not those of the parameters of `optimizer`; the keys are their numbers."""
    if not has_torch_format(optimizer):
        return
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(group["params"]) for group in state_dict["param_groups"]]
    if len(given) != len(sizes):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(given)}, and this optimizer has {len(sizes)}"
        )
    if given != sizes:
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: there are "
            f"{given} parameters in the groups of the state, and {sizes} in those of this optimizer. A pipeline rank writes "
            "the state of its layers"
        )
    _check_kinds(optimizer, state_dict["param_groups"])
    for key, entry in state_dict["state"].items():
        if isinstance(key, int) and not 0 <= key < sum(sizes):
            raise ValueError(f"the optimizer state holds state of parameter {key}, which is in none of its groups")
        if isinstance(key, int) and not isinstance(entry, Mapping):
            raise ValueError(
                f"the optimizer state of parameter {key} is of type {type(entry).__name__}, and must be a mapping"
            )
        names = [name for name in entry if not isinstance(name, str)] if isinstance(key, int) else []
        if names:
            raise ValueError(f"the optimizer state of parameter {key} has entries {names[:4]}, which are no names")


def _moved(update: Update, state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> list[tuple[Any, str]]:
    """Return which tensors take a collective to be laid out as parameters are here."""
    params = params_of(update.optimizer)
    entries: list[tuple[Any, str, Any, torch.Tensor]] = []
    if has_torch_format(update.optimizer):
        states = state_dict["state"]
        entries += [(i, key, value, p) for i, p in enumerate(params) for key, value in states.get(i, {}).items()]
    named = {update.names[param]: param for param in params if param in update.names}
    weights = own.get("masters", {}).get("weights", {})
    entries += [(name, "master", weight, named[name]) for name, weight in weights.items() if name in named]
    return [
        (index, key)
        for index, key, value, param in entries
        if isinstance(value, torch.Tensor) and value.dim() and update.shards.needs_collective(value, param)
    ]


def _local_masters(selection: Selection | None, masters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of masters of a whole model, those that are not of other ranks' layers."""
    if selection is None:
        return masters
    return {**masters, "weights": {n: w for n, w in masters["weights"].items() if n not in selection.elsewhere}}


def _check_kinds(optimizer: Optimizer, given: list[Mapping[str, Any]]) -> None:
    """Raise ValueError if an option in the groups of a state is of another kind than it is here: the next step would fail."""
    defaults = {name: option.default for name, option in inspect.signature(type(optimizer)).parameters.items()}
    for index, (old, new) in enumerate(zip(optimizer.param_groups, given, strict=True)):
        for name in old.keys() & new.keys() - {"params", "param_names"}:
            where = f"the optimizer state's param_groups[{index}][{name!r}]"
            wrong = list(state_differences(where, old[name], new[name], defaults.get(name, ...)))
            sizes = [len(value) if isinstance(value, (list, tuple)) else 0 for value in (old[name], new[name])]
            if not wrong and sizes[0] != sizes[1] and name in defaults:
                wrong = [f"{where} has {sizes[1]} entries, and {sizes[0]} here"]
            if wrong:
                raise ValueError("; ".join(wrong))


_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names"}
