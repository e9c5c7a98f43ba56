"""Torch's schedules that have no end of their own, given one: after `total_steps` the rate stays where it is."""

from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from booster.nn.lr_scheduler.schedule import Rate, checked_number, checked_steps, current_rates

Factor = Callable[[int], float]


class LambdaLR(torch_schedulers.LambdaLR):
    """The base rate times `lr_lambda(step)`; one function for all groups or a sequence with one per group."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Factor | Sequence[Factor], *, last_epoch: int = -1
    ) -> None:
        self.total_steps = checked_steps("total_steps", total_steps)
        super().__init__(optimizer, _functions(lr_lambda), last_epoch)

    def get_lr(self) -> list[Rate]:
        return current_rates(self.optimizer) if self.last_epoch > self.total_steps else super().get_lr()


class MultiplicativeLR(torch_schedulers.MultiplicativeLR):
    """The last rate times `lr_lambda(step)`, from step 1; one function for all groups or a sequence, one per group."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Factor | Sequence[Factor], *, last_epoch: int = -1
    ) -> None:
        self.total_steps = checked_steps("total_steps", total_steps)
        super().__init__(optimizer, _functions(lr_lambda), last_epoch)

    def get_lr(self) -> list[Rate]:
        return current_rates(self.optimizer) if self.last_epoch > self.total_steps else super().get_lr()


class StepLR(torch_schedulers.StepLR):
    """The rate times `gamma` every `step_size` steps."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, *, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.total_steps = checked_steps("total_steps", total_steps)
        step_size = checked_steps("step_size", step_size)
        super().__init__(optimizer, step_size, checked_number("gamma", gamma), last_epoch)

    def get_lr(self) -> list[Rate]:
        return current_rates(self.optimizer) if self.last_epoch > self.total_steps else super().get_lr()


class ExponentialLR(torch_schedulers.ExponentialLR):
    """The rate times `gamma` at every step."""

    def __init__(self, optimizer: Optimizer, total_steps: int, *, gamma: float = 1.0, last_epoch: int = -1) -> None:
        self.total_steps = checked_steps("total_steps", total_steps)
        super().__init__(optimizer, checked_number("gamma", gamma), last_epoch)

    def get_lr(self) -> list[Rate]:
        return current_rates(self.optimizer) if self.last_epoch > self.total_steps else super().get_lr()


def _functions(lr_lambda: Factor | Sequence[Factor]) -> Factor | list[Factor]:
    functions = [lr_lambda] if callable(lr_lambda) else lr_lambda
    if not isinstance(functions, Sequence) or not all(callable(function) for function in functions):
        raise TypeError(f"lr_lambda={lr_lambda!r}: give a function of the step, or a list with one function per group")
    return lr_lambda if callable(lr_lambda) else list(lr_lambda)
