"""Names of other libraries, for errors that say what to write instead, and configuration dicts of the older interface."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any

import torch

from booster.common import arguments
from booster.mixed_precision import (
    FP32,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
    available,
)
from booster.plugin import Plugin

_DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")
# What others call what we take: dtypes, precisions of Fabric and Accelerate, parallelisms of `booster estimate --plugin`.
_PRECISIONS = {
    **dict.fromkeys(("float32", "no", "32", "32-true"), "fp32"),
    **dict.fromkeys(("float16", "half", "16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16-mixed"), "bf16"),
    "16-true": "fp16_naive",
    "bf16-true": "bf16_naive",
}
_PLUGINS = {
    "single": "SingleDevice()",
    "ddp": "TorchDDPPlugin()",
    "fsdp": "TorchFSDPPlugin()",
    "zero1": "LowLevelZeroPlugin(stage=1)",
    "zero2": "LowLevelZeroPlugin(stage=2)",
}


# What others call arguments of `Booster`, and what its methods do.
_ARGUMENTS = {
    "precision": "it is called mixed_precision: Booster(mixed_precision={value})",
    "strategy": "a parallelism is a plugin: Booster(plugin=TorchDDPPlugin())",
    "accelerator": "the device is called so: Booster(device='cuda')",
    "devices": "the launcher chooses how many processes there are: booster run --nproc_per_node N script.py",
    "num_nodes": "the launcher chooses how many machines there are: booster run --nnodes N script.py",
    "cpu": "the device is called so: Booster(device='cpu')",
    "gradient_accumulation_steps": "a group of micro-batches is `with b.accumulate(model, optimizer, N):`",
    "fp16": "it is a precision: Booster(mixed_precision='fp16'), or Booster.from_config(fp16=...) for a dict",
    "bf16": "it is a precision: Booster(mixed_precision='bf16')",
}
_OPTIMIZER = "is a method of the boosted optimizer: optimizer."
_METHODS = {
    **dict.fromkeys(("prepare", "setup"), "is called boost: model, optimizer, *_ = b.boost(model, optimizer)"),
    **dict.fromkeys(("setup_module", "prepare_model"), "is called boost: model, *_ = b.boost(model)"),
    **dict.fromkeys(
        ("setup_optimizers", "prepare_optimizer"), "is part of boost: model, optimizer, *_ = b.boost(model, optimizer)"
    ),
    "setup_dataloaders": "is part of boost, or of b.prepare_dataloader(dataset, batch_size)",
    "prepare_data_loader": "is called prepare_dataloader: b.prepare_dataloader(dataset, batch_size)",
    "clip_grad_norm_": f"{_OPTIMIZER}clip_grad_by_norm(max_norm)",
    "clip_grad_value_": f"{_OPTIMIZER}clip_grad_by_value(clip_value)",
    "clip_gradients": f"{_OPTIMIZER}clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(clip_value)",
    **dict.fromkeys(("unscale_gradients", "unscale_"), f"{_OPTIMIZER}unscale_grads()"),
    "step": f"{_OPTIMIZER}step()",
    "zero_grad": f"{_OPTIMIZER}zero_grad()",
    "no_backward_sync": "is called no_sync: with b.no_sync(model):",
    "unwrap_model": "is called unwrap: b.unwrap(model)",
    "save_state": "is called save: b.save(folder, model, optimizer)",
    "load_state": "is called load: b.load(folder, model, optimizer)",
    "gather_for_metrics": "is gather with the loader: b.gather(tensor, dataloader)",
    "all_gather": "is called gather: b.gather(tensor)",
    "all_reduce": "is called reduce: b.reduce(tensor)",
    "barrier": "is called wait_for_everyone: b.wait_for_everyone()",
    **dict.fromkeys(("is_main_process", "is_global_zero"), "is called is_main: booster.is_main"),
    "launch": "is a function of the package: booster.launch_from_torch()",
}


def refuse_unknown(unknown: Mapping[str, Any], options: Collection[str]) -> None:
    """Raise TypeError if `unknown` names something; what it is called here, or the legal `options`, is in the message."""
    for name, value in unknown.items():
        fix = _ARGUMENTS.get(
            name, f"legal are {', '.join(options)}; options of a precision or a plugin are given to that"
        )
        meant = meant_by(value)[1] or "'bf16'"
        raise TypeError(f"Booster got an unexpected keyword argument {name!r}: {fix.format(value=meant)}")


def missing_method(name: str) -> str:
    """Return the text of the AttributeError for the attribute `name`, which `Booster` has not."""
    return f"'Booster' object has no attribute {name!r}" + (f"; it {_METHODS[name]}" if name in _METHODS else "")


def check_places(device: Any, mixed_precision: Any, plugin: Any) -> None:
    """Raise TypeError or ValueError where an argument of `Booster` got what belongs to another one, and name that; and where
    it got another name of what it takes, as of a dtype or a plugin."""
    for name, value in (("device", device), ("mixed_precision", mixed_precision), ("plugin", plugin)):
        meant, written = meant_by(value)
        is_other_name = isinstance(value, (str, torch.dtype)) and written != repr(str(value))
        if meant is not None and (meant != name or is_other_name):
            kind = ValueError if isinstance(value, str) and name != "plugin" else TypeError
            raise kind(f"{name}={arguments.shown(value)} is not legal; write Booster({meant}={written})")


def meant_by(value: Any) -> tuple[str | None, str]:
    """Return the argument of `Booster` that `value` is meant for, and what is written there; (None, "") for what is none."""
    if isinstance(value, (str, torch.dtype)):
        text = str(value).removeprefix("torch.")
        if text in available() or text in _PRECISIONS:
            return "mixed_precision", repr(_PRECISIONS.get(text, text))
        if text in _PLUGINS:
            return "plugin", _PLUGINS[text]
        return ("device", repr(text)) if _DEVICE.fullmatch(text) else (None, "")
    if isinstance(value, torch.device):
        return "device", repr(str(value))
    kind = value if isinstance(value, type) else type(value)
    for name, base in (("mixed_precision", MixedPrecision), ("plugin", Plugin)):
        if issubclass(kind, base):
            return name, f"{kind.__name__}(...)"
    return None, ""


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
    AMP_TYPE.TORCH: {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000},
    AMP_TYPE.APEX: {
        **dict.fromkeys(("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights")),
        **dict.fromkeys(("loss_scale", "cast_model_outputs", "min_loss_scale")),
        "opt_level": "O1",
        "num_losses": 1,
        "verbosity": 1,
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
