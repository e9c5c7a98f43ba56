"""The methods of `Booster` for tokens that are on several ranks: a batch cut, and losses over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def balancing_loss(
    self: BoosterState,
    router_logits: torch.Tensor | Sequence[torch.Tensor],
    top_k: int,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the loss that keeps experts evenly used, over the tokens of all ranks: 0-dim, float32, on every rank.

    router_logits: (tokens, experts) of this rank's tokens, or a list of them, one for each layer, as a transformers model
        returns them with output_router_logits=True.
    top_k: experts of a token.
    attention_mask: which of the tokens count, in as many elements as there are tokens; None counts all.

    It is `aux_loss` of a transformers model that has the tokens of all ranks; 1 where every expert is used alike, times top_k.
    Multiply it by a coefficient and add it to the loss. With gradients: those of `b.backward` are of this loss. Two small
    collectives over the ranks that average gradients.
    """
    from booster.plugin.expert_parallel import balancing_loss as balancing_loss_over  # imports DTensor

    several = [router_logits] if isinstance(router_logits, torch.Tensor) else router_logits
    if not isinstance(several, (list, tuple)) or not several or not all(isinstance(x, torch.Tensor) for x in several):
        legal = "a tensor of (tokens, experts), or a list of them, one for each layer"
        raise TypeError(arguments.refusal("router_logits", router_logits, legal))
    shapes = {tuple(logits.shape) for logits in several}
    if len(shapes) > 1 or several[0].dim() != 2 or not all(logits.is_floating_point() for logits in several):
        raise ValueError(
            f"router_logits are real numbers of (tokens, experts), alike in every layer, got {sorted(shapes)} of "
            f"{sorted({str(logits.dtype) for logits in several})}"
        )
    tokens, experts = several[0].shape
    if arguments.count("top_k", top_k) > experts:
        raise ValueError(f"top_k={top_k} experts of a token, and router_logits are of {experts}")
    if attention_mask is not None:
        arguments.instance("attention_mask", attention_mask, torch.Tensor, "a tensor, or None")
        if attention_mask.numel() != tokens or attention_mask.is_complex():
            raise ValueError(
                f"attention_mask has {attention_mask.numel()} elements of {attention_mask.dtype} for {tokens} tokens; give one "
                "real number for each"
            )
    return balancing_loss_over(several, top_k, attention_mask, self.plugin.averaging_group)
