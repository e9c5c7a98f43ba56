"""Where activations change layout between the ranks of a tensor-parallel group, with the right gradients.

Every function takes and returns a plain local tensor and runs at most one collective, which backward mirrors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def copy(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the same tensor, for ranks that each use it differently; backward sums their gradients."""
    return _Redistribution.apply(x, mesh, Replicate(), Replicate(), Partial(), Replicate())


def reduce(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum of the ranks' tensors on every rank."""
    return _Redistribution.apply(x, mesh, Partial(), Replicate(), Replicate(), Replicate())


def gather(x: torch.Tensor, mesh: DeviceMesh, dim: int, *, sum_gradients: bool) -> torch.Tensor:
    """Return the ranks' equal shards joined along `dim`, on every rank.

    sum_gradients: in backward, of all ranks.
    """
    shard = Shard(dim % x.dim())
    # Where what follows differs by rank, backward sums; otherwise the gradient is the same on all ranks, and each takes its
    # shard of it.
    return _Redistribution.apply(x, mesh, shard, Replicate(), Partial() if sum_gradients else Replicate(), shard)


def split(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Return this rank's shard along `dim` of a tensor that all ranks have. Raises ValueError if it does not divide."""
    _check_even(x, mesh, dim)
    shard = Shard(dim % x.dim())
    return _Redistribution.apply(x, mesh, Replicate(), shard, shard, Replicate())


def reduce_scatter(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Return this rank's shard along `dim` of the sum of the ranks' tensors. Raises ValueError if it does not divide."""
    _check_even(x, mesh, dim)
    shard = Shard(dim % x.dim())
    return _Redistribution.apply(x, mesh, Partial(), shard, shard, Replicate())


class _Redistribution(torch.autograd.Function):
    """From one layout to another, and the gradient from the layout of the result to that of the input.

    DTensor's own conversions return views, which users could not modify in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mesh: DeviceMesh,
        source: Placement,
        target: Placement,
        grad_source: Placement,
        grad_target: Placement,
    ) -> torch.Tensor:
        ctx.layouts = (mesh, grad_source, grad_target)
        ctx.layouts_of_values = (source, target)
        moved = _move(x, mesh, source, target)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not grad.requires_grad:
            return _move(grad, *ctx.layouts), None, None, None, None, None
        # A second derivative: the gradient of a gradient has the layouts of the values.
        return _Redistribution.apply(grad, *ctx.layouts, *ctx.layouts_of_values), None, None, None, None, None


def _move(x: torch.Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> torch.Tensor:
    if source == target:
        return x
    return DTensor.from_local(x, mesh, [source], run_check=False).redistribute(placements=[target]).to_local()


def _check_even(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> None:
    if x.shape[dim] % mesh.size():
        raise ValueError(
            f"dimension {dim} of a tensor of shape {tuple(x.shape)} does not divide by tp_size={mesh.size()}; under "
            "sequence_parallelism=True pad the sequence to a multiple of it, or use sequence_parallelism=False"
        )
