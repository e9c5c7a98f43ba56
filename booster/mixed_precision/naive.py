"""Half precision throughout: with float32 masters under a Booster, and as a model by itself, `NaiveAMPModel`, without."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.interface.model import CriterionWrapper, ModelWrapper, PrecisionModule
from booster.interface.transparent import refuse_torchscript
from booster.loss_scaler import DynamicScale, LossScaler, check_scale, check_scale_options
from booster.masters.formats import MasterOptions, MasterWeights, Rounding
from booster.masters.quantized_state import States
from booster.masters.update import choose_master_update
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.fp32 import TF32MixedPrecision
from booster.mixed_precision.half import HalfPrecision
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.mixed_precision.hardware import missing
from booster.mixed_precision.keep_fp32 import KeepFP32, is_batch_norm, normalise_keep_fp32
from booster.mixed_precision.policy import DtypePolicy, Placement, cast_parameters, half_policy
from booster.model.modules import PlacedModule
from booster.update.context import UpdateOptions


class NaiveMixedPrecision(HalfPrecision):
    """Half-precision weights, in `dtype`, with float32 master weights. Base of `fp16_naive` and `bf16_naive`.

    log_num_zeros_in_grad: count zero gradient elements for `StepResult.num_zeros_in_grad`; one read of them a step.
    clip_grad_norm: clip gradients to this norm inside every `step()`; 0 does not.
    verbose: log changes of the loss scale and the number of zeros through the logger of `booster.masters.update`.
    output_to_fp32: the model returns float32.
    sync_buffer: average floating buffers over the ranks that share the batch at every forward in training.
    keep_fp32: modules that keep float32 parameters and compute in it, by type, name pattern or predicate (see `KeptModules`);
        BatchNorm by default.
    master_weights: what is kept besides half weights. "fp32": a float32 copy, 4 bytes a parameter. "split": the 16 bits that
        the half weight lacks, 2 bytes, to the same result. "split24": 8 of these, 1 byte, rounded stochastically. "none":
        nothing. "auto": "split" for bfloat16 and elementwise optimizers, else "fp32".
    rounding: of updates, with master_weights="none": "nearest", "stochastic", or "kahan", which keeps the error in 2 bytes.
    sdpa_fp32: run scaled_dot_product_attention in float32 while training; "auto" does so on a CPU, where its half-precision
        backward is several times slower, unless `half_products` of the `Booster` is "native".
    default_dtype: tensors that forward makes without saying in which dtype, as by `torch.zeros`, are `dtype` too, and not
        float32, which half weights do not multiply with.
    states: how optimizer states are kept: "fp32" as they are, "bf16" in 2 bytes an element, "8bit" in 1.0625.
    half_buffers: float buffers stored in half like weights, by their name or by modules that hold them, as in keep_fp32. Others
        stay as they were registered, and do not widen halves.
    fp32_buffers: float buffers that make float32 of halves that they meet, as torch has it; likewise.

    A model that arrives in float32 lends its weights to the masters before it is cast; one in half gives what it has.
    """

    dtype: torch.dtype

    def __init__(
        self,
        log_num_zeros_in_grad: bool = False,
        clip_grad_norm: float = 0.0,
        verbose: bool = False,
        output_to_fp32: bool = True,
        sync_buffer: bool = False,
        keep_fp32: KeepFP32 | Iterable[KeepFP32] = is_batch_norm,
        master_weights: MasterWeights = "auto",
        rounding: Rounding = "nearest",
        sdpa_fp32: bool | Literal["auto"] = "auto",
        default_dtype: bool = False,
        states: States = "fp32",
        half_buffers: KeepFP32 | Iterable[KeepFP32] = (),
        fp32_buffers: KeepFP32 | Iterable[KeepFP32] = (),
    ) -> None:
        arguments.flag("output_to_fp32", output_to_fp32)
        count_zeros = arguments.flag("log_num_zeros_in_grad", log_num_zeros_in_grad)
        self._max_norm = float(arguments.number("clip_grad_norm", clip_grad_norm, least=0, fix="0 is off"))
        verbose = arguments.flag("verbose", verbose)
        self._choose_update = functools.partial(choose_master_update, count_zeros=count_zeros, verbose=verbose)
        self._keep_fp32 = normalise_keep_fp32(keep_fp32)
        self._half_buffers = normalise_keep_fp32(half_buffers, "half_buffers")
        self._fp32_buffers = normalise_keep_fp32(fp32_buffers, "fp32_buffers")
        self._sync_buffer = arguments.flag("sync_buffer", sync_buffer)
        self.kept = MasterOptions(master_weights=master_weights, rounding=rounding, states=states)
        arguments.flag("default_dtype", default_dtype)
        if not hasattr(self, "dtype"):
            raise TypeError(
                f"{type(self).__name__} has no dtype; use FP16NaiveMixedPrecision or BF16NaiveMixedPrecision"
            )
        self._new_tensors = self.dtype if default_dtype else None
        self.half_products = HalfProducts(self.dtype, sdpa_fp32)
        self.policy = DtypePolicy(param=self.dtype, output=torch.float32 if output_to_fp32 else None)

    def configure(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        criterion: Callable[..., Any] | None = None,
        *,
        placement: Placement | None = None,
        options: UpdateOptions | None = None,
    ) -> tuple[Any, Any, ModelWrapper | CriterionWrapper | None]:
        options = options or UpdateOptions()
        if self._max_norm:
            if options.clip_grad_norm not in (0.0, self._max_norm):
                raise ValueError(
                    f"clip_grad_norm is {options.clip_grad_norm} for Booster and {self._max_norm} for "
                    f"{type(self).__name__}; give it once"
                )
            options = dataclasses.replace(options, clip_grad_norm=self._max_norm)
        boosted = super().configure(model, optimizer, criterion, placement=placement, options=options)
        for wrapper in boosted[0] if isinstance(model, Sequence) else [boosted[0]]:
            placed = wrapper.module
            if self._sync_buffer and isinstance(placed, PlacedModule) and placed.is_partial:
                raise ValueError(
                    f"sync_buffer=True of {type(self).__name__} averages buffers where the model is called, and a pipeline "
                    "does not call it; leave it False, or use pp_size=1"
                )
            # On the wrapper, so that it runs before DistributedDataParallel broadcasts the buffers of rank 0.
            if self._sync_buffer and placement is not None and placement.group is not None:
                wrapper.register_forward_pre_hook(BufferAverage(placement.group))
        return boosted


class FP16NaiveMixedPrecision(NaiveMixedPrecision):
    """Half-precision weights (float16) with float32 master weights and a dynamic loss scale.

    initial_scale: the factor on the first loss.
    min_scale: the scale stays at or above it; None is 2**-126.
    growth_factor: what the scale is multiplied by to grow.
    backoff_factor: what it is multiplied by after an overflow.
    growth_interval: steps without overflow after which it grows.
    hysteresis: so many overflows, counted anew when the scale grows, until it backs off; each before skips its step alone.
    max_scale: the scale stays at or below it; None is no bound.
    dynamic_grad_scale: False keeps the scale at `initial_scale`; steps that overflow are still skipped.
    scale: a `LossScaler` in place of the options of the scale; every boosted optimizer gets a copy of it. None makes one.

    The other options, `log_num_zeros_in_grad`, `clip_grad_norm`, `verbose`, `output_to_fp32`, `sync_buffer`, `keep_fp32`,
    `master_weights`, `rounding`, `sdpa_fp32`, `default_dtype`, `states`, `half_buffers` and `fp32_buffers`, are those of
    `NaiveMixedPrecision`.
    """

    dtype = torch.float16

    def __init__(
        self,
        log_num_zeros_in_grad: bool = False,
        initial_scale: float = 2.0**16,
        min_scale: float | None = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float | None = 2.0**32,
        clip_grad_norm: float = 0.0,
        verbose: bool = False,
        dynamic_grad_scale: bool = True,
        output_to_fp32: bool = True,
        sync_buffer: bool = False,
        keep_fp32: KeepFP32 | Iterable[KeepFP32] = is_batch_norm,
        master_weights: MasterWeights = "auto",
        rounding: Rounding = "nearest",
        sdpa_fp32: bool | Literal["auto"] = "auto",
        default_dtype: bool = False,
        *,
        states: States = "fp32",
        half_buffers: KeepFP32 | Iterable[KeepFP32] = (),
        fp32_buffers: KeepFP32 | Iterable[KeepFP32] = (),
        scale: LossScaler | None = None,
    ) -> None:
        super().__init__(
            log_num_zeros_in_grad=log_num_zeros_in_grad,
            clip_grad_norm=clip_grad_norm,
            verbose=verbose,
            output_to_fp32=output_to_fp32,
            sync_buffer=sync_buffer,
            keep_fp32=keep_fp32,
            master_weights=master_weights,
            rounding=rounding,
            sdpa_fp32=sdpa_fp32,
            default_dtype=default_dtype,
            states=states,
            half_buffers=half_buffers,
            fp32_buffers=fp32_buffers,
        )
        arguments.flag("dynamic_grad_scale", dynamic_grad_scale)
        options: dict[str, Any] = {
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "min_scale": min_scale,
            "max_scale": max_scale,
        }
        first = {"initial_scale": initial_scale, "dynamic_grad_scale": dynamic_grad_scale}
        # A scale that stays is a dynamic one between equal bounds: steps that overflow are skipped in the same way.
        made = options if dynamic_grad_scale else options | {"min_scale": initial_scale, "max_scale": initial_scale}
        check_scale_options(initial_scale, **made, initial="initial_scale")
        if scale is not None:
            check_scale(scale, first | options, FP16NaiveMixedPrecision)
        self._scale = DynamicScale(init_scale=initial_scale, **made) if scale is None else scale


class BF16NaiveMixedPrecision(NaiveMixedPrecision):
    """Half-precision weights (bfloat16) with float32 master weights. bfloat16 has the range of float32: the loss is not scaled.

    Its options, `log_num_zeros_in_grad`, `clip_grad_norm`, `verbose`, `output_to_fp32`, `sync_buffer`, `keep_fp32`,
    `master_weights`, `rounding`, `sdpa_fp32`, `default_dtype`, `states`, `half_buffers` and `fp32_buffers`, are those of
    `NaiveMixedPrecision`.
    """

    dtype = torch.bfloat16


class BufferAverage:
    """Before a forward in training, replace every floating buffer by its mean over `group`; in evaluation do nothing.

    group: None means the whole world. Integer and complex buffers are left alone. A group of one, or no process group at
    all, costs nothing.

    Call it with a module, or register it: `model.register_forward_pre_hook(BufferAverage(group))`. On a boosted model it
    runs before DistributedDataParallel broadcasts the buffers of rank 0, which then are the mean.

    Side effect: one float32 SUM all-reduce for each device that holds buffers. Every rank must run its forward.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: Any = ()) -> None:
        if not module.training or not dist.is_initialized():
            return
        world_size = dist.get_world_size(self._group)
        if world_size < 1:
            raise RuntimeError("this rank is not in the group over which the buffers are to be averaged")
        if world_size == 1:
            return
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point() and buffer.numel()]
        for device in dict.fromkeys(buffer.device for buffer in buffers):
            own = [buffer for buffer in buffers if buffer.device == device]
            # In float32, because a sum of halves rounds and overflows; divided afterwards, because gloo has no AVG.
            flat = torch.cat([buffer.reshape(-1).float() for buffer in own])
            dist.all_reduce(flat, group=self._group)
            flat /= world_size
            for buffer, mean in zip(own, flat.split([buffer.numel() for buffer in own]), strict=True):
                buffer.copy_(mean.view_as(buffer))

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferAverage:
        return type(self)(self._group)  # a process group cannot be copied


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
        precision = TF32MixedPrecision() if tf32 else MixedPrecision()
        precision.policy = DtypePolicy(output=policy.output)
        if tf32:
            precision.bind(device)
        super().__init__(cast_parameters(model, policy), precision, input_dtype=dtype)
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
