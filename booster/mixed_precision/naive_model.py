"""A model that computes in half precision with half-precision parameters, on its own."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.common import arguments
from booster.interface.model import PrecisionModule
from booster.interface.transparent import refuse_torchscript
from booster.mixed_precision.hardware import CUDA, missing, switched
from booster.mixed_precision.keep_fp32 import KeepFP32, is_batch_norm
from booster.mixed_precision.naive import BufferAverage
from booster.mixed_precision.policy import cast_parameters, half_policy

_DTYPES = {
    "torch.float16": torch.float16,
    "torch.half": torch.float16,
    "torch.bfloat16": torch.bfloat16,
    "torch.float32": torch.float32,
}
_TF32 = "torch.tf32"


class NaiveAMPModel(PrecisionModule):
    """`model` with parameters, activations and gradients in `dtype`; the model is cast in place.

    output_to_fp32: return float32; False returns what the model computes.
    dtype: torch.float16, torch.bfloat16 or torch.float32, or one of the strings "torch.float16", "torch.half",
        "torch.bfloat16", "torch.float32". "torch.tf32" is float32 with a forward in TF32, on a CUDA device that has it;
        a backward pass, which is the caller's, multiplies as the process has it set.
    sync_buffer: before every forward in training, average the floating buffers over `parallel_group`; see `BufferAverage`.
    parallel_group: ranks that buffers are averaged over; None means the whole world.
    keep_fp32: modules that keep float32 parameters and compute in float32, by type, name pattern or predicate (see
        `KeptModules`), besides those that `set_fp32_attr_to_module` marked.

    Floating inputs are cast to `dtype` in whatever container, integers and float64 stay. Attributes, state dict keys, `train`
    and `eval` are those of `model`. There is no loss scale and there are no master weights: for those, give the model to a
    `Booster` with the precision "fp16_naive" or "bf16_naive" instead.

    Raises ValueError for another dtype and for a module kept in float32 that shares a parameter with one that is not,
    TypeError for what is not a module.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> NaiveAMPModel:
        if "parallel_mode" in kwargs:
            raise TypeError(
                "NaiveAMPModel takes no parallel_mode; pass the process group over which buffers are averaged as "
                "parallel_group, or None for the whole world"
            )
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        output_to_fp32: bool = True,
        dtype: torch.dtype | str = torch.float16,
        sync_buffer: bool = True,
        parallel_group: dist.ProcessGroup | None = None,
        *,
        keep_fp32: KeepFP32 | Iterable[KeepFP32] = is_batch_norm,
    ) -> None:
        refuse_torchscript(model, "model")
        arguments.instance("model", model, nn.Module, "a torch.nn.Module")
        arguments.flag("output_to_fp32", output_to_fp32)
        arguments.flag("sync_buffer", sync_buffer)
        if parallel_group is not None:
            arguments.group("parallel_group", parallel_group)
        if isinstance(model, PrecisionModule):
            raise RuntimeError(f"this {type(model).__name__} runs under a precision already; pass the model inside it")
        tf32 = isinstance(dtype, str) and dtype == _TF32
        if tf32:
            device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
            lacks = missing("tf32", device, capability=(8, 0), generations="Ampere or newer")
            if lacks:
                raise ValueError(
                    f"{lacks}: the model is on {device}. Move it first; or give it to Booster(mixed_precision="
                    "TF32MixedPrecision(emulate=True)), which computes such numbers on any device, slowly, as a rehearsal"
                )
        dtype = torch.float32 if tf32 else parse_dtype(dtype)
        policy = half_policy(model, dtype, keep_fp32=keep_fp32, output=torch.float32 if output_to_fp32 else None)
        super().__init__(cast_parameters(model, policy), _Output(policy.output, tf32=tf32), input_dtype=dtype)
        if sync_buffer:
            self.register_forward_pre_hook(BufferAverage(parallel_group))


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype that a torch dtype or one of its documented names means. Raises ValueError for any other."""
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    raise ValueError(
        f"dtype={arguments.shown(dtype)} is not legal; pass the torch dtype or the string of one of {[*_DTYPES, _TF32]}"
    )


class _Output:
    """The `ForwardPrecision` of a model that computes in the dtype of its parameters."""

    def __init__(self, output_dtype: torch.dtype | None, *, tf32: bool) -> None:
        self.output_dtype = output_dtype
        self._tf32 = tf32

    def forward_context(self) -> AbstractContextManager[Any]:
        return switched(CUDA, "tf32") if self._tf32 else nullcontext()
