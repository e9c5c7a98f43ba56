"""Torch's own schedules over a known number of steps: after `total_steps` the rate stays where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from booster.common import arguments
from booster.nn.lr_scheduler.schedule import Rate, check_common, current_rates

Factor = Callable[[int], float]


class CosineAnnealingLR(torch_schedulers.CosineAnnealingLR):
    """Torch's cosine annealing from the base rate to `eta_min` over `total_steps`, without its climb back afterwards.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    eta_min: the rate at the end.
    last_epoch: the last step that was taken, to resume; -1 begins anew.

    Source: Loshchilov and Hutter, "SGDR", 2017.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, *, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.total_steps = check_common(optimizer, total_steps, last_epoch)
        super().__init__(optimizer, total_steps, arguments.number("eta_min", eta_min, least=0), last_epoch)

    def get_lr(self) -> list[Rate]:
        return current_rates(self.optimizer) if self.last_epoch > self.total_steps else super().get_lr()


class OneCycleLR(torch_schedulers.OneCycleLR):
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
        total_steps = check_common(optimizer, total_steps, last_epoch)
        arguments.number("pct_start", pct_start, least=0, most=1)
        arguments.choice("anneal_strategy", anneal_strategy, ("cos", "linear"))
        arguments.flag("cycle_momentum", cycle_momentum)
        arguments.number("base_momentum", base_momentum, least=0, most=1)
        arguments.number("max_momentum", max_momentum, least=0, most=1)
        arguments.number("div_factor", div_factor, above=0)
        arguments.number("final_div_factor", final_div_factor, above=0)
        super().__init__(
            optimizer,
            # In an optimizer loaded from a checkpoint "lr" is somewhere on the cycle; the peak was kept beside it.
            [group.get("max_lr", group["lr"]) for group in optimizer.param_groups],
            total_steps=total_steps,
            pct_start=float(pct_start),  # torch takes no int
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            last_epoch=last_epoch,
        )

    def get_lr(self) -> list[Rate]:
        # Torch's cycle has its lowest rate at total_steps - 1, and turns up again at total_steps.
        return current_rates(self.optimizer) if self.last_epoch >= self.total_steps else super().get_lr()


class LambdaLR(torch_schedulers.LambdaLR):
    """The base rate times `lr_lambda(step)`.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    lr_lambda: one function of the step for all groups, or a sequence with one per group.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Factor | Sequence[Factor], *, last_epoch: int = -1
    ) -> None:
        self.total_steps = check_common(optimizer, total_steps, last_epoch)
        super().__init__(optimizer, _functions(optimizer, lr_lambda), last_epoch)

    def get_lr(self) -> list[Rate]:
        return current_rates(self.optimizer) if self.last_epoch > self.total_steps else super().get_lr()


class MultiplicativeLR(torch_schedulers.MultiplicativeLR):
    """The last rate times `lr_lambda(step)`, from step 1.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    lr_lambda: one function of the step for all groups, or a sequence with one per group.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Factor | Sequence[Factor], *, last_epoch: int = -1
    ) -> None:
        self.total_steps = check_common(optimizer, total_steps, last_epoch)
        super().__init__(optimizer, _functions(optimizer, lr_lambda), last_epoch)

    def get_lr(self) -> list[Rate]:
        return current_rates(self.optimizer) if self.last_epoch > self.total_steps else super().get_lr()


class StepLR(torch_schedulers.StepLR):
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
        self.total_steps = check_common(optimizer, total_steps, last_epoch)
        step_size = arguments.count("step_size", step_size)
        super().__init__(optimizer, step_size, arguments.number("gamma", gamma, least=0), last_epoch)

    def get_lr(self) -> list[Rate]:
        return current_rates(self.optimizer) if self.last_epoch > self.total_steps else super().get_lr()


class ExponentialLR(torch_schedulers.ExponentialLR):
    """The rate times `gamma` at every step.

    optimizer: the user's, before `boost`, or the boosted one.
    total_steps: the length of the schedule, in optimizer steps; after it the rate stays where it is.
    gamma: factor on the rate at each step; 1 keeps it.
    last_epoch: the last step that was taken, to resume; -1 begins anew.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, *, gamma: float = 1.0, last_epoch: int = -1) -> None:
        self.total_steps = check_common(optimizer, total_steps, last_epoch)
        super().__init__(optimizer, arguments.number("gamma", gamma, least=0), last_epoch)

    def get_lr(self) -> list[Rate]:
        return current_rates(self.optimizer) if self.last_epoch > self.total_steps else super().get_lr()


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
