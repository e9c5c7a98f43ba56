"""Whether a step is made: decided on the host, or on a device, where nobody waits for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from booster.update.application import Application
from booster.update.gradients import Gradients
from booster.update.in_backward_pass import InBackwardPass
from booster.update.outcome import StepResult


class Decision(ABC):
    """Steps or skips by what was read of `gradients`, and tells their loss scale. application: what steps."""

    on_device = False
    """Whether nobody on the host knows, when `step` returns, what was decided."""

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

    def released_pass(self, gradients: Gradients) -> InBackwardPass:
        """Return what uses `gradients` in a backward pass, where that is asked for."""
        return InBackwardPass(gradients)

    def begin_gradual(self) -> None:
        """A step that is made of parts, within backward, begins."""

    def look_at_part(self, params: Sequence[torch.Tensor]) -> None:
        """A part of a step that is made of parts is next to be stepped: `params`, with their gradients."""
