"""Where in its epoch a loader is: what its state dict says, and which loaders can go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from booster.data.samplers import stride

# In the state of a boosted loader, what is each rank's own: the state that the loader inside keeps, and random states at the
# beginning of the epoch, from which the order may follow.
OWN_STATE, RANDOM = "loader", "random"


def position_of(state: Mapping[str, Any], loader: Any) -> dict[str, Any]:
    """Return the position that `state`, a state dict of a boosted loader, is for `loader`.

    "epoch" counts from 0; "batches" and "samples" are what was yielded of it, on this rank and over all ranks. Raises
    ValueError for another state, and where `loader` cannot go on from it.
    """
    try:
        position: dict[str, Any] = {key: int(state[key]) for key in ("epoch", "batches", "samples")}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is no state of a boosted dataloader ({error!r}): {state!r}") from error
    if min(position.values()) < 0:
        raise ValueError(f"a dataloader's position counts from 0, got {position}")
    seen, samples, width = position["batches"], position["samples"], stride(loader)
    read_again = OWN_STATE not in state and not skips(loader)
    if read_again and seen and width and samples and samples != seen * width:
        raise ValueError(
            f"this {type(loader).__name__} reads {width} samples in a step over all ranks, and {samples // seen} "
            "when the state was taken; load on as many ranks and with the same batch size, or train with a loader of "
            "booster.prepare_dataloader, whose rest of the epoch is dealt to any number of ranks"
        )
    if OWN_STATE in state and not is_stateful(loader):
        raise ValueError(f"the state is that of a loader with load_state_dict(), which {type(loader).__name__} has not")
    return position | {key: state[key] for key in (RANDOM, OWN_STATE) if key in state}


def skips(loader: Any) -> bool:
    """Return whether `loader` leaves out what was seen without reading it."""
    return getattr(loader, "can_start_after", False) is True


def is_stateful(loader: Any) -> bool:
    """Return whether `loader` keeps a state of its own."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
