"""Precisions that compute in a half dtype: float32 weights under autocast (`fp16`, `bf16`), and the base of half weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from booster.common import arguments
from booster.common.arguments import listed
from booster.interface.model import ModelWrapper, extras_of
from booster.loss_scaler import DynamicScale, LossScaler, NoScale, check_scale
from booster.masters.formats import MasterOptions
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.half_products.probability_losses import UNSAFE
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.mixed_precision.keep_fp32 import AUTO, KeepFP32, KeptModules, RunPins, compute_in_fp32, normalise_keep_fp32
from booster.mixed_precision.policy import DtypePolicy, Placement, half_policy
from booster.model.modules import bare, materialise_on
from booster.tensors.cast_regions import NewTensors, nest_contexts
from booster.tensors.trees import HALF_DTYPES


class HalfPrecision(MixedPrecision):
    """Which of the two it is, the policy says: `compute` is the dtype of autocast's products, `param` that of half weights.

    Base of autocast's precisions, of those with half weights, and of low precisions, where all other layers are one or the
    other.
    """

    half_products: HalfProducts
    _cache_enabled = True  # of autocast
    _half_buffers: tuple[KeepFP32, ...] = ()
    _fp32_buffers: tuple[KeepFP32, ...] = ()
    _new_tensors: torch.dtype | None = None  # dtype of those that a forward makes without saying which
    _scale: LossScaler = NoScale()

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.policy.param

    def bind(self, device: torch.device) -> None:
        super().bind(device)
        if device.type != "cuda" or torch.bfloat16 not in (self.policy.compute, self.policy.param):
            return
        natively = self.policy.compute is not None
        with torch.cuda.device(device):
            runs = torch.cuda.is_bf16_supported(including_emulation=not natively)
        if runs:
            return
        name = torch.cuda.get_device_name(device)
        if natively:
            raise ValueError(f"{name} only emulates bfloat16, slowly; use mixed_precision='fp16' or 'fp32'")
        raise ValueError(f"bfloat16 does not run on {name}; use mixed_precision='fp16_naive' or 'fp32'")

    def keeping(self, names: Iterable[str]) -> HalfPrecision:
        clone = copy.deepcopy(self)
        clone._device, clone._keep_fp32 = None, (*self._keep_fp32, *names)
        return clone

    def make_scaler(self) -> LossScaler:
        return copy.deepcopy(self._scale)

    def policy_for(self, model: nn.Module) -> DtypePolicy:
        policy = super().policy_for(model)
        if policy.param is None:
            return policy
        half = half_policy(
            model,
            policy.param,
            keep_fp32=self._keep_fp32,
            output=policy.output,
            half_buffers=self._half_buffers,
            fp32_buffers=self._fp32_buffers,
        )
        named = {field: getattr(half, field) for field in ("keep_fp32", "half_buffers", "fp32_buffers")}
        return dataclasses.replace(policy, store=self._store, **named)

    def check(self, model: nn.Module) -> None:
        if self.half_dtype is not None and any(isinstance(child, nn.BCELoss) for child in model.modules()):
            raise TypeError(f"{type(model).__name__} has a BCELoss under {type(self).__name__}, and {UNSAFE}")
        if self.policy.compute is None:
            return
        half = [name for name, param in model.named_parameters() if param.requires_grad and param.dtype in HALF_DTYPES]
        if half:
            naive = "fp16_naive" if self.policy.compute == torch.float16 else "bf16_naive"
            raise ValueError(
                f"{type(self).__name__} trains float32 parameters, but these trainable ones are in half precision: "
                f"{listed(half)}. {_cure(model, naive)}"
            )

    def convert(self, model: nn.Module) -> nn.Module:
        model = super().convert(model)
        if self.policy.compute is not None:
            self.half_products.inspect(model)
        # Modules amid half weights are seen to by the plugin when it places them, see `install_keep_fp32`.
        if self._keep_fp32 and self.policy.compute is not None:
            inner = bare(model)  # names as the user knows them, also in a compiled model
            for name in KeptModules(inner, self._keep_fp32).names:
                compute_in_fp32(inner.get_submodule(name), self.device.type)
        return model

    def keep_weights(self, model: nn.Module, placement: Placement) -> dict[str, torch.Tensor]:
        # The float32 shards of such a plugin are the masters; nothing is lost by placing.
        if self.policy.param is None or (placement.stores_float32 and self._store is None):
            return {}
        materialise_on(model, self.device)
        placement.synchronise(model)
        wide = (torch.float32, torch.float64)
        return {
            name: param.detach()  # keeps the storage that casting takes from the parameter
            for name, param in bare(model).named_parameters()
            if param.requires_grad and param.dtype in wide
        }

    def masters_on(self, device: torch.device) -> MasterOptions | None:
        return super().masters_on(device) if self.policy.param is None else self.kept

    @property
    def _store(self) -> torch.dtype | None:
        # Where a plugin shards, float32 shards are the masters, unless another form of them was asked for by name.
        return self.policy.param if self.kept.master_weights in ("split", "split24", "none") else None

    def forward_context(self) -> AbstractContextManager[Any]:
        device_type, compute = "cpu" if self._device is None else self._device.type, self.policy.compute
        products = self.half_products.forward_context(device_type) if self.half_products.widens else None
        if compute is not None:
            autocast = torch.autocast(device_type, compute, cache_enabled=self._cache_enabled)
            return autocast if products is None else nest_contexts(autocast, products)
        inner = products or nullcontext()
        return nest_contexts(NewTensors(self._new_tensors), inner) if self._new_tensors else inner

    def backward_context(self) -> AbstractContextManager[Any]:
        device_type = "cpu" if self._device is None else self._device.type
        inner = self.half_products.backward_context(device_type) if self.half_products.widens else nullcontext()
        return nest_contexts(NewTensors(self._new_tensors), inner) if self._new_tensors else inner


def _cure(model: nn.Module, naive: str) -> str:
    """What to do about trainable half parameters of `model`: without wide copies of those that are frozen, if most are."""
    sizes = {True: 0, False: 0}
    for param in model.parameters():
        sizes[param.requires_grad] += param.numel()
    if sizes[False] > sizes[True]:
        return (
            "Most weights are frozen, as under LoRA, and may stay half: cast what trains, with `for p in filter(lambda p: "
            "p.requires_grad, model.parameters()): p.data = p.data.float()`, or use "
            f"mixed_precision={naive!r}, which keeps float32 masters of it"
        )
    return (
        f"Use mixed_precision={naive!r}, which keeps float32 masters of half weights, or load the model in float32 with "
        "model.float()"
    )


class AutocastMixedPrecision(HalfPrecision):
    """Float32 parameters; forward passes run under `torch.autocast` to `dtype`. Base of `fp16` and `bf16`.

    cache_enabled: keep the `dtype` copy of each weight until the forward pass ends.
    output_dtype: floating dtype of what the model returns; None leaves the dtypes of autocast.
    keep_fp32: modules that compute in float32, by type, name pattern or predicate (see `KeptModules`).
    sdpa_fp32: run scaled_dot_product_attention in float32 while training; "auto" does so on a CPU, where its half-precision
        backward is several times slower, unless `half_products` of the `Booster` is "native".
    gather_in_half: a plugin that shards weights gathers those of linear and convolution layers in `dtype`: half the bytes.
        Not a bit changes, but where a forward reads such a weight by itself; see `DtypePolicy.gather`.
    """

    dtype: torch.dtype

    def __init__(
        self,
        *,
        cache_enabled: bool = True,
        output_dtype: torch.dtype | None = torch.float32,
        keep_fp32: KeepFP32 | Iterable[KeepFP32] = (),
        sdpa_fp32: bool | Literal["auto"] = "auto",
        gather_in_half: bool = False,
    ) -> None:
        if not hasattr(self, "dtype"):
            raise TypeError(
                f"{type(self).__name__} does not say in which dtype it computes; use FP16TorchMixedPrecision or "
                "BF16MixedPrecision, or set `dtype` in a subclass"
            )
        if output_dtype is not None:
            arguments.floating_dtype("output_dtype", output_dtype)
        self._cache_enabled = arguments.flag("cache_enabled", cache_enabled)
        # bfloat16 overflows where float32 does, so pinning during the run would help nothing there.
        entries = normalise_keep_fp32(keep_fp32, auto=self.dtype == torch.float16)
        self._pins_during_run = AUTO in [entry for entry in entries if isinstance(entry, str)]
        self._keep_fp32 = tuple(entry for entry in entries if not (isinstance(entry, str) and entry == AUTO))
        self.half_products = HalfProducts(self.dtype, sdpa_fp32)
        gather = self.dtype if arguments.flag("gather_in_half", gather_in_half) else None
        self.policy = DtypePolicy(compute=self.dtype, gather=gather, output=output_dtype)

    @property
    def pins_during_run(self) -> bool:
        return self._pins_during_run

    def wrap_model(self, placed: nn.Module) -> ModelWrapper:
        boosted = super().wrap_model(placed)
        if self._pins_during_run:
            extras_of(boosted).pins = RunPins(bare(placed), self.device.type)
        return boosted


class FP16TorchMixedPrecision(AutocastMixedPrecision):
    """float16 autocast with a dynamic loss scale, as torch.autocast with a GradScaler; on a CPU too.

    init_scale: the factor on the first loss.
    growth_factor: what the scale is multiplied by to grow.
    backoff_factor: what it is multiplied by after an overflow.
    growth_interval: steps without overflow after which it grows.
    hysteresis: so many overflows, counted anew when the scale grows, until it backs off; each before skips its step alone.
    min_scale: the scale stays at or above it; None is 2**-126.
    max_scale: the scale stays at or below it; None is no bound.
    keep_fp32: modules that compute in float32, by type, name pattern or predicate (see `KeptModules`);
        "auto" finds them during the run, see below.
    scale: a `LossScaler` in place of the options above; every boosted optimizer gets a copy of it. None makes a `DynamicScale`.

    keep_fp32="auto", alone or among others: `Booster` diagnoses skipped steps, as with `diagnose="every"`, and a module in
    which 2 of them within 100 steps begin, and which float32 would help, computes in float32 from then on, on all ranks, with
    a WARNING. Checkpoints keep it. It needs a plugin that leaves models whole.

    The other options, `cache_enabled`, `output_dtype`, `sdpa_fp32` and `gather_in_half`, are those of `AutocastMixedPrecision`,
    which says what None means in them.
    """

    dtype = torch.float16

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float | None = None,
        max_scale: float | None = None,
        cache_enabled: bool = True,
        output_dtype: torch.dtype | None = torch.float32,
        keep_fp32: KeepFP32 | Iterable[KeepFP32] = (),
        sdpa_fp32: bool | Literal["auto"] = "auto",
        *,
        gather_in_half: bool = False,
        scale: LossScaler | None = None,
    ) -> None:
        super().__init__(
            cache_enabled=cache_enabled,
            output_dtype=output_dtype,
            keep_fp32=keep_fp32,
            sdpa_fp32=sdpa_fp32,
            gather_in_half=gather_in_half,
        )
        options: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "min_scale": min_scale,
            "max_scale": max_scale,
        }
        if scale is not None:
            check_scale(scale, options, FP16TorchMixedPrecision)
        self._scale = DynamicScale(**options) if scale is None else scale


class BF16MixedPrecision(AutocastMixedPrecision):
    """bfloat16 autocast, as torch.autocast. bfloat16 has the range of float32, so the loss is not scaled.

    Its options, `cache_enabled`, `output_dtype`, `keep_fp32`, `sdpa_fp32` and `gather_in_half`, are those of
    `AutocastMixedPrecision`, which says what None means in them.
    """

    dtype = torch.bfloat16
