"""Parallelisms."""

from booster.plugin.base import Plugin, SingleDevice
from booster.plugin.torch_ddp import TorchDDPPlugin

__all__ = ["Plugin", "SingleDevice", "TorchDDPPlugin"]
