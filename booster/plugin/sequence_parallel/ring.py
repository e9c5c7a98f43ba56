"""Attention in a ring: queries stay, keys and values go from rank to rank, and partial results are joined (ring attention).

Source: Liu et al. 2023, arXiv 2310.01889. By the zigzag cut every rank has the same share of a causal triangle. A part's output
and log-sum-exp are joined in float32. A rank never has more keys and values than its own and those on their way, and backward
sends their gradients round with them, in float32.

On a CPU parts are computed in float32 from operands in their dtype, and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from booster.common.torch_internals.tensor_internals import flash_backward, flash_forward, is_fake_kind
from booster.plugin.sequence_parallel.all_to_all import Attention, gather_tokens, row_and_key_sizes, shape_of_attention
from booster.plugin.sequence_parallel.sequence_cut import SequenceCut
from booster.ranks.agreement import communication_device
from booster.tensors.trees import HALF_DTYPES


def attend_in_ring(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, call: Attention
) -> torch.Tensor:
    """Return `F.scaled_dot_product_attention` of this rank's queries and all keys, as `attend_by_heads` does.

    Any number of heads. A collective for each other rank, and one more where keys are masked rank by rank. Raises RuntimeError
    for dropout, and on CUDA for masks and documents.
    """
    cut, group = call.cut, call.group
    if call.dropout_p:
        raise RuntimeError(
            f'attention with dropout_p={call.dropout_p} under sequence_parallelism_mode="ring_attn": the kernels that give a '
            'log-sum-exp drop nothing on a CPU; set the dropout of attention to 0, or choose "all_to_all"'
        )
    if query.shape[1] % key.shape[1]:
        raise RuntimeError(f"{query.shape[1]} heads of queries do not share {key.shape[1]} of keys evenly")
    if query.shape[-1] != value.shape[-1]:
        raise RuntimeError(
            f'keys of {query.shape[-1]} features and values of {value.shape[-1]} under sequence_parallelism_mode="ring_attn", '
            'which wants as many; choose "all_to_all"'
        )
    if mask is not None and mask.requires_grad:
        raise RuntimeError(
            'a mask with gradients, such as a learned bias, under sequence_parallelism_mode="ring_attn", where kernels give '
            'none for it; choose "all_to_all"'
        )
    features, scale = query.shape[-1], call.scale
    if query.device.type != "cpu":
        if mask is not None or cut.documents is not None or query.dtype not in HALF_DTYPES or features > 256:
            raise RuntimeError(
                f'attention of {query.dtype} in {features} features under sequence_parallelism_mode="ring_attn": the kernel of '
                "this device that gives a log-sum-exp takes halves in up to 256, without masks and documents; choose "
                '"all_to_all"'
            )
        scale = features**-0.5 if scale is None else scale
        query, key, value = (F.pad(x, (0, -features % 8)) for x in (query, key, value))  # as that kernel wants them
    if is_fake_kind(type(query)):
        return shape_of_attention(query, key, value, mask, cut)
    if mask is not None and row_and_key_sizes(mask, cut)[1] == "own":
        mask = _in_order(gather_tokens(mask, mask.dim() - 1, group), cut)
    blocks = _Blocks(query, mask, call.is_causal, cut)
    out: torch.Tensor = _Ring.apply(query, key, value, blocks, scale, group)
    return out[..., :features]


def _in_order(mask: torch.Tensor, cut: SequenceCut) -> torch.Tensor:
    """Return `mask` with its keys, which come rank by rank, in the order of the sequence."""
    order = torch.cat([cut.positions(mask.device, rank) for rank in range(cut.size)])
    return mask.index_select(-1, order.argsort())


class _Blocks:
    """Which of this rank's queries attend to which keys of another rank, and how."""

    def __init__(self, query: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, cut: SequenceCut) -> None:
        self.cut, self.is_causal, self.mask = cut, is_causal, mask
        if mask is not None or cut.documents is not None:  # they are copied to the device, which waits
            self._own = cut.positions(query.device)
        if mask is not None and row_and_key_sizes(mask, cut)[0] == "all":
            rows = self._own.clamp(max=mask.shape[-2] - 1)  # rows of padding are not read
            self.mask = mask.index_select(-2, rows)
        self._documents = None if cut.documents is None else cut.document_ids(query.device)

    def of(self, source: int) -> tuple[slice, slice, bool, torch.Tensor | None, torch.Tensor | None] | None:
        """Return (queries, keys, causal, additive mask, rows with a key) of the block with the keys of `source`; None: empty.

        The last two are None where every query reads all keys, or all up to itself where it is causal.
        """
        cut = self.cut
        queries, keys, causal = slice(0, cut.local_length), slice(0, cut.num_real(source)), False
        if self.is_causal:
            causal = source == cut.rank
            if causal:
                keys = slice(0, cut.local_length)
            elif source < cut.rank:  # its first piece is before both of ours, its second behind them
                keys = slice(0, min(cut.piece, keys.stop))
            else:  # both are before our second piece, and behind our first
                queries = slice(cut.piece, cut.local_length)
        if not keys.stop:
            return None
        if self.mask is None and self._documents is None:
            return queries, keys, causal, None, None
        return self._masked(source, queries, keys, causal)

    def _masked(self, source: int, queries: slice, keys: slice, causal: bool) -> Any:
        where = self.cut.positions(self._own.device, source)[keys]
        rows = self._own[queries]
        allowed = torch.ones((1, 1, len(rows), len(where)), dtype=torch.bool, device=self._own.device)
        if causal:
            allowed = allowed & (where <= rows[:, None])
        if self._documents is not None:
            ids = self._documents
            allowed = allowed & (ids[:, None, rows, None] == ids[:, None, None, where])
        bias = None
        if self.mask is not None:
            mask = self.mask if self.mask.shape[-2] == 1 else self.mask[..., queries, :]
            if mask.shape[-1] > 1:
                mask = mask.index_select(-1, where.clamp(max=mask.shape[-1] - 1))
            mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
            if mask.dtype == torch.bool:
                allowed = allowed & mask
            else:
                bias = mask.to(torch.float32)
                allowed = allowed & (bias > float("-inf"))
        read = allowed.any(-1)
        if not bool(read.any()):
            return None
        additive = torch.zeros(allowed.shape, dtype=torch.float32, device=allowed.device) if bias is None else bias
        # A row without keys reads them all, and counts for nothing: kernels differ in what they make of it.
        return queries, keys, False, additive.masked_fill(~(allowed | ~read[..., None]), float("-inf")), read


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, blocks: _Blocks, scale: float | None, group: Any) -> Any:
        q, repeats = _operand(query), query.shape[1] // key.shape[1]
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
        for source, (k, v) in _passed_round(torch.stack([key, value]), group):
            block = blocks.of(source)
            if block is None:
                continue
            queries, keys, causal, mask, read = block
            k, v = (_repeated(_operand(x[:, :, keys]), repeats) for x in (k, v))
            part, part_lse = flash_forward(q[:, :, queries], k, v, mask, is_causal=causal, scale=scale)
            if read is not None:
                part_lse = part_lse.masked_fill(~read, float("-inf"))
            _join(out[:, :, queries], lse[:, :, queries], part.float(), part_lse)
        lse.masked_fill_(lse == float("-inf"), 0.0)  # rows that read nothing
        out = out.to(query.dtype)
        # The place, so that activation checkpointing sees a recomputation that does not come here.
        ctx.save_for_backward(query, key, value, out, lse, torch.tensor([group.rank()], dtype=torch.int64))
        ctx.blocks, ctx.scale, ctx.group = blocks, scale, group
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, lse, _ = ctx.saved_tensors
        q, o, g = _operand(query), _operand(out), _operand(grad)
        repeats = query.shape[1] // key.shape[1]
        grad_query = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        sums = torch.zeros((2, *key.shape), dtype=torch.float32, device=q.device)
        for source, (k, v) in _passed_round(torch.stack([key, value]), ctx.group, sums):
            block = ctx.blocks.of(source)
            if block is None:
                continue
            queries, keys, causal, mask, read = block
            k, v = (_repeated(_operand(x[:, :, keys]), repeats) for x in (k, v))
            rows = [x[:, :, queries] for x in (g, q, o, lse)]
            if read is not None:  # exp(score - log-sum-exp) of rows that read nothing here
                rows[3] = rows[3].masked_fill(~read, float("inf"))
            grads = flash_backward(rows[0], rows[1], k, v, rows[2], rows[3], mask, is_causal=causal, scale=ctx.scale)
            grad_query[:, :, queries] += grads[0]
            for total, part in zip(sums, grads[1:], strict=True):
                total[:, :, keys] += part.unflatten(1, (-1, repeats)).sum(2, dtype=torch.float32)
        return grad_query.to(query.dtype), *(x.to(key.dtype) for x in sums), None, None, None


