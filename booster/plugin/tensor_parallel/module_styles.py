"""Embeddings, experts, torch's MultiheadAttention by heads, and modules that only read or return sharded activations.

MultiheadAttention has no linear layer for queries, keys and values that a plan could name.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn import functional as F

from booster.common import arguments
from booster.common.torch_internals.tensor_internals import StridedShard
from booster.plugin.tensor_parallel import local_style
from booster.plugin.tensor_parallel.linear_styles import packed_shard
from booster.plugin.tensor_parallel.local_style import Args, Kwargs, LocalStyle, ShardForward, swapped
from booster.tensors.weak import ForwardProxy, ModuleReference


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
            return local_style.reduce(output, mesh)
        return local_style.gather(output, mesh, -1, sum_gradients=False) if self.gather_output else output


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
            vectors = self.run(torch.where(inside, ids - start, 0))
        # Ids of other ranks were looked up as row 0, so that no index is out of range.
        return vectors.masked_fill(~inside.unsqueeze(-1), 0)


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
                given.arguments[name] = tuple(local_style.copy(x, mesh) if x.requires_grad else x for x in tensors)
        return given.args[1:], given.kwargs

    def _move_in(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if x.dim() != 3:
            raise ValueError(
                f"sequence_parallelism=True needs activations of three dimensions, batch, sequence and features, got "
                f"{tuple(x.shape)}"
            )
        if self.into == "split":
            return local_style.split(x, mesh, self.sequence_dim)
        return local_style.gather(x, mesh, self.sequence_dim, sum_gradients=True)

    def _move_out(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if self.out == "reduce":
            return local_style.reduce(x, mesh)
        if self.out == "copy":
            return local_style.copy(x, mesh)
        return local_style.gather(x, mesh, self.sequence_dim, sum_gradients=False)


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
        return torch.cat([output[..., :latent], local_style.copy(output[..., latent:], mesh)], dim=-1)


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
            return local_style.copy(value, mesh) if differentiable else value

        return tuple(map(copy, args)), {key: copy(value) for key, value in kwargs.items()}

    def exit(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        return local_style.reduce(output, mesh)


class HeadParallel(LocalStyle):
    """`nn.MultiheadAttention` with some of its heads on every rank; its `out_proj` needs a `Rowwise` too.

    sequence_dim: queries are a shard of the sequence, which is gathered. whole_memory: keys and values that are not the
    queries are unsharded. Attention weights are not returned: need_weights=True raises ValueError.
    """

    def __init__(self, *, sequence_dim: int | None = None, whole_memory: bool = True) -> None:
        self.sequence_dim = sequence_dim
        self.whole_memory = whole_memory

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        if module.in_proj_weight is None:
            named: dict[str, Placement] = dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), Shard(0))
        else:
            named = {"in_proj_weight": StridedShard(0, split_factor=3)}
        return {**named, "in_proj_bias": Replicate()}

    def check(self, name: str, module: Any, tp_size: int) -> None:
        if not isinstance(module, nn.MultiheadAttention):
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, not a MultiheadAttention, which is divided by heads"
            )
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                f"{name!r} uses add_bias_kv or add_zero_attn, which do not work divided by heads; leave it out of tp_plan"
            )
        if module.num_heads % tp_size:
            raise ValueError(
                f"{name!r} has num_heads={module.num_heads}, which does not divide by tp_size={tp_size}; choose another tp_size"
            )

    def make_forward(self, module: nn.Module, mesh: DeviceMesh) -> _HeadForward:
        return _HeadForward(module, self, mesh)

    def local_params(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, torch.Tensor | None]:
        params = dict(super().local_params(module, mesh))
        if "in_proj_bias" in params:
            params["in_proj_bias"] = packed_shard(params["in_proj_bias"], 3, mesh)
        return params


class _HeadForward(ModuleReference):
    def __init__(self, module: nn.Module, style: HeadParallel, mesh: DeviceMesh) -> None:
        self._module = weakref.ref(module)
        self.style = style
        self.mesh = mesh

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        module: Any = self._module()
        mesh = self.mesh
        if need_weights:
            raise ValueError(
                "attention weights are not available under tensor parallelism; call with need_weights=False"
            )
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a hint about attn_mask; give the mask too")
        queries, keys, values = self._inputs(query, key, value)
        with swapped(module._parameters, self.style.local_params(module, mesh)):
            projected = _project(module, queries, keys, values)
        time_first = query.dim() == 3 and not module.batch_first
        q, k, v = (_split_heads(module, x, time_first) for x in projected)
        mask = self._mask(q, k, attn_mask, key_padding_mask)
        dropout = module.dropout if module.training else 0.0
        # With the hint alone torch may use its fused causal kernel; a padding mask needs the masks added up.
        if is_causal and key_padding_mask is None:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        out = out.transpose(1, 2).flatten(2)
        out = out.transpose(0, 1) if time_first else out
        return module.out_proj(out if query.dim() == 3 else out.squeeze(0)), None

    def _inputs(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # One copy or gather for each tensor, so that self-attention sends once.
        entered: dict[int, torch.Tensor] = {}
        dim = self.style.sequence_dim
        for x in (query, key, value):
            if id(x) in entered:
                continue
            if dim is not None and (x is query or not self.style.whole_memory):
                entered[id(x)] = local_style.gather(x, self.mesh, dim, sum_gradients=True)
            else:
                entered[id(x)] = local_style.copy(x, self.mesh)
        return entered[id(query)], entered[id(key)], entered[id(value)]

    def _mask(
        self, q: torch.Tensor, k: torch.Tensor, attn_mask: torch.Tensor | None, padding: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the sum of the masks, zeros where attention is allowed; None without any."""

        def additive(mask: torch.Tensor) -> torch.Tensor:
            if mask.dtype == torch.bool:
                return torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill(mask, float("-inf"))
            return mask.to(q.dtype)

        batch, heads = q.shape[:2]
        masks = []
        if attn_mask is not None:
            if attn_mask.dim() == 3:  # batch * all heads
                mine = slice(self.mesh.get_local_rank() * heads, (self.mesh.get_local_rank() + 1) * heads)
                attn_mask = attn_mask.unflatten(0, (batch, -1))[:, mine]
            masks.append(additive(attn_mask))
        if padding is not None:
            masks.append(additive(padding).view(batch, 1, 1, k.shape[2]))
        return sum(masks[1:], start=masks[0]) if masks else None


def _project(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if module.in_proj_weight is not None and query is key and key is value:
        return F.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))


def _split_heads(module: Any, x: torch.Tensor, time_first: bool) -> torch.Tensor:
    x = x.unsqueeze(0) if x.dim() == 2 else x
    x = x.transpose(0, 1) if time_first else x
    return x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)  # batch, heads of this rank, time, features
