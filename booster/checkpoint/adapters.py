"""Low-rank adapters of peft in files: alone, or as part of what they adapt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.checkpoint.agree import agree_on_success, is_first
from booster.checkpoint.folder import write_beside
from booster.checkpoint.serving import Source, sources_of
from booster.checkpoint.tensor_file import write_tensors
from booster.checkpoint.weights import replaced
from booster.ground.torch_internals import gather_whole
from booster.model.dtensors import is_dtensor

_WRAPPER = "base_model.model."  # what peft puts before the names of a model
_SAVED = "modules_to_save"


def check_merges(model: nn.Module) -> None:
    """Raise ValueError where `model` has no adapters, or others than sums of two products, which alone are merged here."""
    if not hasattr(model, "peft_config"):
        raise ValueError(
            f"merge=True is for models with adapters, as enable_lora gives, and this {type(model).__name__} has none; leave "
            "it out"
        )
    unfit = {name: why for name, layer in _adapted(model) if (why := _unfit(layer))}
    if unfit:
        raise ValueError(
            f"merge=True adds products of two matrices to a weight, which these are not: {unfit}; merge them on one device, by "
            "merge_and_unload() of the model that b.unwrap gives, and write the result with save_pretrained"
        )


def save_adapters(
    model: nn.Module, state: Mapping[str, torch.Tensor], folder: Path, group: dist.ProcessGroup | None
) -> None:
    """Write the adapters of `model` into `folder`, as peft does; a collective. state: its state dict on this rank."""
    if not hasattr(model, "peft_config"):
        raise ValueError(
            f"save_lora is for models with adapters, as enable_lora gives, and this {type(model).__name__} has none; "
            "save_model writes all weights"
        )
    for adapter in model.peft_config:  # type: ignore[union-attr]
        own = {name: gather_whole(value) if is_dtensor(value) else value for name, value in _own(state, adapter)}
        problem: Exception | None = None
        try:
            if is_first(group):
                _write(model, own, adapter, folder if adapter == "default" else folder / adapter)
        except Exception as error:  # raised again once the others know
            problem = error
        agree_on_success(problem, group)


def _write(model: Any, own: dict[str, torch.Tensor], adapter: str, folder: Path) -> None:
    from peft import get_peft_model_state_dict  # the model is of that package

    folder.mkdir(parents=True, exist_ok=True)
    kept = get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter)
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in kept.items()}
    replaced(folder / "adapter_model.safetensors", lambda path: write_tensors(path, shapes, kept.__getitem__))
    write_beside(folder, model.peft_config[adapter].save_pretrained)


def _own(state: Mapping[str, torch.Tensor], adapter: str) -> list[tuple[str, torch.Tensor]]:
    """What of `state` belongs to the adapter: its matrices, and its copies of modules."""
    return [
        (name, value)
        for name, value in state.items()
        if f".{adapter}." in name and (".lora_" in name or f".{_SAVED}." in name)
    ]


def merged(model: nn.Module, names: Iterable[str]) -> tuple[nn.Module, dict[str, Source]]:
    """Return the model inside of adapters, and how its weights are made of those tensors of `model` that `names` are.

    model: one that `check_merges` lets pass. Copies of modules that train beside adapters take the place of the originals.
    """
    sources = sources_of(model, names, unpack=True)
    for name, layer in _adapted(model):
        weight = f"{name}.base_layer.weight"
        pairs = []
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                a, b = f"{name}.lora_A.{adapter}.weight", f"{name}.lora_B.{adapter}.weight"
                pairs.append((a, b, float(layer.scaling[adapter])))
        transposed = bool(getattr(layer, "fan_in_fan_out", False))
        sources[weight] = dataclasses.replace(sources[weight], adapters=tuple(pairs), transposed=transposed)
    copies = {
        f"{name}.{_SAVED}.{adapter}."
        for name, module in model.named_modules()
        if hasattr(module, _SAVED)
        for adapter in module.active_adapters
    }
    found = {}
    for name, source in sources.items():
        if ".lora_" in name or ".original_module." in name:
            continue
        for copy in copies:
            if name.startswith(copy):
                name = copy[: copy.index(f".{_SAVED}.") + 1] + name.removeprefix(copy)
        if f".{_SAVED}." not in name:
            found[name.removeprefix(_WRAPPER).replace(".base_layer.", ".")] = source
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    return base, found


def _adapted(model: nn.Module) -> Iterable[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]


def _unfit(layer: Any) -> str:
    """Why an adapted layer cannot be merged as a sum; empty where it can."""
    kind = type(layer).__name__
    if not isinstance(layer.base_layer, nn.Linear) and type(layer.base_layer).__name__ != "Conv1D":
        return f"{kind} around {type(layer.base_layer).__name__}"
    if any(getattr(layer, "use_dora", {}).values()) or len(getattr(layer, "lora_variant", {})):
        return f"{kind} of another variant, such as DoRA"
    if any(getattr(layer, "lora_bias", {}).values()):
        return f"{kind} with biases"
    return ""
