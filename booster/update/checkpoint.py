"""The state of an update as torch's state dict, of whole parameters, and what is kept besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from booster.update.history import read_counters

if TYPE_CHECKING:
    from booster.update.base import Update

STATE_KEY = "booster"  # of what is ours in a state dict


def state_of(update: Update) -> tuple[dict[str, Any], dict[str, Any]]:
    """Torch's state dict of the optimizer, and what `update` keeps besides. A collective where ranks hold flat shards."""
    shards = update.shards
    with shards.local():
        state, own = update.optimizer_state_dict()
        state["state"] = shards.widen_state(state["state"])
        if "masters" in own:
            weights = shards.widen_weights(own["masters"]["weights"], update.names)
            own = {**own, "masters": {**own["masters"], "weights": weights}}
    return state, own


def load_into(update: Update, state_dict: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Load what `state_of` gave; `own` may lack entries. If it raises, nothing has changed."""
    shards = update.shards
    state_dict = _numbered(shards.kept.of(state_dict) if shards.kept is not None else state_dict)
    with shards.local():
        if isinstance(state_dict.get("state"), dict):
            state_dict = {**state_dict, "state": shards.cut_state(state_dict["state"])}
        masters = own.get("masters")
        if isinstance(masters, Mapping) and isinstance(masters.get("weights"), Mapping):
            weights = shards.cut_weights(dict(masters["weights"]), update.names)
            own = {**own, "masters": {**masters, "weights": weights}}
        update.load_optimizer_state_dict(state_dict, own)


def read_own(own: Any) -> tuple[dict[str, int], dict[str, Any]]:
    """(counters, loss-scaler state) from the entry `STATE_KEY`; raises ValueError if `state_dict` did not write it."""
    try:
        return read_counters(own), dict(own["loss_scaler"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the optimizer state's entry {STATE_KEY!r} is not what state_dict() wrote ({error}): {own!r}"
        ) from error


def _numbered(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Torch takes any keys for parameters, such as the names that `torch.distributed.checkpoint` writes; as numbers, they
    say which parameter is meant."""
    try:
        groups = [dict(group) for group in state_dict["param_groups"]]
        numbers = {key: number for number, key in enumerate(key for group in groups for key in group["params"])}
        state = {numbers.get(key, key): value for key, value in state_dict["state"].items()}
    except (KeyError, TypeError, AttributeError):
        return state_dict  # torch says what is wrong with it
    for group in groups:
        group["params"] = [numbers[key] for key in group["params"]]
    return {**state_dict, "state": state, "param_groups": groups}
