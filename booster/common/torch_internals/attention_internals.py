"""Torch's flash attention with what its public function keeps to itself: the log-sum-exp of each query's scores.

Parts of attention are joined, and differentiated, by it. On a CPU in float32 alone, whatever the operands are, since half
sums would be joined; on CUDA in their dtype, float16 or bfloat16, without masks.
"""

from __future__ import annotations

from typing import Any

import torch

_aten: Any = torch.ops.aten


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp, (batch, heads, queries) in float32. mask: additive, in the dtype of `query`."""
    if query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return out, lse
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    return out, lse


def flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value. out, lse: of all keys, also where `key` are only some of them."""
    if query.device.type == "cpu":
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
            )
        )
        return found
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    lse = lse.contiguous()  # which is read as if it were so
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, of which there is none
    nothing = torch.empty(0, dtype=torch.int32, device=query.device)
    lengths = (None, None, query.shape[2], key.shape[2])
    of_cuda: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, lse, *lengths, 0.0, is_causal, seed, nothing, scale=scale
    )
    return of_cuda
