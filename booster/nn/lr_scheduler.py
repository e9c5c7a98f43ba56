"""Learning-rate schedules over a known number of steps; all take `(optimizer, total_steps, ...)`.

Steps are counted from 0: the rate of step t is the one in force while step t is taken. After `total_steps` the rate
stays where it is. Every schedule works with any torch.optim.Optimizer, and resumes exactly from its `state_dict`
together with the optimizer's.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as of_torch

from booster.common import arguments

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
]

Rate = float | Tensor  # a tensor where the optimizer's lr is one
Factor = Callable[[int], float]


def _check_common(optimizer: Optimizer, total_steps: int, last_epoch: int) -> int:
    """Return `total_steps`; raise TypeError or ValueError for an illegal argument of those that all schedules have."""
    arguments.instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    arguments.count("last_epoch", last_epoch, least=-1, fix="-1 begins anew")
    return arguments.count("total_steps", total_steps, what="the length of the schedule")


# ---------------------------------------------------------------------- closed forms


class ClosedFormLR(of_torch.LRScheduler):
    """A rate that is a function of the step alone: a linear warmup, then the `curve` of a subclass.

    The warmup is base_lr * (t + 1) / warmup_steps, so the base rate is reached at the last warmup step and held for the
    step after it, where the curve starts.
    """

    _warmup_may_outlast = False  # whether the schedule may end within its warmup
    _extra = 0  # steps by which the climb is longer than the warmup

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int, last_epoch: int) -> None:
        self.total_steps = _check_common(optimizer, total_steps, last_epoch)
        most = None if self._warmup_may_outlast else total_steps
        self.warmup_steps = arguments.count("warmup_steps", warmup_steps, least=0, most=most, what="of total_steps")
        super().__init__(optimizer, last_epoch)

    @abstractmethod
    def curve(self, step: int, steps: int, base_lr: Rate) -> Rate:
        """Return the rate at `step` of the `steps` after the warmup, for a group that began with `base_lr`."""

    def get_lr(self) -> list[Rate]:
        # At the end the last rate stays. Not the rate of the step before plus something: a loaded step gives its rate at once.
        step, warmup = min(self.last_epoch, self.total_steps), self.warmup_steps
        if step < warmup:
            return [(step + 1) / (warmup + self._extra) * base_lr for base_lr in self.base_lrs]
        return [self.curve(step - warmup, self.total_steps - warmup, base_lr) for base_lr in self.base_lrs]


def _cosine(step: int, steps: int, start: Rate, end: float) -> Rate:
    """Return the rate at `step` of half a cosine wave from `start` at 0 down to `end` at `steps`."""
    return end + (start - end) * (1 + math.cos(math.pi * step / steps)) / 2 if steps else start


def _polynomial(step: int, steps: int, start: Rate, end: float, power: float) -> Rate:
    """Return the rate at `step` of (1 - step / steps) ** power, scaled to go from `start` at 0 to `end` at `steps`."""
    return end + (start - end) * (1 - step / steps) ** power if steps else start


class LinearWarmupLR(ClosedFormLR):
    """Climb to the base rate over `warmup_steps`, then fall linearly to 0 at `total_steps`.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    warmup_steps: steps in which the rate climbs linearly; 0 does not.
    last_epoch: the last step that was taken, to resume; -1 begins anew.

    Warmup is base_lr * (t + 1) / (warmup_steps + 1): here the base rate is first reached at the step after the warmup,
    so that no two steps have it. The other warmup schedules reach it at the last warmup step. A warmup longer than
    `total_steps` is legal here, as the published ViT recipe has it (50 of 2 epochs): the schedule ends while it climbs.
    """

    _warmup_may_outlast = True
    _extra = 1

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, *, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def curve(self, step: int, steps: int, base_lr: Rate) -> Rate:
        return _polynomial(step, steps, base_lr, 0.0, 1.0)


class PolynomialWarmupLR(ClosedFormLR):
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
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def curve(self, step: int, steps: int, base_lr: Rate) -> Rate:
        return _polynomial(step, steps, base_lr, self.end_lr, self.power)


class PolynomialLR(PolynomialWarmupLR):
    """Polynomial decay from the base rate to `end_lr` at `total_steps` (torch's of this name always ends at 0).

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    end_lr: the rate at `total_steps`.
    power: of the curve; 1 is a line.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, *, end_lr: float = 1e-4, power: float = 1.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, end_lr=end_lr, power=power, last_epoch=last_epoch)


