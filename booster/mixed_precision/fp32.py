"""Models in the dtype of their parameters, and with products and convolutions that read 10 bits of mantissa (TF32)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from booster.common import arguments
from booster.common.snapshot import attributes
from booster.common.torch_internals.tensor_internals import TorchDispatchMode
from booster.interface.model import ModelWrapper
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.hardware import CUDA, ONEDNN, missing, missing_on_cpu, switched
from booster.number_formats.number_format import TF32, round_to
from booster.tensors.cast_regions import surrounding
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
        return nullcontext() if self._products == "float32" else switched(ONEDNN, "bf16")  # no call of its own

    def wrap_model(self, placed: nn.Module) -> ModelWrapper:
        dtypes = {param.dtype for param in placed.parameters()}
        widens = torch.float32 in dtypes and dtypes.isdisjoint(HALF_DTYPES)
        return ModelWrapper(placed, self, input_dtype=torch.float32 if widens else None)


_logger = logging.getLogger(__name__)


class TF32MixedPrecision(FP32):
    """Float32 with products and convolutions that may run in TF32, forward and backward; weights and gradients stay float32.

    emulate: False needs a CUDA device of compute capability 8.0 (Ampere) or above, and raises ValueError elsewhere; True rounds
        what products read to TF32 on any device, and is slower than float32; "auto" emulates where it must.

    torch's own switch (`fp32_precision` of its backends) is turned on around each forward and backward pass and restored after
    it. It is one for the process: what other threads multiply in the meantime runs in TF32 too. Emulated are linear layers,
    products, convolutions and attention, not recurrent layers; a compiled model runs uncompiled. Call `b.backward`, as always:
    a bare `loss.backward()` is outside of it.
    """

    def __init__(self, *, emulate: bool | Literal["auto"] = False) -> None:
        self._emulate = arguments.choice("emulate", emulate, (True, False, "auto"))
        self._said = False

    def shown_options(self) -> dict[str, str]:
        return {"emulate": repr(self._emulate)} if self._emulate else {}

    def bind(self, device: torch.device) -> None:
        super().bind(device)
        if self._runs() or self._said:
            return
        _logger.warning("tf32 is emulated on %s: a rehearsal of its numbers, slower than float32", device)
        self._said = True

    def tell_no_rehearsal(self) -> None:
        self._said = True

    def forward_context(self) -> AbstractContextManager[Any]:
        # A switch of the process, as torch has no other; `switched` gives it back after each pass.
        return switched(CUDA, "tf32") if self._runs() else _rehearsed()

    def backward_context(self) -> AbstractContextManager[Any]:
        return self.forward_context()

    @property
    def products(self) -> str:
        return "tf32"

    @property
    def is_rehearsal(self) -> bool:
        return not self._runs()

    def _runs(self) -> bool:
        """Whether the hardware does it, and not the emulation; raises ValueError where neither may."""
        if self._emulate is True:
            return False
        lacks = missing("tf32", self.device, capability=(8, 0), generations="Ampere or newer")
        if lacks and not self._emulate:
            raise ValueError(
                f"{lacks}; TF32MixedPrecision(emulate=True) computes such numbers on any device, slowly, as a rehearsal"
            )
        return not lacks


_aten = torch.ops.aten
# Which arguments a tensor core multiplies.
_OPERANDS: Mapping[Any, tuple[int, ...]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
    _aten.convolution.default: (0, 1),
    _aten.convolution_backward.default: (0, 1, 2),
}


class RoundedOperands(TorchDispatchMode):
    """While active, float32 products and convolutions of this thread, autograd's included, read operands rounded to TF32.

    To the nearest, ties to even; sums are in float32. enabled: while False it does nothing.
    """

    enabled = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        operands = _OPERANDS.get(func, ()) if self.enabled else ()
        if operands:
            args = tuple(
                round_to(each, TF32) if place in operands and each.dtype == torch.float32 else each
                for place, each in enumerate(args)
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _rehearsed() -> Iterator[None]:
    cuda = torch.backends.cuda
    enabled = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
    }
    operands, backends = RoundedOperands(), [backend for backend, is_enabled in enabled.items() if is_enabled]

    @contextmanager
    def left() -> Iterator[None]:
        with attributes([operands], enabled=False), sdpa_kernel(backends):
            yield

    # By the math backend attention is made of products, which the mode sees.
    with surrounding(left), operands, sdpa_kernel(SDPBackend.MATH):
        yield
