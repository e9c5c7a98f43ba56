"""Parameters that several modules share, which must still be one parameter after they are sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from booster.model.modules import places_of
from booster.plugin.tensor_parallel.local_style import LocalStyle

Slots = list[tuple[str, nn.Module, str]]  # name of the parameter, its module, its name in there


def tied_slots(model: nn.Module) -> list[Slots]:
    """Return the places of every parameter of `model` that is in more than one."""
    found = []
    for places in places_of(model).values():
        # A module that is registered twice is one slot.
        slots = {(id(place.holder), place.own): (place.name, place.holder, place.own) for place in reversed(places)}
        found.append(list(reversed(slots.values())))
    return [slots for slots in found if len(slots) > 1]


def check_ties(model: nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """Raise ValueError if `plan`, of exact names, would give a tied parameter several placements."""
    styles = {id(model.get_submodule(name)): style for name, style in plan.items()}
    for places in tied_slots(model):
        known = [(name, _placement(styles.get(id(module)), module, own)) for name, module, own in places]
        for name, placement in known[1:]:
            if placement != known[0][1]:
                raise _disagree(known[0][0], known[0][1], name, placement)


def tie(slots: list[Slots]) -> None:
    """Put the parameter of the first place of each list into the others. Raises ValueError if their placements differ."""
    for places in slots:
        (first_name, first_module, first_own), *others = places
        param = first_module._parameters[first_own]
        for name, module, own in others:
            other = module._parameters[own]
            if _of(other) != _of(param):
                raise _disagree(first_name, _of(param), name, _of(other))
            module._parameters[own] = param


def _of(param: torch.Tensor | None) -> Placement | None:
    return param.placements[0] if isinstance(param, DTensor) else None


def _placement(style: ParallelStyle | None, module: nn.Module, own: str) -> Placement | None:
    """Return the placement that `style` will give a parameter; None for a plain tensor, and for a style of the user."""
    if isinstance(style, LocalStyle):
        return style.placements(module).get(own)
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return None
    by_rows = isinstance(style, RowwiseParallel)
    if own == "bias" and by_rows:
        return Replicate()
    return Shard(int(by_rows) if not isinstance(module, nn.Embedding) else 1 - int(by_rows))


def _disagree(first: str, placement: Placement | None, second: str, other: Placement | None) -> ValueError:
    return ValueError(
        f"{first!r} and {second!r} are one tied parameter, but tp_plan makes it {placement or 'whole'!s} in the one and "
        f"{other or 'whole'!s} in the other; name both modules or neither, for example 'embedding_rowwise' for an embedding "
        "and 'colwise_gather_output' for the head that shares its weight"
    )
