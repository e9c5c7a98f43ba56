"""Which parameter or buffer a tensor is part of, also where many share one memory."""

from __future__ import annotations

import torch

from booster.torch_internals import storage_key


class MemoryNames:
    """Names of tensors by where in memory they are on this rank; of two in one place, the first."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int, str]]] = {}

    def add(self, tensor: torch.Tensor, name: str) -> None:
        """Give the memory of a plain `tensor` a name."""
        if tensor.numel():
            start = tensor.storage_offset()
            length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            size = tensor.element_size()
            self._spans.setdefault(storage_key(tensor), []).append(
                (int(start) * size, int(start + length) * size, name)
            )

    def of(self, tensor: torch.Tensor) -> str:
        """Return the name of what holds the first inf or NaN of a plain `tensor`; "" where nothing has one."""
        spans = self._spans.get(storage_key(tensor), [])
        if len(spans) < 2:  # the usual case, without a search
            return spans[0][2] if spans else ""
        bad = tensor.detach().isfinite().logical_not().nonzero()
        if not len(bad):
            return ""
        place = tensor.storage_offset() + sum(
            int(i) * stride for i, stride in zip(bad[0], tensor.stride(), strict=True)
        )
        byte = place * tensor.element_size()
        return next((name for start, end, name in spans if start <= byte < end), "")
