"""Where the tensors of a module came from: noted when they are loaded, read by who describes a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

_ORIGINS = "booster_loaded_from"


def note_origin(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Note that the tensor `name` of `module` itself was loaded from a file that has it in `dtype`."""
    module.__dict__[_ORIGINS] = {**origins_of(module), name: dtype}


def origins_of(module: nn.Module) -> Mapping[str, torch.dtype]:
    """Return the dtypes, by name, in which files had the tensors that `module` itself holds."""
    origins: Mapping[str, torch.dtype] = module.__dict__.get(_ORIGINS, {})
    return origins
