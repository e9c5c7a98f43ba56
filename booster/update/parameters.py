"""The parameters of one optimizer: what they are called, and whether they are what they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from booster.tensors.trees import HALF_DTYPES

SPARSE = "{name}, {dtype}, has a sparse gradient, which flat buckets do not step; build its module with sparse=False"
KEPT_FLOAT32 = ", or keep it in float32 (keep_fp32=...)"

_DTYPE = attrgetter("dtype")  # of every parameter, without a Python call for each


def name_of_stranger(group: int, place: int) -> str:
    """What a parameter of no boosted model is called in states and checkpoints: by its group and its place there."""
    return f"group {group}, parameter {place}"


class Parameters:
    """What the groups of `optimizer` hold. names: of each, for reports.

    are_full: whether none was half when that was noted last.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[Any, str]) -> None:
        self._optimizer = optimizer
        self.names = names
        self.note_dtypes()

    def held(self) -> list[torch.Tensor]:
        """What the optimizer's groups hold now."""
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def name_of(self, param: torch.Tensor) -> str:
        """The qualified name of `param`, for reports."""
        return self.names.get(param, f"a parameter of shape {tuple(param.shape)}")

    def names_of(self, indices: Sequence[int], params: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """The names of those of `params`."""
        return tuple(self.name_of(params[index]) for index in indices)

    def refuse_sparse_halves(self) -> None:
        """Raise RuntimeError where a half parameter has a sparse gradient, to which torch may not be able to add another."""
        for param in self.held():
            if param.dtype in HALF_DTYPES and param.grad is not None and param.grad.is_sparse:
                raise RuntimeError(SPARSE.format(name=self.name_of(param), dtype=param.dtype) + KEPT_FLOAT32)

    def note_dtypes(self) -> None:
        """Note whether parameters are float32 now, so that a step can tell if they were made half since."""
        self.are_full = HALF_DTYPES.isdisjoint(map(_DTYPE, self.held()))

    def check_full(self, params: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError if all parameters were float32 or float64, and some of `params` are half now."""
        half = [param for param in params if param.dtype in HALF_DTYPES] if self.are_full else []
        if half:
            raise RuntimeError(
                f"{self.name_of(half[0])} was float32 at boost() and is {half[0].dtype} now, as after model.half() or "
                "model.to(dtype): no float32 master stands behind it, and small updates would be lost. Leave the weights as "
                "they are, since the precision casts what it computes; for half weights with masters use "
                "mixed_precision='fp16_naive' or 'bf16_naive'"
            )
