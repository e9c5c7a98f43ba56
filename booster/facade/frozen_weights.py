"""Models with frozen weights in few bits: weights of files loaded so, and low-rank adapters of peft around a frozen model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from booster.common import arguments
from booster.common.devices import resolve_device
from booster.facade.booster_state import BoosterState
from booster.frozen import FORMS, Form, FrozenLinear
from booster.interface.model import PrecisionModule, boosted_wrapper
from booster.mixed_precision.keep_fp32 import KeepFP32, normalise_keep_fp32
from booster.model.modules import parents, tensor_places

StorageDtype = torch.dtype | Literal["int8", "fp8", "nf4"]

_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    storage_dtype: StorageDtype | None = None,
    compute_dtype: torch.dtype | None = None,
    keep: KeepFP32 | Iterable[KeepFP32] = (),
    device: str | torch.device | None = None,
) -> nn.Module:
    """Read the weights in `path` into `model`, in place, in the dtype that they are to be stored in; returns `model`.

    path: a safetensors file, or a folder of them with an index, as `save_pretrained` and `Booster.save_model` write it. What
        has no memory yet, or is to be frozen, is read first; then all else into its own memory. No second copy is made.
    storage_dtype: None stores parameters in the model's dtypes, which must be those of the file. torch.float32, torch.bfloat16
        or torch.float16 stores all floating parameters in it. "int8", "fp8" and "nf4" store the weights of linear layers in 8
        or 4 bits, with a float32 scale for each 128 or 64 numbers of a row; such a layer becomes a
        `booster.frozen.FrozenLinear`: its weight does not train and is unpacked in every pass. All else (biases, norms,
        embeddings) keeps the model's dtype, in which it must lose nothing; so do buffers always.
    compute_dtype: what frozen layers multiply in; None means the dtype of autocast, or of their input. With a floating
        storage_dtype that is another one, linear layers are frozen as well, and only their weights are stored in it.
    keep: linear layers that are not frozen, by type, name pattern or predicate, as `keep_fp32`. A weight that two modules
        share, and that of a subclass of `nn.Linear`, is never frozen.
    device: where what is on the meta device gets memory, which is in memory once; None as for `Booster`. All else stays where
        it is.

    Make the optimizer afterwards.
    Raises `booster.checkpoint.CheckpointError` that lists all names that one side lacks and all shapes and dtypes that differ,
    with nothing touched, and where a file that fits cannot be read to its end says whether weights hold parts of it;
    RuntimeError for a model that is boosted. No collective: every rank reads for itself.
    """
    from booster.checkpoint.streaming import (
        Storage,
        stream,
    )  # imported here: it takes time that most scripts need not spend

    arguments.instance("model", model, nn.Module, "a torch.nn.Module")
    if isinstance(model, PrecisionModule):
        raise RuntimeError("load_weights is for models before boost(); Booster.load_model loads into a boosted one")
    given = arguments.path("path", path)
    arguments.choice("storage_dtype", storage_dtype, (None, *_FLOATING, *FORMS))
    arguments.choice("compute_dtype", compute_dtype, (None, *_FLOATING))
    entries = normalise_keep_fp32(keep, "keep")
    target = resolve_device(device)
    if compute_dtype is not None and storage_dtype is None:
        raise ValueError(
            f"compute_dtype={compute_dtype} needs storage_dtype, which says what is stored; give the same to both where they "
            "are one"
        )
    linear: Form | torch.dtype | None = None
    if isinstance(storage_dtype, str):
        linear = FORMS[storage_dtype]
    elif compute_dtype not in (None, storage_dtype):
        linear = storage_dtype
    if entries and linear is None:
        raise ValueError(
            f"keep={arguments.shown(keep)} says which linear layers are not frozen, and none would be; leave it out, or pass "
            f"storage_dtype= one of {list(FORMS)}"
        )
    wide = storage_dtype if linear is None and isinstance(storage_dtype, torch.dtype) else None
    return stream(model, given, Storage(linear, wide, compute_dtype), keep=entries, device=target)


_HALF = (torch.bfloat16, torch.float16)


def enable_lora(
    self: BoosterState,
    model: nn.Module,
    pretrained_dir: str | os.PathLike[str] | None = None,
    lora_config: Any = None,
    *,
    storage_dtype: StorageDtype | None = None,
) -> Any:
    """LoRA, QLoRA: freeze `model` and put low-rank adapters of peft around it, in place; returns the PeftModel, to boost.

    pretrained_dir: a folder of `save_lora` or of peft: adapters from there train on. None makes new ones by `lora_config`.
    lora_config: a peft.LoraConfig, for new adapters; None where there is a folder.
    storage_dtype: how the weights of frozen linear layers are stored, as for `load_weights`: "nf4" (QLoRA), "int8", "fp8",
        torch.bfloat16 or torch.float16, from what they are now; all but those that others share, and what makes the logits.
        None leaves them. Adapters are float32.

    Raises ImportError without peft, RuntimeError for a boosted model, and ValueError for a model with adapters and for
    what cannot be on packed weights: DoRA, and adapters that begin with numbers of the base.
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError("adapters are those of peft: pip install peft") from error
    arguments.instance("model", model, nn.Module, "a torch.nn.Module")
    if isinstance(model, PrecisionModule):
        raise RuntimeError("enable_lora is for models before boost(); boost what it returns")
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"this {type(model).__name__} has adapters already; boost it as it is, or give the model inside"
        )
    # A folder has its own configuration, so one beside it would be ignored.
    if (pretrained_dir is None) == (lora_config is None):
        raise ValueError(
            "enable_lora takes lora_config, for new adapters, or pretrained_dir, a folder of save_lora, for those of before: "
            f"one of them, got {'neither' if lora_config is None else 'both'}"
        )
    arguments.choice("storage_dtype", storage_dtype, (None, *_HALF, *FORMS))
    if pretrained_dir is not None:
        folder = os.fspath(arguments.path("pretrained_dir", pretrained_dir))
        lora_config = peft.PeftConfig.from_pretrained(folder)
    if not isinstance(lora_config, peft.LoraConfig):
        what = "lora_config" if pretrained_dir is None else f"what {pretrained_dir} holds"
        raise TypeError(f"{what} must be a peft.LoraConfig, got {arguments.described(lora_config)}")
    form = FORMS[storage_dtype] if isinstance(storage_dtype, str) else storage_dtype
    if form is not None:
        _refuse_readers(lora_config, storage_dtype)
        freeze_linears(model, form, tuple(lora_config.modules_to_save or ()))
    if pretrained_dir is None:
        return peft.get_peft_model(model, lora_config)
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True)


