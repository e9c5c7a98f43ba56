"""Models in the dtype of their parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from booster.common import arguments
from booster.interface.model import ModelWrapper
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.hardware import ONEDNN, missing_on_cpu, switched
from booster.tensors.trees import HALF_DTYPES


class FP32(MixedPrecision):
    """No mixed precision: models compute in the dtype of their parameters.

    products: "bfloat16" lets oneDNN round what float32 products, convolutions and recurrent layers read to bfloat16, on a CPU
        where it does so (of x86 those with AMX), and raises ValueError elsewhere; one product is looked at. Sums, and all else,
        stay in float32.

    The half inputs of a float32 model, such as the activations of a half model around it, are widened. For "bfloat16" torch's
    own switch (`torch.backends.mkldnn`) is turned on around each forward and backward pass and restored after it. It is one for
    the process: what other threads multiply in the meantime is rounded too. torch multiplies small matrices by itself, in
    float32. Call `b.backward`, as always: a bare `loss.backward()` is outside of it.
    """

    _products: Literal["float32", "bfloat16"] = "float32"

    def __init__(self, *, products: Literal["float32", "bfloat16"] = "float32") -> None:
        self._products = arguments.choice("products", products, ("float32", "bfloat16"))

    @property
    def products(self) -> str | None:
        return None if self._products == "float32" else self._products

    def shown_options(self) -> dict[str, str]:
        return {} if self._products == "float32" else {"products": repr(self._products)}

    def bind(self, device: torch.device) -> None:
        super().bind(device)
        lacks = "" if self._products == "float32" else missing_on_cpu("products in bfloat16", device)
        if lacks:
            raise ValueError(f"{lacks}; use FP32(), or mixed_precision='bf16'")

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._products == "float32" else switched(ONEDNN, "bf16")

    def backward_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._products == "float32" else switched(ONEDNN, "bf16")

    def wrap_model(self, placed: nn.Module) -> ModelWrapper:
        dtypes = {param.dtype for param in placed.parameters()}
        widens = torch.float32 in dtypes and dtypes.isdisjoint(HALF_DTYPES)
        return ModelWrapper(placed, self, input_dtype=torch.float32 if widens else None)
