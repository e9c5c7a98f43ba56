"""One backward pass on behalf of one or several boosted optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from booster import arguments
from booster.cast_regions import backward_region
from booster.casting import HALF_DTYPES
from booster.update.backward_pass import BackwardPass
from booster.update.joint import JointDecision

if TYPE_CHECKING:
    from booster.interface.optimizer import OptimizerWrapper


def run_backward(
    loss: torch.Tensor,
    optimizers: Sequence[OptimizerWrapper],
    *,
    divisor: float = 1.0,
    loss_id: int = 0,
    delayed: bool = False,
    inputs: Any = None,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> None:
    """Accumulate the gradients of `loss / divisor`, scaled for all of `optimizers` by the smallest of their scales.

    loss: one element, any floating dtype; a half loss is widened first, which a large scale would overflow. Optimizers
    given together step together: one decision for all. loss_id, delayed: see `BackwardPass`. Side effect: the plugin's
    gradient collectives run inside. If the pass raises, gradients that were set aside for it come back.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else arguments.described(loss)
        raise ValueError(f"the loss must be a tensor of one element, got {shape}; reduce it first, e.g. loss.mean()")
    if loss.is_complex():
        raise ValueError(f"the loss must be real, got {loss.dtype}; take its real part or absolute value")
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss does not require gradients: it was computed under no_grad, or from detached tensors"
        )
    arguments.flag("retain_graph", retain_graph)
    arguments.flag("create_graph", create_graph)
    inputs = None if inputs is None else _checked_inputs(inputs)
    this, scale = begin_backward(optimizers, loss_id=loss_id, delayed=delayed, create_graph=create_graph)
    if loss.dtype in HALF_DTYPES:
        loss = loss.float()
    seed = scale if isinstance(scale, torch.Tensor) and divisor == 1.0 else scale / divisor
    if isinstance(seed, torch.Tensor):
        gradient: torch.Tensor | None = seed.to(loss.device, loss.dtype).expand_as(loss)
    elif seed == 1.0:
        gradient = None
    else:
        gradient = torch.full_like(loss, seed, requires_grad=False)
    try:
        with backward_region(optimizers[0].backward_context):
            torch.autograd.backward(loss, gradient, retain_graph or None, create_graph, inputs=inputs)
    except BaseException:
        abandon_backward(this)
        raise
    end_backward(this, loss)


def begin_backward(
    optimizers: Sequence[OptimizerWrapper], *, loss_id: int = 0, delayed: bool = False, create_graph: bool = False
) -> tuple[BackwardPass, Any]:
    """Make `optimizers` ready for gradients of a loss; returns the pass and the scale to multiply the loss with, a float or
    0-dim tensor. `end_backward` or `abandon_backward` must follow."""
    updates = [optimizer._update for optimizer in optimizers]
    scaled = [update.scale_for(loss_id) for update in updates if update.scaler.enabled]
    scale: Any = _smallest(scaled) if scaled else 1.0
    if len(updates) > 1:
        joined = {id(member): member for update in updates for member in update.joint.updates}
        decision = JointDecision(list(joined.values()))
        for update in decision.updates:
            update.joint = decision
    this = BackwardPass(updates, loss_id=loss_id, delayed=delayed, create_graph=create_graph)
    for update in updates:
        update.before_backward(scale, this)
    return this, scale


def end_backward(this: BackwardPass, loss: torch.Tensor | None) -> None:
    """The gradients of `loss` are there; None where another pipeline stage has it."""
    for update in this.updates:
        update.after_backward(loss)


def abandon_backward(this: BackwardPass) -> None:
    """The pass raised: gradients that were set aside for it come back."""
    for update in this.updates:
        update.abandon_backward()
        update.shards.abandon_backward()


def _checked_inputs(inputs: Any) -> tuple[Any, ...]:
    one = isinstance(inputs, (torch.Tensor, GradientEdge))
    several = (inputs,) if one else tuple(inputs) if isinstance(inputs, Iterable) else ()
    if isinstance(inputs, Sequence) and not inputs:
        raise ValueError(
            "inputs are empty, so no gradient would be computed; name tensors, or pass None for all leaves"
        )
    if not several or not all(isinstance(entry, (torch.Tensor, GradientEdge)) for entry in several):
        legal = "a tensor, several in a list, or None for all leaves of the graph"
        raise TypeError(arguments.refusal("inputs", inputs, legal))
    if any(isinstance(entry, torch.Tensor) and not entry.requires_grad for entry in several):
        raise ValueError("inputs hold a tensor that does not require gradients, so none can be accumulated in it")
    return several


def _smallest(scales: list[Any]) -> Any:
    smallest = scales[0]
    for scale in scales[1:]:
        if isinstance(smallest, torch.Tensor) or isinstance(scale, torch.Tensor):
            smallest = torch.minimum(torch.as_tensor(smallest), torch.as_tensor(scale))
        else:
            smallest = min(smallest, scale)
    return smallest
