"""The boosted LR scheduler: it advances with the optimizer, not with the loop."""

from __future__ import annotations

from typing import Any

from booster.interface.optimizer import OptimizerWrapper


class LRSchedulerWrapper:
    """A scheduler whose `step()` advances only if the optimizer applied a step since the last call.

    With arguments, such as an epoch or a metric, `step` says itself where to go or what was seen, and is passed on always.
    Attributes pass through to the scheduler inside. Where the outcome of the last optimizer step is still on a device,
    `step` takes effect at the start of the next `optimizer.step()`, the first place that reads the learning rate; reading
    any attribute here, such as `get_last_lr`, settles it at once.
    """

    def __init__(self, scheduler: Any, optimizer: OptimizerWrapper) -> None:
        self.scheduler = scheduler
        self._optimizer = optimizer
        self._progress = optimizer.progress

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler, if an optimizer step was applied since the last call or there are arguments to pass on."""
        self._optimizer.when_settled(lambda: self._step(args, kwargs))

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state."""
        self._optimizer.settle()
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scheduler's state; the next step counts from here."""
        self._optimizer.settle()
        self.scheduler.load_state_dict(state_dict)
        self._progress = self._optimizer.progress

    def unwrap(self) -> Any:
        """The user's scheduler."""
        return self.scheduler

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "_optimizer"):
            raise AttributeError(name)
        self._optimizer.settle()
        return getattr(self.scheduler, name)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        progress = self._optimizer.progress
        told = any(value is not None for value in (*args, *kwargs.values()))  # step(None) is torch's default
        if told or progress != self._progress:
            self._progress = progress
            self.scheduler.step(*args, **kwargs)
