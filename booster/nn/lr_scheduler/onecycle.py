"""The one-cycle policy."""

from typing import Literal

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from booster.nn.lr_scheduler.schedule import Rate, checked_steps, current_rates


class OneCycleLR(torch_schedulers.OneCycleLR):
    """Torch's one-cycle policy; the optimizer's own rates are the peaks, and it rests at the end instead of raising.

    The cycle starts at peak / div_factor, peaks after the share `pct_start` of the steps, and ends at
    peak / div_factor / final_div_factor. Side effect: with `cycle_momentum` the momentum (or beta1) of every group goes
    from `max_momentum` down to `base_momentum` and back.
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
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f"anneal_strategy={anneal_strategy!r} is unknown; choose 'cos' or 'linear'")
        super().__init__(
            optimizer,
            # In an optimizer loaded from a checkpoint "lr" is somewhere on the cycle; the peak was kept beside it.
            [group.get("max_lr", group["lr"]) for group in optimizer.param_groups],
            total_steps=checked_steps("total_steps", total_steps),
            pct_start=pct_start,
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
