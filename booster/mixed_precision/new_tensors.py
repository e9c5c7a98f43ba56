"""Making new tensors in half precision, for models that make some of their own in forward and half weights to meet them."""

from __future__ import annotations

from typing import Any

import torch

from booster.mixed_precision.engine import run_engine
from booster.tensors.cast_regions import CastMode

_FLOATING = {
    torch.bartlett_window,
    torch.blackman_window,
    torch.empty,
    torch.empty_permuted,
    torch.empty_strided,
    torch.eye,
    torch.fft.fftfreq,
    torch.fft.rfftfreq,
    torch.hamming_window,
    torch.hann_window,
    torch.kaiser_window,
    torch.linspace,
    torch.logspace,
    torch.ones,
    torch.rand,
    torch.randn,
    torch.zeros,
}
_BY_VALUE = {torch.arange, torch.as_tensor, torch.asarray, torch.full, torch.scalar_tensor, torch.tensor}


class NewTensors(CastMode):
    """While active, torch functions that make tensors make them in `dtype` where nobody says which and it would be float32.

    What `torch.set_default_dtype` does, for one thread. Integers, and copies of arrays and tensors, keep their dtype. It stays
    active in `torch.autograd.backward`, for activations that are recomputed.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward:  # which a mode otherwise leaves
            with self:
                return run_engine(*args, **kwargs)
        if self.enabled and (func in _FLOATING or func in _BY_VALUE) and self._is_open(func, args, kwargs):
            kwargs = {**kwargs, "dtype": self._dtype}
        return func(*args, **kwargs)

    def _is_open(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the call leaves the dtype to torch, which would take float32."""
        if (
            kwargs.get("dtype") is not None
            or kwargs.get("out") is not None
            or torch.get_default_dtype() != torch.float32
        ):
            return False
        if func in _FLOATING:
            return True
        values = [*args, *(kwargs.get(name) for name in ("data", "obj", "start", "end", "step", "fill_value", "s"))]
        return not any(hasattr(value, "dtype") for value in values) and func(*args, **kwargs).dtype == torch.float32
