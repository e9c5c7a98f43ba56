"""Names that other libraries have for what `Booster` takes and does, for errors that say what to write instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from booster.common import arguments
from booster.mixed_precision import MixedPrecision, available
from booster.plugin import Plugin

_DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")
# What others call what we take: dtypes, the precisions of Fabric and Accelerate, and parallelisms as `booster estimate
# --plugin` names them.
_PRECISIONS = {
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "no": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "16": "fp16",
    "16-mixed": "fp16",
    "16-true": "fp16_naive",
    "bf16-mixed": "bf16",
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
    "prepare": "is called boost: model, optimizer, *_ = b.boost(model, optimizer)",
    "setup": "is called boost: model, optimizer, *_ = b.boost(model, optimizer)",
    "setup_module": "is called boost: model, *_ = b.boost(model)",
    "setup_optimizers": "is part of boost: model, optimizer, *_ = b.boost(model, optimizer)",
    "setup_dataloaders": "is part of boost, or of b.prepare_dataloader(dataset, batch_size)",
    "prepare_model": "is called boost: model, *_ = b.boost(model)",
    "prepare_optimizer": "is part of boost: model, optimizer, *_ = b.boost(model, optimizer)",
    "prepare_data_loader": "is called prepare_dataloader: b.prepare_dataloader(dataset, batch_size)",
    "clip_grad_norm_": f"{_OPTIMIZER}clip_grad_by_norm(max_norm)",
    "clip_grad_value_": f"{_OPTIMIZER}clip_grad_by_value(clip_value)",
    "clip_gradients": f"{_OPTIMIZER}clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(clip_value)",
    "unscale_gradients": f"{_OPTIMIZER}unscale_grads()",
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
    "is_main_process": "is called is_main: booster.is_main",
    "is_global_zero": "is called is_main: booster.is_main",
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
