"""Where in its epoch a loader is: what its state dict says, and which loaders can go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from booster import arguments
from booster.data.draws import generators_of
from booster.data.samplers import is_stateful, stride

# In the state of a boosted loader, what is each rank's own: the state that the loader inside keeps, and the random states
# from which its order follows; see `Draws.state_dict`.
OWN_STATE, DRAWS = "loader", "draws"


def position_of(state: Mapping[str, Any], loader: Any) -> dict[str, Any]:
    """Return the position that `state`, a state dict of a boosted loader, is for `loader`.

    "epoch" counts from 0; "batches" and "samples" are what was yielded of it, on this rank and over all ranks. Raises
    ValueError for another state, and where `loader` cannot go on from it.
    """
    names = ("epoch", "batches", "samples")
    if not isinstance(state, Mapping) or not all(arguments.is_whole(state.get(name)) for name in names):
        raise ValueError(f"this is no state of a boosted dataloader, with whole numbers {', '.join(names)}: {state!r}")
    position: dict[str, Any] = {name: int(state[name]) for name in names}
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
    if DRAWS in state:
        _check_draws(state[DRAWS], loader)
    return position | {key: state[key] for key in (DRAWS, OWN_STATE) if key in state}


def _check_draws(draws: Any, loader: Any) -> None:
    """Raise ValueError where a pass over `loader` cannot be made again from what `Draws.state_dict` said."""
    try:
        places, workers = sorted(draws["now"]), draws["num_workers"]
        passes = [] if "begin" not in draws else [each for each in (draws["begin"], draws["first"]) if each is not None]
        complete = isinstance(draws["warm"], bool) and all(sorted(each["generators"]) == places for each in passes)
        complete = complete and (not passes or all(isinstance(place, str) for place in draws["apart"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no state of a boosted dataloader ({error!r})") from error
    if not complete:
        raise ValueError(f"this is no state of a boosted dataloader: of what it drew there is {sorted(draws)}")
    if places != (here := sorted(generators_of(loader))):
        raise ValueError(
            f"the state is that of a dataloader with generators, or samplers with a state, at {places or 'no place'}, and "
            f"this {type(loader).__name__} has them at {here or 'no place'}; make the dataloader as it was"
        )
    if workers not in (None, getattr(loader, "num_workers", None)):
        raise ValueError(
            f"a stream that {workers} workers read comes in another order with {getattr(loader, 'num_workers', None)}; make "
            f"the dataloader with num_workers={workers}"
        )


def skips(loader: Any) -> bool:
    """Return whether `loader` leaves out what was seen without reading it."""
    return getattr(loader, "can_start_after", False) is True
