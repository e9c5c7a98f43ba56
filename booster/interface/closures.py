"""What the boosted optimizer does around the user's own code: closures, and `zero_grad` of gradients of several kinds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from booster.ranks import agreement
from booster.update.decision import StepResult
from booster.update.update import Update


def has_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether `function` may be called with the keyword `name`; True where its signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def zero_mixed_gradients(param_groups: Iterable[Mapping[str, Any]]) -> bool:
    """Zero plain gradients and DTensors in place, as tensor parallelism has both; False, with nothing done, for one kind."""
    grads = [p.grad for group in param_groups for p in group["params"] if p.grad is not None]
    if len(set(map(type, grads))) < 2:
        return False
    for grad in grads:
        # Torch's `zero_grad` zeroes all in one call, which refuses two kinds.
        grad.detach_().zero_()
    return True


def step_with_closure(update: Update, closure: Callable[[], Any], *, clip: float) -> StepResult:
    """Step as `update` does, by an optimizer that calls `closure`. clip: the norm that gradients are clipped to; 0: none."""
    gradients = update.gradients
    if gradients.closure_refusal is not None:
        raise RuntimeError(gradients.closure_refusal)

    def checked() -> Any:
        loss = closure()
        update.shards.check_gradients()
        if clip:
            gradients.clip_norm(clip, asked=False)
        # The mean over the ranks of `group` of `loss`, a number or tensor of one element: by what optimizers read of
        # it, as LBFGS does, they go on, so that it is the same on all ranks; anything else as it is
        group = gradients.group
        number = isinstance(loss, torch.Tensor) and loss.numel() == 1 or isinstance(loss, (int, float))
        if group is None or not number:
            return loss
        value = (
            loss.detach().reshape(()).double()
            if isinstance(loss, torch.Tensor)
            else torch.tensor(loss, dtype=torch.float64)
        )
        mean = agreement.all_reduce(value, group, dist.ReduceOp.SUM) / dist.get_world_size(group)
        return mean.to(loss.dtype).expand_as(loss) if isinstance(loss, torch.Tensor) else float(mean)

    return update.step_with_closure(checked)
