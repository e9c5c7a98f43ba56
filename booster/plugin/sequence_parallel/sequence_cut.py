"""How a batch of sequences is cut: which tokens a rank has, what padding must not touch, and losses over all ranks' tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from booster.ranks.agreement import reduced


@dataclass(frozen=True, eq=False)
class SequenceCut:
    """How the sequences of one batch were cut.

    Attributes:
        batch_size: sequences of this rank's batch.
        length: tokens of a whole sequence.
        size, rank: ranks that share a sequence, and which of them this is.
        zigzag: a rank has two pieces, one from the front and the one as far from the end, so that causal attention takes every
            rank as long; else one.
        documents: for each sequence of the batch the first tokens of its documents, and its length; None: it is one document.
        key_mask: (batch, length), False for tokens that attention does not read; None reads all. For transformers models.
        counted: (batch,), of each sequence how many labels of this rank count; None where the batch has no labels.
    """

    batch_size: int
    length: int
    size: int
    rank: int
    zigzag: bool
    documents: tuple[tuple[int, ...], ...] | None = None
    key_mask: torch.Tensor | None = None
    counted: torch.Tensor | None = None

    def micro_batches(self, number: int) -> list[SequenceCut]:
        """Return how each of `number` micro-batches of the batch was cut."""
        size, left = divmod(self.batch_size, number)
        if left:
            raise ValueError(
                f"{self.batch_size} sequences that shard_sequence cut do not divide into {number} micro-batches"
            )
        rows = [slice(first, first + size) for first in range(0, self.batch_size, size)]
        parts: list[Any] = [
            [x if x is None else x[at] for x in (self.documents, self.key_mask, self.counted)] for at in rows
        ]
        return [
            replace(self, batch_size=size, documents=own, key_mask=mask, counted=counted)
            for own, mask, counted in parts
        ]

    @property
    def piece(self) -> int:
        """Return how many tokens a piece has, padding included."""
        return -(-self.length // (self.size * (2 if self.zigzag else 1)))

    @property
    def local_length(self) -> int:
        """Return how many tokens each rank has, padding included."""
        return self.piece * (2 if self.zigzag else 1)

    def pieces(self, rank: int) -> tuple[int, ...]:
        """Return the places of the pieces of `rank`, in order."""
        return (rank, 2 * self.size - 1 - rank) if self.zigzag else (rank,)

    def num_real(self, rank: int) -> int:
        """Return how many tokens of `rank` are no padding; they come first."""
        return sum(min(max(self.length - place * self.piece, 0), self.piece) for place in self.pieces(rank))

    def positions(self, device: torch.device, rank: int | None = None) -> torch.Tensor:
        """Return the places in the whole sequence of the tokens of `rank`, None of this one: (local_length,), int64."""
        own = self.pieces(self.rank if rank is None else rank)
        starts = torch.tensor([place * self.piece for place in own], dtype=torch.int64, device=device)
        return (starts[:, None] + torch.arange(self.piece, dtype=torch.int64, device=device)).flatten()

    def document_ids(self, device: torch.device) -> torch.Tensor:
        """Return which document each token of the whole, padded sequence is in: (batch, size * local_length), int64."""
        tokens = torch.arange(self.size * self.local_length, dtype=torch.int64, device=device)
        starts = [
            torch.tensor(each[1:], dtype=torch.int64, device=device) for each in self.documents or ((0, self.length),)
        ]
        # The first start, 0, was left out: tokens before the first boundary are in document 0; padding is in one of its own.
        return torch.stack([torch.bucketize(tokens, each, right=True) for each in starts])

    def cut(self, tensor: torch.Tensor, dim: int, padding: Any) -> torch.Tensor:
        """Return this rank's part of `tensor`, whole along `dim`, padded by `padding` at the end; contiguous."""
        # Padding is at the end of the whole sequence, so that it is at the end of each rank's tokens too.
        missing = self.size * self.local_length - self.length
        if missing:
            tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing), value=padding)
        return torch.cat([tensor.narrow(dim, each * self.piece, self.piece) for each in self.pieces(self.rank)], dim)


