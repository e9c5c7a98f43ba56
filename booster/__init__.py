"""Mixed-precision training for PyTorch: your loop, any precision, any parallelism."""

import torch

from booster import logging, mixed_precision, nn, plugin
from booster.booster import Booster
from booster.common.installed import tell_untried
from booster.facade.batch_size import find_batch_size
from booster.facade.description import Description, describe
from booster.facade.older_config import AMP_TYPE
from booster.facade.stored_weights import load_weights
from booster.launch import (
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    launch_notebook,
    seed_everything,
)
from booster.model.optimizer_kinds import register_elementwise
from booster.ranks.coordinator import DistCoordinator
from booster.update.outcome import LossScaleError, StepResult

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
