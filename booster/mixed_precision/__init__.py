"""Precisions, and the table of their names."""

from __future__ import annotations

from booster.common import arguments
from booster.loss_scaler import DynamicScale, LossScaler, NoScale, StaticScale
from booster.mixed_precision.amp import AutocastMixedPrecision, BF16MixedPrecision, FP16TorchMixedPrecision
from booster.mixed_precision.apex import FP16ApexMixedPrecision
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.fp32 import FP32
from booster.mixed_precision.keep_fp32 import Blocks, Ends, KeptModules, is_batch_norm, set_fp32_attr_to_module
from booster.mixed_precision.low_precision.autopilot import Autopilot
from booster.mixed_precision.low_precision.delayed import DelayedScaling
from booster.mixed_precision.low_precision.strategy import (
    FP8MixedPrecision,
    Int8MixedPrecision,
    LowPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
)
from booster.mixed_precision.naive import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, NaiveMixedPrecision
from booster.mixed_precision.naive_model import NaiveAMPModel
from booster.mixed_precision.policy import DtypePolicy, Placement, cast_parameters, install_keep_fp32
from booster.mixed_precision.schedule import PrecisionSchedule
from booster.mixed_precision.tf32 import TF32MixedPrecision

__all__ = [
    "AutocastMixedPrecision",
    "Autopilot",
    "BF16MixedPrecision",
    "BF16NaiveMixedPrecision",
    "Blocks",
    "DelayedScaling",
    "DtypePolicy",
    "DynamicScale",
    "Ends",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "FP32",
    "FP8MixedPrecision",
    "Int8MixedPrecision",
    "KeptModules",
    "LossScaler",
    "LowPrecision",
    "MXFP8MixedPrecision",
    "MixedPrecision",
    "NaiveAMPModel",
    "NVFP4MixedPrecision",
    "NaiveMixedPrecision",
    "NoScale",
    "Placement",
    "PrecisionSchedule",
    "StaticScale",
    "TF32MixedPrecision",
    "available",
    "cast_parameters",
    "install_keep_fp32",
    "is_batch_norm",
    "make",
    "register",
    "set_fp32_attr_to_module",
]

_REGISTRY: dict[str, type[MixedPrecision]] = {
    "fp32": FP32,
    "fp16": FP16TorchMixedPrecision,
    "bf16": BF16MixedPrecision,
    "fp16_naive": FP16NaiveMixedPrecision,
    "bf16_naive": BF16NaiveMixedPrecision,
    "fp16_apex": FP16ApexMixedPrecision,
    "tf32": TF32MixedPrecision,
    "fp8": FP8MixedPrecision,
    "mxfp8": MXFP8MixedPrecision,
    "nvfp4": NVFP4MixedPrecision,
    "int8": Int8MixedPrecision,
}


def register(name: str, strategy: type[MixedPrecision]) -> None:
    """Make `Booster(mixed_precision=name)` mean `strategy()`. Raises ValueError if the name is taken by another class.

    name: for `Booster(mixed_precision=...)`.
    strategy: a subclass of `MixedPrecision`, whose options have defaults.
    """
    arguments.text("name", name, "the name that Booster(mixed_precision=...) will know it by")
    if not (isinstance(strategy, type) and issubclass(strategy, MixedPrecision)):
        raise TypeError(
            f"register({name!r}, strategy) needs a subclass of booster.mixed_precision.MixedPrecision, got "
            f"{arguments.described(strategy)}"
        )
    if _REGISTRY.get(name, strategy) is not strategy:
        raise ValueError(f"mixed_precision {name!r} is already {_REGISTRY[name].__name__}; choose another name")
    _REGISTRY[name] = strategy


def available() -> list[str]:
    """Names that `Booster(mixed_precision=...)` accepts."""
    return sorted(_REGISTRY)


def make(precision: str | MixedPrecision | None, argument: str = "mixed_precision") -> MixedPrecision:
    """A strategy from what a user passed.

    precision: None means float32, a string is looked up, an object is returned.
    argument: what errors call it.
    """
    if precision is None:
        return FP32()
    if isinstance(precision, str):
        if precision not in _REGISTRY:
            raise ValueError(
                f"{argument}={precision!r} is unknown; choose one of {available()} or pass a MixedPrecision"
            )
        return _REGISTRY[precision]()
    if isinstance(precision, MixedPrecision):
        return precision
    raise TypeError(
        f"{argument} must be one of {available()}, a MixedPrecision object or None, got "
        f"{arguments.described(precision)}" + ("; pass an instance of it" if isinstance(precision, type) else "")
    )