def _operand(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.device.type == "cpu" else x


def _repeated(x: torch.Tensor, repeats: int) -> torch.Tensor:
    return x.repeat_interleave(repeats, dim=1) if repeats > 1 else x


def _join(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add the result `part` over more keys to `out`, both averages weighted by exp of their log-sum-exp, in place."""
    total = torch.logaddexp(lse, part_lse)
    has_keys = total > float("-inf")
    old, new = (torch.where(has_keys, (x - total).exp(), 0.0).unsqueeze(-1) for x in (lse, part_lse))
    out.mul_(old).addcmul_(part, new)
    lse.copy_(total)


def _passed_round(
    held: torch.Tensor, group: dist.ProcessGroup, sums: torch.Tensor | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (rank, its `held`), this rank's own first, while the next are on their way.

    sums: belongs to what is held, and is added to in place while it goes round; this rank's own again at the end.
    """
    size, rank = group.size(), group.rank()
    home, device = held.device, communication_device(held.device, group)  # gloo sends no memory of GPUs
    held = held.contiguous()
    for step in range(size):
        last = step == size - 1
        arriving = torch.empty_like(held, device=device)
        works = [] if last else _send(held.to(device), arriving, group)
        yield (rank - step) % size, held
        if sums is not None:
            returned = torch.empty_like(sums, device=device)
            for work in _send(sums.to(device), returned, group):
                work.wait()
            sums.copy_(returned)
        for work in works:
            work.wait()
        held = arriving.to(home)


def _send(given: torch.Tensor, arriving: torch.Tensor, group: dist.ProcessGroup) -> list[Any]:
    size, rank = group.size(), group.rank()
    sends = dist.P2POp(dist.isend, given, group=group, group_peer=(rank + 1) % size)
    receives = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % size)
    return list(dist.batch_isend_irecv([sends, receives]))
