"""Moving a batch to a device, whatever it is made of."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor on `device`, in containers of the same types.

    Goes through tuples, namedtuples, lists, mappings, dataclasses, and objects with a `to(device)` method (such as a
    tokenizer's output, which moves itself in place); everything else is left alone. A tensor that is there already is
    not copied. Copies from pinned memory do not block; others wait for the copy.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=device.type == "cuda" and batch.is_pinned())
    if isinstance(batch, type):
        return batch
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)  # keeps the type, and what a subclass holds beside its items
        for key, value in batch.items():
            moved[key] = to_device(value, device)
        return moved
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    if dataclasses.is_dataclass(batch):
        instance: Any = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                # Past the class: it may be frozen.
                object.__setattr__(instance, field.name, to_device(getattr(batch, field.name), device))
        return instance
    return batch
