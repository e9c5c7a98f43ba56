"""Mixed-precision training for PyTorch: your loop, any precision, any parallelism."""

import torch

from booster import logging, mixed_precision, nn, plugin
from booster.batch_size import find_batch_size
from booster.booster import Booster
from booster.config import AMP_TYPE
from booster.coordinator import DistCoordinator
from booster.description import Description, describe
from booster.installed import tell_untried
from booster.launch import (
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    seed_everything,
)
from booster.notebook import launch_notebook
from booster.optimizer_kinds import register_elementwise
from booster.update.outcome import LossScaleError, StepResult
from booster.weights import load_weights

__version__ = "0.1.0"

tell_untried(torch.__version__)

__all__ = [
    "AMP_TYPE",
    "Booster",
    "Description",
    "DistCoordinator",
    "LossScaleError",
    "StepResult",
    "__version__",
    "describe",
    "find_batch_size",
    "get_default_parser",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "launch_notebook",
    "load_weights",
    "logging",
    "mixed_precision",
    "nn",
    "plugin",
    "register_elementwise",
    "seed_everything",
]
