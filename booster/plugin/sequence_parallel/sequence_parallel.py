"""The ranks that share sequences: what cuts their batches, joins their attention and counts their tokens."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from booster.common import arguments
from booster.common.torch_internals.autograd_internals import graph_task
from booster.model.modules import bare
from booster.plugin.sequence_parallel.all_to_all import attend_by_heads
from booster.plugin.sequence_parallel.attention_mode import SequenceMode
from booster.plugin.sequence_parallel.refusals import check_model
from booster.plugin.sequence_parallel.ring import attend_in_ring
from booster.plugin.sequence_parallel.sequence_cut import SequenceCut
from booster.plugin.sequence_parallel.token_batch import shard_batch, token_mean
from booster.plugin.sequence_parallel.transformers_attention import is_of_transformers, use_own_masks

CutMode = Literal["all_to_all", "ring_attn"]


class SequenceParallel:
    """Divides the tokens of sequences among the ranks of `group`.

    mode: "all_to_all" or "ring_attn".
    group: the ranks that share sequences.
    averaging_group: all ranks over which gradients are averaged.

    Attributes:
        cut: how the last batch was cut; None before the first. Forward passes go by it.
        buffers: ids of the buffers of models; tables of positions are among them.
    """

    def __init__(self, mode: CutMode, group: dist.ProcessGroup, averaging_group: dist.ProcessGroup | None) -> None:
        self.mode, self.group, self._averaging_group = mode, group, averaging_group
        self.size, self.rank = group.size(), group.rank()
        self.attend = attend_by_heads if mode == "all_to_all" else attend_in_ring
        self.cut: SequenceCut | None = None
        self.buffers: set[int] = set()
        self._counts = False  # whether the batch has the number by which its model divides
        self._unweighted = False  # whether what went forward last made a loss of this rank's tokens alone
        # Of forward passes since the last backward pass began, and of those that this one may recompute. Passes in evaluation
        # that forgot torch.no_grad() do not pile up.
        self._forward_cuts: deque[SequenceCut] = deque(maxlen=256)
        self._backward_cuts: list[SequenceCut] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self  # a process group cannot be copied

    # ---------------------------------------------------------------------- models

    def check(self, model: nn.Module, tp_size: int = 1) -> None:
        """Raise ValueError if `model` has what reads several tokens, or cannot be seen to. Before anything is changed."""
        check_model(model, by_heads=self.mode == "all_to_all", size=self.size, tp_size=tp_size)

    def install(self, module: nn.Module) -> None:
        """Have the forward passes of the placed `module`, and of its parts where they are recomputed, join attention."""
        model = bare(module)
        if is_of_transformers(model):
            use_own_masks(model)
        self.buffers |= {id(buffer) for buffer in model.buffers()}
        region = _Region(self, model)
        for each in model.modules():
            # A leaf of torch computes no attention, but for that of MultiheadAttention, which has children.
            if (
                each is model
                or next(each.children(), None) is not None
                or not type(each).__module__.startswith("torch.")
            ):
                each.register_forward_pre_hook(region.enter)
                each.register_forward_hook(region.exit, always_call=True)

    # ---------------------------------------------------------------------- batches and losses

    def shard(self, batch: Any, *, shift_labels: bool, **options: Any) -> Any:
        """Return this rank's part of `batch`; see `shard_batch`, which passes the other options on."""
        zigzag = self.mode == "ring_attn"
        ranks: dict[str, Any] = {"size": self.size, "rank": self.rank, "averaging_group": self._averaging_group}
        made, self.cut = shard_batch(batch, zigzag=zigzag, shift_labels=shift_labels, **ranks, **options)
        self._counts = shift_labels
        return made

    def token_mean(self, losses: torch.Tensor, counted: torch.Tensor | float | None) -> torch.Tensor:
        """Return the mean of `losses` over the tokens of all ranks; see `Booster.token_mean`."""
        self._unweighted = False
        return token_mean(losses, counted, self._averaging_group)

    def cut_of_pass(self, is_whole: bool) -> SequenceCut | None:
        """Return how the batch was cut of the pass that begins; is_whole: of a model, not of a part of one.

        A part that is recomputed in backward is of an earlier pass than that of the batch that was cut last. Raises
        RuntimeError where it may be of several that were cut otherwise.
        """
        if graph_task() == -1:
            if is_whole and self.cut is not None and torch.is_grad_enabled():
                self._unweighted = not self._counts
                if self.cut not in self._forward_cuts:
                    self._forward_cuts.append(self.cut)
            return self.cut
        found = list(self._forward_cuts) or self._backward_cuts
        alike = {(cut.length, cut.batch_size, cut.documents, id(cut.key_mask)) for cut in found}
        if len(alike) > 1:
            raise RuntimeError(
                f"activations of one of {len(found)} batches are recomputed, which differ in length, documents or padding, and "
                "it cannot be seen of which; call backward after each forward, or cut them alike"
            )
        return found[-1] if found else self.cut

    def before_backward(self, *, by_tokens: bool) -> None:
        """Note that a pass begins. Raise RuntimeError unless its loss is one over the tokens of all ranks.

        by_tokens: it is a sum that is divided by their number.
        """
        if self._forward_cuts:
            self._backward_cuts = list(self._forward_cuts)
            self._forward_cuts.clear()
        if self._unweighted and not by_tokens:
            raise RuntimeError(
                "backward of a loss of part of a sequence, which is not one over the tokens of all ranks: a mean over this "
                "rank's tokens weighs those of a rank with few labels more. Compute losses with reduction='none', and "
                "loss = b.token_mean(losses, labels != -100); or for a transformers model that computes its own, "
                "b.shard_sequence(batch, shift_labels=True)"
            )


