"""Configuration dicts of the older interface, `fp16 = dict(mode=AMP_TYPE.NAIVE, ...)`, as a precision and a clip."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from booster.common import arguments
from booster.mixed_precision import (
    FP32,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
)


class AMP_TYPE(str, Enum):
    """The modes of an fp16 dict. PARALLEL is the older name of NAIVE; `AMP_TYPE("parallel")` is NAIVE as well."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"
    PARALLEL = "naive"  # noqa: PIE796  (an alias is what it is meant to be)

    @classmethod
    def _missing_(cls, value: object) -> AMP_TYPE | None:
        return cls.NAIVE if value == "parallel" else None


# The documented fields of each mode, with their documented defaults.
_FIELDS: dict[AMP_TYPE, dict[str, Any]] = {
    AMP_TYPE.TORCH: {
        "init_scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
    },
    AMP_TYPE.APEX: {
        "opt_level": "O1",
        "cast_model_type": None,
        "patch_torch_functions": None,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": None,
        "cast_model_outputs": None,
        "num_losses": 1,
        "verbosity": 1,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
        "scale_window": 2000,
        "backend": "auto",
    },
    AMP_TYPE.NAIVE: {
        "log_num_zeros_in_grad": False,
        "initial_scale": 2.0**32,
        "min_scale": 1.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "hysteresis": 2,
        "max_scale": 2.0**32,
        "dynamic_grad_scale": True,
        "verbose": False,
    },
}
_CLIPS = ("clip_grad", "clip_grad_norm")
_BUILD: dict[AMP_TYPE, Callable[..., MixedPrecision]] = {
    AMP_TYPE.TORCH: FP16TorchMixedPrecision,
    AMP_TYPE.APEX: FP16ApexMixedPrecision,
    AMP_TYPE.NAIVE: FP16NaiveMixedPrecision,
}


def translate(fp16: Mapping[str, Any] | None, clip_grad_norm: float | None = None) -> tuple[MixedPrecision, float]:
    """The precision that an fp16 dict asks for, and the norm to which `step()` clips; 0 is off.

    fp16: None or {} means float32. Otherwise it has the field `mode`, an `AMP_TYPE` or its value, and any of
    - mode TORCH: init_scale, growth_factor, backoff_factor, growth_interval;
    - mode NAIVE or PARALLEL: log_num_zeros_in_grad, initial_scale (2**32), min_scale, growth_factor, backoff_factor,
      growth_interval, hysteresis, max_scale, dynamic_grad_scale, verbose;
    - mode APEX: opt_level and the other arguments of apex's initialize, scale_window and backend;
    - every mode: enabled (False means float32) and clip_grad or clip_grad_norm, which are the same.

    Raises ValueError for a missing or unknown mode, an unknown field, and clips that contradict each other; TypeError
    for what is not a dict.
    """
    if fp16 is not None and not isinstance(fp16, Mapping):
        raise TypeError(
            f"fp16 must be a dict such as dict(mode=AMP_TYPE.NAIVE), or None, got {arguments.described(fp16)}"
        )
    fields = dict(fp16 or {})
    clips = {"clip_grad_norm": clip_grad_norm, **{f"fp16[{name!r}]": fields.pop(name, None) for name in _CLIPS}}
    clip = _one_clip({name: value for name, value in clips.items() if value is not None})
    if not fields and not fp16:
        return FP32(), clip
    mode = _mode(fields)
    enabled = fields.pop("enabled", True)
    arguments.flag("fp16['enabled']", enabled)
    legal = [*_FIELDS[mode], "enabled", *_CLIPS]
    for name in fields:
        if name not in legal:
            close = difflib.get_close_matches(str(name), legal, n=1, cutoff=0.0)
            raise ValueError(
                f"fp16[{name!r}] is no field of mode {mode.value!r}; did you mean {close[0]!r}? Its fields are {legal}"
            )
    if not enabled:
        return FP32(), clip
    return _BUILD[mode](**{**_FIELDS[mode], **fields}), clip


def _mode(fields: dict[str, Any]) -> AMP_TYPE:
    modes = [mode.value for mode in AMP_TYPE] + ["parallel"]
    if "mode" not in fields:
        close = difflib.get_close_matches("mode", fields, n=1)
        raise ValueError(
            f"fp16 has no field 'mode'{f'; is {close[0]!r} meant to be it?' if close else ''}: add "
            f"mode=AMP_TYPE.TORCH, or one of the strings {modes}"
        )
    mode = fields.pop("mode")
    try:
        return AMP_TYPE(mode)
    except ValueError:
        raise ValueError(f"fp16['mode']={mode!r} is not legal; choose an AMP_TYPE or one of {modes}") from None


def _one_clip(given: Mapping[str, Any]) -> float:
    for name, value in given.items():
        arguments.number(name, value, least=0, fix="0 is off")
    if len(set(given.values())) > 1:
        raise ValueError(
            f"the norm to clip to is given twice with different values: "
            f"{', '.join(f'{name}={value}' for name, value in given.items())}; give it once"
        )
    return float(next(iter(given.values()), 0.0))
