"""Where what a rank holds of tensors lies in the whole ones, so that parts are compared without gathering anything."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_RANK = 2**32  # more than a part has elements
# A memo of the job: layouts repeat from program to program, and each costs collectives.
_known = {}


def local(tensor):
    """What this rank holds of a tensor."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def positions(tensor):
    """Return for each element of this rank's part of `tensor`, in order, its position in the whole, flat.

    A collective of the ranks of the DTensor's mesh where a layout is new, which is asked of torch: elements that are
    numbered, rank by rank, are gathered.
    """
    if not isinstance(tensor, DTensor):
        return torch.arange(tensor.numel())
    key = (tensor.device_mesh, tensor.placements, tensor.shape)
    if key not in _known:
        part = tensor.detach().to_local()
        numbers = (torch.arange(part.numel()) + dist.get_rank() * _RANK).view(part.shape)
        numbered = DTensor.from_local(
            numbers, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        whole = numbered.full_tensor().flatten()
        (mine,) = torch.nonzero(whole // _RANK == dist.get_rank(), as_tuple=True)
        found = torch.empty(part.numel(), dtype=torch.int64)
        found[whole[mine] % _RANK] = mine
        _known[key] = found
    return _known[key]
