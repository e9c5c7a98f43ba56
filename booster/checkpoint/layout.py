"""Tensors between the layout of a running job and the whole names and shapes of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from booster.shards import is_dtensor
from booster.shards.divided import Divided

Held = torch.Tensor | Divided  # what a rank holds of a tensor


def storable(tensor: Held) -> Held:
    """Return `tensor` as the planners take it: a DTensor of plain shards as it is, any other one whole.

    A collective for a DTensor whose shards are not boxes of the whole, as those of a fused projection are that tensor
    parallelism divides part by part.
    """
    if is_dtensor(tensor) and not _is_boxes(tensor):  # type: ignore[arg-type]
        return tensor.full_tensor()  # type: ignore[union-attr]
    return tensor


def empty_like_whole(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor | None) -> torch.Tensor:
    """Return memory to read a whole tensor of `shape` into: divided as `like` is where that has this shape, else plain."""
    if like is None or tuple(like.shape) != shape or not is_dtensor(like) or not _is_boxes(like):
        return torch.empty(shape, dtype=dtype, device="cpu" if like is None else like.device)
    return torch.empty_like(like, dtype=dtype)


def placed_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value`, whole on every rank, divided as `like` is; no communication."""
    if not is_dtensor(like) or is_dtensor(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Torch's planner for tensors under their whole names, some of them `Divided`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """As torch's, which also makes real what is on the meta device, and for that takes tensors alone."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """As torch's, which looks for parts in tensors alone."""
        held = self.state_dict[index.fqn]
        return held.box_at(index.offset) if isinstance(held, Divided) else super().lookup_tensor(index)


class SavePlanner(dcp.DefaultSavePlanner):
    """Torch's planner for tensors under their whole names, some of them `Divided`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """As torch's, which looks for parts in tensors alone."""
        held = self.state_dict[index.fqn]
        return held.box_at(index.offset) if isinstance(held, Divided) else super().lookup_object(index)


def _is_boxes(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements = tensor.placements  # type: ignore[attr-defined]
    return all(type(placement) in (Replicate, Shard, Partial) for placement in placements)
