"""Weights given to a model before it is boosted: in which dtype they are stored, and in which they are computed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from booster.common import arguments
from booster.common.devices import resolve_device
from booster.frozen import FORMS, Form
from booster.interface.model import PrecisionModule
from booster.mixed_precision.keep_fp32 import KeepFP32, normalise_keep_fp32

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
        `booster.frozen.FrozenLinear`, whose weight does not train and is unpacked in every pass. All else (biases, norms,
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
    there = resolve_device(device)
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
    return stream(model, given, Storage(linear, wide, compute_dtype), keep=entries, device=there)
