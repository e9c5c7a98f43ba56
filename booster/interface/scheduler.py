"""The boosted LR scheduler: it advances with the optimizer, not with the loop."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from booster.common.untrusted_files import printable
from booster.interface.optimizer import OptimizerWrapper
from booster.model.optimizers import entry_differences

_logger = logging.getLogger(__name__)


class LRSchedulerWrapper:
    """A scheduler that advances by `step()` only if the optimizer applied a step since the last call.

    With arguments, such as an epoch or a metric, `step` says itself where to go or what was seen, and is passed on always.
    Attributes pass through to the scheduler inside. Where the outcome of the last optimizer step is still on a device,
    `step` takes effect at the start of the next `optimizer.step()`, the first place that reads the learning rate; reading
    any attribute here, such as `get_last_lr`, settles it at once.
    """

    def __init__(self, scheduler: Any, optimizer: OptimizerWrapper) -> None:
        self.scheduler = scheduler
        self._optimizer = optimizer
        self._seen = _Seen(optimizer.progress)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler, if an optimizer step was applied since the last call or there are arguments to pass on."""
        self._optimizer.when_synced(PendingSchedulerStep(self.scheduler, self._optimizer, self._seen, args, kwargs))

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state."""
        self._optimizer.sync()
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scheduler's state; the next step counts from here. One WARNING where it is that of other options, such as
        another total_steps, with which the schedule then goes on.

        Raises ValueError, nothing changed, for a state of another class of torch's schedulers, or with values of other kinds.
        """
        self._optimizer.sync()
        state_dict, left_out = known_state(self.scheduler, state_dict)
        if left_out:
            _logger.warning("%s", printable(left_out))
        if not _loads_any_entry(self.scheduler):
            self.scheduler.load_state_dict(state_dict)
        else:
            if others := _other_options(self.scheduler, state_dict):
                _logger.warning("%s", printable(others))
            # torch writes entries as it reads them: a state that fails half-way is taken back.
            before = dict(vars(self.scheduler))
            try:
                self.scheduler.load_state_dict(state_dict)
            except Exception as error:
                vars(self.scheduler).clear()
                vars(self.scheduler).update(before)
                raise ValueError(f"the state of {type(self.scheduler).__name__} does not load: {error}") from error
        self._seen.progress = self._optimizer.progress

    def unwrap(self) -> Any:
        """The user's scheduler."""
        return self.scheduler

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "_optimizer"):
            raise AttributeError(name)
        self._optimizer.sync()
        return getattr(self.scheduler, name)


@dataclass
class _Seen:
    """progress: steps of its optimizer that a scheduler has seen."""

    progress: int


class PendingSchedulerStep:
    """A step of a boosted scheduler that waits for the outcome of its optimizer's. scheduler: the user's."""

    def __init__(
        self, scheduler: Any, optimizer: OptimizerWrapper, seen: _Seen, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.scheduler, self._seen, self._args, self._kwargs = scheduler, seen, args, kwargs
        self._optimizer: Any = weakref.proxy(optimizer)  # weakly: its history holds this

    @property
    def has_arguments(self) -> bool:
        """Whether it was given an epoch or a metric: step(None) is torch's default."""
        return any(value is not None for value in (*self._args, *self._kwargs.values()))

    def has_seen(self, progress: int) -> bool:
        """Return whether the scheduler has seen all of `progress` steps, so that it goes on with the next that is applied."""
        return self._seen.progress == progress

    def __call__(self) -> None:
        progress = self._optimizer.progress
        if self.has_arguments or progress != self._seen.progress:
            self._seen.progress = progress
            self.scheduler.step(*self._args, **self._kwargs)


def known_state(scheduler: Any, state: Any) -> tuple[Any, str]:
    """Return what of `state` a scheduler is to be given, and what is left out of it, in words.

    Raises ValueError for a state with which such a scheduler would fail, or stay where it is.
    """
    if not _loads_any_entry(scheduler):
        return state, ""
    name = f"the state of {type(scheduler).__name__}"
    if not isinstance(state, Mapping):
        raise ValueError(f"{name} is of type {type(state).__name__}, and must be a mapping")
    now = scheduler.state_dict()
    # Torch's schedulers take any entry for an attribute.
    # Theirs are all there from the beginning, so what one does not have is that of another version.
    taken = sorted(str(key) for key in state.keys() - now.keys() if hasattr(scheduler, str(key)))
    wrong = [f"{name} would replace {taken} of the scheduler"] if taken else []
    wrong += entry_differences(name, now, state)
    if f"{type(scheduler).__module__}.".startswith(_TORCH_AND_OURS):
        num_groups = len(scheduler.optimizer.param_groups)
        wrong += [
            f"{name} has {len(state[key])} of {key!r}, and there are {len(own)}"
            for key, own in now.items()
            if isinstance(own, (list, tuple))
            and isinstance(state.get(key), (list, tuple))
            and len(state[key]) != len(own)
            and not (key in _OF_GROUPS and 0 < len(state[key]) <= num_groups)
        ]
        if state.get("_anneal_func_type", "cos") not in ("cos", "linear"):
            wrong.append(f"{name} has {state['_anneal_func_type']!r} for '_anneal_func_type'")
        if lacking := sorted(_PROGRESS & now.keys() - state.keys()):
            wrong.append(f"{name} lacks {lacking}, which say where it is")
    if wrong:
        raise ValueError("; ".join(wrong))
    unknown = sorted(map(str, state.keys() - now.keys())) if type(scheduler).__module__.startswith("torch.") else []
    left_out = f"{name} has {unknown}, which this one does not know, and they are left out" if unknown else ""
    return {key: value for key, value in state.items() if str(key) not in unknown}, left_out


def _other_options(scheduler: Any, state: Mapping[str, Any]) -> str:
    """Say with which options of `state` a schedule goes on that was made with others; "" where there are none."""
    others = [
        (name, state[name], own)
        for name, own in scheduler.state_dict().items()
        if name in state and name not in _PROGRESS and not name.startswith("_")
        if isinstance(own, (bool, int, float, str)) and isinstance(state[name], (bool, int, float, str))
        if state[name] != own
    ]
    if not others:
        return ""
    saved, made = (", ".join(f"{other[0]}={other[place]!r}" for other in others) for place in (1, 2))
    closed = any((base.__module__, base.__name__) == _CLOSED for base in type(scheduler).__mro__)
    fix = ", until it is set on b.unwrap(lr_scheduler)" if closed else ""
    return (
        f"{type(scheduler).__name__} was made with {made}, and goes on with {saved} of the state that was loaded{fix}"
    )


def _loads_any_entry(scheduler: Any) -> bool:
    """Whether any entry of a state becomes an attribute of `scheduler`, as torch's schedulers have it."""
    own = type(scheduler).load_state_dict if isinstance(scheduler, LRScheduler) else None
    return own is not None and f"{own.__module__}.".startswith(_TORCH_AND_OURS)


_CLOSED = ("booster.nn.lr_scheduler", "ClosedFormLR")  # where a rate follows from the step and the options alone
_TORCH_AND_OURS = ("torch.", "booster.")
# What moves as a schedule goes on.
_PROGRESS = {"last_epoch", "_step_count", "_last_lr", "base_lrs", "T_cur", "T_i", "_schedulers"} | {
    "best",
    "num_bad_epochs",
    "cooldown_counter",
}
# One entry for each group that there was when a scheduler was made; groups may come later.
_OF_GROUPS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "base_momentums", "max_momentums")