def make_cut(
    batch: Any, *, size: int, rank: int, zigzag: bool, documents: torch.Tensor | None, whole: Collection[str | int]
) -> SequenceCut:
    """Return how `batch` is to be cut; see `Booster.shard_sequence`. Reads `documents` on the host."""
    named = [(name, value) for name, value in entries(batch) if name not in whole]
    sequences = [value for _, value in named if isinstance(value, torch.Tensor) and value.dim() >= 2]
    if not sequences:
        raise ValueError(
            f"shard_sequence found no tensor of (batch, sequence, ...) in {type(batch).__name__} of "
            f"{[name for name, _ in named]}; give a mapping, tuple or list of tensors, as a loader does"
        )
    batch_size, length = sequences[0].shape[:2]
    if length < 2 * size:
        raise ValueError(
            f"sequences of {length} tokens cannot be cut among sp_size={size} ranks; give at least {2 * size} tokens, or "
            "choose a smaller sp_size"
        )
    mask = dict(named).get("attention_mask")
    # A mask that reads everything is none: kernels without masks are faster, and the ring takes no others.
    keys = None
    if isinstance(mask, torch.Tensor) and mask.shape == (batch_size, length) and not bool(mask.all()):
        keys = mask.bool()
    starts = None if documents is None else _document_starts(documents, batch_size, length)
    return SequenceCut(batch_size, length, size, rank, zigzag, starts, keys)


def _document_starts(documents: torch.Tensor, batch_size: int, length: int) -> tuple[tuple[int, ...], ...]:
    if not isinstance(documents, torch.Tensor) or documents.is_floating_point() or documents.dim() not in (1, 2):
        raise TypeError(
            "documents is a tensor of integers: the number of each token's document, (batch, sequence), or for a batch of one "
            f"sequence where documents begin, and the length, as cu_seqlens; got {_shown(documents)}"
        )
    if documents.dim() == 1:
        starts: list[int] = documents.tolist()
        if (
            batch_size != 1
            or starts[:1] != [0]
            or starts[-1] != length
            or any(a >= b for a, b in zip(starts, starts[1:], strict=False))
        ):
            raise ValueError(
                f"documents={starts} are where documents begin, so they rise from 0 to the length of {length} tokens, of the "
                f"only sequence of a batch, and there are {batch_size}"
            )
        return (tuple(starts),)
    if documents.shape != (batch_size, length):
        raise ValueError(f"documents is {_shown(documents)}, and the batch ({batch_size}, {length}, ...)")
    # A document is a run of equal numbers, so the same number may come back later for another one.
    changes = documents[:, 1:] != documents[:, :-1]
    return tuple((0, *(row.nonzero().flatten() + 1).tolist(), length) for row in changes)


def cut_entries(
    batch: Any, cut: SequenceCut, *, whole: Collection[str | int], labels: str | int | None, ignore_index: int
) -> dict[str | int, Any]:
    """Return the entries of `batch`, each cut but for those in `whole`, and for what has no dimensions, or one."""
    made: dict[str | int, Any] = {}
    shape = (cut.batch_size, cut.length)
    for name, value in entries(batch):
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or name in whole:
            made[name] = value
        elif value.dim() == 4 and value.shape[-2:] == (cut.length, cut.length) and value.shape[1] != cut.length:
            made[name] = cut.cut(value, 2, False if value.dtype == torch.bool else 0)  # a mask: its rows are the tokens
        # Positions are often given once for all sequences of a batch.
        elif value.shape[:2] == shape or value.shape[:2] == (1, cut.length):
            made[name] = cut.cut(value, 1, ignore_index if name == labels else 0)
        else:
            raise ValueError(
                f"{name!r} is {_shown(value)}, and the sequences of this batch are {shape}: it is no (batch, sequence, ...); "
                f"make it so, or leave it whole on every rank, shard_sequence(batch, whole=[{name!r}])"
            )
    return made


def entries(batch: Any) -> list[tuple[str | int, Any]]:
    """Return the entries of `batch` with their names or places; one tensor is a batch of one."""
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, torch.Tensor):
        return [(0, batch)]
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return list(enumerate(batch))
    raise TypeError(f"shard_sequence takes a mapping, tuple or list of tensors, got {type(batch).__name__}")


def _shown(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


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
    asked = [*([] if labels is None else [(labels, "labels")]), *((name, "whole") for name in whole)]
    for given, option in asked:
        if given not in names:
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
    expected: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the sum of `losses` over the ranks of `group` divided by their number; None is this rank alone.

    expected: how many must count here, and by what is divided in place of their number over all ranks. A host read.
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
    if expected is not None and float(own) != float(expected[0]):
        raise RuntimeError(
            f"token_mean of a micro-batch counts {float(own):g} tokens, and its labels {float(expected[0]):g} that are not "
            "ignore_index: execute_pipeline divides by those of all micro-batches, so give counted=labels != ignore_index"
        )
    mean: torch.Tensor = _TokenMean.apply(losses.float().sum(), own, group, None if expected is None else expected[1])
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
