"""One forward and backward pass over a batch in micro-batches, whether the model lies on one rank or on several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from booster.cast_regions import forward_region, outside
from booster.interface.model import CriterionWrapper, ModelWrapper
from booster.interface.optimizer import OptimizerWrapper, updates_of
from booster.micro_batch import MicroBatch, divide
from booster.plugin import Pipeline
from booster.trees import join, map_tensors
from booster.update.backward import abandon_backward, begin_backward, end_backward

if TYPE_CHECKING:
    from booster.booster import Booster

INSIDE_ACCUMULATE = (
    "execute_pipeline accumulates the gradients of its {count} micro-batches by itself, so it cannot run inside accumulate(); "
    "pass one larger batch, and HybridParallelPlugin(num_microbatches=...)"
)
Criterion = Callable[[Any, Any], torch.Tensor]


def execute(
    booster: Booster,
    batch: Any,
    model: ModelWrapper,
    criterion: Criterion,
    optimizers: Sequence[OptimizerWrapper],
    *,
    return_loss: bool,
    return_outputs: bool,
) -> dict[str, Any]:
    """See `Booster.execute_pipeline`; without `optimizers` there is no backward."""
    micro_batches = divide(batch, booster.plugin.num_micro_batches)
    pipeline = booster.plugin.pipeline(model.module)
    with nullcontext() if optimizers else torch.no_grad():
        if pipeline is None:
            losses, outputs = _run_whole(booster, model, criterion, optimizers, micro_batches, return_outputs)
        else:
            losses, outputs = _run_stages(
                booster, pipeline, model, criterion, optimizers, micro_batches, return_outputs
            )
    loss = torch.stack([part.detach().reshape(()) for part in losses]).mean() if losses else None
    if return_loss and pipeline is not None:
        loss = pipeline.share(loss, booster.device)
    return {"loss": loss if return_loss else None, "outputs": join(outputs) if outputs else None}


def _run_whole(
    booster: Booster,
    model: ModelWrapper,
    criterion: Criterion,
    optimizers: Sequence[OptimizerWrapper],
    micro_batches: list[MicroBatch],
    return_outputs: bool,
) -> tuple[list[torch.Tensor], list[Any]]:
    losses, outputs = [], []
    inside = _is_accumulating(booster, optimizers)
    if inside and len(micro_batches) > 1:
        raise RuntimeError(INSIDE_ACCUMULATE.format(count=len(micro_batches)))
    alone = optimizers and not inside
    with booster.accumulate(model, optimizers, len(micro_batches)) if alone else nullcontext():
        for part in micro_batches:
            output = model(*part.args, **part.kwargs)
            loss = criterion(output, part.target)
            if optimizers:
                booster.backward(loss, optimizers)
            losses.append(loss.detach())
            if return_outputs:
                outputs.append(map_tensors(torch.Tensor.detach, output))
    return losses, outputs


def _run_stages(
    booster: Booster,
    pipeline: Pipeline,
    model: ModelWrapper,
    criterion: Criterion,
    optimizers: Sequence[OptimizerWrapper],
    micro_batches: list[MicroBatch],
    return_outputs: bool,
) -> tuple[list[torch.Tensor], list[Any]]:
    if _is_accumulating(booster, optimizers):
        raise RuntimeError(INSIDE_ACCUMULATE.format(count=len(micro_batches)))
    precision = booster.precision
    cast = [
        MicroBatch(model.cast_inputs(part.args), model.cast_inputs(part.kwargs), part.target) for part in micro_batches
    ]

    boosted = isinstance(criterion, (ModelWrapper, CriterionWrapper))

    def computed(output: Any, target: Any) -> torch.Tensor:
        # A criterion that was not boosted runs outside of the precision, as it does without a pipeline.
        with nullcontext() if boosted else outside():
            return criterion(model.cast_outputs(output), target)

    # One context around the schedule: micro-batches then share the half copies that autocast makes of weights.
    this, seed = begin_backward(updates_of(optimizers)) if optimizers else (None, None)
    try:
        with forward_region(precision), precision.backward_context():
            losses, outputs = pipeline.run(cast, computed, seed=seed, return_outputs=return_outputs)
    except BaseException:
        if this is not None:
            abandon_backward(this)
        raise
    if this is not None:
        end_backward(this, torch.stack([loss.reshape(()) for loss in losses]).mean() if losses else None)
    return losses, [model.cast_outputs(output) for output in outputs]


def _is_accumulating(booster: Booster, optimizers: Sequence[OptimizerWrapper]) -> bool:
    return any(entry in group.optimizers for group in booster._accumulations for entry in optimizers)
