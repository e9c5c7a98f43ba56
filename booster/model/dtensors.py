"""DTensors: this rank's shard of one, and DTensors made around a shard.

Buckets of an update see plain local memory. An optimizer that needs unsharded tensors steps DTensors made around that memory,
so its products and norms are those of the unsharded tensor. Nothing here imports DTensor: where it is not loaded, none exists.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def is_dtensor(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor, without importing them: where they are not imported there is none."""
    return isinstance(tensor, dtensor_types())


def is_part(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor of which other ranks hold other parts."""
    if not is_dtensor(tensor) or tensor.device_mesh.size() == 1:
        return False
    return not all(each.is_replicate() for each in tensor.placements)  # a strided shard is none, says `is_shard`


def dtensor_types() -> tuple[type, ...]:
    """Return the class DTensor for `isinstance`, or nothing where it is not imported, so that there is none."""
    # Importing it takes long, and before the import no tensor can be one.
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of `tensor`, detached, in the memory of `tensor`; of no DTensor, `tensor` itself."""
    if not is_dtensor(tensor):
        return tensor
    held: Any = tensor.detach()
    local: torch.Tensor = held.to_local()
    return local


def memory_of(tensor: torch.Tensor) -> int:
    """Return what is the same of two weights in one place: the memory of this rank's shard, or, where that is empty, the id."""
    local = local_shard(tensor)
    return local.data_ptr() if local.numel() else id(tensor)


def dtensor_around(local: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out as `whole`, of which this rank holds `local`; where `whole` is no DTensor, `local`."""
    if not is_dtensor(whole):
        return local
    from torch.distributed.tensor import DTensor

    like: Any = whole
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def empty_handle(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a float32 leaf of the shape and layout of `like`, without storage: a parameter, or a DTensor."""
    empty = torch.zeros((), dtype=torch.float32, device=device).expand(local_shard(like).shape)
    # Not as a parameter: `to_local` of one returns another tensor each time.
    return dtensor_around(empty, like).requires_grad_() if is_dtensor(like) else nn.Parameter(empty)


def inner_tensor(handle: torch.Tensor) -> torch.Tensor:
    """Return the tensor that is given data for `handle`: the handle itself, or what is inside of a DTensor."""
    if not is_dtensor(handle):
        return handle
    divided: Any = handle
    with torch.no_grad():  # else torch gives a view of it
        inner: torch.Tensor = divided.to_local()
    return inner
