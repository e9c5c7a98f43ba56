"""The base of the styles: a module computes on plain local tensors, and its parameters are DTensors; and where its activations
change layout between the ranks of a tensor-parallel group, with the right gradients.

Each of these moves takes and returns a plain local tensor and runs at most one collective, which backward mirrors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from booster.common.snapshot import attributes
from booster.tensors.weak import ForwardProxy

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class LocalStyle(ParallelStyle):
    """How one module is sharded over the ranks of a tensor-parallel group.

    The module's parameters become DTensors, as `placements` says. Its forward runs on the local tensors that `local_params`
    makes of them, between `enter` and `exit`, which move activations. All of that is in a `forward` of the instance, not in
    hooks, so that a module pinned to float32 communicates in float32, and no operator needs to know DTensor.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return the placement of each parameter of `module` itself; one that is not named stays a plain tensor."""
        return {}

    def check(self, name: str, module: nn.Module, tp_size: int) -> None:
        """Raise ValueError if `module`, called `name`, cannot be sharded so over `tp_size` ranks. Nothing is changed."""

    def localise(self, module: nn.Module, tp_size: int) -> None:
        """Change other attributes of `module` to those of one shard of `tp_size`, such as its number of heads."""

    def enter(self, module: nn.Module, mesh: DeviceMesh, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return what the forward of `module` is called with, on this rank of `mesh`, in place of `args` and `kwargs`."""
        return args, kwargs

    def local_params(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, torch.Tensor | None]:
        """Return what the forward sees on this rank of `mesh` in place of each parameter of `module` itself."""
        return {name: local_with_gradient(param) for name, param in own_dtensors(module).items()}

    def exit(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        """Return what `module` gives, on this rank of `mesh`, in place of the `output` of its forward."""
        return output

    def make_forward(self, module: nn.Module, mesh: DeviceMesh) -> Callable[..., Any]:
        """Return what is called in place of the forward of `module` on this rank of `mesh`."""
        return ShardForward(module, self, mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements(module).items():
            param = module._parameters[name]
            if param is not None:
                module._parameters[name] = shard_parameter(param, device_mesh, placement)
        module.forward = self.make_forward(module, device_mesh)
        self.localise(module, device_mesh.size())
        return module


class ShardForward(ForwardProxy):
    """The forward of one module on this rank's shards of its parameters."""

    def __init__(self, module: nn.Module, style: LocalStyle, mesh: DeviceMesh) -> None:
        super().__init__(module.forward, module)
        self.style = style
        self.mesh = mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._owner()  # a weak reference: the module holds this
        args, kwargs = self.style.enter(module, self.mesh, args, kwargs)
        with swapped(module._parameters, self.style.local_params(module, self.mesh)):
            output = self.run(*args, **kwargs)
        return self.style.exit(module, self.mesh, output)


def shard_parameter(param: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return `param`, which is equal on all ranks, as a DTensor parameter with its own memory."""
    # src_data_rank=None: ranks have equal weights already, and nothing is sent.
    sharded = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(sharded, requires_grad=param.requires_grad)


def own_dtensors(module: nn.Module) -> dict[str, DTensor]:
    """Return the parameters of `module` itself, not of its children, that are DTensors."""
    params: dict[str, Any] = dict(module._parameters)
    return {name: param for name, param in params.items() if isinstance(param, DTensor)}


def local_with_gradient(param: DTensor) -> torch.Tensor:
    """Return this rank's shard of `param`, a plain tensor. Gradients of a replicated one are summed over the ranks."""
    # Each rank computes the gradient from its tokens or heads alone, so DTensor has to sum.
    replicated = isinstance(param.placements[0], Replicate)
    return param.to_local(grad_placements=[Partial()] if replicated else None)


@contextmanager
def swapped(values: dict[str, Any], replacements: Mapping[str, Any]) -> Iterator[None]:
    """Return a context in which entries of a dict are replaced."""
    originals = {name: values[name] for name in replacements}
    values.update(replacements)
    try:
        yield
    finally:
        values.update(originals)


class SharedInputGrad:
    """One sum of gradients for column-wise layers that read the same input, such as those of queries, keys and values.

    While the forward of the module around them runs, layers that are given one tensor get the same copy of it. So backward adds
    their gradients before it sums them over the ranks, once. Outside of that forward every layer has its own copy and sum.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def copy(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Do what `local_style.copy` does."""
        differentiates = torch.is_grad_enabled() and x.requires_grad
        if self._copies is None or not differentiates or torch.compiler.is_compiling():
            return copy(x, mesh)
        for given, made in self._copies:  # by identity: equal values may be other tensors of the graph
            if given is x:
                return made
        made = copy(x, mesh)
        self._copies.append((x, made))
        return made

    def open(self) -> AbstractContextManager[None]:
        return attributes([self], _copies=[])


class SharingForward(ForwardProxy):
    """The forward of a module with children that have a `SharedInputGrad`."""

    def __init__(self, forward: Callable[..., Any], shared: SharedInputGrad) -> None:
        super().__init__(forward)
        self.shared = shared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.shared.open():
            return self.run(*args, **kwargs)


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
