"""The ranks that share sequences: what cuts their batches, joins their attention and counts their tokens."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from booster.common import arguments
from booster.common.torch_internals.autograd_internals import graph_task
from booster.model.modules import bare
from booster.plugin.sequence_parallel.all_to_all import attend_by_heads
from booster.plugin.sequence_parallel.attention_mode import SequenceMode, check_model
from booster.plugin.sequence_parallel.ring import attend_in_ring
from booster.plugin.sequence_parallel.sequence_cut import SequenceCut, shard_batch, token_mean
from booster.plugin.sequence_parallel.transformers_attention import is_of_transformers, use_own_masks
from booster.ranks.agreement import reduced
from booster.tensors.trees import tensors

CutMode = Literal["all_to_all", "ring_attn"]


class SequenceParallel:
    """Divides the tokens of sequences among the ranks of `group`.

    mode: "all_to_all" or "ring_attn".
    group: the ranks that share sequences.
    averaging_group: all ranks over which gradients are averaged.

    Attributes:
        cut: how the last batch was cut; None before the first. Forward passes go by it.
        buffers: ids of the buffers of models; tables of positions are among them.
        micro_batch: inside `micro_batches`, the number of the one that is computed, or that recomputes activations.
    """

    def __init__(self, mode: CutMode, group: dist.ProcessGroup, averaging_group: dist.ProcessGroup | None) -> None:
        self.mode, self.group, self._averaging_group = mode, group, averaging_group
        self.size, self.rank = group.size(), group.rank()
        self.attend = attend_by_heads if mode == "all_to_all" else attend_in_ring
        self.cut: SequenceCut | None = None
        self.buffers: set[int] = set()
        self._made: list[weakref.ref[torch.Tensor]] = []  # what the last batch was cut to
        self._counts = False  # whether the batch has the number by which its model divides
        self._unweighted = False  # whether what went forward last made a loss of this rank's tokens alone
        # Of forward passes since the last backward pass began, and of those that this one may recompute. Passes in evaluation
        # that forgot torch.no_grad() do not pile up.
        self._forward_cuts: deque[SequenceCut] = deque(maxlen=256)
        self._backward_cuts: list[SequenceCut] = []
        self.micro_batch = 0
        self._parts: list[SequenceCut] = []
        self._divisor: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self  # a process group cannot be copied

    # ---------------------------------------------------------------------- models

    def check(self, model: nn.Module, tp_size: int = 1) -> None:
        """Raise ValueError if `model` has what reads several tokens, or cannot be seen to. Before anything is changed."""
        check_model(model, by_heads=self.mode == "all_to_all", size=self.size, tp_size=tp_size)

    def install(self, roots: Sequence[nn.Module], fakes: nn.Module | None = None) -> None:
        """Have the forward passes of the placed `roots`, and of their parts where they are recomputed, join attention.

        roots: the model, or this rank's stages of it. fakes: a copy of the model whose modules stand for other stages'.
        """
        models = [bare(root) for root in roots]
        for model in (*models, *([] if fakes is None else [bare(fakes)])):
            if is_of_transformers(model):
                use_own_masks(model)
        self.buffers |= {id(buffer) for model in models for buffer in model.buffers()}
        region = _Region(self, models)
        # A stage has shallow copies of these modules, which share their hooks.
        foreign = set() if fakes is None else {id(each._forward_pre_hooks) for each in bare(fakes).modules()}
        for each in {id(module): module for model in models for module in model.modules()}.values():
            # A leaf of torch computes no attention, but for that of MultiheadAttention, which has children.
            if id(each._forward_pre_hooks) not in foreign and (
                any(each is model for model in models)
                or next(each.children(), None) is not None
                or not type(each).__module__.startswith("torch.")
            ):
                each.register_forward_pre_hook(region.enter)
                each.register_forward_hook(region.exit, always_call=True)

    # ---------------------------------------------------------------------- batches and losses

    def shard(self, batch: Any, *, shift_labels: bool, **options: Any) -> Any:
        """Return this rank's part of `batch`; see `shard_batch`, which passes the other options on."""
        given = {id(tensor) for tensor in tensors(batch)}
        if any(id(made()) in given for made in self._made):
            raise ValueError(
                "this batch was cut by shard_sequence before; give it what the loader gave, once for each batch"
            )
        zigzag = self.mode == "ring_attn"
        ranks: dict[str, Any] = {"size": self.size, "rank": self.rank, "averaging_group": self._averaging_group}
        made, self.cut = shard_batch(batch, zigzag=zigzag, shift_labels=shift_labels, **ranks, **options)
        self._counts = shift_labels
        self._made = [weakref.ref(tensor) for tensor in tensors(made) if id(tensor) not in given]
        return made

    def token_mean(self, losses: torch.Tensor, counted: torch.Tensor | float | None) -> torch.Tensor:
        """Return the mean of `losses` over the tokens of all ranks; see `Booster.token_mean`."""
        self._unweighted = False
        if not self._parts:
            return token_mean(losses, counted, self._averaging_group)
        own = self._parts[self.micro_batch].counted
        if own is None or self._divisor is None:
            raise RuntimeError(
                "token_mean in execute_pipeline divides by the labels of all micro-batches, and shard_sequence found none in "
                "this batch; name them, b.shard_sequence(batch, labels=...)"
            )
        return token_mean(losses, counted, self._averaging_group, (own.sum(), self._divisor))

    @contextmanager
    def micro_batches(self, cut: SequenceCut | None, parts: Sequence[Any]) -> Iterator[None]:
        """A context in which the batch that was cut as `cut` says is computed in `parts`; losses are their mean.

        A collective over the ranks that average gradients, where the batch has labels.
        """
        if cut is None or len(parts) == 1:
            yield
            return
        cuts, number = cut.micro_batches(len(parts)), len(parts)
        if cut.counted is not None:
            count = cut.counted.sum().double().reshape(1)
            if self._averaging_group is not None:
                count = reduced(count, dist.ReduceOp.SUM, self._averaging_group).to(cut.counted.device)
            self._divisor = count[0] / number
        for part in parts:  # mappings that `divide` made, by which transformers' own loss divides
            for given in (part.kwargs, part.target) if "num_items_in_batch" in part.kwargs else ():
                given["num_items_in_batch"] = given["num_items_in_batch"] / number
        self._parts, self.micro_batch = cuts, 0
        try:
            yield
        finally:
            self._parts, self.micro_batch, self._divisor = [], 0, None

    def joined(self) -> SequenceMode:
        """Return a context in which attention is that of the micro-batch that is computed now, or of the batch."""
        return SequenceMode(self, self._parts[self.micro_batch] if self._parts else self.cut)

    def cut_of_pass(self, is_whole: bool) -> SequenceCut | None:
        """Return how the batch was cut of the pass that begins; is_whole: of a model, not of a part of one.

        A part that is recomputed in backward is of an earlier pass than that of the batch that was cut last. Raises
        RuntimeError where it may be of several that were cut otherwise.
        """
        if graph_task() == -1:
            if is_whole and self.cut is not None and torch.is_grad_enabled():
                self._unweighted = not self._counts
                if self.cut not in self._forward_cuts and not self._parts:
                    self._forward_cuts.append(self.cut)
            return self._parts[self.micro_batch] if self._parts else self.cut
        if self._parts:
            return self._parts[self.micro_batch]
        cuts = list(self._forward_cuts) or self._backward_cuts
        alike = {(cut.length, cut.batch_size, cut.documents, id(cut.key_mask)) for cut in cuts}
        if len(alike) > 1:
            raise RuntimeError(
                f"activations of one of {len(cuts)} batches are recomputed, which differ in length, documents or padding, and "
                "it cannot be seen of which; call backward after each forward, or cut them alike"
            )
        return cuts[-1] if cuts else self.cut

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

    def __init__(self, owner: SequenceParallel, models: Sequence[nn.Module]) -> None:
        self._owner, self._models = owner, {id(model) for model in models}
        self._local = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Region:
        return self

    def enter(self, module: nn.Module, args: Any) -> None:
        entered: list[tuple[int, SequenceMode | None]] = self._local.__dict__.setdefault("entered", [])
        mode = None if entered else SequenceMode(self._owner, self._owner.cut_of_pass(id(module) in self._models))
        if mode is not None:
            mode.__enter__()
        entered.append((id(module), mode))

    def exit(self, module: nn.Module, args: Any, output: Any) -> None:
        entered = self._local.__dict__.get("entered", [])
        # Not where a hook before ours raised. The end of a stage is no Exception, and leaves modules without their hooks.
        while any(key == id(module) for key, _ in entered):
            key, mode = entered.pop()
            if mode is not None:
                mode.__exit__(None, None, None)
            if key == id(module):
                break


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