def save_lora(self: BoosterState, model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the adapters (LoRA) of the boosted `model` alone, as peft reads them; a collective.

    folder: gets adapter_model.safetensors and adapter_config.json, for `enable_lora(pretrained_dir=...)`, for
    `PeftModel.from_pretrained` and for servers.

    `save_model(merge=True)` merges them. Raises ValueError for a model without adapters.
    """
    from booster.checkpoint.adapters import save_adapters

    save_adapters(boosted_wrapper(model, "save_lora"), arguments.path("folder", folder), self.plugin.group)


@torch.no_grad()
def freeze_linears(model: nn.Module, form: Form | torch.dtype, trained: tuple[str, ...]) -> None:
    """Store the weights of linear layers of `model` in `form`, in place, but those that others share, and what makes logits.

    Raises ValueError where there is nothing to store.
    """
    shared = {place.holder for places in tensor_places(model).values() if len(places) > 1 for place in places}
    # What makes logits stays wide: its rounding is the error of every log-probability.
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name and module not in shared and module is not head
        # Modules that train stay as they are.
        if not any(each.endswith(trained) for each in (*parents(name), name) if trained)
    }
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no linear layer to store in {form}; leave storage_dtype out")
    # One after another, so that two forms of all weights are never in memory.
    for name, linear in layers.items():
        weight = linear.weight.detach()
        stored = form.pack(weight) if isinstance(form, Form) else weight.to(form)
        model.set_submodule(name, FrozenLinear.of(linear, form, weight=stored))


def _refuse_readers(config: Any, storage_dtype: Any) -> None:
    """Raise ValueError where adapters begin with, or read, numbers of a base that is packed."""
    if config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        option = f"init_lora_weights={config.init_lora_weights!r}"
    elif config.use_dora:
        option = "use_dora=True"
    else:
        return
    raise ValueError(
        f"{option} reads the weights of the base, which storage_dtype={arguments.shown(storage_dtype)} packs; leave one of "
        "them out"
    )
