"""Embeddings, experts, and modules that are not sharded but read or return sharded activations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from booster.common import arguments
from booster.common.torch_internals.tensor_internals import StridedShard
from booster.plugin.tensor_parallel import boundary
from booster.plugin.tensor_parallel.local_style import Args, Kwargs, LocalStyle, ShardForward, swapped
from booster.tensors.weak import ForwardProxy


@dataclass(kw_only=True, eq=False)
class EmbeddingParallel(LocalStyle):
    """An embedding by vocabulary, with lookups that are summed over ranks, or by features, which are gathered.

    by: which of the two.
    gather_output: False leaves every rank its own features, as biases by head are wanted.
    """

    by: Literal["vocabulary", "features"]
    gather_output: bool = True

    def __post_init__(self) -> None:
        arguments.choice("by", self.by, ("vocabulary", "features"))
        arguments.flag("gather_output", self.gather_output)

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {"weight": Shard(0 if self.by == "vocabulary" else 1)}

    def check(self, name: str, module: Any, tp_size: int) -> None:
        if not isinstance(module, nn.Embedding):
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, which cannot be divided by {self.by}, as an Embedding"
            )
        unfit = [
            each for each in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, each) not in (None, False)
        ]
        if unfit:
            raise ValueError(f"the Embedding {name!r} uses {unfit}, which do not work divided; leave it out of tp_plan")
        size = module.weight.shape[0 if self.by == "vocabulary" else 1]
        if size % tp_size:
            what = "entries" if self.by == "vocabulary" else "features"
            raise ValueError(
                f"{name!r} has {size} {what}, which do not divide by tp_size={tp_size}; pad the vocabulary, or leave the "
                "module out of tp_plan"
            )

    def make_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        forward = ShardForward(module, self, mesh)
        if self.by == "vocabulary":
            forward.put_around(_VocabularyLookup(module.forward, module, mesh))
        return forward

    def exit(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        if self.by == "vocabulary":
            return boundary.reduce(output, mesh)
        return boundary.gather(output, mesh, -1, sum_gradients=False) if self.gather_output else output


class _VocabularyLookup(ForwardProxy):
    """Looks up the ids of this rank's shard of the vocabulary; all others give zeros."""

    def __init__(self, forward: Any, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(forward, module)
        self.mesh = mesh

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        module = self._owner()
        count = module.weight.shape[0]  # of the local shard, which the parameter is meanwhile
        start = self.mesh.get_local_rank() * count
        inside = (ids >= start) & (ids < start + count)
        padding = module.padding_idx
        # Only the rank that has the padding row must leave its gradient zero.
        mine = padding - start if padding is not None and start <= padding < start + count else None
        with swapped(module.__dict__, {"padding_idx": mine}):
            found = self.run(torch.where(inside, ids - start, 0))
        # Ids of other ranks were looked up as row 0, so that no index is out of range.
        return found.masked_fill(~inside.unsqueeze(-1), 0)


@dataclass(kw_only=True, eq=False)
class Region(LocalStyle):
    """A module with unsharded parameters, if any, that changes the layout of its input or output.

    partial_gradients: own parameters meet only a part of the tokens or heads here, so their gradients are sums over the ranks.
    into: "gather" joins the sequence of the first argument, "split" cuts it; None leaves it.
    out: "gather" joins the sequence of the (first) output, "reduce" sums it over ranks, "copy" sums its gradient, where each
        rank reads it for its own heads or features; None leaves it.
    sequence_dim: the dimension of the sequence.
    divide: attributes to divide by the number of ranks.
    assign: attributes to set; None are none.
    by_heads: arguments of shape (batch * all heads, ...), of which every rank takes its heads.
    shared: arguments that are several tensors, which every head reads; their gradients are summed over ranks.
    """

    partial_gradients: bool = False
    into: Literal["gather", "split"] | None = None
    out: Literal["gather", "reduce", "copy"] | None = None
    sequence_dim: int = 1
    divide: tuple[str, ...] = ()
    assign: Mapping[str, Any] | None = None
    by_heads: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.assign is not None and not (isinstance(self.assign, Mapping) and all(map(_is_name, self.assign))):
            legal = "a dict from names of attributes to values"
            raise TypeError(arguments.refusal("assign", self.assign, legal, "None"))
        arguments.flag("partial_gradients", self.partial_gradients)
        arguments.choice("into", self.into, (None, "gather", "split"))
        arguments.choice("out", self.out, (None, "gather", "reduce", "copy"))
        arguments.count("sequence_dim", self.sequence_dim, least=-(2**31), what="a dimension of the input")
        for option in ("divide", "by_heads", "shared"):
            names = getattr(self, option)
            if not isinstance(names, (tuple, list)) or not all(_is_name(each) and each for each in names):
                raise TypeError(arguments.refusal(option, names, "a tuple of names"))
            setattr(self, option, tuple(names))

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
        for attribute, value in (self.assign or {}).items():
            setattr(module, attribute, value)

    def enter(self, module: nn.Module, mesh: DeviceMesh, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if self.by_heads or self.shared:
            args, kwargs = self._bind(module, mesh, args, kwargs)
        if self.into is None:
            return args, kwargs
        if args:
            return (self._move_in(args[0], mesh), *args[1:]), kwargs
        # transformers calls its layers by keyword.
        first = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, {**kwargs, first: self._move_in(kwargs[first], mesh)}

    def exit(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        if self.out is None:
            return output
        if isinstance(output, tuple):
            return (self._move_out(output[0], mesh), *output[1:])
        return self._move_out(output, mesh)

    def _bind(self, module: nn.Module, mesh: DeviceMesh, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        # By the class's forward: that of the instance is ours.
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        for name in self.by_heads:
            whole = given.arguments.get(name)
            if whole is not None:
                batch = given.args[1].shape[0]
                # Such biases are (batch * heads, ...), with the heads of one sample next to each other.
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


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


class KVLatentProjection(Region):
    """Whole on every rank; of its output the last features, positions, are read by every rank for its own heads, so their
    gradient is summed; that of the latent before them is, by the column-wise layer that reads it.

    num_positions: how many these are; None: as many as the attention around it says, by `qk_rope_head_dim`.
    """

    def __init__(self, num_positions: int | None = None) -> None:
        super().__init__(out="copy")
        self.num_positions = num_positions

    def exit(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        latent = output.shape[-1] - int(self.num_positions or 0)
        return torch.cat([output[..., :latent], boundary.copy(output[..., latent:], mesh)], dim=-1)


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
        # Two projections one after the other: every rank needs its features of both.
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

    def enter(self, module: nn.Module, mesh: DeviceMesh, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        def copy(value: Any) -> Any:
            differentiable = isinstance(value, torch.Tensor) and value.is_floating_point()
            return boundary.copy(value, mesh) if differentiable else value

        return tuple(map(copy, args)), {key: copy(value) for key, value in kwargs.items()}

    def exit(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        return boundary.reduce(output, mesh)
