"""Linear layers by columns and by rows."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from booster.common import arguments
from booster.common.torch_internals.tensor_internals import StridedShard
from booster.plugin.tensor_parallel import local_style
from booster.plugin.tensor_parallel.local_style import (
    Args,
    Kwargs,
    LocalStyle,
    SharedInputGrad,
    local_with_gradient,
    own_dtensors,
)
from booster.shards.dtensor import differing

_COMPARED = 3  # backward passes in which ranks compare the gradients of what they gathered


@dataclass(kw_only=True, eq=False)
class Colwise(LocalStyle):
    """A linear layer by output features: every rank computes some of them from the whole input.

    num_parts: how many projections of equal width the layer holds one after the other (3 for a fused qkv); every rank gets its
        share of each.
    gather_output: join the output features on every rank.
    sequence_dim: the input is a part of the sequence, which is gathered along this dimension; None: it is whole.
    shared_input: a module around this one sums the gradients of the input.
    """

    num_parts: int = 1
    gather_output: bool = False
    sequence_dim: int | None = None
    shared_input: bool = False

    def __post_init__(self) -> None:
        arguments.count("num_parts", self.num_parts)
        arguments.flag("gather_output", self.gather_output)
        check_sequence_dim(self.sequence_dim)
        arguments.flag("shared_input", self.shared_input)
        self.shared: SharedInputGrad | None = None
        # By layer, its name and the backward passes in which its gradients are still compared.
        self._to_compare: weakref.WeakKeyDictionary[nn.Module, tuple[str, int]] = weakref.WeakKeyDictionary()

    @property
    def reads_whole_input(self) -> bool:
        """Whether the layer sums the gradients of its input itself, or shares the sum with others."""
        return self.sequence_dim is None and not self.shared_input

    def sharing(self, shared: SharedInputGrad) -> Colwise:
        """Return this style for a layer that may share its input, by `shared`."""
        style = copy.copy(self)
        style.shared = shared
        return style

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        dim = output_dim(module)
        if self.num_parts == 1:
            return {"weight": Shard(dim), "bias": Shard(0)}
        # A strided bias has no placement that FSDP could divide again; whole, it is small.
        return {"weight": StridedShard(dim, split_factor=self.num_parts), "bias": Replicate()}

    def check(self, name: str, module: Any, tp_size: int) -> None:
        _check_linear(name, module, "by columns")
        if self.gather_output:
            self._to_compare[module] = name, _COMPARED
        features = module.weight.shape[output_dim(module)]
        if features % (self.num_parts * tp_size):
            projections = f" in {self.num_parts} projections" if self.num_parts > 1 else ""
            raise ValueError(
                f"{name!r} has {features} output features{projections}, which do not divide by tp_size={tp_size}; "
                "choose another tp_size, or leave the module out of tp_plan"
            )

    def localise(self, module: Any, tp_size: int) -> None:
        if is_conv1d(module):
            module.nf //= tp_size  # by which it shapes its output

    def enter(self, module: nn.Module, mesh: DeviceMesh, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        x, *rest = args
        if self.sequence_dim is not None:
            x = local_style.gather(x, mesh, self.sequence_dim, sum_gradients=True)
        elif not self.shared_input:
            x = local_style.copy(x, mesh) if self.shared is None else self.shared.copy(x, mesh)
        return (x, *rest), kwargs

    def local_params(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, torch.Tensor | None]:
        params = dict(super().local_params(module, mesh))
        if self.num_parts > 1 and "bias" in params:
            params["bias"] = packed_shard(params["bias"], self.num_parts, mesh)
        return params

    def exit(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        if not self.gather_output:
            return output
        whole = local_style.gather(output, mesh, -1, sum_gradients=False)
        name, left = self._to_compare.get(module, ("", 0))
        if left and whole.requires_grad and not torch.compiler.is_compiling():
            self._to_compare[module] = name, left - 1
            whole.register_hook(functools.partial(_check_alike, name, mesh))
        return whole


def _check_alike(name: str, mesh: DeviceMesh, grad: torch.Tensor) -> None:
    """Raise RuntimeError, on all ranks, unless `grad`, of a gathered output, is the same on all of them."""
    if differing([grad], [grad], mesh.get_group()) == [True]:
        raise RuntimeError(
            f"tp_plan gives {name!r} 'colwise_gather_output', and all ranks must use its whole output alike, but the gradient "
            "of it differs among them: each reads it for its own heads or features, as keys and values that all heads share. "
            "Give it 'replicated_with_output_grad_allreduce', which sums these gradients"
        )


@dataclass(kw_only=True, eq=False)
class Rowwise(LocalStyle):
    """A linear layer by input features: every rank has some of them, and the ranks' outputs are summed.

    split_input: the input is whole, and each rank takes its features.
    sequence_dim: every rank keeps a part of the sequence of the sum, along this dimension; None: all of it.

    The bias is added once, after the sum.
    """

    split_input: bool = False
    sequence_dim: int | None = None

    def __post_init__(self) -> None:
        arguments.flag("split_input", self.split_input)
        check_sequence_dim(self.sequence_dim)

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {"weight": Shard(1 - output_dim(module)), "bias": Replicate()}

    def check(self, name: str, module: Any, tp_size: int) -> None:
        _check_linear(name, module, "by rows")
        features = module.weight.shape[1 - output_dim(module)]
        if features % tp_size:
            raise ValueError(
                f"{name!r} has {features} input features, which do not divide by tp_size={tp_size}; choose another tp_size, "
                "or leave the module out of tp_plan"
            )

    def enter(self, module: nn.Module, mesh: DeviceMesh, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        x, *rest = args
        return (local_style.split(x, mesh, -1) if self.split_input else x, *rest), kwargs

    def local_params(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, torch.Tensor | None]:
        params = dict(super().local_params(module, mesh))
        if "bias" in params:
            bias = module._parameters["bias"].to_local().detach()  # type: ignore[union-attr]
            # Conv1D of transformers does not compute without one
            params["bias"] = None if isinstance(module, nn.Linear) else torch.zeros_like(bias)
        return params

    def exit(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        bias = own_dtensors(module).get("bias")
        if self.sequence_dim is None:
            output = local_style.reduce(output, mesh)
            return output if bias is None else output + bias.to_local().to(output.dtype)
        output = local_style.reduce_scatter(output, mesh, self.sequence_dim)
        return output if bias is None else output + local_with_gradient(bias).to(output.dtype)


def output_dim(module: nn.Module) -> int:
    """Return the dimension of output features in the weight of a linear layer; 1 for the transposed Conv1D of transformers."""
    return 1 if is_conv1d(module) else 0


def is_conv1d(module: nn.Module) -> bool:
    return any(cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__)


def packed_shard(whole: torch.Tensor | None, num_parts: int, mesh: DeviceMesh) -> torch.Tensor | None:
    """Return this rank's shard of each of the `num_parts` equal pieces of a vector, one after the other."""
    if whole is None:
        return None
    return torch.cat([piece.chunk(mesh.size())[mesh.get_local_rank()] for piece in whole.chunk(num_parts)])


def _check_linear(name: str, module: nn.Module, how: str) -> None:
    if not (isinstance(module, nn.Linear) or is_conv1d(module)):
        raise ValueError(f"{name!r} is a {type(module).__name__}, which cannot be divided {how}; linear layers can")


def check_sequence_dim(value: Any) -> None:
    """Raise TypeError or ValueError unless `value` can be the option `sequence_dim`, or is None."""
    if value is not None:
        arguments.count("sequence_dim", value, least=-(2**31), what="a dimension of the input")
