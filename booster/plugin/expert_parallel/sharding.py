"""Experts as DTensors: by whole experts over one dimension of a mesh, and over the others as all parameters are."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from booster.plugin.base import shared_mesh
from booster.plugin.expert_parallel.experts import ExpertForward


def expert_mesh_sizes(sizes: Mapping[str, int], ep_size: int) -> dict[str, int]:
    """Return the dimensions of the mesh on which experts are, from those of the mesh of all other parameters."""
    # Ranks that share the batch, along "shard" or, where that is 1, along "replicate", are cut into groups of `ep_size`.
    cut = "shard" if sizes["shard"] > 1 else "replicate"
    found: dict[str, int] = {}
    for name, size in sizes.items():
        found[name] = size // ep_size if name == cut else size
        if name == "shard":
            found["ep"] = ep_size
    return found


class ExpertSharding:
    """How modules with experts are divided.

    Attributes:
        names: of these modules.
        mesh: what `fully_shard` divides them over, one dimension or (replicate, shard).
    """

    def __init__(self, device_type: str, sizes: Mapping[str, int], ep_size: int, names: Collection[str]) -> None:
        """sizes: of the mesh of all other parameters. A collective, the first time."""
        whole = shared_mesh(device_type, expert_mesh_sizes(sizes, ep_size))
        self.names = names
        self.mesh = whole["replicate", "shard"] if "replicate" in sizes else whole["shard"]
        self._ranks = whole["ep"]
        self._with_layers = whole["ep", "tp"] if sizes.get("tp", 1) > 1 else None

    def in_stage(self, names: Collection[str]) -> ExpertSharding:
        """Return the same for the modules of these names alone, those of a stage of a pipeline."""
        own = copy.copy(self)
        own.names = names
        return own

    @torch.no_grad()
    def divide(self, module: nn.Module) -> None:
        """Leave `module` this rank's experts.

        Parameters become DTensors; those of tensor parallelism, which has been applied, get a dimension more.
        """
        for name, param in module._parameters.items():
            if param is not None:
                # Ranks come with the same parameters, and nothing is sent.
                module._parameters[name] = nn.Parameter(self._own(param), requires_grad=param.requires_grad)
        module.forward = ExpertForward(module, self._ranks)
        module.num_experts = module.num_experts // self._ranks.size()  # type: ignore[operator, assignment]

    def _own(self, param: Any) -> DTensor:
        if not isinstance(param, DTensor):
            return distribute_tensor(param.detach(), self._ranks, [Shard(0)], src_data_rank=None)
        if self._with_layers is None:
            raise RuntimeError("experts are DTensors already; pass the model as it was before it was divided")
        local = param.to_local().chunk(self._ranks.size())[self._ranks.get_local_rank()].clone()
        return DTensor.from_local(
            local,
            self._with_layers,
            [Shard(0), *param.placements],
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )

    def placement(self, param: nn.Parameter) -> Shard | None:
        """Return the dimension along which `fully_shard` divides a parameter of experts: a free one that divides, or None."""
        taken = {getattr(placement, "dim", None) for placement in param.placements}  # type: ignore[attr-defined]
        parts = self.mesh.size(self.mesh.ndim - 1)
        free = [dim for dim in range(param.dim()) if dim not in taken and param.shape[dim] % parts == 0]
        return Shard(free[0]) if free else None
