"""What is known between passes of gradients that are used within backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def _nothing_waits() -> None:
    pass


class OptimizerInBackward:
    """How the gradients of one update are released, and what of that is known between passes.

    mode: "exact" or "previous_norm". max_norm: to clip to; 0 does not. decision: the `Decision` by which a pass steps, which
    holds the gradients that hold this, and so is held weakly.
    uncounted: a pass has stepped, or decided to skip, and `step()` is still to count it. previous: the norm of the last step,
    where that is what clips.
    """

    def __init__(self, mode: str, max_norm: float, decision: Any) -> None:
        self.decision_is(decision)
        self.mode = mode
        self.max_norm = max_norm
        self.uncounted = False
        self.sync: Callable[[], None] = _nothing_waits
        """Counts the last step: schedules that wait for it write the learning rates by which a pass steps."""
        self.previous: Any = None  # a float, or a 0-dim tensor where a device decides
        self._torn = ""

    def decision_is(self, decision: Any) -> None:
        """Step by `decision` from now on."""
        self.decision = weakref.proxy(decision)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "decision"}

    def check_weights(self) -> None:
        """Raise RuntimeError if a pass raised after some parameters were stepped."""
        if self._torn:
            raise RuntimeError(self._torn)

    def check(self, *, create_graph: bool) -> None:
        """Raise RuntimeError or ValueError if a pass cannot use its gradients."""
        self.check_weights()
        self.sync()
        if self.uncounted:
            raise RuntimeError(
                "a second backward pass before optimizer.step(): release_gradients has stepped on the gradients of the first, "
                "so they cannot be added up. Call step() after each backward pass, or put the passes of one step in "
                "b.accumulate(model, optimizer, num_micro_batches)"
            )
        if create_graph:
            raise ValueError(
                "create_graph=True makes gradients part of a graph, and release_gradients frees them within the pass; compute "
                "a penalty by torch.autograd.grad(..., create_graph=True) in the loss, or use release_gradients=False"
            )

    def refuse(self, what: str) -> None:
        """Raise RuntimeError if gradients were used already. what: the call that needs them."""
        if self.uncounted:
            raise RuntimeError(
                f"{what} comes too late: release_gradients has stepped on the gradients within backward and freed them. Clip "
                "by Booster(clip_grad_norm=...), or use release_gradients=False"
            )

    def mark_partial_step(self, stepped: int, number: int) -> None:
        """A pass raised after `stepped` of `number` parameters were stepped."""
        self._torn = (
            f"the last backward pass raised after {stepped} of {number} parameters were stepped within it, so the weights are "
            "those of no step; load a checkpoint before going on"
        )

    def reset(self, previous: float | None) -> None:
        """A state was loaded. previous: the norm in it."""
        self._torn, self.previous = "", previous
