"""One decision for optimizers that share a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from booster.update.step_result import SkippedReason

if TYPE_CHECKING:
    from booster.update.base import Update


class JointDecision:
    """Optimizers that share a backward and therefore step together or not at all.

    updates: those that have not stepped yet. What the others contributed to a decision is kept for the last one's report.
    """

    def __init__(self, updates: list[Update]) -> None:
        self.updates = updates
        self.found: Any = None
        self.nonfinite_loss: bool | None = None  # of any rank; None: not asked
        self._losses: list[torch.Tensor] = []
        self._blame: list[Callable[[], tuple[str, ...]]] = []

    def has_nonfinite_loss(self) -> bool:
        """Whether a loss on this rank is inf or NaN; waits for the device."""
        return any(not bool(loss.isfinite().all()) for update in self.updates for loss in update.losses)

    def decide(self, found: Any) -> None:
        """Take the decision for all: `found` is a bool, or a 0-dim tensor."""
        self.found = found
        if found is not False:
            self._losses = [loss for update in self.updates for loss in update.losses]
            self._blame = [update.blame() for update in self.updates]

    def report(self) -> Callable[[], tuple[SkippedReason, tuple[str, ...]]]:
        """What tells reason and culprits if this decision is to skip; calling it waits for the device."""
        losses, blame = self._losses, self._blame

        def read() -> tuple[SkippedReason, tuple[str, ...]]:
            known = self.nonfinite_loss
            finite_loss = all(bool(loss.isfinite().all()) for loss in losses) if known is None else not known
            culprit = tuple(name for names in blame for name in names())
            return "nonfinite_grad" if finite_loss else "nonfinite_loss", culprit

        return read
