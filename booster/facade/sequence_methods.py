"""The methods of `Booster` for sequences that ranks share: a batch cut, and a loss over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from booster.common import arguments
from booster.facade.booster_state import BoosterState


def shard_sequence(
    self: BoosterState,
    batch: Any,
    *,
    labels: str | int | None = None,
    shift_labels: bool = False,
    documents: torch.Tensor | None = None,
    whole: Collection[str | int] = (),
    ignore_index: int = -100,
) -> Any:
    """Return this rank's part of `batch`, for forward passes until the next one is cut; where no ranks share it, all of it.

    batch: a mapping, tuple or list of tensors, or one tensor, the same on all ranks that share its sequences, as a prepared
        loader gives it. Tensors of (batch, sequence, ...) are cut alike, tokens, labels, positions and masks; of a mask
        (batch, heads or 1, sequence, sequence) the rows. What has fewer dimensions stays. A mapping with "input_ids" gets
        "position_ids" and "attention_mask" where it has none.
    labels: the name or place of the labels, padded with `ignore_index`; None is "labels" of a mapping, the last of a tuple.
    shift_labels: labels of a mapping are the tokens themselves: moved one on before the cut, and given as "shift_labels" too,
        with "num_items_in_batch" in float64, so that a transformers model computes the loss over all tokens, in float64
        too; its mean over ranks is `b.reduce(loss)`. False: labels are those of their tokens. True is a collective.
    documents: of packed sequences, where attention stays within a document: the number of each token's, (batch, sequence), or
        for one sequence where they begin and the length, as cu_seqlens. None: a sequence is one document. Reads them on the
        host. On a single device they raise: there a mask of the model's says it.
    whole: names or places of tensors that stay whole on every rank.
    ignore_index: the label that does not count.

    A length that ranks do not divide is padded at its end; attention reads no padding, and its labels are `ignore_index`.
    Raises ValueError for sequences that are too short or of several lengths, and for "position_ids" that begin anew without
    `documents` or an "attention_mask"; TypeError for other batches.
    """
    if labels is not None and not isinstance(labels, (str, int)):
        raise TypeError(
            f"labels is the name or place of an entry of the batch, or None, got {arguments.described(labels)}"
        )
    arguments.flag("shift_labels", shift_labels)
    if not arguments.is_whole(ignore_index) or not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index is a label, a whole number of 64 bits, got {arguments.described(ignore_index)}")
    if isinstance(whole, (str, bytes, torch.Tensor)) or not isinstance(whole, (list, tuple, set, frozenset)):
        raise TypeError(f"whole is a list of names or places, got {arguments.described(whole)}")
    return self.plugin.shard_sequence(
        batch,
        labels=labels,
        shift_labels=shift_labels,
        documents=documents,
        whole=set(whole),
        ignore_index=ignore_index,
    )


def token_mean(self: BoosterState, losses: torch.Tensor, counted: torch.Tensor | float | None = None) -> torch.Tensor:
    """Return the sum of `losses` over the tokens of all ranks, divided by how many count: 0-dim, float32, on every rank.

    losses: of this rank's tokens, in any shape, as reduction="none" gives them; or their sum.
    counted: which of them count, as `labels != -100`, or weights, in their shape or in as many elements; with a sum their
        number; None counts all.

    What does not count may be no number. With gradients: those of `b.backward` are of this mean. A small collective over the
    ranks that average gradients; without any, of this process's tokens.
    """
    arguments.instance("losses", losses, torch.Tensor, "a tensor")
    if losses.is_complex():
        raise ValueError(f"losses are real numbers, got a tensor of {losses.dtype}")
    if counted is not None and not isinstance(counted, torch.Tensor):
        arguments.number("counted", counted, least=0.0, also="a tensor, or None")
    if isinstance(counted, torch.Tensor) and counted.numel() not in (1, losses.numel()):
        raise ValueError(
            f"counted has {counted.numel()} elements and losses have {losses.numel()}; give one for each, or one number"
        )
    return self.plugin.token_mean(losses, counted)
