"""Tensors between the layout of a running job and the whole shapes of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from booster.common.torch_internals.tensor_internals import gather_full
from booster.model.dtensors import is_dtensor, local_shard
from booster.shards.flat_shard import FlatShard

HeldTensor = torch.Tensor | FlatShard  # what a rank holds of a tensor


def as_planned(tensor: HeldTensor) -> HeldTensor:
    """Return `tensor` as the planners take it: a DTensor of plain shards as it is, any other one whole."""
    # A collective for a DTensor with shards that are not boxes of the whole, as those of a fused projection are that tensor
    # parallelism divides part by part.
    if is_dtensor(tensor) and not is_boxes(tensor):  # type: ignore[arg-type]
        return gather_full(tensor)
    return tensor


def empty_like_whole(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor | None) -> torch.Tensor:
    """Return memory to read a whole tensor of `shape` into: divided as `like` is where that has this shape, else plain."""
    if like is None or tuple(like.shape) != shape or not is_dtensor(like) or not is_boxes(like):
        return torch.empty(shape, dtype=dtype, device="cpu" if like is None else like.device)
    return torch.empty_like(like, dtype=dtype)


def shard_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value`, whole on every rank, divided as `like` is; no communication."""
    if not is_dtensor(like) or is_dtensor(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def can_be_read_into(held: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the bytes of a tensor of `shape` and `dtype`, or this rank's part of them, are in `held` as in a file."""
    if held.dtype != dtype or tuple(held.shape) != shape or (is_dtensor(held) and not is_boxes(held)):
        return False
    local = local_shard(held)
    return (
        local.device.type == "cpu"
        and type(local) in (torch.Tensor, torch.nn.Parameter)
        and local.layout is torch.strided
        and local.is_contiguous()
        and not (local.is_conj() or local.is_neg() or local.is_inference())
        and bool(local.numel())
    )


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that the memory of `tensors` was written to, which a read from a file does past it."""
    # A backward that saved one of them must raise, as after any write in place.
    written = list(tensors)
    torch.autograd.graph.increment_version([*written, *(local_shard(each) for each in written if is_dtensor(each))])


def is_boxes(tensor: torch.Tensor) -> bool:
    """Return whether what each rank has of a DTensor is one box of it."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements = tensor.placements  # type: ignore[attr-defined]
    return all(type(placement) in (Replicate, Shard, Partial) for placement in placements)


def refuse_made_of_tensors(where: str, tensor: HeldTensor) -> None:
    """Raise TypeError for a tensor made of others inside, as those of torchao in few bits and sparse ones are."""
    held = tensor.values if isinstance(tensor, FlatShard) else tensor
    local = held.to_local() if is_dtensor(held) else held  # type: ignore[attr-defined]
    if hasattr(type(local), "__tensor_flatten__"):
        raise TypeError(
            f"{where} is a {type(local).__name__}, made of tensors inside, which no checkpoint holds; leave weights that do "
            "not train out with b.save(frozen=False), and keep states of optimizers in few bits with Booster(states='8bit')"
        )
    if local.layout is not torch.strided:
        layout = str(local.layout).removeprefix("torch.")
        raise TypeError(
            f"{where} is a tensor of layout {layout}, which no checkpoint holds; a buffer that the model makes anew is "
            "left out with register_buffer(..., persistent=False), any other is kept as its indices and its values"
        )
