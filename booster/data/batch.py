"""Batches: containers of tensors, moved to a device."""

from __future__ import annotations

from typing import Any

import torch

from booster.trees import map_tensors


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor on `device`, in containers of the same types, all of them new.

    batch: see `booster.trees`; an object with a method `to(device)` (such as a tokenizer's output, which moves itself in
    place) moves itself. A tensor that is there already is not copied. Copies from pinned memory do not block; others wait
    for the copy.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=device.type == "cuda" and tensor.is_pinned())

    def move_itself(value: Any) -> Any:
        return (
            value.to(device) if callable(getattr(value, "to", None)) and not isinstance(value, type) else NotImplemented
        )

    return map_tensors(move, batch, instead=move_itself, copy_containers=True)
