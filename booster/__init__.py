"""Mixed-precision training for PyTorch: your loop, any precision, any parallelism.

    b = booster.Booster(mixed_precision="bf16", plugin=booster.plugin.TorchDDPPlugin())
    model, optimizer, *_ = b.boost(model, optimizer)
    loss = criterion(model(x), y)
    b.backward(loss, optimizer)
    optimizer.step()

Where to begin reading. Every room is a folder with a head in its `__init__.py`: the idea, an example where one helps, its
files in reading order. These follow the five lines above:

    booster.py           `Booster`: one class, with methods that call one thing each; facade/ is what they call
    mixed_precision/     a precision: its dtypes (`policy.py`), its place in `boost` (`configure.py`), the names of all
    plugin/              a placement on ranks: ddp/, zero.py, fsdp/, tensor_parallel/, sequence_parallel/, pipeline/,
                         expert_parallel.py; hybrid.py has several at once
    interface/           what `boost` returns: wrappers of model, optimizer and scheduler
    update/              from gradients to a step: unscale, clip, decide, apply; `choice.py` says which of these is taken
    masters/, shards/    float32 numbers of half-precision parameters; what of a tensor this rank holds
    checkpoint/          runs saved and loaded by names and shapes
    data/, nn/, number_formats/, frozen.py
                         loaders, schedules, formats of few bits, frozen weights in them
    common/, model/, tensors/, ranks/
                         what every room asks

Off this road: numerics/, memory/ and capture/ (tools that look at a run), kernels/ (the same steps on a GPU), integrations/,
cli/, launch.py, loss_scaler.py, logging.py. docs/design.md has the one seam between precision and placement, and in section 3
the file to open for a change; docs/design/words.md what a word means.
"""

import torch

from booster import logging, mixed_precision, nn, plugin
from booster.booster import Booster
from booster.common.installed import tell_untried
from booster.facade.batch_size import find_batch_size
from booster.facade.description import Description, describe
from booster.facade.foreign_names import AMP_TYPE
from booster.facade.frozen_weights import load_weights
from booster.launch import (
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    launch_notebook,
    seed_everything,
)
from booster.model.optimizers import register_elementwise
from booster.ranks.agreement import DistCoordinator
from booster.update.decision import LossScaleError, StepResult

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
