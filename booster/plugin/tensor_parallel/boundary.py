"""Where activations change layout between the ranks of a tensor-parallel group, with the right gradients.

Every function takes and returns a plain local tensor and runs at most one collective, which backward mirrors.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def copy(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The same tensor for ranks that each use it in their own way; backward sums their gradients."""
    return _wrap(x, mesh, Replicate()).to_local(grad_placements=[Partial()])


def reduce(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' tensors, on every rank."""
    return _move(x, mesh, Partial(), Replicate())


def gather(x: torch.Tensor, mesh: DeviceMesh, dim: int, *, sum_gradients: bool) -> torch.Tensor:
    """The ranks' equal parts joined along `dim`, on every rank.

    sum_gradients: what follows differs by rank, so backward sums; otherwise the gradient is the same on all ranks, and
    each takes its part of it.
    """
    whole = _wrap(x, mesh, Shard(dim)).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial() if sum_gradients else Replicate()])


def split(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have, cut along `dim`. Raises ValueError if it does not divide."""
    _check_even(x, mesh, dim)
    return _move(x, mesh, Replicate(), Shard(dim))


def reduce_scatter(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's part, along `dim`, of the sum of the ranks' tensors. Raises ValueError if it does not divide."""
    _check_even(x, mesh, dim)
    return _move(x, mesh, Partial(), Shard(dim))


def _wrap(x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def _move(x: torch.Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> torch.Tensor:
    return _wrap(x, mesh, source).redistribute(placements=[target]).to_local()


def _check_even(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> None:
    if x.shape[dim] % mesh.size():
        raise ValueError(
            f"dimension {dim} of a tensor of shape {tuple(x.shape)} does not divide by tp_size={mesh.size()}; under "
            "sequence_parallelism=True pad the sequence to a multiple of it, or use sequence_parallelism=False"
        )
