"""Packages that lean on torchvision, for ranks, which have no fixtures."""

import contextlib
import importlib.util
import warnings
from importlib import import_module
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def package(name):
    """timm or transformers, also where torchvision's compiled operators do not load."""
    spec = importlib.util.spec_from_file_location("torchvision_ops", EXAMPLES / "vit" / "torchvision_ops.py")
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
        with contextlib.suppress(ModuleNotFoundError):
            module.import_torchvision()
        return import_module(name)
