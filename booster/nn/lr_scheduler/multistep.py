"""Decay at given steps, with and without warmup."""

from bisect import bisect_right
from collections.abc import Sequence

from torch.optim import Optimizer

from booster.nn.lr_scheduler.schedule import Rate, WarmupSchedule, checked_number, checked_steps


class MultiStepWarmupLR(WarmupSchedule):
    """Linear warmup, then the base rate times `gamma` to the number of milestones passed.

    milestones: increasing steps, counted from the start of training (warmup included), in [warmup_steps, total_steps];
        from step m on the decay of milestone m is in force.
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
        total_steps = checked_steps("total_steps", total_steps)
        warmup_steps = checked_steps("warmup_steps", warmup_steps, least=0, most=total_steps)
        self.milestones = _checked_milestones(milestones, warmup_steps, total_steps)
        self.gamma = checked_number("gamma", gamma)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch=last_epoch)

    def rate_after_warmup(self, step: int, base_lr: Rate) -> Rate:
        return base_lr * self.gamma ** bisect_right(self.milestones, step + self.warmup_steps)


class MultiStepLR(MultiStepWarmupLR):
    """The base rate times `gamma` to the number of `milestones` (increasing steps) passed."""

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


def _checked_milestones(milestones: Sequence[int] | None, first: int, last: int) -> list[int]:
    if not milestones:
        raise ValueError(
            f"milestones={milestones!r}: give the steps at which the rate decays, e.g. milestones=[60, 80]"
        )
    steps = [checked_steps("a milestone", step, least=first, most=last) for step in milestones]
    if any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
        raise ValueError(f"milestones={steps}: give them in increasing order, each once")
    return steps
