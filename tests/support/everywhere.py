"""Precisions that run on any machine, for any model."""

from booster import mixed_precision
from booster.mixed_precision import LowPrecision


def everywhere():
    """Names of those that need no hardware, and no model of large linear layers."""
    return [
        name for name in mixed_precision.available() if not issubclass(mixed_precision._REGISTRY[name], LowPrecision)
    ]
