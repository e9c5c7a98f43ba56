"""Polynomial decay, with and without warmup."""

from torch.optim import Optimizer

from booster.nn.lr_scheduler.schedule import Rate, WarmupSchedule, checked_number, polynomial


class PolynomialWarmupLR(WarmupSchedule):
    """Linear warmup, then (base_lr - end_lr) * (1 - progress) ** power + end_lr, which is `end_lr` at `total_steps`.

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
        self.end_lr = checked_number("end_lr", end_lr)
        self.power = checked_number("power", power)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch=last_epoch)

    def rate_after_warmup(self, step: int, base_lr: Rate) -> Rate:
        return polynomial(step, self.total_steps - self.warmup_steps, base_lr, self.end_lr, self.power)


class PolynomialLR(PolynomialWarmupLR):
    """Polynomial decay from the base rate to `end_lr` at `total_steps` (torch's of this name always ends at 0)."""

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
