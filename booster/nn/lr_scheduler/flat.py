"""A flat stretch at the base rate, then cosine annealing; with and without warmup."""

from torch.optim import Optimizer

from booster.nn.lr_scheduler.schedule import Rate, WarmupSchedule, checked_number, cosine


class FlatAnnealingWarmupLR(WarmupSchedule):
    """Linear warmup, the base rate for the share `pct_start` of the other steps, then cosine annealing to `eta_min`."""

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
        self.pct_start = checked_number("pct_start", pct_start, most=1.0)
        self.eta_min = checked_number("eta_min", eta_min)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch=last_epoch)

    def rate_after_warmup(self, step: int, base_lr: Rate) -> Rate:
        steps = self.total_steps - self.warmup_steps
        flat_steps = int(steps * self.pct_start)
        if step < flat_steps:
            return base_lr
        return cosine(step - flat_steps, steps - flat_steps, base_lr, self.eta_min)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """The base rate for the share `pct_start` of the steps, then cosine annealing to 0 at `total_steps`."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, *, pct_start: float = 0.72, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, pct_start=pct_start, last_epoch=last_epoch)
