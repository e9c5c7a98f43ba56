"""torch's MultiheadAttention by heads: it has no linear layer for queries, keys and values that a plan could name."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn import functional as F

from booster.common.torch_internals.tensor_internals import StridedShard
from booster.plugin.tensor_parallel import boundary
from booster.plugin.tensor_parallel.linear_styles import packed_shard
from booster.plugin.tensor_parallel.local_style import LocalStyle, swapped
from booster.tensors.weak import ModuleReference


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
                entered[id(x)] = boundary.gather(x, self.mesh, dim, sum_gradients=True)
            else:
                entered[id(x)] = boundary.copy(x, self.mesh)
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
