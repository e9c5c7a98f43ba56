"""Learning-rate schedules over a known number of steps; all take `(optimizer, total_steps, ...)`.

Steps are counted from 0: the rate of step t is the one in force while step t is taken. After `total_steps` the rate
stays where it is. Every schedule works with any torch.optim.Optimizer, and resumes exactly from its `state_dict`
together with the optimizer's.
"""

from booster.nn.lr_scheduler.cosine import CosineAnnealingLR, CosineAnnealingWarmupLR
from booster.nn.lr_scheduler.flat import FlatAnnealingLR, FlatAnnealingWarmupLR
from booster.nn.lr_scheduler.linear import LinearWarmupLR
from booster.nn.lr_scheduler.multistep import MultiStepLR, MultiStepWarmupLR
from booster.nn.lr_scheduler.onecycle import OneCycleLR
from booster.nn.lr_scheduler.polynomial import PolynomialLR, PolynomialWarmupLR
from booster.nn.lr_scheduler.step import ExponentialLR, LambdaLR, MultiplicativeLR, StepLR

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
