"""`fp16_apex`: the optimization levels of NVIDIA's apex.amp."""

from booster.mixed_precision.apex.strategy import FP16ApexMixedPrecision

__all__ = ["FP16ApexMixedPrecision"]
