"""The experts of a transformers model: one module that holds the weights of all experts as bare parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from booster.common.torch_internals.tensor_internals import StridedShard
from booster.plugin.tensor_parallel import boundary
from booster.plugin.tensor_parallel.boundary import LocalStyle

_PIECES = {"colwise": 1, "packed_colwise": 2, "rowwise": 1}


class Experts(LocalStyle):
    """Every rank has some hidden features of every expert; the ranks' outputs are summed.

    parameters: for each own parameter (experts, output features, input features), "colwise", "packed_colwise" (two
    projections one after the other) or "rowwise". Tensors given to the module are whole, routing weights too.
    """

    def __init__(self, parameters: Mapping[str, object]) -> None:
        self.parameters = dict(parameters)

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        placements: dict[str, Placement] = {"colwise": Shard(1), "rowwise": Shard(2)}
        placements["packed_colwise"] = StridedShard(1, split_factor=_PIECES["packed_colwise"])
        return {name: placements[str(style)] for name, style in self.parameters.items()}

    def check(self, name: str, module: nn.Module, tp_size: int) -> None:
        left = [own for own in module._parameters if own not in self.parameters]
        if left:
            raise ValueError(
                f"{name!r} is divided as experts, but tp_plan does not say how its parameter {left[0]!r} is"
            )
        for own, style in self.parameters.items():
            param: Any = module._parameters[own]
            if style not in _PIECES or param.dim() != 3:
                raise ValueError(
                    f"'{name}.{own}', of shape {tuple(param.shape)}, cannot be divided by {style!r}; parameters of experts "
                    f"have three dimensions, and one of the styles {sorted(_PIECES)}"
                )
            features = param.shape[2 if style == "rowwise" else 1]
            if features % (_PIECES[str(style)] * tp_size):
                raise ValueError(
                    f"'{name}.{own}' has {features} features to divide by {style!r}, which do not divide by tp_size={tp_size}; "
                    "choose another tp_size, or leave the experts out of tp_plan"
                )

    def enter(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def copy(value: Any) -> Any:
            differentiable = isinstance(value, torch.Tensor) and value.is_floating_point()
            return boundary.copy(value, mesh) if differentiable else value

        return tuple(map(copy, args)), {key: copy(value) for key, value in kwargs.items()}

    def leave(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        return boundary.reduce(output, mesh)
