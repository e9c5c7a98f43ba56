"""How many steps were applied and how many skipped, once their outcome is known to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from booster import arguments
from booster.update.errors import LossScaleError
from booster.update.step_result import StepResult


class StepHistory:
    """Counters of one optimizer's steps, and what waits for the outcome of the last one.

    max_consecutive_skips: so many skips in a row raise `LossScaleError` on settling; None never does. describe_scale: what
    its message says about the loss scale.
    """

    def __init__(self, max_consecutive_skips: int | None, describe_scale: Callable[[], str]) -> None:
        self.num_steps = 0
        self.num_applied = 0
        self.num_consecutive_skips = 0
        self.progress = 0  # applied in this process, never restored
        self.last: StepResult | None = None
        self._max_consecutive_skips = max_consecutive_skips
        self._describe_scale = describe_scale
        self._unsettled: StepResult | None = None
        self._deferred: list[Callable[[], None]] = []

    def record(self, result: StepResult) -> None:
        """Note a step whose outcome need not be known yet."""
        self.num_steps += 1
        self._unsettled = self.last = result.without_loss()

    def when_settled(self, action: Callable[[], None]) -> None:
        """Run `action` once the last step's outcome is known to the host: now, or at the next `settle()`."""
        if self._unsettled is None:
            action()
        else:
            self._deferred.append(action)

    def settle(self) -> None:
        """Count the last step, waiting for its outcome, then run what waited for it. Raises `LossScaleError`."""
        if self._unsettled is None:
            return
        result, self._unsettled = self._unsettled, None
        if result.applied:
            self.num_applied += 1
            self.progress += 1
            self.num_consecutive_skips = 0
        else:
            self.num_consecutive_skips += 1
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()
        if self._max_consecutive_skips is not None and self.num_consecutive_skips >= self._max_consecutive_skips:
            raise LossScaleError(self._report(result))

    def state_dict(self) -> dict[str, int]:
        """The counters, without `progress`."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, counters: dict[str, int]) -> None:
        """Restore what `read_counters` found."""
        for name in _COUNTERS:
            setattr(self, name, counters[name])

    def _report(self, result: StepResult) -> str:
        last = self.num_steps - self.num_consecutive_skips
        return (
            f"{self.num_consecutive_skips} optimizer steps in a row were skipped, up to step {self.num_steps}; "
            f"{f'the last finite one was step {last}' if last else 'none was finite'}. Reason: {result.skipped_reason}; "
            f"not finite: {', '.join(result.culprit) or 'gradients of another rank'}; loss scale {self._describe_scale()}. "
            "Look at these parameters' module and its inputs, lower the learning rate, keep the module in float32 "
            "(keep_fp32=...), or raise Booster(max_consecutive_skips=...), which is "
            f"{self._max_consecutive_skips}"
        )


def read_counters(state: Mapping[str, Any]) -> dict[str, int]:
    """The counters in `state`; raises ValueError if one is missing or no whole number, or if they contradict each other."""
    missing = [name for name in _COUNTERS if name not in state]
    if missing:
        raise ValueError(f"step counters {missing} are missing; there are {sorted(map(str, state))}")
    counters = {name: state[name] for name in _COUNTERS}
    for name, count in counters.items():
        if not arguments.is_whole(count) or count < 0:
            raise ValueError(f"{name}={count!r} is not a whole number of at least 0")
    if counters["num_applied"] + counters["num_consecutive_skips"] > counters["num_steps"]:
        raise ValueError(
            f"the step counters contradict each other, more were applied and skipped than done: {counters}"
        )
    return counters


_COUNTERS = ("num_steps", "num_applied", "num_consecutive_skips")
