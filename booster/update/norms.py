"""How the norms of one optimizer's gradients are read, and shared among ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from booster.ranks import agreement
from booster.update.context import UpdateContext
from booster.update.outcome import NonFiniteParams


class Norms(ABC):
    """How the norms of one optimizer's gradients are read. What was read is kept with the gradients, in `Gradients.read`.

    gradients: a `Gradients`."""

    on_device = False
    """Whether scale, norms and clip factors are 0-dim tensors, which nobody waits for, and not Python numbers."""
    waits = False
    """Whether a clip that no call of the user's asked for can wait, unread, for the decision."""

    def __init__(self, context: UpdateContext) -> None:
        self.optimizer = context.optimizer
        self.shards = context.shards
        self.group = context.group
        self._copies: tuple[list[int], torch.Tensor] | None = None  # of parts, and the same where norms are

    @abstractmethod
    def read(self, gradients: Any, norm_type: float) -> tuple[Any, Any]:
        """Read `gradients` once. Returns what was read, whose `total` is the norm of what is in `.grad`, and the norm as it
        would be unscaled, clips applied. Inside `local()`."""

    @abstractmethod
    def found(self, read: Sequence[Any]) -> Any:
        """Return whether one of `read` had an inf or NaN: a bool, or a 0-dim tensor."""

    @abstractmethod
    def nonfinite_params(self, gradients: Any) -> NonFiniteParams:
        """Return what names the parameters with an inf or NaN in what was read, also after it is forgotten."""

    @abstractmethod
    def clipped(self, norm: Any, max_norm: float, factor: Any) -> Any:
        """The clip factor that waits after a clip of gradients whose true norm is `norm`: torch's max_norm / (norm + 1e-6).

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

        It is the same on every rank, and not finite if any rank holds an inf or NaN. norms: of `params`, may be empty.
        """
        if math.isinf(norm_type):
            # NaN does not survive a MAX on every backend.
            largest = norms.double().amax() if norms.numel() else norms.new_zeros((), dtype=torch.float64)
            return agreement.all_reduce(largest.nan_to_num(math.inf, math.inf), self.group, dist.ReduceOp.MAX)
        copies = self.shards.num_replicas_of(params)
        if self._copies is None or self._copies[0] != copies:
            self._copies = copies, torch.tensor(copies, dtype=torch.float64).to(norms.device)
        powers = norms.double() ** norm_type / self._copies[1]
        return agreement.all_reduce(powers.sum(), self.group, dist.ReduceOp.SUM) ** (1.0 / norm_type)
