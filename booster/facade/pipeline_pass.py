"""One forward and backward pass over a batch in micro-batches, with the model on one rank or in stages on several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from booster.interface.model import CriterionWrapper, ModelWrapper
from booster.interface.optimizer import OptimizerWrapper, gradients_of
from booster.mixed_precision import MixedPrecision
from booster.plugin import Pipeline
from booster.tensors.cast_regions import outside, region, sharing_weights
from booster.tensors.micro_batch import MicroBatch
from booster.tensors.trees import map_tensors
from booster.update.backward import abandon_backward, begin_backward, end_backward

Criterion = Callable[[Any, Any], torch.Tensor]


def run_whole(
    model: ModelWrapper,
    criterion: Criterion,
    micro_batches: list[MicroBatch],
    backward: Callable[[torch.Tensor], None] | None,
    return_outputs: bool,
) -> tuple[list[torch.Tensor], list[Any]]:
    losses, outputs = [], []
    for part in micro_batches:
        output = model(*part.args, **part.kwargs)
        loss = criterion(output, part.target)
        if return_outputs:
            outputs.append(map_tensors(torch.Tensor.detach, output))
        del output  # logits take more than a layer does
        if backward is not None:
            backward(loss)
        losses.append(loss.detach())
    return losses, outputs


def run_stages(
    pipeline: Pipeline,
    precision: MixedPrecision,
    model: ModelWrapper,
    criterion: Criterion,
    optimizers: Sequence[OptimizerWrapper],
    micro_batches: list[MicroBatch],
    return_outputs: bool,
) -> tuple[list[torch.Tensor], list[Any]]:
    cast = [
        MicroBatch(model.cast_inputs(part.args), model.cast_inputs(part.kwargs), part.target) for part in micro_batches
    ]
    boosted = isinstance(criterion, (ModelWrapper, CriterionWrapper))

    def computed(output: Any, target: Any) -> torch.Tensor:
        # A criterion that was not boosted runs outside of the precision, as it does without a pipeline.
        with nullcontext() if boosted else outside():
            return criterion(model.cast_outputs(output), target)

    # One context around the schedule: micro-batches then share the half copies that autocast makes of weights.
    this, seed = begin_backward(gradients_of(optimizers)) if optimizers else (None, None)
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
