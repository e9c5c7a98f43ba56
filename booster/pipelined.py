"""One forward and backward pass over a batch in micro-batches, whether the model lies on one rank or on several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.micro_batch import MicroBatch, divide, joined
from booster.plugin import Pipeline
from booster.update.backward import abandon_backward, begin_backward, end_backward

if TYPE_CHECKING:
    from booster.booster import Booster

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
    return {"loss": loss if return_loss else None, "outputs": joined(outputs) if outputs else None}


def _run_whole(
    booster: Booster,
    model: ModelWrapper,
    criterion: Criterion,
    optimizers: Sequence[OptimizerWrapper],
    micro_batches: list[MicroBatch],
    return_outputs: bool,
) -> tuple[list[torch.Tensor], list[Any]]:
    losses, outputs = [], []
    with booster.accumulate(model, optimizers, len(micro_batches)) if optimizers else nullcontext():
        for part in micro_batches:
            output = model(*part.args, **part.kwargs)
            loss = criterion(output, part.target)
            if optimizers:
                booster.backward(loss, optimizers)
            losses.append(loss.detach())
            if return_outputs:
                outputs.append(tree_map(_detached, output))
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
    precision = booster.precision
    cast = [
        MicroBatch(model.cast_inputs(part.args), model.cast_inputs(part.kwargs), part.target) for part in micro_batches
    ]

    def computed(output: Any, target: Any) -> torch.Tensor:
        return criterion(model.cast_outputs(output), target)

    # One context around the schedule: micro-batches then share the half copies that autocast makes of weights.
    this, seed = begin_backward(optimizers) if optimizers else (None, None)
    try:
        with precision.forward_context(), precision.backward_context():
            losses, outputs = pipeline.run(cast, computed, seed=seed, return_outputs=return_outputs)
    except BaseException:
        if this is not None:
            abandon_backward(this)
        raise
    if this is not None:
        end_backward(this, torch.stack([loss.reshape(()) for loss in losses]).mean() if losses else None)
    return losses, [model.cast_outputs(output) for output in outputs]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
