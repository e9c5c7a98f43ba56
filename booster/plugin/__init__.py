"""Parallelisms. Those on DTensors are loaded when first asked for: they import much of torch.distributed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from booster.modules import PlacedModule
from booster.plugin.base import Pipeline, Plugin, SingleDevice
from booster.plugin.fp8_communication import FP8Communication
from booster.plugin.torch_ddp import TorchDDPPlugin

if TYPE_CHECKING:
    from booster.plugin.hybrid_parallel import HybridParallelPlugin
    from booster.plugin.low_level_zero import LowLevelZeroPlugin
    from booster.plugin.torch_fsdp import TorchFSDPPlugin

__all__ = [
    "FP8Communication",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Pipeline",
    "PlacedModule",
    "Plugin",
    "SingleDevice",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]

_LAZY = {
    "HybridParallelPlugin": "booster.plugin.hybrid_parallel",
    "LowLevelZeroPlugin": "booster.plugin.low_level_zero",
    "TorchFSDPPlugin": "booster.plugin.torch_fsdp",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
