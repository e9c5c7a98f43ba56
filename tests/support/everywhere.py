"""Precisions that run on any machine, for any model."""

from booster import mixed_precision
from booster.mixed_precision import LowPrecision, TF32MixedPrecision


def everywhere():
    """Names of those that need no hardware, and no model of large linear layers."""
    registry, needy = mixed_precision._REGISTRY, (LowPrecision, TF32MixedPrecision)
    return [name for name in mixed_precision.available() if not issubclass(registry[name], needy)]
