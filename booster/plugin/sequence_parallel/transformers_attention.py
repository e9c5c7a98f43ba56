"""Models of transformers: their own attention by torch, with masks over the tokens of all ranks.

They make a mask from the length of what they are given, here a rank's part: a sliding window that is longer than that would be
full causal attention. So an implementation of ours, in their registry, has their masks made for this rank's positions and all
keys; outside of a sequence-parallel forward pass it is their "sdpa".
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from booster.common.torch_internals.autograd_internals import without_function_modes
from booster.plugin.sequence_parallel.attention_mode import active_mode

NAME = "booster_sequence"


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether `model` is one of transformers that chooses attention by a name, now "sdpa"."""
    loaded = sys.modules.get("transformers")
    return (
        loaded is not None
        and isinstance(model, loaded.PreTrainedModel)
        and model.config._attn_implementation in ("sdpa", NAME)
    )


def use_own_masks(model: Any) -> None:
    """Have `model` make its masks for all keys."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ValueError(
            f"{type(model).__name__} does not choose its attention by transformers' registry, so its masks cannot be made for "
            "all tokens; leave sp_size at 1"
        )


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    own = ("softcap", "position_bias", "cache", "s_aux")
    if active_mode() is None or any(options.get(name) is not None for name in own):
        options |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return result
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Keys that several heads share are sent once, also with a mask, where transformers would repeat them before.
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        is_causal and attention_mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **options: Any,
) -> torch.Tensor | None:
    """A mask (batch or 1, 1, tokens of this rank, of all), as the model's own rule has it; None where is_causal says all."""
    from transformers import masking_utils

    mode = active_mode()
    if mode is None or mode.cut is None:
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            device=device,
            **options,
        )
    cut = mode.cut
    if (q_length, kv_length) != (cut.local_length, cut.local_length) or options.get("q_offset") or use_vmap:
        raise RuntimeError(
            f"a mask of {q_length} by {kv_length} tokens{', by a rule of the model that is not by index,' * use_vmap} in a "
            f"forward pass on {cut.local_length} of {cut.length} tokens: sequence parallelism has no caches and no such rules"
        )
    if cut.key_mask is not None and attention_mask is None:
        raise RuntimeError("the batch that was cut has an attention_mask, and the model was not given it")
    if cut.key_mask is not None and cut.key_mask.shape[0] != batch_size:
        raise RuntimeError(
            f"{batch_size} sequences, and shard_sequence got {cut.batch_size}; cut each micro-batch by itself"
        )
    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if mask_function in plain and cut.key_mask is None:
        return None
    with without_function_modes():  # which would take these for positions of the model's own
        rows, keys = cut.positions(torch.device(device)), torch.arange(cut.length, dtype=torch.int64, device=device)
        batches = torch.arange(batch_size, dtype=torch.int64, device=device)
        heads = torch.zeros(1, dtype=torch.int64, device=device)
        mask: torch.Tensor = mask_function(
            batches[:, None, None, None],
            heads[None, :, None, None],
            rows[None, None, :, None],
            keys[None, None, None, :],
        )
    if cut.key_mask is not None:
        mask = mask & cut.key_mask.to(mask.device)[:, None, None, :]
    return mask
