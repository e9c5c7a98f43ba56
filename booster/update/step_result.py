"""What one optimizer step did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch

SkippedReason = Literal["nonfinite_loss", "nonfinite_grad"]


class StepFields(NamedTuple):
    """The fields of a `StepResult` that are not needed to go on."""

    loss_scale: float
    grad_norm: float | None = None
    skipped_reason: SkippedReason | None = None
    culprit: tuple[str, ...] = ()
    num_zeros_in_grad: int | None = None


class Applied(Protocol):
    """Whether a step was applied, which a device knows. Calling it waits for the device."""

    def __call__(self) -> bool: ...

    def on_device(self) -> torch.Tensor: ...


class StepResult:
    """The outcome of `optimizer.step()`; true if parameters were updated.

    Where the decision lives on a device, `applied` waits for that one flag and the other fields for the device, each when
    first read; until then nothing waits.
    """

    __slots__ = ("_applied", "_fields", "loss")

    def __init__(
        self,
        applied: bool | Applied,
        fields: StepFields | Callable[[bool], StepFields],
        *,
        loss: Any = None,
    ) -> None:
        self._applied = applied
        self._fields = fields
        self.loss = loss

    @property
    def applied(self) -> bool:
        """Whether the optimizer changed the parameters."""
        if not isinstance(self._applied, bool):
            self._applied = self._applied()
        return self._applied

    @property
    def decision(self) -> bool | torch.Tensor:
        """What `applied` says, without waiting: a 0-dim bool tensor on the device where the decision lives on one."""
        return self._applied if isinstance(self._applied, bool) else self._applied.on_device()

    @property
    def grad_norm(self) -> float | None:
        """Norm of the unscaled gradients before clipping; None where the step did not look at them, as torch's own.

        It looks under a loss scaler, after a clip and with `skip_nonfinite`. The gradients are those after the last
        backward, and the norm type is that of the first `clip_grad_by_norm` since then, else 2.
        """
        return self._read().grad_norm

    @property
    def loss_scale(self) -> float:
        """The scale that this step's gradients carried; 1.0 without a loss scaler."""
        return self._read().loss_scale

    @property
    def skipped_reason(self) -> SkippedReason | None:
        """Why the step was skipped: None, "nonfinite_loss" or "nonfinite_grad"."""
        return self._read().skipped_reason

    @property
    def culprit(self) -> tuple[str, ...]:
        """Names of the parameters of this rank whose gradient held an inf or NaN when the step was skipped."""
        return self._read().culprit

    @property
    def num_zeros_in_grad(self) -> int | None:
        """How many gradient elements of this rank were zero; None unless the precision was asked to count them."""
        return self._read().num_zeros_in_grad

    def without_loss(self) -> StepResult:
        """This result, or a copy that does not hold the loss of a closure, and with it a graph."""
        return self if self.loss is None else StepResult(self._applied, self._fields)

    def _read(self) -> StepFields:
        if not isinstance(self._fields, StepFields):
            self._fields = self._fields(self.applied)
        return self._fields

    def __bool__(self) -> bool:
        return self.applied

    def __repr__(self) -> str:
        loss = self.loss.item() if isinstance(self.loss, torch.Tensor) and self.loss.numel() == 1 else self.loss
        fields = ", ".join(f"{name}={value!r}" for name, value in self._read()._asdict().items())
        return f"StepResult(applied={self.applied}, {fields}, loss={loss!r})"
