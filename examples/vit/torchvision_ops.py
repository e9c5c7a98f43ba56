"""Make `import torchvision` work with a CPU-only torch; call this before importing timm.

The usual torchvision wheel is built against CUDA, so with a CPU-only torch its compiled operators do not load.
torchvision tolerates that everywhere except for two operators, `nms` and `qnms`, for which it registers
shapes without asking whether the operators exist. timm imports torchvision, so timm fails as well.

The repair runs only after that very failure: declaring the operators where the compiled ones do load would register
them twice, which ends the process.
"""

import functools
import importlib
import sys

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@functools.cache
def declare_missing_ops() -> torch.library.Library:
    """Declare the two operators, without an implementation. The cache keeps the declaration alive."""
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    return library


def import_torchvision() -> None:
    """Import torchvision, repairing it first where its compiled operators are missing."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        declare_missing_ops()
        importlib.import_module("torchvision")
