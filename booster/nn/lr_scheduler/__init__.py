"""Learning-rate schedules over a known number of steps; all take `(optimizer, total_steps, ...)`.

Steps are counted from 0: the rate of step t is the one in force while step t is taken. After `total_steps` the rate
stays where it is. Every schedule works with any torch.optim.Optimizer, and resumes exactly from its `state_dict`
together with the optimizer's.
"""

from booster.nn.lr_scheduler.of_torch import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiplicativeLR,
    OneCycleLR,
    StepLR,
)
from booster.nn.lr_scheduler.schedule import (
    CosineAnnealingWarmupLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LinearWarmupLR,
    MultiStepLR,
    MultiStepWarmupLR,
    PolynomialLR,
    PolynomialWarmupLR,
)

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
