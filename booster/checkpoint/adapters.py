"""Low-rank adapters of peft in files: alone, or as part of what they adapt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.checkpoint.folder import write_beside
from booster.checkpoint.manifest import CheckpointError, agreed, is_first
from booster.checkpoint.serving import ExportSpec, sources_of
from booster.checkpoint.tensor_file import write_tensors
from booster.checkpoint.weight_files import replaced
from booster.common.arguments import listed
from booster.common.torch_internals.tensor_internals import gather_full
from booster.interface.model import ModelWrapper
from booster.model.modules import bare, parameter_names
from booster.model.params import is_dtensor
from booster.ranks.agreement import gather

_WRAPPER = "base_model.model."  # what peft puts before the names of a model
_SAVED = "modules_to_save"
_ENCODER = "prompt_encoder."  # and before those of an encoder of prompts


def check_merges(model: nn.Module) -> None:
    """Raise ValueError where `model` has no adapters, or others than sums of two products, which alone are merged here."""
    if not hasattr(model, "peft_config"):
        raise ValueError(
            f"merge=True is for models with adapters, as enable_lora gives, and this {type(model).__name__} has none; leave "
            "it out"
        )
    unfit = {
        f"adapter {name!r}": f"of the kind {_kind_of(config)}"
        for name, config in model.peft_config.items()  # type: ignore[operator, union-attr]
        if _kind_of(config) != "LORA"
    } or {name: why for name, layer in _of_peft(model) if (why := _unfit(layer))}
    if unfit:
        raise ValueError(
            f"merge=True adds products of two matrices to a weight, which these are not: {unfit}; merge them on one device, by "
            "merge_and_unload() of the model that b.unwrap gives, and write the result with save_pretrained"
        )


def save_adapters(model: ModelWrapper, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write the adapters of `model` into `folder`, as peft does; a collective.

    Raises ValueError where a parameter that trains is in none of the files.
    """
    own: Any = bare(model.module)
    if not hasattr(own, "peft_config"):
        raise ValueError(
            f"save_lora is for models with adapters, as enable_lora gives, and this {type(own).__name__} has none; "
            "save_model writes all weights"
        )
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    with agreed(group):
        kept = {adapter: _asked_of_peft(own, state, adapter) for adapter in own.peft_config}
        _refuse_what_is_left_out(own, state, kept, partial=getattr(model.module, "is_partial", False))
    # Whether a vocabulary has grown peft may ask the hub, which may answer one rank alone: none waits for what another lacks.
    names = gather({adapter: list(tensors) for adapter, tensors in kept.items()}, group)
    if any(each != names[0] for each in names):
        raise CheckpointError("peft found other tensors to write on one rank than on another; nothing was written")
    for adapter, tensors in kept.items():
        whole = {name: gather_full(value) if is_dtensor(value) else value for name, value in tensors.items()}
        with agreed(group):
            if is_first(group):
                _write(own.peft_config[adapter], whole, folder if adapter == "default" else folder / adapter)


def _asked_of_peft(model: Any, state: dict[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    """Return what peft writes of an adapter, by the names in its file."""
    from peft import get_peft_model_state_dict  # the model is of that package

    kept: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    return kept


def _refuse_what_is_left_out(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    kept: Mapping[str, Mapping[str, torch.Tensor]],
    *,
    partial: bool,
) -> None:
    if partial:
        raise ValueError(
            "save_lora writes what the first rank gathers, and stages of a pipeline hold layers that it lacks"
        )
    written = {id(value) for tensors in kept.values() for value in tensors.values()}
    # What peft writes may be another tensor: those rows that AdaLora leaves, and what an encoder makes of its prompts.
    names = {name.replace(f".{adapter}", ""): name for adapter in kept for name in state}
    written |= {id(state[names[name]]) for tensors in kept.values() for name in tensors.keys() & names.keys()}
    prompts = any("prompt_embeddings" in tensors for tensors in kept.values())
    left_out = [
        names_here[0]
        for param, names_here in parameter_names(model).items()
        if param.requires_grad
        and not any(id(state.get(name)) in written or (prompts and name.startswith(_ENCODER)) for name in names_here)
    ]
    if left_out:
        raise ValueError(
            f"peft writes nothing of {listed(left_out, 8)}, which train as the adapters do; name their modules in "
            "modules_to_save, or write all weights with save_model"
        )


def _write(config: Any, kept: dict[str, torch.Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in kept.items()}
    replaced(folder / "adapter_model.safetensors", lambda path: write_tensors(path, shapes, kept.__getitem__))
    write_beside(folder, config.save_pretrained)


def merged(model: nn.Module, names: Iterable[str]) -> tuple[nn.Module, dict[str, ExportSpec]]:
    """Return the model inside of adapters, and how its weights are made of the tensors `names`."""
    sources = sources_of(model, names, unpack=True)
    copies, originals = set(), set()
    for name, layer in _of_peft(model):
        if hasattr(layer, _SAVED):
            active = [each for each in layer.active_adapters if each in layer.modules_to_save]
            # Copies of modules that train next to adapters take the place of the originals.
            copies |= {f"{name}.{_SAVED}.{adapter}." for adapter in active}
            originals |= set() if active else {f"{name}.original_module."}
            continue
        weight = f"{name}.base_layer.weight"
        pairs = []
        for adapter in () if layer.merged else layer.active_adapters:  # else the products are in the weight already
            if adapter in layer.lora_A:
                a, b = f"{name}.lora_A.{adapter}.weight", f"{name}.lora_B.{adapter}.weight"
                pairs.append((a, b, float(layer.scaling[adapter])))
        transposed = bool(layer.fan_in_fan_out)
        sources[weight] = dataclasses.replace(sources[weight], adapters=tuple(pairs), transposed=transposed)
    found = {}
    for name, source in sources.items():
        for copy in (*copies, *originals):
            if name.startswith(copy):
                holder = copy.removesuffix(".").removesuffix(".original_module").partition(f".{_SAVED}.")[0]
                name = f"{holder}.{name.removeprefix(copy)}"
        if not any(f".{inside}" in name for inside in ("lora_", "original_module.", f"{_SAVED}.")):
            found[name.removeprefix(_WRAPPER).replace(".base_layer.", ".")] = source
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    return base, found


def _of_peft(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules of `model` that peft put into the place of others, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # the model is of that package
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def _kind_of(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _unfit(layer: Any) -> str:
    """Why what peft put around a module cannot be merged as a sum; empty where it can."""
    from peft.tuners.lora.layer import Linear
    from peft.utils import ModulesToSaveWrapper

    kind = type(layer).__name__
    if type(layer) is ModulesToSaveWrapper:
        return ""
    if type(layer) is not Linear:  # an embedding, single tokens, experts, layers quantised by others
        return f"{kind} around {type(getattr(layer, 'base_layer', layer)).__name__}"
    if any(layer.use_dora.values()) or layer.lora_variant:
        return f"{kind} of another variant, such as DoRA"
    if any(layer.lora_bias.values()):
        return f"{kind} with biases"
    return ""