class _Region:
    """The hooks around forward passes. Nested ones, and those of a thread that recomputes, enter the mode once."""

    def __init__(self, owner: SequenceParallel, model: nn.Module) -> None:
        self._owner, self._model = owner, id(model)
        self._here = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Region:
        return self

    def enter(self, module: nn.Module, args: Any) -> None:
        entered: list[tuple[int, SequenceMode | None]] = self._here.__dict__.setdefault("entered", [])
        mode = None if entered else SequenceMode(self._owner, self._owner.cut_of_pass(id(module) == self._model))
        if mode is not None:
            mode.__enter__()
        entered.append((id(module), mode))

    def exit(self, module: nn.Module, args: Any, output: Any) -> None:
        entered = self._here.__dict__.get("entered", [])
        if not entered or entered[-1][0] != id(module):  # a hook before ours raised
            return
        _, mode = entered.pop()
        if mode is not None:
            mode.__exit__(None, None, None)


def check_sizes(sp_size: int, mode: str | None, tp_size: int | None = None) -> None:
    """Raise ValueError unless the options of sequence parallelism fit each other. tp_size: None where no layer is divided."""
    arguments.count("sp_size", sp_size)
    legal = ("all_to_all", "ring_attn") if tp_size is None else ("split_gather", "all_to_all", "ring_attn")
    if mode is not None:
        arguments.choice("sequence_parallelism_mode", mode, legal)
    if mode == "split_gather" and (tp_size == 1 or sp_size not in (1, tp_size)):
        raise ValueError(
            f'sequence_parallelism_mode="split_gather" divides activations among the tp_size={tp_size} ranks of tensor '
            f"parallelism, and sp_size is {sp_size}; choose tp_size above 1 and leave sp_size out, or another mode"
        )
    if mode in ("all_to_all", "ring_attn") and sp_size == 1:
        raise ValueError(f"sequence_parallelism_mode={mode!r} divides sequences among sp_size ranks, and sp_size is 1")
    if mode is None and sp_size > 1:
        raise ValueError(f'sp_size={sp_size} needs sequence_parallelism_mode="all_to_all" or "ring_attn"')
