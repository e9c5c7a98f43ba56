"""Precisions: how a model and its criterion compute, what its weights are stored in, whether the loss is scaled.

The idea: precision and parallelism are two axes. A precision is an object with hooks; a plugin never sees it, but its dtypes
as data (`DtypePolicy`). A precision never imports a plugin, but is given a `Placement` of six members. So each is one file,
and all pairs work or are refused by name.

An example: "bf16_naive", half-precision weights with float32 masters, under ZeRO.

    Booster(mixed_precision="bf16_naive")   `make` looks it up in `_REGISTRY`; `bind` gives it the device
    boost                                   `policy_for` -> DtypePolicy(param=bfloat16, keep_fp32={"bn1"}, ...)
                                            `keep_weights` keeps the float32 numbers; the plugin casts and shards by the policy
                                            `make_update` -> an update that steps float32 masters of each rank's shards
    model(x)                                x -> bfloat16; on a CPU without units for it, products in float32
    backward, step                          no loss scale; the masters are rounded to bfloat16 weights

Files and rooms, in reading order:

    base.py            the hooks, and the life of a precision
    configure.py       the order in which `boost` asks for them
    policy.py          DtypePolicy, how a model is cast by it, and what a precision sees of a plugin
    keep_fp32.py       modules that stay in float32, and how they compute there
    fp32.py            float32, and products of it that read fewer bits (TF32)
    half.py            half precision in common; autocast
    naive.py           half weights with masters, and `NaiveAMPModel` without a Booster
    half_products/     products of halves on a CPU, in float32; weights that only products read
    low_precision/     linear layers in 4 to 8 bits
    schedule.py        precisions one after another in one run
    apex/, apex_amp.py the levels of NVIDIA's apex, and its own interface
    hardware.py        what a device or a CPU multiplies in

What may be touched: a new precision is a file and a line of `_REGISTRY` (docs/guides/extend.md). The names below are public.
"""

from __future__ import annotations

from booster.common import arguments
from booster.loss_scaler import DynamicScale, LossScaler, NoScale, StaticScale
from booster.mixed_precision.apex import FP16ApexMixedPrecision
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.fp32 import FP32, TF32MixedPrecision
from booster.mixed_precision.half import AutocastMixedPrecision, BF16MixedPrecision, FP16TorchMixedPrecision
from booster.mixed_precision.keep_fp32 import Blocks, Ends, KeptModules, is_batch_norm, set_fp32_attr_to_module
from booster.mixed_precision.low_precision.autopilot import Autopilot
from booster.mixed_precision.low_precision.linear import DelayedScaling
from booster.mixed_precision.low_precision.low_precisions import (
    FP8MixedPrecision,
    Int8MixedPrecision,
    LowPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
)
from booster.mixed_precision.naive import (
    BF16NaiveMixedPrecision,
    FP16NaiveMixedPrecision,
    NaiveAMPModel,
    NaiveMixedPrecision,
)
from booster.mixed_precision.policy import DtypePolicy, Placement, cast_parameters, install_keep_fp32
from booster.mixed_precision.schedule import PrecisionSchedule

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
    strategy: a subclass of `MixedPrecision`; all its options have defaults."""
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
