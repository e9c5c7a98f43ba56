"""Attention by heads: a rank sends its tokens of other ranks' heads, and receives the other tokens of its heads (Ulysses).

Source: Jacobs et al. 2023, arXiv 2309.14509. A layer sends 1 / size of queries, keys, values and output to each other rank, in
two collectives, forward and backward alike. The ranks then have whole sequences, so any mask is honoured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from booster.common.torch_internals.tensor_internals import is_fake_kind
from booster.plugin.sequence_parallel.sequence_cut import SequenceCut


@dataclass(frozen=True, eq=False)
class Attention:
    """One call of `F.scaled_dot_product_attention`, of the ranks of `group` on sequences that were cut as `cut` says."""

    dropout_p: float
    is_causal: bool
    scale: float | None
    cut: SequenceCut
    group: dist.ProcessGroup


class _Exchange(torch.autograd.Function):
    """Tensors (batch, heads, local tokens, features), exchanged for (batch, heads / size, all tokens, features), or back."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, to_heads: bool, *tensors: torch.Tensor) -> Any:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(tensors, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The other direction, by `apply`, so that gradients of gradients are exchanged as well.
        return None, None, *_Exchange.apply(ctx.group, not ctx.to_heads, *grads)


def _exchanged(tensors: tuple[torch.Tensor, ...], group: dist.ProcessGroup, to_heads: bool) -> tuple[torch.Tensor, ...]:
    size = group.size()
    if len({tensor.dtype for tensor in tensors}) > 1:  # one message has one dtype
        return tuple(_exchanged((tensor,), group, to_heads)[0] for tensor in tensors)
    if to_heads:  # whom it goes to, batch, heads, tokens, features
        parts = [x.unflatten(1, (size, -1)).transpose(0, 1) for x in tensors]
    else:
        parts = [x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4) for x in tensors]
    # Queries, keys and values go in one message: one collective a layer and direction, not three.
    sent = torch.cat([part.reshape(size, -1) for part in parts], dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    split = received.split([part[0].numel() for part in parts], dim=1)
    pieces = [piece.reshape(part.shape) for piece, part in zip(split, parts, strict=True)]
    if to_heads:
        return tuple(x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in pieces)
    return tuple(x.transpose(0, 1).flatten(1, 2) for x in pieces)


class _GatherTokens(torch.autograd.Function):
    """Gather dimension `dim` of a mask from this rank's tokens to those of all ranks."""

    @staticmethod
    def forward(ctx: Any, mask: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.length = dim, group, mask.shape[dim]
        return gather_tokens(mask, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # Every rank attended with the whole mask, so the gradient of a rank's part is the sum over all of them.
        whole = grad.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole.narrow(ctx.dim, ctx.group.rank() * ctx.length, ctx.length), None, None


def gather_tokens(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `tensor` with the tokens of all ranks along `dim`, rank by rank; a collective."""
    # Backends do not all take booleans.
    own = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    own = own.contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts, dim).to(tensor.dtype)


def attend_by_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, call: Attention
) -> torch.Tensor:
    """Return `F.scaled_dot_product_attention` of this rank's queries and all keys: (batch, heads, local tokens, features).

    query, key, value: (batch, heads, local tokens, features); with fewer heads of keys and values they are shared, and repeated
        only as often as makes the ranks divide them. mask: (..., rows, keys) of all tokens, or of this rank's as `whole_mask`
        says. Two collectives. Raises RuntimeError for heads that the ranks do not divide.
    """
    cut, group, heads, key_heads = call.cut, call.group, query.shape[1], key.shape[1]
    size = cut.size
    if heads % size:
        raise RuntimeError(
            f'sequence_parallelism_mode="all_to_all" divides heads among ranks, and attention with {heads} heads does not '
            f'divide by sp_size={size}; choose an sp_size that does, or "ring_attn"'
        )
    if heads % key_heads:
        raise RuntimeError(f"{heads} heads of queries do not share {key_heads} of keys evenly")
    if is_fake_kind(type(query)):
        return shape_of_attention(query, key, value, mask, cut)
    # The fewest repeats after which every rank has whole heads of keys; attention itself shares them further.
    repeats = size // math.gcd(size, key_heads)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    exchanged = _Exchange.apply(group, True, query, key, value)
    query, key, value = (x[:, :, : cut.length] for x in exchanged)  # padding neither asks nor answers
    if mask is not None:
        mask = whole_mask(mask, cut, group)
        if mask.dim() > 2 and mask.shape[-3] not in (1, heads):
            raise RuntimeError(f"a mask of {tuple(mask.shape)} is not of {heads} heads")
        # After the exchange this rank has these heads alone.
        if mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask.narrow(-3, group.rank() * (heads // size), heads // size)
    options: dict[str, Any] = {"dropout_p": call.dropout_p, "is_causal": call.is_causal, "scale": call.scale}
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    if cut.documents is None:
        out = F.scaled_dot_product_attention(query, key, value, mask, **options)
    else:
        out = _by_documents(query, key, value, mask, cut, options)
    # The way back sends pieces of one length, so rows of padding return, as zeros.
    out = F.pad(out, (0, 0, 0, size * cut.local_length - cut.length))
    (out,) = _Exchange.apply(group, False, out)
    return out


def _by_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    cut: SequenceCut,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention within each document by itself: no work, and no mask, for what others have."""
    if mask is not None:
        # Rows of the batch and documents are cut out of it below, so dimensions of 1 have to be there.
        mask = mask.expand(query.shape[0], -1, cut.length, cut.length)
    rows = []
    for row, starts in enumerate(cut.documents or ()):
        one = slice(row, row + 1)
        outs = []
        for first, end in zip(starts, starts[1:], strict=False):
            own = None if mask is None else mask[one, :, first:end, first:end]
            q, k, v = (x[one, :, first:end] for x in (query, key, value))
            outs.append(F.scaled_dot_product_attention(q, k, v, own, **options))
        rows.append(torch.cat(outs, dim=2))
    return torch.cat(rows)


def shape_of_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, cut: SequenceCut
) -> torch.Tensor:
    """Return for fake tensors, by which stages of a pipeline learn shapes, what attention returns; nothing is sent."""
    if mask is not None:
        row_and_key_sizes(mask, cut)
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])


def whole_mask(mask: torch.Tensor, cut: SequenceCut, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `mask`, given for all tokens or for this rank's, for all queries and all keys, where they differ.

    Legal are (rows, keys) of (all, all), (1, all), (own, all), (own, 1) and (1, own), where own are this rank's tokens; what is
    own is gathered. Own by own says nothing of other ranks' tokens, and raises RuntimeError.
    """
    rows, keys = row_and_key_sizes(mask, cut)
    if keys == "own":
        mask = _GatherTokens.apply(mask, mask.dim() - 1, group)
    if rows == "own":
        mask = _GatherTokens.apply(mask, mask.dim() - 2, group)
    return mask[..., : cut.length if rows != "one" else 1, : cut.length if keys != "one" else 1]


def row_and_key_sizes(mask: torch.Tensor, cut: SequenceCut) -> tuple[str, str]:
    """Return of which tokens rows and keys of `mask` are: "all", "own" or "one" for them all. Raises RuntimeError otherwise."""
    padded = cut.size * cut.local_length
    named = {1: "one", cut.local_length: "own", padded: "all", cut.length: "all"}
    shape = (1, *mask.shape)[-2:]
    rows, keys = (named.get(each) for each in shape)
    if rows is None or keys is None or (rows, keys) == ("own", "own"):
        raise RuntimeError(
            f"a mask of {tuple(mask.shape)} says nothing of other ranks' tokens: a rank has {cut.local_length} of the "
            f"{cut.length} of a sequence. Pass is_causal=True, or give the mask (..., {cut.local_length}, {cut.length}): a row "
            "for each token of this rank, by its position, over the keys of all, as shard_sequence cuts a mask in the batch"
        )
    return rows, keys
