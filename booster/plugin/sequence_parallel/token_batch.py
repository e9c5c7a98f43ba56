"""Batches of token sequences, cut, and losses over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from booster.plugin.sequence_parallel.sequence_cut import SequenceCut, cut_entries, entries, make_cut
from booster.ranks.messages import reduced


def shard_batch(
    batch: Any,
    *,
    size: int,
    rank: int,
    zigzag: bool,
    averaging_group: dist.ProcessGroup | None,
    labels: str | int | None,
    shift_labels: bool,
    documents: torch.Tensor | None,
    whole: Collection[str | int],
    ignore_index: int,
) -> tuple[Any, SequenceCut]:
    """Return the part of `batch` that `rank` of `size` has, and how it was cut; see `Booster.shard_sequence`.

    zigzag: as `SequenceCut` has it. averaging_group: the ranks over which gradients are averaged; None is this one alone. With
    shift_labels a collective over them.
    """
    names = [name for name, _ in entries(batch)]
    for given, option in ((labels, "labels"), *((name, "whole") for name in whole)):
        if given is not None and given not in names:
            raise ValueError(f"{option} names {given!r}, which is no entry of this batch; it has {names}")
    is_mapping = isinstance(batch, Mapping)
    named: Any = dict(batch) if is_mapping else batch
    if is_mapping:
        labels = "labels" if labels is None and "labels" in named else labels
    elif labels is None and not isinstance(batch, torch.Tensor) and len(batch) > 1:
        labels = len(batch) - 1
    if shift_labels:
        if labels is None or not is_mapping:
            raise ValueError(
                "shift_labels=True moves the labels of a mapping one token on, and this batch "
                f"({type(batch).__name__}) has no entry 'labels'; name it by labels=, or shift them in the loader"
            )
        named = _shifted(named, str(labels), ignore_index, size, averaging_group)
    asks = is_mapping and size > 1 and documents is None and "attention_mask" not in named
    if asks and _begin_anew(named.get("position_ids")):
        raise ValueError(
            "position_ids begin anew within a sequence, and there is no attention_mask: are there several documents? Give "
            "documents=, the number of each token's, or an attention_mask of ones if attention reads across them"
        )
    cut = make_cut(named, size=size, rank=rank, zigzag=zigzag, documents=documents, whole=whole)
    if is_mapping and "input_ids" in named:
        device = named["input_ids"].device
        if "position_ids" not in named:
            named["position_ids"] = _position_ids(cut, device)
        # Without one, a transformers model would take each jump of the positions that a rank has for a document's begin.
        if size > 1:
            named.setdefault(
                "attention_mask", torch.ones((cut.batch_size, cut.length), dtype=torch.int64, device=device)
            )
    left = {*whole, "num_items_in_batch"}
    made = cut_entries(named, cut, whole=left, labels=labels, ignore_index=ignore_index)
    if labels in made and isinstance(made[labels], torch.Tensor):
        cut = replace(cut, counted=(made[labels] != ignore_index).flatten(1).sum(1))
    if shift_labels:
        made["shift_labels"] = made[labels]  # type: ignore[index] # which a transformers model reads where it would shift
    if is_mapping:
        return made, cut
    values = list(made.values())
    if isinstance(batch, torch.Tensor):
        return values[0], cut
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values), cut


def _shifted(
    named: dict[Any, Any], labels: str, ignore_index: int, size: int, group: dist.ProcessGroup | None
) -> dict[Any, Any]:
    whole = named[labels]
    moved = torch.cat([whole[:, 1:], torch.full_like(whole[:, :1], ignore_index)], dim=1)
    count = (moved != ignore_index).sum().double().reshape(1)
    if group is not None:
        # Each of the ranks that share a sequence counts it; and they average gradients of losses that are divided by this.
        count = reduced(count, dist.ReduceOp.SUM, group).to(whole.device) / (size * group.size())
    return {**named, labels: moved, "num_items_in_batch": count.reshape(())}  # float64: no precision casts it


def _begin_anew(positions: Any) -> bool:
    """Return whether positions of a sequence begin anew, by which a transformers model without a cache knows documents."""
    is_ids = isinstance(positions, torch.Tensor) and positions.dim() == 2
    return is_ids and bool((positions[:, 1:] != positions[:, :-1] + 1).any())


def _position_ids(cut: SequenceCut, device: torch.device) -> torch.Tensor:
    tokens = torch.arange(cut.length, dtype=torch.int64, device=device).expand(cut.batch_size, -1)
    if cut.documents is None:
        return tokens
    starts = [torch.tensor(each[:-1], dtype=torch.int64, device=device) for each in cut.documents]
    first = [own[torch.bucketize(tokens[0], own, right=True) - 1] for own in starts]
    return tokens - torch.stack(first)


def token_mean(
    losses: torch.Tensor,
    counted: torch.Tensor | float | None,
    group: dist.ProcessGroup | None,
    known: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the sum of `losses` over the ranks of `group` divided by their number; None is this rank alone.

    known: how many must count here, and by what is divided in place of their number over all ranks. A host read.
    """
    if counted is None:
        counted = torch.ones_like(losses, dtype=torch.float32)
    if not isinstance(counted, torch.Tensor):
        counted = torch.tensor(float(counted), dtype=torch.float32, device=losses.device)
    if counted.numel() > 1:
        if counted.shape != losses.shape:
            counted = counted.reshape(losses.shape)
        # Not by a product: what does not count may be no number.
        losses = torch.where(counted != 0, losses, 0.0) * (counted if counted.dtype != torch.bool else 1.0)
    own = counted.detach().double().sum()
    if known is not None and float(own) != float(known[0]):
        raise RuntimeError(
            f"token_mean of a micro-batch counts {float(own):g} tokens, and its labels {float(known[0]):g} that are not "
            "ignore_index: execute_pipeline divides by those of all micro-batches, so give counted=labels != ignore_index"
        )
    mean: torch.Tensor = _TokenMean.apply(losses.float().sum(), own, group, None if known is None else known[1])
    return mean


class _TokenMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, count: torch.Tensor, group: Any, divisor: torch.Tensor | None
    ) -> torch.Tensor:
        both = torch.stack([own.double(), count])
        if group is not None:
            both = reduced(both, dist.ReduceOp.SUM, group).to(own.device)
        number = both[1] if divisor is None else divisor
        ctx.factor = (1 if group is None else group.size()) / number
        return (both[0] / number).float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad * ctx.factor).float(), None, None, None
