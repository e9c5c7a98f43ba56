"""Cosine annealing, with and without warmup."""

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from booster.nn.lr_scheduler.schedule import (
    Rate,
    WarmupSchedule,
    checked_number,
    checked_steps,
    cosine,
    current_rates,
)


class CosineAnnealingLR(torch_schedulers.CosineAnnealingLR):
    """Torch's cosine annealing from the base rate to `eta_min` over `total_steps`, without its climb back afterwards.

    Source: Loshchilov and Hutter, "SGDR", 2017.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, *, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.total_steps = checked_steps("total_steps", total_steps)
        super().__init__(optimizer, total_steps, checked_number("eta_min", eta_min), last_epoch)

    def get_lr(self) -> list[Rate]:
        return current_rates(self.optimizer) if self.last_epoch > self.total_steps else super().get_lr()


class CosineAnnealingWarmupLR(WarmupSchedule):
    """Linear warmup over `warmup_steps`, then cosine annealing to `eta_min` at `total_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        *,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.eta_min = checked_number("eta_min", eta_min)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch=last_epoch)

    def rate_after_warmup(self, step: int, base_lr: Rate) -> Rate:
        return cosine(step, self.total_steps - self.warmup_steps, base_lr, self.eta_min)
