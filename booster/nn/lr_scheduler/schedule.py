"""What the schedules share: a rate in closed form, a linear warmup before it, and checked step counts."""

import math
from abc import abstractmethod

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Rate = float | Tensor  # a tensor where the optimizer's lr is one


def checked_steps(name: str, value: int, *, least: int = 1, most: int | None = None) -> int:
    """Return `value`; raise ValueError unless it is an int in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        legal = f"at least {least}" if most is None else f"in [{least}, {most}] (total_steps is {most})"
        raise ValueError(f"{name}={value!r}: give a whole number of steps, {legal}")
    return value


def checked_number(name: str, value: float, *, most: float = math.inf) -> float:
    """Return `value`; raise ValueError unless it is a number in [0, most]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise ValueError(
            f"{name}={value!r}: give a number that is at least 0" + (f", at most {most}" * (most < math.inf))
        )
    return value


def current_rates(optimizer: Optimizer) -> list[Rate]:
    """Return the rates now in force."""
    return [group["lr"] for group in optimizer.param_groups]


class Schedule(LRScheduler):
    """A schedule whose rate is a function of the step alone; it does not build on the rate of the step before."""

    def __init__(self, optimizer: Optimizer, total_steps: int, *, last_epoch: int = -1) -> None:
        self.total_steps = checked_steps("total_steps", total_steps)
        super().__init__(optimizer, last_epoch)

    @abstractmethod
    def rate(self, step: int, base_lr: Rate) -> Rate:
        """Return the rate of `step` (from 0 to total_steps) for a group that began with `base_lr`."""

    def get_lr(self) -> list[Rate]:
        step = min(self.last_epoch, self.total_steps)
        return [self.rate(step, base_lr) for base_lr in self.base_lrs]


class WarmupSchedule(Schedule):
    """A schedule that first climbs linearly: base_lr * (t + 1) / warmup_steps, so base_lr is reached at the last
    warmup step and held for the step after it, where the schedule proper starts."""

    warmup_may_outlast = False  # whether the schedule may end within its warmup

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int, *, last_epoch: int = -1) -> None:
        total_steps = checked_steps("total_steps", total_steps)
        most = None if self.warmup_may_outlast else total_steps
        self.warmup_steps = checked_steps("warmup_steps", warmup_steps, least=0, most=most)
        super().__init__(optimizer, total_steps, last_epoch=last_epoch)

    @abstractmethod
    def rate_after_warmup(self, step: int, base_lr: Rate) -> Rate:
        """Return the rate of `step`, counted from 0 at the end of the warmup."""

    def rate(self, step: int, base_lr: Rate) -> Rate:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps * base_lr
        return self.rate_after_warmup(step - self.warmup_steps, base_lr)


def cosine(step: int, steps: int, start: Rate, end: float) -> Rate:
    """Return the rate at `step` of half a cosine wave from `start` at 0 down to `end` at `steps`."""
    if steps == 0:
        return start
    return end + (start - end) * (1 + math.cos(math.pi * step / steps)) / 2


def polynomial(step: int, steps: int, start: Rate, end: float, power: float) -> Rate:
    """Return the rate at `step` of (1 - step / steps) ** power, scaled to go from `start` at 0 to `end` at `steps`."""
    if steps == 0:
        return start
    return end + (start - end) * (1 - step / steps) ** power
