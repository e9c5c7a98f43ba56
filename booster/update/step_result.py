"""What one optimizer step did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

SkippedReason = Literal["nonfinite_loss", "nonfinite_grad"]


class StepResult:
    """The outcome of `optimizer.step()`; true if parameters were updated.

    Where the decision lives on a device, reading a field other than `loss` waits for it once; until then nothing is
    copied to the host.
    """

    __slots__ = ("_read", "_values", "loss")

    def __init__(self, read: Callable[[], dict[str, Any]], *, loss: Any = None) -> None:
        self._read: Callable[[], dict[str, Any]] | None = read
        self._values: dict[str, Any] = {}
        self.loss = loss

    def _value(self, name: str) -> Any:
        if self._read is not None:
            self._values = self._read()
            self._read = None
        return self._values[name]

    @property
    def applied(self) -> bool:
        """Whether the optimizer changed the parameters."""
        return self._value("applied")

    @property
    def grad_norm(self) -> float | None:
        """Norm of the unscaled gradients before clipping; None unless it was clipped by norm or the loss was scaled.

        The norm type is that of the last `clip_grad_by_norm`, else 2.
        """
        return self._value("grad_norm")

    @property
    def loss_scale(self) -> float:
        """The scale that this step's gradients carried; 1.0 without a loss scaler."""
        return self._value("loss_scale")

    @property
    def skipped_reason(self) -> SkippedReason | None:
        """Why the step was skipped: None, "nonfinite_loss" or "nonfinite_grad"."""
        return self._value("skipped_reason")

    @property
    def culprit(self) -> tuple[str, ...]:
        """Names of the parameters of this rank whose gradient held an inf or NaN when the step was skipped."""
        return self._value("culprit")

    def __bool__(self) -> bool:
        return self.applied

    def __repr__(self) -> str:
        names = ("applied", "grad_norm", "loss_scale", "skipped_reason", "culprit")
        fields = [f"{name}={getattr(self, name)!r}" for name in names]
        loss = self.loss.item() if isinstance(self.loss, torch.Tensor) and self.loss.numel() == 1 else self.loss
        return f"StepResult({', '.join(fields)}, loss={loss!r})"
