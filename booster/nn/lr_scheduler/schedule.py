"""Schedules in closed form: a rate is a function of the step alone, and does not build on the rate of the step before.

Most climb linearly first (`WarmupSchedule`), then follow a curve of their own: `cosine`, `polynomial`, or steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from booster.common import arguments

Rate = float | Tensor  # a tensor where the optimizer's lr is one


def check_common(optimizer: Optimizer, total_steps: int, last_epoch: int) -> int:
    """Return `total_steps`; raise TypeError or ValueError for an argument that all schedules have and that is not legal."""
    arguments.instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    arguments.count("last_epoch", last_epoch, least=-1, fix="-1 begins anew")
    return arguments.count("total_steps", total_steps, what="the length of the schedule")


def current_rates(optimizer: Optimizer) -> list[Rate]:
    """Return the rates now in force."""
    return [group["lr"] for group in optimizer.param_groups]


class Schedule(LRScheduler):
    """A schedule whose rate is a function of the step alone."""

    def __init__(self, optimizer: Optimizer, total_steps: int, *, last_epoch: int = -1) -> None:
        self.total_steps = check_common(optimizer, total_steps, last_epoch)
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
        total_steps = check_common(optimizer, total_steps, last_epoch)
        most = None if self.warmup_may_outlast else total_steps
        self.warmup_steps = arguments.count("warmup_steps", warmup_steps, least=0, most=most, what="of total_steps")
        super().__init__(optimizer, total_steps, last_epoch=last_epoch)

    @abstractmethod
    def rate_after_warmup(self, step: int, base_lr: Rate) -> Rate:
        """Return the rate of `step`, counted from 0 at the end of the warmup, for a group that began with `base_lr`."""

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


class LinearWarmupLR(WarmupSchedule):
    """Climb to the base rate over `warmup_steps`, then fall linearly to 0 at `total_steps`.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    warmup_steps: steps in which the rate climbs linearly; 0 does not.
    last_epoch: the last step that was taken, to resume; -1 begins anew.

    Warmup is base_lr * (t + 1) / (warmup_steps + 1): here the base rate is first reached at the step after the warmup,
    so that no two steps have it. The other warmup schedules reach it at the last warmup step. A warmup longer than
    `total_steps` is legal here, as the published ViT recipe has it (50 of 2 epochs): the schedule ends while it climbs.
    """

    warmup_may_outlast = True

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, *, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch=last_epoch)

    def rate(self, step: int, base_lr: Rate) -> Rate:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1) * base_lr
        return self.rate_after_warmup(step - self.warmup_steps, base_lr)

    def rate_after_warmup(self, step: int, base_lr: Rate) -> Rate:
        return polynomial(step, self.total_steps - self.warmup_steps, base_lr, 0.0, 1.0)


class PolynomialWarmupLR(WarmupSchedule):
    """Linear warmup, then (base_lr - end_lr) * (1 - progress) ** power + end_lr, which is `end_lr` at `total_steps`.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    warmup_steps: steps of `total_steps` in which the rate climbs linearly; 0 does not.
    end_lr: the rate at `total_steps`.
    power: of the curve; 1 is a line.
    last_epoch: the last step that was taken, to resume; -1 begins anew.

    A base rate below `end_lr` climbs to it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        *,
        end_lr: float = 1e-4,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        self.end_lr = arguments.number("end_lr", end_lr, least=0)
        self.power = arguments.number("power", power, least=0)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch=last_epoch)

    def rate_after_warmup(self, step: int, base_lr: Rate) -> Rate:
        return polynomial(step, self.total_steps - self.warmup_steps, base_lr, self.end_lr, self.power)


class PolynomialLR(PolynomialWarmupLR):
    """Polynomial decay from the base rate to `end_lr` at `total_steps` (torch's of this name always ends at 0).

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    end_lr: the rate at `total_steps`.
    power: of the curve; 1 is a line.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        end_lr: float = 1e-4,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, end_lr=end_lr, power=power, last_epoch=last_epoch)


class CosineAnnealingWarmupLR(WarmupSchedule):
    """Linear warmup over `warmup_steps`, then cosine annealing to `eta_min` at `total_steps`.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    warmup_steps: steps of `total_steps` in which the rate climbs linearly; 0 does not.
    eta_min: the rate at the end.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        *,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.eta_min = arguments.number("eta_min", eta_min, least=0)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch=last_epoch)

    def rate_after_warmup(self, step: int, base_lr: Rate) -> Rate:
        return cosine(step, self.total_steps - self.warmup_steps, base_lr, self.eta_min)


class FlatAnnealingWarmupLR(WarmupSchedule):
    """Linear warmup, the base rate for the share `pct_start` of the other steps, then cosine annealing to `eta_min`.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    warmup_steps: steps of `total_steps` in which the rate climbs linearly; 0 does not.
    pct_start: share of the steps after warmup that have the base rate, from 0 to 1.
    eta_min: the rate at the end.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        *,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.pct_start = arguments.number("pct_start", pct_start, least=0, most=1)
        self.eta_min = arguments.number("eta_min", eta_min, least=0)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch=last_epoch)

    def rate_after_warmup(self, step: int, base_lr: Rate) -> Rate:
        steps = self.total_steps - self.warmup_steps
        flat_steps = int(steps * self.pct_start)
        if step < flat_steps:
            return base_lr
        return cosine(step - flat_steps, steps - flat_steps, base_lr, self.eta_min)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """The base rate for the share `pct_start` of the steps, then cosine annealing to 0 at `total_steps`.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    pct_start: share of the steps that have the base rate, from 0 to 1.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, *, pct_start: float = 0.72, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, pct_start=pct_start, last_epoch=last_epoch)


class MultiStepWarmupLR(WarmupSchedule):
    """Linear warmup, then the base rate times `gamma` to the number of milestones passed.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    warmup_steps: steps of `total_steps` in which the rate climbs linearly; 0 does not.
    milestones: increasing steps, counted from the start of training (warmup included), in [warmup_steps, total_steps];
        from step m on the decay of milestone m is in force. None, the default, is not legal.
    gamma: factor on the rate at each.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        *,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.milestones = _checked_milestones(milestones)
        self.gamma = arguments.number("gamma", gamma, least=0)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch=last_epoch)
        for step in self.milestones:
            arguments.count("milestones", step, least=warmup_steps, most=total_steps, what="from warmup to total_steps")

    def rate_after_warmup(self, step: int, base_lr: Rate) -> Rate:
        return base_lr * self.gamma ** bisect_right(self.milestones, step + self.warmup_steps)


class MultiStepLR(MultiStepWarmupLR):
    """The base rate times `gamma` to the number of `milestones` passed.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    milestones: increasing steps, at most `total_steps`;
        from step m on the decay of milestone m is in force. None, the default, is not legal.
    gamma: factor on the rate at each.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, milestones=milestones, gamma=gamma, last_epoch=last_epoch)


def _checked_milestones(milestones: Sequence[int] | None) -> list[int]:
    if milestones is None or not isinstance(milestones, Sequence) or isinstance(milestones, (str, bytes)):
        legal = "the steps at which the rate decays"
        kind = ValueError if milestones is None else TypeError
        raise kind(arguments.refusal("milestones", milestones, legal, fix="for instance milestones=[60, 80]"))
    steps = [arguments.count("milestones", step, least=0) for step in milestones]
    if not steps or any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
        raise ValueError(
            arguments.refusal("milestones", steps, "steps in increasing order, each once, and at least one")
        )
    return steps
