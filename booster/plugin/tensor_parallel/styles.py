"""How single modules are divided: by columns, by rows, by vocabulary, or not at all but with partial gradients."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from booster.common import arguments
from booster.common.torch_internals.tensor_internals import StridedShard
from booster.plugin.tensor_parallel import boundary
from booster.plugin.tensor_parallel.boundary import LocalStyle, PartForward, own_dtensors, part_with_gradient, swapped
from booster.plugin.tensor_parallel.shared_input import SharedInput
from booster.ranks.messages import communication_device
from booster.tensors.trees import HALF_DTYPES
from booster.tensors.weak import InPlaceOfForward

_LOOKS = 3  # backward passes in which ranks compare the gradients of what they gathered


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(entry, str) and entry for entry in value):
        raise TypeError(arguments.refusal(name, value, "a tuple of names"))
    return tuple(value)


def _dim(value: Any) -> int:
    return arguments.count("sequence_dim", value, least=-(2**31), what="a dimension of the input")


def _dim_or_none(value: Any) -> int | None:
    return None if value is None else _dim(value)


class Colwise(LocalStyle):
    """A linear layer by output features: every rank computes some of them from the whole input.

    num_parts: how many projections of equal width the layer holds one after the other (3 for a fused qkv); every rank gets its
        share of each.
    gather_output: join the output features on every rank.
    sequence_dim: the input is a part of the sequence, which is gathered along this dimension; None: it is whole.
    shared_input: a module around this one sums the gradients of the input.
    """

    def __init__(
        self,
        *,
        num_parts: int = 1,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        shared_input: bool = False,
    ) -> None:
        self.num_parts = arguments.count("num_parts", num_parts)
        self.gather_output = arguments.flag("gather_output", gather_output)
        self.sequence_dim = _dim_or_none(sequence_dim)
        self.shared_input = arguments.flag("shared_input", shared_input)
        self.shared: SharedInput | None = None
        self._looks: weakref.WeakKeyDictionary[nn.Module, tuple[str, int]] = weakref.WeakKeyDictionary()

    @property
    def reads_whole_input(self) -> bool:
        """Whether every layer sums the gradients of its input by itself, unless it shares it."""
        return self.sequence_dim is None and not self.shared_input

    def sharing(self, shared: SharedInput) -> Colwise:
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
            self._looks[module] = name, _LOOKS
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

    def enter(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, *rest = args
        if self.sequence_dim is not None:
            x = boundary.gather(x, mesh, self.sequence_dim, sum_gradients=True)
        elif not self.shared_input:
            x = boundary.copy(x, mesh) if self.shared is None else self.shared.copy(x, mesh)
        return (x, *rest), kwargs

    def parts(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, torch.Tensor | None]:
        parts = dict(super().parts(module, mesh))
        if self.num_parts > 1 and "bias" in parts:
            parts["bias"] = packed_part(parts["bias"], self.num_parts, mesh)
        return parts

    def leave(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        if not self.gather_output:
            return output
        whole = boundary.gather(output, mesh, -1, sum_gradients=False)
        name, left = self._looks.get(module, ("", 0))
        if left and whole.requires_grad and not torch.compiler.is_compiling():
            self._looks[module] = name, left - 1
            whole.register_hook(functools.partial(_check_alike, name, mesh))
        return whole


@torch.no_grad()
def _check_alike(name: str, mesh: DeviceMesh, grad: torch.Tensor) -> None:
    """Raise RuntimeError, on all ranks, unless they have the same `grad`, of a whole output of which each takes its part."""
    digest = torch.stack([grad.double().norm(), grad.double().sum()])
    known = digest.where(digest.isfinite(), torch.inf)  # a maximum may lose a NaN
    ends = torch.stack([known, -known]).to(communication_device(grad.device, mesh.get_group()))
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=mesh.get_group())
    most, least = ends[0].cpu(), -ends[1].cpu()
    allowed = (5e-2 if grad.dtype in HALF_DTYPES else 1e-3) * float(most[0])  # the same sums in another order at most
    bounds = torch.tensor([allowed, allowed * max(grad.numel(), 1) ** 0.5], dtype=torch.float64)
    if bool(most.isfinite().all()) and bool(((most - least) > bounds).any()):
        raise RuntimeError(
            f"tp_plan gives {name!r} 'colwise_gather_output', whose whole output all ranks must use alike, but the gradient of "
            "it differs among them: each reads it for its own heads or features, as keys and values that all heads share. "
            "Give it 'replicated_with_output_grad_allreduce', which sums these gradients"
        )


class Rowwise(LocalStyle):
    """A linear layer by input features: every rank has some of them, and the ranks' outputs are summed.

    split_input: the input is whole, and each rank takes its features.
    sequence_dim: every rank keeps a part of the sequence of the sum, along this dimension; None: all of it.

    The bias is added once, after the sum.
    """

    def __init__(self, *, split_input: bool = False, sequence_dim: int | None = None) -> None:
        self.split_input = arguments.flag("split_input", split_input)
        self.sequence_dim = _dim_or_none(sequence_dim)

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

    def enter(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, *rest = args
        return (boundary.split(x, mesh, -1) if self.split_input else x, *rest), kwargs

    def parts(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, torch.Tensor | None]:
        parts = dict(super().parts(module, mesh))
        if "bias" in parts:
            bias = module._parameters["bias"].to_local().detach()  # type: ignore[union-attr]
            # Conv1D of transformers does not compute without one
            parts["bias"] = None if isinstance(module, nn.Linear) else torch.zeros_like(bias)
        return parts

    def leave(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        bias = own_dtensors(module).get("bias")
        if self.sequence_dim is None:
            output = boundary.reduce(output, mesh)
            return output if bias is None else output + bias.to_local().to(output.dtype)
        output = boundary.reduce_scatter(output, mesh, self.sequence_dim)
        return output if bias is None else output + part_with_gradient(bias).to(output.dtype)


class EmbeddingParallel(LocalStyle):
    """An embedding by vocabulary, whose ranks' lookups are summed, or by features, which are joined.

    by: which of the two.
    gather_output: False leaves every rank its own features, as biases by head are wanted.
    """

    def __init__(self, *, by: Literal["vocabulary", "features"], gather_output: bool = True) -> None:
        self.by = arguments.choice("by", by, ("vocabulary", "features"))
        self.gather_output = arguments.flag("gather_output", gather_output)

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {"weight": Shard(0 if self.by == "vocabulary" else 1)}

    def check(self, name: str, module: Any, tp_size: int) -> None:
        if not isinstance(module, nn.Embedding):
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, which cannot be divided by {self.by}, as an Embedding"
            )
        set_options = [
            option
            for option in ("max_norm", "scale_grad_by_freq", "sparse")
            if getattr(module, option) not in (None, False)
        ]
        if set_options:
            raise ValueError(
                f"the Embedding {name!r} uses {set_options}, which do not work divided; leave it out of tp_plan"
            )
        size = module.weight.shape[0 if self.by == "vocabulary" else 1]
        if size % tp_size:
            what = "entries" if self.by == "vocabulary" else "features"
            raise ValueError(
                f"{name!r} has {size} {what}, which do not divide by tp_size={tp_size}; pad the vocabulary, or leave the "
                "module out of tp_plan"
            )

    def make_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        forward = PartForward(module, self, mesh)
        if self.by == "vocabulary":
            forward.put_around(_VocabularyLookup(module.forward, module, mesh))
        return forward

    def leave(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        if self.by == "vocabulary":
            return boundary.reduce(output, mesh)
        return boundary.gather(output, mesh, -1, sum_gradients=False) if self.gather_output else output


class _VocabularyLookup(InPlaceOfForward):
    """Look up the ids that lie in this rank's part of the vocabulary; the rest are zeros."""

    def __init__(self, forward: Any, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(forward, module)
        self.mesh = mesh

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        module = self._owner()
        count = module.weight.shape[0]  # of the part that stands for the parameter meanwhile
        start = self.mesh.get_local_rank() * count
        inside = (ids >= start) & (ids < start + count)
        padding = module.padding_idx
        mine = padding - start if padding is not None and start <= padding < start + count else None
        with swapped(module.__dict__, {"padding_idx": mine}):
            found = self.run(torch.where(inside, ids - start, 0))
        return found.masked_fill(~inside.unsqueeze(-1), 0)


class Region(LocalStyle):
    """A module whose own parameters, if any, stay whole, and whose input or output changes its layout.

    partial_gradients: own parameters meet only a part of the tokens or heads here, so their gradients are sums over the ranks.
    into: "gather" joins the sequence of the first argument, "split" cuts it; None leaves it.
    out: "gather" joins the sequence of the (first) output, "reduce" sums it over ranks, "copy" sums its gradient, where each
        rank reads it for its own heads or features; None leaves it.
    sequence_dim: the dimension of the sequence.
    divide: attributes to divide by the number of ranks.
    assign: attributes to set; None are none.
    by_heads: arguments of shape (batch * all heads, ...), of which every rank takes its heads.
    shared: arguments that are several tensors, which every head reads, whose gradients are therefore sums over ranks.
    """

    def __init__(
        self,
        *,
        partial_gradients: bool = False,
        into: Literal["gather", "split"] | None = None,
        out: Literal["gather", "reduce", "copy"] | None = None,
        sequence_dim: int = 1,
        divide: tuple[str, ...] = (),
        assign: Mapping[str, Any] | None = None,
        by_heads: tuple[str, ...] = (),
        shared: tuple[str, ...] = (),
    ) -> None:
        if assign is not None and not (isinstance(assign, Mapping) and all(isinstance(name, str) for name in assign)):
            raise TypeError(arguments.refusal("assign", assign, "a dict from names of attributes to values", "None"))
        self.partial_gradients = arguments.flag("partial_gradients", partial_gradients)
        self.into = arguments.choice("into", into, (None, "gather", "split"))
        self.out = arguments.choice("out", out, (None, "gather", "reduce", "copy"))
        self.sequence_dim = _dim(sequence_dim)
        self.divide = _names("divide", divide)
        self.assign = dict(assign or {})
        self.by_heads = _names("by_heads", by_heads)
        self.shared = _names("shared", shared)

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return dict.fromkeys(module._parameters, Replicate()) if self.partial_gradients else {}

    def check(self, name: str, module: Any, tp_size: int) -> None:
        for attribute in self.divide:
            value = getattr(module, attribute)
            if value % tp_size:
                raise ValueError(
                    f"{name!r} has {attribute}={value}, which does not divide by tp_size={tp_size}; choose another tp_size"
                )

    def localise(self, module: nn.Module, tp_size: int) -> None:
        for attribute in self.divide:
            setattr(module, attribute, getattr(module, attribute) // tp_size)
        for attribute, value in self.assign.items():
            setattr(module, attribute, value)

    def enter(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.by_heads or self.shared:
            args, kwargs = self._bind(module, mesh, args, kwargs)
        if self.into is None:
            return args, kwargs
        if args:
            return (self._move_in(args[0], mesh), *args[1:]), kwargs
        first = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, {**kwargs, first: self._move_in(kwargs[first], mesh)}

    def leave(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        if self.out is None:
            return output
        if isinstance(output, tuple):
            return (self._move_out(output[0], mesh), *output[1:])
        return self._move_out(output, mesh)

    def _bind(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        for name in self.by_heads:
            whole = given.arguments.get(name)
            if whole is not None:
                batch = given.args[1].shape[0]
                part = whole.unflatten(0, (batch, -1)).chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
                given.arguments[name] = part.flatten(0, 1)
        for name in self.shared:
            tensors = given.arguments.get(name)
            if isinstance(tensors, (tuple, list)):
                given.arguments[name] = tuple(boundary.copy(x, mesh) if x.requires_grad else x for x in tensors)
        return given.args[1:], given.kwargs

    def _move_in(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if x.dim() != 3:
            raise ValueError(
                f"sequence_parallelism=True needs activations of three dimensions, batch, sequence and features, got "
                f"{tuple(x.shape)}"
            )
        if self.into == "split":
            return boundary.split(x, mesh, self.sequence_dim)
        return boundary.gather(x, mesh, self.sequence_dim, sum_gradients=True)

    def _move_out(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if self.out == "reduce":
            return boundary.reduce(x, mesh)
        if self.out == "copy":
            return boundary.copy(x, mesh)
        return boundary.gather(x, mesh, self.sequence_dim, sum_gradients=False)


class LatentProjection(Region):
    """Whole on every rank; of its output the last features, positions, are read by every rank for its own heads, so their
    gradient is summed; that of the latent before them is, by the column-wise layer that reads it.

    num_positions: how many these are; None: as many as the attention around it says, by `qk_rope_head_dim`.
    """

    def __init__(self, num_positions: int | None = None) -> None:
        super().__init__(out="copy")
        self.num_positions = num_positions

    def leave(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        latent = output.shape[-1] - int(self.num_positions or 0)
        return torch.cat([output[..., :latent], boundary.copy(output[..., latent:], mesh)], dim=-1)


def output_dim(module: nn.Module) -> int:
    """The dimension of output features in the weight of a linear layer; 1 for the transposed Conv1D of transformers."""
    return 1 if is_conv1d(module) else 0


def is_conv1d(module: nn.Module) -> bool:
    return any(cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__)


def packed_part(whole: torch.Tensor | None, num_parts: int, mesh: DeviceMesh) -> torch.Tensor | None:
    """This rank's share of each of the `num_parts` equal pieces of a vector, one after the other."""
    if whole is None:
        return None
    return torch.cat([piece.chunk(mesh.size())[mesh.get_local_rank()] for piece in whole.chunk(num_parts)])


def _check_linear(name: str, module: nn.Module, how: str) -> None:
    if not (isinstance(module, nn.Linear) or is_conv1d(module)):
        raise ValueError(f"{name!r} is a {type(module).__name__}, which cannot be divided {how}; linear layers can")
