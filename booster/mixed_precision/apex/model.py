"""The boosted model of apex: inputs and outputs cast whatever their width, and a state dict in float32."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.common.torch_internals.tensor_internals import add_state_dict_hook
from booster.interface.model import ForwardPrecision, ModelWrapper
from booster.tensors.cast_regions import cast_floats
from booster.tensors.trees import is_container


class ApexModel(ModelWrapper):
    """As `ModelWrapper`; cast are also float64 tensors, objects with a method `to`, and collections of any type."""

    @staticmethod
    def _cast(tree: Any, dtype: torch.dtype | None) -> Any:  # type: ignore[override]
        return tree if dtype is None else _cast(tree, dtype)

    _cast_in = _cast


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return cast_floats(tree, dtype, float64=True, instead=partial(_cast_object, dtype=dtype))


def _cast_object(value: Any, *, dtype: torch.dtype) -> Any:
    if isinstance(value, (str, bytes, bytearray, range, nn.Module)) or hasattr(value, "__array__"):
        return value
    if is_container(value):
        return NotImplemented
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(dtype)
    if not isinstance(value, Collection):
        return value
    items = [_cast(item, dtype) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(items)  # type: ignore[call-arg]


class CriterionPrecision:
    """What a criterion runs under: the precision's context; what it returns is left alone."""

    output_dtype = None

    def __init__(self, precision: ForwardPrecision) -> None:
        self._precision = precision

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._precision.forward_context()


def save_in_float32(model: nn.Module) -> None:
    """Make `state_dict()` of `model` and of each of its modules give float32 for float16 tensors. Repeating it is harmless."""
    for module in model.modules():
        add_state_dict_hook(module, _widen_own)


def _widen_own(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name in (*module._parameters, *module._buffers):
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
            state_dict[prefix + name] = value.float()
