"""The methods of `Booster` around passes: one, a group, a batch in micro-batches or cut along its sequences, a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster.common import arguments
from booster.common.hang_watchdog import abandon_pass, leaving_pass
from booster.facade import refusals
from booster.facade.accumulation import Accumulation, NoSync
from booster.facade.booster_state import BoosterState, Optimizers
from booster.interface.error_hints import hint_of_loss
from booster.interface.model import CriterionWrapper, ModelWrapper
from booster.interface.optimizer import OptimizerWrapper, gradients_of
from booster.mixed_precision import MixedPrecision
from booster.plugin import Pipeline
from booster.tensors.cast_regions import outside, region, sharing_weights
from booster.tensors.trees import MicroBatch, divide, join, map_tensors
from booster.update.backward import abandon_backward, check_first, end_backward, prepare_backward, run_backward

if TYPE_CHECKING:
    from booster.capture.captured import CapturedStep
    from booster.capture.graph import Recorder
    from booster.plugin.sequence_parallel import SequenceParallel

Criterion = Callable[[Any, Any], torch.Tensor]


def _run_whole(
    model: ModelWrapper,
    criterion: Criterion,
    micro_batches: list[MicroBatch],
    backward: Callable[[torch.Tensor], None] | None,
    return_outputs: bool,
    sequences: SequenceParallel | None,
) -> tuple[list[torch.Tensor], list[Any]]:
    losses, outputs = [], []
    for number, part in enumerate(micro_batches):
        if sequences is not None:
            sequences.micro_batch = number
        output = model(*part.args, **part.kwargs)
        loss = criterion(output, part.target)
        if return_outputs:
            outputs.append(map_tensors(torch.Tensor.detach, output))
        del output  # logits take more than a layer does
        if backward is not None:
            backward(loss)
        losses.append(loss.detach())
    return losses, outputs


def _run_stages(
    pipeline: Pipeline,
    precision: MixedPrecision,
    model: ModelWrapper,
    criterion: Criterion,
    optimizers: Sequence[OptimizerWrapper],
    micro_batches: list[MicroBatch],
    return_outputs: bool,
    sequences: SequenceParallel | None,
) -> tuple[list[torch.Tensor], list[Any]]:
    cast = [
        MicroBatch(model.cast_inputs(part.args), model.cast_inputs(part.kwargs), part.target) for part in micro_batches
    ]
    boosted = isinstance(criterion, (ModelWrapper, CriterionWrapper))

    def computed(output: Any, target: Any) -> torch.Tensor:
        # A criterion that was not boosted runs outside of the precision, as it does without a pipeline.
        with nullcontext() if boosted else outside():
            loss: torch.Tensor = criterion(model.cast_outputs(output), target)
        # In the last stage alone, where the loss is; what is wrong with it raises before others wait for its gradient.
        if gradients and isinstance(loss, torch.Tensor):
            check_first(loss, gradients)
            if sequences is not None:
                sequences.before_backward(by_tokens=False)
        return loss

    gradients = gradients_of(optimizers) if optimizers else []
    # One context around the schedule: micro-batches then share the half copies that autocast makes of weights.
    this, seed = prepare_backward(gradients) if gradients else (None, None)
    try:
        with region(precision.forward_context), sharing_weights(), precision.backward_context():
            losses, outputs = pipeline.run(cast, computed, seed=seed, return_outputs=return_outputs)
    except BaseException:
        if this is not None:
            # Else the next pass would find this one open, and refuse.
            abandon_backward(this)
        raise
    if this is not None:
        end_backward(this, torch.stack([loss.reshape(()) for loss in losses]).mean() if losses else None)
    return losses, [model.cast_outputs(output) for output in outputs]


_INSIDE_ACCUMULATE = (
    "execute_pipeline accumulates the gradients of its {count} micro-batches by itself, so it cannot run inside accumulate(); "
    "pass one larger batch, and HybridParallelPlugin(num_microbatches=...)"
)


def backward(
    self: BoosterState,
    loss: torch.Tensor,
    optimizer: Optimizers,
    *,
    loss_id: int = 0,
    inputs: Any = None,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> None:
    """Accumulate the gradients of `loss` (one element), scaled as the optimizer's loss scaler wants.

    optimizer: the boosted optimizer that will step on it, or several: then the smallest of their scales is used and they
        step together or not at all.
    loss_id: which of the precision's loss scalers, for those that keep several.
    inputs, retain_graph, create_graph: those of `torch.autograd.backward`; inputs=None is every leaf.

    Under `accumulate` the loss is divided as given there. Side effect: the plugin's gradient collectives, except inside
    `no_sync`.
    """
    try:
        if isinstance(optimizer, OptimizerWrapper):
            optimizers = [optimizer]
        else:
            optimizers = refusals.check_boosted_optimizers(optimizer, "backward")
        # Calls cost in every step, so what nearly every call passes is compared here: 0 is a scaler of every precision.
        if type(loss_id) is not int or loss_id != 0:
            self.precision.check_loss_id(loss_id)
        # Of a pass outside of any group; most are.
        group, divisor, weight, delayed = None, 1.0, 1.0, False
        if self._accumulations.any_open:  # an attribute, for the same reason
            group = self._accumulations.group_of(optimizers)
            delayed = self._accumulations.is_unsynchronised(optimizers)
            if group is not None:
                group.before_backward()
                divisor, weight, delayed = group.divisor, group.weight, delayed or group.delayed
        if self.plugin.sequence_parallel is not None:
            self.plugin.sequence_parallel.before_backward(by_tokens=group is not None and group.by_tokens)
        run_backward(
            loss,
            gradients_of(optimizers),
            optimizers[0].backward_context,
            divisor=divisor,
            weight=weight,
            loss_id=loss_id,
            delayed=delayed,
            inputs=inputs,
            retain_graph=retain_graph,
            create_graph=create_graph,
        )
    except Exception as error:
        # Ranks that are in this pass wait for this one; they are to raise too, and not at the timeout.
        abandon_pass(error)
        if (advice := hint_of_loss(error, loss)) is None:
            raise
        raise RuntimeError(advice) from error
    for other in self._boosted.optimizers.values() if len(self._boosted.optimizers) > len(optimizers) else ():
        other.bare_passes.params.clear()  # no bare pass brought what this one did
    if group is not None:
        group.after_backward()
    if self._shown_loss is not None:
        # Micro-batches of unequal weight: the bar shows what they sum up to.
        self._shown_loss.keep(loss if weight == 1.0 else loss.detach() * weight)
    if self._watcher is not None:
        self._watcher.log.end_pass(loss, optimizers, divisor)


@leaving_pass()
def accumulate(
    self: BoosterState, model: nn.Module, optimizer: Optimizers, num_micro_batches: int, num_tokens: float | None = None
) -> AbstractContextManager[Any]:
    """Context around one group of micro-batches, of which gradients are summed before a step (gradient accumulation).

    model, optimizer: those that the group trains.
    num_micro_batches: how many backward passes the group has; each is divided by it, and only the last synchronises,
        so a short last group passes its own length.
    num_tokens: divide by this instead, for losses summed over tokens: the tokens of the whole group over all micro-batches
        and data-parallel ranks, so one number on all of them, as `b.reduce(own_tokens, "sum")` gives. None divides by
        num_micro_batches.

    On several ranks the first groups of a run are a small collective, and ValueError where ranks gave another num_tokens. Under
    ZeRO-2, FSDP and hybrid, where all ranks make every pass together, so is another num_micro_batches, by the group's store.

        for group in groups:
            with b.accumulate(model, optimizer, num_micro_batches=len(group)):
                for x, y in group:
                    b.backward(criterion(model(x), y), optimizer)
            optimizer.step()
    """
    optimizers = refusals.check_boosted_optimizers(optimizer, "accumulate")
    num_micro_batches, num_tokens = refusals.checked_group(num_micro_batches, num_tokens)
    self._run.switch_if_due()
    placed = self._boosted.own(model, "accumulate").module
    size = self.plugin.averaging_size
    # There another number of passes is other collectives, of which one rank has none.
    alike = self.plugin.passes_together or self.plugin.sequence_parallel is not None
    self._accumulations.compare(num_micro_batches, num_tokens, self.plugin.group, alike=alike)
    # Ranks average their gradients, while tokens count over all of them.
    divisor = float(num_micro_batches) if num_tokens is None else float(num_tokens) / size
    group = Accumulation(
        model,
        optimizers,
        num_micro_batches=num_micro_batches,
        divisor=divisor,
        # Made anew for each pass: a context of DistributedDataParallel is entered once.
        no_sync=lambda: self.plugin.no_sync(placed),
        synchronises=size > 1,
        by_tokens=num_tokens is not None,
    )
    return self._accumulations.open(group)


@leaving_pass()
def no_sync(self: BoosterState, model: nn.Module, optimizer: Optimizers | None = None) -> AbstractContextManager[Any]:
    """Context in which forward and backward of `model` leave gradients unsynchronised among ranks.

    optimizer: the boosted optimizer of the model, or several, for plugins that hold gradients in it; None where none does.
    """
    optimizers = None if optimizer is None else refusals.check_boosted_optimizers(optimizer, "no_sync")
    boosted = self._boosted.own(model, "no_sync")
    self._run.switch_if_due()
    entry = NoSync(boosted, optimizers, self.plugin.no_sync(boosted.module))
    return self._accumulations.unsynchronised(entry)


@leaving_pass()
def execute_pipeline(
    self: BoosterState,
    data_iter: Iterator[Any],
    model: nn.Module,
    criterion: Callable[[Any, Any], torch.Tensor],
    optimizer: Optimizers | None = None,
    return_loss: bool = True,
    return_outputs: bool = False,
) -> dict[str, Any]:
    """Forward and backward of the next batch of `data_iter`, in the micro-batches of the plugin; a pipeline needs it.

    data_iter: batches, (inputs..., target): `criterion(model(*inputs), target)`; or mappings: `criterion(model(**batch),
        batch)`. All ranks of a pipeline read the same ones.
    model: the boosted model.
    criterion: a function of output and target; the loss is the mean over micro-batches.
    optimizer: as for `backward`; None evaluates.
    return_loss: whether the loss is returned.
    return_outputs: whether what the model returned is.

    Returns {"loss": detached, 0-dim, unscaled, of this rank's batch, on every rank of a pipeline; "outputs": what the model
    returned, on the last stage}, None for what was not asked for or is elsewhere.
    """
    optimizers = [] if optimizer is None else refusals.check_boosted_optimizers(optimizer, "execute_pipeline")
    arguments.function("criterion", criterion, "a function of output and target")
    arguments.flag("return_loss", return_loss)
    arguments.flag("return_outputs", return_outputs)
    wrapper, batch = self._boosted.own(model, "execute_pipeline"), refusals.next_batch(data_iter)
    pipeline, sequences = self.plugin.pipeline(wrapper.module), self.plugin.sequence_parallel
    cut = None if sequences is None else sequences.cut
    accumulating = self._accumulations.any_of(optimizers)

    def passes() -> dict[str, Any]:
        # A diagnosis of a skipped step runs this again, and names rows of the whole batch: so it sees the batch divided.
        micro_batches = divide(batch, self.plugin.num_micro_batches)
        # Before the first micro-batch: a rank that raised between two stages would leave the others waiting.
        if accumulating and (pipeline is not None or len(micro_batches) > 1):
            raise RuntimeError(_INSIDE_ACCUMULATE.format(count=len(micro_batches)))
        whole = nullcontext() if sequences is None else sequences.micro_batches(cut, micro_batches)
        with nullcontext() if optimizers else torch.no_grad(), whole:
            if pipeline is None:
                alone = optimizers and not accumulating
                with self.accumulate(wrapper, optimizers, len(micro_batches)) if alone else nullcontext():
                    run = (lambda loss: self.backward(loss, optimizers)) if optimizers else None
                    losses, outputs = _run_whole(wrapper, criterion, micro_batches, run, return_outputs, sequences)
            else:
                run_by = pipeline, self.precision, wrapper, criterion, optimizers
                losses, outputs = _run_stages(*run_by, micro_batches, return_outputs, sequences)
        # Losses are on the last stage; `share` brings the mean to the others.
        loss = torch.stack([part.detach().reshape(()) for part in losses]).mean() if losses else None
        if return_loss and pipeline is not None:
            loss = pipeline.share(loss, self.device)
        return {"loss": loss if return_loss else None, "outputs": join(outputs) if outputs else None}

    if self._watcher is None or not optimizers or pipeline is None:
        return passes()
    return self._watcher.keep_pipeline(passes, optimizers)


def capturable(self: BoosterState, train_step: Callable[..., Any], *example_batch: Any) -> list[str]:
    """Run a whole training step and return what in it keeps a CUDA graph from being made of it, `path/file.py:LINE: what`.

    Empty where nothing does. No GPU is needed: boosted optimizers decide as they would on one, so what is listed is what
    a GPU would be waited for, found by running: `.item()`, `float(loss)`, an `if` on a tensor, printing, masks as indices;
    in helpers too; with the line of the user's statement. Besides, what a graph would do again with the numbers of its
    capture: options of a group written by Python, as by a scheduler that was not boosted, and copies of numbers to the
    device. Tensors that are made without naming a device lie on the host, and cost nothing to read.

    train_step: called with `example_batch`, on the device: forward, `backward`, clip, `optimizer.step()`,
        `scheduler.step()`, `zero_grad`. It runs twice, of which the second is looked at. Weights, states, gradients, loss
        scales, schedules and random states are afterwards what they were, also where it raises; what it does besides, such
        as appending to a list, it does. No line is written to a record. Costs a copy of all that training changes.
    """
    from booster.capture.trial import reads_of
    from booster.data.boosted_loader import to_device

    arguments.function("train_step", train_step, "a function that makes one training step of a batch")
    # Before the step runs: without an optimizer nothing of it could be undone.
    optimizers = self._boosted.all_optimizers("capturable")
    batch, roots = to_device(example_batch, self.device), self._boosted.modules()
    with nullcontext() if self._watcher is None else self._watcher.log.paused(), self._unrecorded():
        return reads_of(train_step, batch, roots=roots, optimizers=optimizers, device=self.device)


def capture(
    self: BoosterState, train_step: Callable[..., Any], *example_batch: Any, max_graphs: int = 8
) -> Callable[..., Any]:
    """Return `train_step` as a CUDA graph: one launch for a whole step, where launches are the price.

        step = b.capture(train_step, x, y)
        for x, y in loader:
            loss = step(x, y)

    train_step: a function of a batch that makes a step with boosted objects: forward, `backward`, clip, `optimizer.step()`,
    `scheduler.step()` of a boosted scheduler, `zero_grad`; or a part of one, such as a micro-batch of `accumulate`. It may
    return tensors and results of steps, which come back as copies, without a graph of autograd. What it computes from
    Python's numbers, and draws from Python's random ones, is the same in every replay. Numbers in the batch separate one kind
    of call from another, as do shapes, dtypes, modules in training or not, and gradients that wait. The first call of a
    kind runs `train_step`, the second is recorded, those after it are replayed; both run it for what it does besides.
    example_batch: one batch, on which it is looked at what a host would read.
    max_graphs: so many kinds; others run without a graph, to the same bits.

    Learning rates are read from tensors, in float32 on a GPU, so schedules go on; other options of a group that change,
    loaded states and new groups have graphs made anew. Skips, loss scales, counters and results are those of each step.
    While a record is written or skipped steps are diagnosed, steps run without a graph. Where there is no GPU all do, and
    one WARNING says so. Nothing changes before the first call; on a GPU `train_step` runs twice, as for `capturable`.
    Raises RuntimeError for what `capturable` lists, by line, and by name for several ranks, optimizers that decide on the
    host, offloaded states and release_gradients.
    """
    from booster.capture.graph import recorder_of

    arguments.function("train_step", train_step, "a function that makes one training step of a batch")
    arguments.count("max_graphs", max_graphs)
    return captured(self, train_step, example_batch, recorder_of(self.device), max_graphs)


def captured(
    self: BoosterState,
    train_step: Callable[..., Any],
    example_batch: Sequence[Any],
    recorder: Recorder | None,
    max_graphs: int,
) -> CapturedStep:
    """Do what `capture` does, by `recorder`, which tests choose; None captures nothing."""
    from booster.capture.captured import CapturedStep
    from booster.capture.trial import check

    optimizers = self._boosted.all_optimizers("capture")
    if recorder is not None:
        check(optimizers, plugin=type(self.plugin).__name__, several_ranks=self.plugin.group is not None)
        reads = self.capturable(train_step, *example_batch)
        if reads:
            lines = "".join(f"\n  {line}" for line in reads)
            raise RuntimeError(
                f"capture() makes no graph of a step that a host has a part in; capturable() lists:{lines}"
            )
    return CapturedStep(
        train_step,
        modules=self._boosted.modules(),
        optimizers=optimizers,
        passes=self._accumulations,
        device=self.device,
        recorder=recorder,
        max_graphs=max_graphs,
        switch_if_due=self._run.switch_if_due,
    )


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
