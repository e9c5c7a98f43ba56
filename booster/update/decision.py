"""The rule by which a step is made or skipped, and what a host, a device and kernels do of it in their own way.

With `norm`, the norm of the gradients as they are, multiplied by `carried`, and `pending`, the factor of clips that wait::

    true norm    = norm / carried * pending
    found_inf    = norm is inf or NaN, on any rank, of any optimizer that shares the backward pass
    clip factor  = min(1, max_norm / (true norm + 1e-6)), 1 where the norm is not finite
    grad_scale   = carried / (pending * clip factor)        what the optimizer divides by
    next scale   = that of `DynamicScale.update(found_inf)`
    found_inf: weights, states and step counts stay as they are, and so do the gradients; else the optimizer steps

Three executions follow it. The host (`host.py`) has Python numbers, and does not call the optimizer on a skip. A device
(`device.py`) has 0-dim tensors that nothing waits for, and the optimizer's fused kernel heeds them. Triton kernels
(`kernels/launches.py`, `decide`) compute all of it in one launch. One table of numbers holds the three together:
`tests/unit/test_decision_rule.py`.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from booster.ranks import agreement
from booster.update.context import UpdateContext
from booster.update.in_backward_pass import InBackwardPass
from booster.update.outcome import NonFiniteParams, StepResult

Gradients = Any  # of `update.gradients`, which imports this file
Application = Any  # of `update.application`, likewise


class Norms(ABC):
    """How the norms of one optimizer's gradients are read. What was read is kept with the gradients, in `Gradients.read`.

    gradients: a `Gradients`."""

    on_device = False
    """Whether scale, norms and clip factors are 0-dim tensors, not waited for, and not Python numbers."""
    waits = False
    """Whether a clip that no call of the user's asked for can wait, unread, for the decision."""

    def __init__(self, context: UpdateContext) -> None:
        self.optimizer = context.optimizer
        self.shards = context.shards
        self.group = context.group
        self._copies: tuple[list[int], torch.Tensor] | None = None  # of parts, and the same where norms are

    @abstractmethod
    def read(self, gradients: Any, norm_type: float) -> tuple[Any, Any]:
        """Read `gradients` once. Returns what was read, with the norm of what is in `.grad` as `total`, and the norm as it
        would be unscaled, clips applied. Inside `local()`."""

    @abstractmethod
    def found(self, read: Sequence[Any]) -> Any:
        """Return whether one of `read` had an inf or NaN: a bool, or a 0-dim tensor."""

    @abstractmethod
    def nonfinite_params(self, gradients: Any) -> NonFiniteParams:
        """Return what names the parameters with an inf or NaN in what was read, also after it is forgotten."""

    @abstractmethod
    def clipped(self, norm: Any, max_norm: float, factor: Any) -> Any:
        """The clip factor that waits after a clip of gradients of the true norm `norm`: torch's max_norm / (norm + 1e-6).

        factor: the one that waited before, or None."""

    @abstractmethod
    def clamp(self, gradients: Any, clip_value: float) -> None:
        """Clamp `gradients`, as they would be unscaled, to [-clip_value, clip_value]. Inside `local()`."""

    @property
    def found_is_shared(self) -> bool:
        """Whether what `found` tells speaks for all ranks already."""
        return False

    def all_finite(self, read: Sequence[Any]) -> bool:
        """Whether it is known without a collective that no rank has an inf or NaN; the same on every rank."""
        return False

    def shared_total(self, norms: torch.Tensor, norm_type: float, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm over all ranks from those of the tensors here, where ranks hold shards: 0-dim, float64, one collective.

        norms: of `params`, may be empty."""
        if math.isinf(norm_type):
            # NaN does not survive a MAX on every backend: it travels as inf, and inf as the largest number.
            largest = norms.double().amax() if norms.numel() else norms.new_zeros((), dtype=torch.float64)
            sent = largest.nan_to_num(math.inf, sys.float_info.max)
            total = agreement.all_reduce(sent, self.group, dist.ReduceOp.MAX)
            return torch.where(total.isinf(), math.nan, torch.where(total == sys.float_info.max, math.inf, total))
        # A replica is summed on each rank that holds it, and counts once.
        copies = self.shards.num_replicas_of(params)
        if self._copies is None or self._copies[0] != copies:
            self._copies = copies, torch.tensor(copies, dtype=torch.float64).to(norms.device)
        # It is the same on every rank, and not finite if any rank holds an inf or NaN.
        powers = norms.double() ** norm_type / self._copies[1]
        return agreement.all_reduce(powers.sum(), self.group, dist.ReduceOp.SUM) ** (1.0 / norm_type)


class Decision(ABC):
    """Steps or skips by what was read of `gradients`, and tells their loss scale. application: what steps."""

    on_device = False
    """Whether the host does not know what was decided when `step` returns."""

    def __init__(self, gradients: Gradients, application: Application) -> None:
        self.gradients = gradients
        self.application = application

    @abstractmethod
    def step(self, params: list[torch.Tensor]) -> tuple[StepResult, Any]:
        """Step or skip `params`, which have gradients, and update the loss scale. Returns also what `.grad` is multiplied by.

        Inside `local()`. Where a pass has used its gradients, what it left is counted, and nothing stepped."""

    def held_by(self, graph: list[Any]) -> AbstractContextManager[None]:
        """Return a context in which a step is recorded: what its launches read by address, if any do, is put into `graph`."""
        return nullcontext()

    def backward_pass(self, gradients: Gradients) -> InBackwardPass:
        """Return what uses `gradients` in a backward pass, where that is asked for."""
        return InBackwardPass(gradients)

    def begin_gradual(self) -> None:
        """A step that is made of parts, within backward, begins."""

    def look_at_part(self, params: Sequence[torch.Tensor]) -> None:
        """A part of a step that is made of parts is next to be stepped: `params`, with their gradients."""
