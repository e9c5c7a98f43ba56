"""One backward pass on behalf of one or several boosted optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

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
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"the loss must be a tensor of one element, got {shape}; reduce it first, e.g. loss.mean()")
    if loss.is_complex():
        raise ValueError(f"the loss must be real, got {loss.dtype}; take its real part or absolute value")
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss does not require gradients: it was computed under no_grad, or from detached tensors"
        )
    updates = [optimizer._update for optimizer in optimizers]
    scaled = [update.scale_for(loss_id) for update in updates if update.scaler.enabled]
    scale: Any = _smallest(scaled) if scaled else 1.0
    if len(updates) > 1:
        joined = {id(member): member for update in updates for member in update.joint.updates}
        decision = JointDecision(list(joined.values()))
        for update in decision.updates:
            update.joint = decision
    this = BackwardPass(updates, loss_id=loss_id, delayed=delayed)
    for update in updates:
        update.before_backward(scale, this)
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
        with optimizers[0].backward_context():
            run_engine(loss, gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
    except BaseException:
        for update in updates:
            update.abandon_backward()
        raise
    for update in updates:
        update.after_backward(loss)


def run_engine(
    loss: torch.Tensor,
    gradient: torch.Tensor | None,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward`, but torch function modes that are active stay so while activations are recomputed."""
    if torch._C._len_torch_function_stack() == 0:
        torch.autograd.backward(loss, gradient, retain_graph or None, create_graph, inputs=inputs)
        return
    # torch.autograd.backward takes torch function modes off before it starts the engine, and activation checkpointing
    # would then recompute without the precision that the forward pass had.
    if inputs is not None:
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        if not inputs:
            raise ValueError("inputs is empty; name the tensors to accumulate gradients into, or pass None for all")
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,),
        (torch.ones_like(loss, requires_grad=False) if gradient is None else gradient,),
        retain_graph or create_graph,
        create_graph,
        inputs or (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _smallest(scales: list[Any]) -> Any:
    smallest = scales[0]
    for scale in scales[1:]:
        if isinstance(smallest, torch.Tensor) or isinstance(scale, torch.Tensor):
            smallest = torch.minimum(torch.as_tensor(smallest), torch.as_tensor(scale))
        else:
            smallest = min(smallest, scale)
    return smallest