class CosineAnnealingWarmupLR(ClosedFormLR):
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
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def curve(self, step: int, steps: int, base_lr: Rate) -> Rate:
        return _cosine(step, steps, base_lr, self.eta_min)


class FlatAnnealingWarmupLR(ClosedFormLR):
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
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def curve(self, step: int, steps: int, base_lr: Rate) -> Rate:
        flat = int(steps * self.pct_start)
        return base_lr if step < flat else _cosine(step - flat, steps - flat, base_lr, self.eta_min)


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


class MultiStepWarmupLR(ClosedFormLR):
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
        if milestones is None or not isinstance(milestones, Sequence) or isinstance(milestones, (str, bytes)):
            legal = "the steps at which the rate decays"
            kind = ValueError if milestones is None else TypeError
            raise kind(arguments.refusal("milestones", milestones, legal, fix="for instance milestones=[60, 80]"))
        steps = [arguments.count("milestones", step, least=0) for step in milestones]
        if not steps or any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
            legal = "steps in increasing order, each once, and at least one"
            raise ValueError(arguments.refusal("milestones", steps, legal))
        self.milestones = steps  # a list, as the state dict must be plain data
        self.gamma = arguments.number("gamma", gamma, least=0)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)
        # After `super().__init__`, which checks the two bounds.
        for step in self.milestones:
            arguments.count("milestones", step, least=warmup_steps, most=total_steps, what="from warmup to total_steps")

    def curve(self, step: int, steps: int, base_lr: Rate) -> Rate:
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


# ---------------------------------------------------------------------- torch's own, with an end


def _ending(schedule: type[of_torch.LRScheduler], last: int = 0) -> Any:
    """Return `schedule` as a base class: the rate stays where it is after step `total_steps + last`."""

    # Beyond its end torch's cycle raises, and its cosine climbs again.
    class Ending(schedule):  # type: ignore[valid-type, misc]
        def get_lr(self) -> list[Rate]:
            if self.last_epoch > self.total_steps + last:
                return [group["lr"] for group in self.optimizer.param_groups]
            rates: list[Rate] = super().get_lr()
            return rates

    return Ending


