"""Who is told of an optimizer's backward passes and steps."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from booster.update.outcome import StepResult


class StepListener(Protocol):
    """What an `Update` tells. A listener changes nothing that trains, and waits for no device."""

    def after_backward(self, loss: torch.Tensor | None) -> None:
        """A pass is complete. loss: detached, of one element, not scaled; None where another pipeline stage has it."""

    def before_step(self, update: Any, number: int) -> None:
        """Gradients are there, as `update.carried` says, and nothing is decided yet. Not before a step with a closure."""

    def after_step(self, update: Any, number: int, result: StepResult) -> None:
        """The step is made or skipped. number: of the step, from 1; a checkpoint keeps count."""
