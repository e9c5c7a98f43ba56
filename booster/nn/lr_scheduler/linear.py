"""Linear warmup, then linear decay to zero."""

from torch.optim import Optimizer

from booster.nn.lr_scheduler.schedule import Rate, WarmupSchedule, polynomial


class LinearWarmupLR(WarmupSchedule):
    """Climb to the base rate over `warmup_steps`, then fall linearly to 0 at `total_steps`.

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
