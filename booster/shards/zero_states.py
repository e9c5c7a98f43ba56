"""State of whole parameters from what each rank holds of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from booster.communicate import broadcast, communication_device, exchange
from booster.flat import shaped_like
from booster.shards.base import State
from booster.shards.zero_buckets import FlatParameters

Key = str | int


class Holding(NamedTuple):
    """A parameter in a flat bucket."""

    bucket: FlatParameters
    position: int

    @property
    def param(self) -> torch.Tensor:
        return self.bucket.params[self.position]

    def has_shape_of_part(self, value: torch.Tensor, rank: int) -> bool:
        start, stop = self.bucket.overlap(self.position, rank)
        return self.bucket.even and value.dim() == 1 and value.numel() == stop - start


def gather_states(
    states: Mapping[Key, State], holdings: Mapping[Key, Holding], group: dist.ProcessGroup
) -> dict[Key, State]:
    """Return, on every rank, the state of each key that any rank has state for, of whole parameters; a collective.

    states: of this rank's parts. holdings: the parameter of each key, the same on all ranks. Tensors of the part's shape
    come back in the parameter's, others are those of the rank that has them. They arrive in host memory, because together
    they are what does not fit on a device.
    """
    rank = dist.get_rank(group)
    mine = [
        (key, name, *_describe(value, holdings[key], rank))
        for key, own in states.items()
        for name, value in own.items()
    ]
    merged: dict[tuple[Key, str], dict[int, Any]] = {}
    for holder, entries in enumerate(_exchange(mine, group)):
        for key, name, *description in entries:
            merged.setdefault((key, name), {})[holder] = description
    found: dict[Key, State] = {}
    for (key, name), holders in merged.items():
        own = states.get(key, {}).get(name)
        found.setdefault(key, {})[name] = _gather(own, holders, holdings[key], group)
    position = {key: index for index, key in enumerate(holdings)}
    return {key: found[key] for key in sorted(found, key=position.__getitem__)}


def _describe(value: Any, holding: Holding, rank: int) -> tuple[str, str, Any]:
    if not isinstance(value, torch.Tensor):
        return "number", type(value).__name__, value
    dtype = str(value.dtype).removeprefix("torch.")
    if value.dim() and holding.has_shape_of_part(value, rank):
        return "part", dtype, None
    return ("scalar", dtype, value.item()) if value.dim() == 0 else ("tensor", dtype, list(value.shape))


def _gather(own: Any, holders: dict[int, Any], holding: Holding, group: dist.ProcessGroup) -> Any:
    first = min(holders)
    kind, dtype_name, content = holders[first]
    if kind == "number":
        return content
    dtype = getattr(torch, dtype_name)
    if kind == "scalar":
        return torch.tensor(content, dtype=dtype)
    rank, param = dist.get_rank(group), holding.param
    device = communication_device(param.device, group)
    if kind == "tensor":
        whole = own.to(device).contiguous() if rank == first else torch.empty(content, dtype=dtype, device=device)
        broadcast(whole, first, group)
        return whole.cpu()
    flat = torch.empty(param.numel(), dtype=dtype, device=device)
    for holder in holders:
        start, stop = holding.bucket.overlap(holding.position, holder)
        if holder == rank:
            flat[start:stop].copy_(own)
        broadcast(flat[start:stop], holder, group)
    return shaped_like(flat.cpu(), param)


def _exchange(entries: list[Any], group: dist.ProcessGroup) -> list[Any]:
    """Return the entries of each rank, which travel as JSON: it tells every float exactly."""
    try:
        text = json.dumps(entries).encode()
    except TypeError as error:
        raise TypeError(f"the optimizer's state holds something that is neither tensor nor number: {error}") from error
    return [json.loads(data) for data in exchange(text, group)]
