"""Tensors between the layout of a running job and the whole names and shapes of a checkpoint."""

from __future__ import annotations

import torch

from booster.shards import is_dtensor


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as the planners take it: a DTensor of plain shards as it is, any other one whole.

    A collective for a DTensor whose shards are not boxes of the whole, as those of a fused projection are that tensor
    parallelism divides part by part.
    """
    if is_dtensor(tensor) and not _is_boxes(tensor):
        return tensor.full_tensor()  # type: ignore[attr-defined]
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


def _is_boxes(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements = tensor.placements  # type: ignore[attr-defined]
    return all(type(placement) in (Replicate, Shard, Partial) for placement in placements)
