"""Where activations change layout between the ranks of a tensor-parallel group, with the right gradients.

Every function takes and returns a plain local tensor and runs at most one collective, which backward mirrors.

The base of the styles that strings stand for: a module computes on plain local tensors, its parameters are DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from booster.tensors.weak import InPlaceOfForward


def copy(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The same tensor for ranks that each use it in their own way; backward sums their gradients."""
    return _Redistribution.apply(x, mesh, Replicate(), Replicate(), Partial(), Replicate())


def reduce(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' tensors, on every rank."""
    return _Redistribution.apply(x, mesh, Partial(), Replicate(), Replicate(), Replicate())


def gather(x: torch.Tensor, mesh: DeviceMesh, dim: int, *, sum_gradients: bool) -> torch.Tensor:
    """The ranks' equal parts joined along `dim`, on every rank.

    sum_gradients: what follows differs by rank, so backward sums; otherwise the gradient is the same on all ranks, and
    each takes its part of it.
    """
    part = Shard(dim % x.dim())
    return _Redistribution.apply(x, mesh, part, Replicate(), Partial() if sum_gradients else Replicate(), part)


def split(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have, cut along `dim`. Raises ValueError if it does not divide."""
    _check_even(x, mesh, dim)
    part = Shard(dim % x.dim())
    return _Redistribution.apply(x, mesh, Replicate(), part, part, Replicate())


def reduce_scatter(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's part, along `dim`, of the sum of the ranks' tensors. Raises ValueError if it does not divide."""
    _check_even(x, mesh, dim)
    part = Shard(dim % x.dim())
    return _Redistribution.apply(x, mesh, Partial(), part, part, Replicate())


class _Redistribution(torch.autograd.Function):
    """From one layout to another, and the gradient from that of the result to that of the input.

    What DTensor's own conversions return is a view, which users could not modify in place.
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
        # What comes back to gradients is laid out as the values are that they belong to.
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


class LocalStyle(ParallelStyle):
    """How one module is divided among the ranks of a tensor-parallel group.

    The module's own parameters become DTensors, as `placements` says. Its forward runs on what `parts` makes of them,
    between `enter` and `leave`, which move activations. All of that is in a `forward` of the instance, not in hooks, so
    that a module pinned to float32 communicates in float32, and no operator needs to know DTensor.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """How each own parameter of `module` is stored; one that is not named stays a plain tensor."""
        return {}

    def check(self, name: str, module: nn.Module, tp_size: int) -> None:
        """Raise ValueError if `module`, called `name`, cannot be divided among `tp_size` ranks so. Nothing is changed."""

    def localise(self, module: nn.Module, tp_size: int) -> None:
        """Change what else of `module` must know that it works on a part of `tp_size`, such as a number of heads."""

    def enter(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the forward of `module` is called with, on this rank of `mesh`, in place of `args` and `kwargs`."""
        return args, kwargs

    def parts(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, torch.Tensor | None]:
        """What the forward sees, on this rank of `mesh`, in place of each own parameter of `module`."""
        return {name: part_with_gradient(param) for name, param in own_dtensors(module).items()}

    def leave(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        """Return what `module` gives, on this rank of `mesh`, in place of the `output` of its forward."""
        return output

    def make_forward(self, module: nn.Module, mesh: DeviceMesh) -> Callable[..., Any]:
        """Return what is called in place of the forward of `module` on this rank of `mesh`."""
        return PartForward(module, self, mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements(module).items():
            param = module._parameters[name]
            if param is not None:
                module._parameters[name] = shard_parameter(param, device_mesh, placement)
        module.forward = self.make_forward(module, device_mesh)
        self.localise(module, device_mesh.size())
        return module


class PartForward(InPlaceOfForward):
    """The forward of one module on this rank's parts of its parameters."""

    def __init__(self, module: nn.Module, style: LocalStyle, mesh: DeviceMesh) -> None:
        super().__init__(module.forward, module)
        self.style = style
        self.mesh = mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._owner()
        args, kwargs = self.style.enter(module, self.mesh, args, kwargs)
        with swapped(module._parameters, self.style.parts(module, self.mesh)):
            output = self.run(*args, **kwargs)
        return self.style.leave(module, self.mesh, output)


def shard_parameter(param: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """`param`, which all ranks have alike, as a DTensor parameter; a part has memory of its own."""
    sharded = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(sharded, requires_grad=param.requires_grad)


def own_dtensors(module: nn.Module) -> dict[str, DTensor]:
    """Parameters of `module` itself, not of its children, that are sharded or replicated DTensors."""
    params: dict[str, Any] = dict(module._parameters)
    return {name: param for name, param in params.items() if isinstance(param, DTensor)}


def part_with_gradient(param: DTensor) -> torch.Tensor:
    """This rank's part of `param`, a plain tensor. The gradient of a replicated one is this rank's share of a sum."""
    replicated = isinstance(param.placements[0], Replicate)
    return param.to_local(grad_placements=[Partial()] if replicated else None)


@contextmanager
def swapped(values: dict[str, Any], replacements: Mapping[str, Any]) -> Iterator[None]:
    """Entries of a dict replaced for the length of a `with`."""
    originals = {name: values[name] for name in replacements}
    values.update(replacements)
    try:
        yield
    finally:
        values.update(originals)
