"""The methods of `Booster` around forward and backward passes: one pass, a group of them, a batch in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster.common import arguments
from booster.common.hang_watchdog import leave_pass, leaving_pass
from booster.facade import refusals
from booster.facade.accumulation import Accumulation, NoSync
from booster.facade.booster_state import BoosterState, Optimizers
from booster.interface.model import CriterionWrapper, ModelWrapper
from booster.interface.optimizer import OptimizerWrapper, gradients_of
from booster.mixed_precision import MixedPrecision
from booster.plugin import Pipeline
from booster.tensors.cast_regions import outside, region, sharing_weights
from booster.tensors.micro_batch import MicroBatch, divide
from booster.tensors.trees import join, map_tensors
from booster.update.backward import abandon_backward, begin_backward, check_first, end_backward, run_backward

if TYPE_CHECKING:
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
        if gradients and isinstance(loss, torch.Tensor):
            check_first(loss, gradients)
            if sequences is not None:
                sequences.before_backward(by_tokens=False)
        return loss

    gradients = gradients_of(optimizers) if optimizers else []
    # One context around the schedule: micro-batches then share the half copies that autocast makes of weights.
    this, seed = begin_backward(gradients) if gradients else (None, None)
    try:
        with region(precision.forward_context), sharing_weights(), precision.backward_context():
            losses, outputs = pipeline.run(cast, computed, seed=seed, return_outputs=return_outputs)
    except BaseException:
        if this is not None:
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
        group, divisor, weight, delayed = None, 1.0, 1.0, False
        if self._accumulations.any_open:  # an attribute, for the same reason
            group = self._accumulations.group_of(optimizers)
            delayed = self._accumulations.leaves_unsynchronised(optimizers)
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
        leave_pass(error)
        raise
    if group is not None:
        group.after_backward()
    if self._shown_loss is not None:
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
    alike = self.plugin.passes_together or self.plugin.sequence_parallel is not None
    self._accumulations.compare(num_micro_batches, num_tokens, self.plugin.group, alike=alike)
    # Ranks average their gradients, while tokens count over all of them.
    divisor = float(num_micro_batches) if num_tokens is None else float(num_tokens) / size
    group = Accumulation(
        model,
        optimizers,
        num_micro_batches=num_micro_batches,
        divisor=divisor,
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
        loss = torch.stack([part.detach().reshape(()) for part in losses]).mean() if losses else None
        if return_loss and pipeline is not None:
            loss = pipeline.share(loss, self.device)
        return {"loss": loss if return_loss else None, "outputs": join(outputs) if outputs else None}

    if self._watcher is None or not optimizers or pipeline is None:
        return passes()
    return self._watcher.keep_pipeline(passes, optimizers)