class CosineAnnealingLR(_ending(of_torch.CosineAnnealingLR)):  # type: ignore[misc]
    """Torch's cosine annealing from the base rate to `eta_min` over `total_steps`, without its climb back afterwards.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    eta_min: the rate at the end.
    last_epoch: the last step that was taken, to resume; -1 begins anew.

    Source: Loshchilov and Hutter, "SGDR", 2017.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, *, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.total_steps = _check_common(optimizer, total_steps, last_epoch)
        super().__init__(optimizer, total_steps, arguments.number("eta_min", eta_min, least=0), last_epoch)


# Torch's cycle has its lowest rate at total_steps - 1, and turns up again at total_steps.
class OneCycleLR(_ending(of_torch.OneCycleLR, last=-1)):  # type: ignore[misc]
    """Torch's one-cycle policy; the optimizer's own rates are the peaks, and it rests at the end instead of raising.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    pct_start: share of the steps, from 0 to 1, at which the peak is.
    anneal_strategy: the curve up and down: a cosine or a line.
    cycle_momentum: move the momentum (or beta1) of every group against the rate, from `max_momentum` to `base_momentum` and
        back.
    base_momentum: the momentum at the peak.
    max_momentum: the momentum at both ends.
    div_factor: the cycle starts at peak / div_factor.
    final_div_factor: it ends at peak / div_factor / final_div_factor.
    last_epoch: the last step that was taken, to resume; -1 begins anew.

    Source: Smith and Topin, "Super-Convergence", 2018.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        last_epoch: int = -1,
    ) -> None:
        total_steps = _check_common(optimizer, total_steps, last_epoch)
        super().__init__(
            optimizer,
            # In an optimizer loaded from a checkpoint "lr" is somewhere on the cycle; the peak was kept in max_lr.
            [group.get("max_lr", group["lr"]) for group in optimizer.param_groups],
            total_steps=total_steps,
            pct_start=float(arguments.number("pct_start", pct_start, least=0, most=1)),  # torch takes no int
            anneal_strategy=arguments.choice("anneal_strategy", anneal_strategy, ("cos", "linear")),
            cycle_momentum=arguments.flag("cycle_momentum", cycle_momentum),
            base_momentum=arguments.number("base_momentum", base_momentum, least=0, most=1),
            max_momentum=arguments.number("max_momentum", max_momentum, least=0, most=1),
            div_factor=arguments.number("div_factor", div_factor, above=0),
            final_div_factor=arguments.number("final_div_factor", final_div_factor, above=0),
            last_epoch=last_epoch,
        )


class LambdaLR(_ending(of_torch.LambdaLR)):  # type: ignore[misc]
    """The base rate times `lr_lambda(step)`.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    lr_lambda: one function of the step for all groups, or a sequence with one per group.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Factor | Sequence[Factor], *, last_epoch: int = -1
    ) -> None:
        self.total_steps = _check_common(optimizer, total_steps, last_epoch)
        super().__init__(optimizer, _functions(optimizer, lr_lambda), last_epoch)


class MultiplicativeLR(_ending(of_torch.MultiplicativeLR)):  # type: ignore[misc]
    """The last rate times `lr_lambda(step)`, from step 1.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    lr_lambda: one function of the step for all groups, or a sequence with one per group.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Factor | Sequence[Factor], *, last_epoch: int = -1
    ) -> None:
        self.total_steps = _check_common(optimizer, total_steps, last_epoch)
        super().__init__(optimizer, _functions(optimizer, lr_lambda), last_epoch)


class StepLR(_ending(of_torch.StepLR)):  # type: ignore[misc]
    """The rate times `gamma` every `step_size` steps.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    step_size: steps between two decays.
    gamma: factor on the rate at each.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, *, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.total_steps = _check_common(optimizer, total_steps, last_epoch)
        step_size = arguments.count("step_size", step_size)
        super().__init__(optimizer, step_size, arguments.number("gamma", gamma, least=0), last_epoch)


class ExponentialLR(_ending(of_torch.ExponentialLR)):  # type: ignore[misc]
    """The rate times `gamma` at every step.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    gamma: factor on the rate at each step; 1 keeps it.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, *, gamma: float = 1.0, last_epoch: int = -1) -> None:
        self.total_steps = _check_common(optimizer, total_steps, last_epoch)
        super().__init__(optimizer, arguments.number("gamma", gamma, least=0), last_epoch)


def _functions(optimizer: Optimizer, lr_lambda: Factor | Sequence[Factor]) -> Factor | list[Factor]:
    functions = [lr_lambda] if callable(lr_lambda) else lr_lambda
    if not isinstance(functions, Sequence) or not all(callable(function) for function in functions):
        legal = "a function of the step, or a list with one function per group"
        raise TypeError(arguments.refusal("lr_lambda", lr_lambda, legal))
    if not callable(lr_lambda) and len(functions) != len(optimizer.param_groups):
        raise ValueError(
            f"lr_lambda has {len(functions)} functions for {len(optimizer.param_groups)} groups; give one per group"
        )
    return lr_lambda if callable(lr_lambda) else list(functions)
