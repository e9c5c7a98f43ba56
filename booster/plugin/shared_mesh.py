"""Device meshes that plugins of one shape share: their process groups hold threads and sockets until the job ends."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# A memo: the same job and arguments give the same mesh. Of the present world only, so that an ended one is let go.
_meshes: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[dist.ProcessGroup, DeviceMesh]] = {}


def shared_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return the mesh over the world with dimensions of these names and sizes; a collective where it is made.

    Made once: the process groups that `init_device_mesh` makes are never closed, because parameters that lie on them, and
    kernels under way, may outlive whoever asked. In gloo each costs three threads and four descriptors.
    """
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("a device mesh needs a process group, and there is none")
    for key in [key for key, (other, _) in _meshes.items() if other is not world]:
        del _meshes[key]
    key = (device_type, tuple(sizes.items()))
    if key not in _meshes:
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        _meshes[key] = (world, mesh)
    return _meshes[key][1]
