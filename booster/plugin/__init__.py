"""Parallelisms. Those on DTensors are loaded when first asked for: they import much of torch.distributed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from booster.model.modules import PlacedModule
from booster.plugin.base import Pipeline, Plugin, SingleDevice
from booster.plugin.ddp.fp8_communication import FP8Communication
from booster.plugin.ddp.plugin import TorchDDPPlugin

if TYPE_CHECKING:
    from booster.plugin.fsdp.plugin import TorchFSDPPlugin
    from booster.plugin.hybrid import HybridParallelPlugin
    from booster.plugin.zero.plugin import LowLevelZeroPlugin

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
    "HybridParallelPlugin": "booster.plugin.hybrid",
    "LowLevelZeroPlugin": "booster.plugin.zero.plugin",
    "TorchFSDPPlugin": "booster.plugin.fsdp.plugin",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
