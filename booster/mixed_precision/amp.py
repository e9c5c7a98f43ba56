"""Mixed precision on torch.autocast: float32 parameters, half-precision matrix products."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from booster.common import arguments
from booster.interface.model import ModelWrapper, extras_of
from booster.loss_scaler import DynamicScale, LossScaler, check_scale
from booster.mixed_precision.half import HalfPrecision
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.mixed_precision.keep_fp32 import AUTO, KeepFP32, RunPins, normalise_keep_fp32
from booster.mixed_precision.policy import DtypePolicy
from booster.model.modules import bare


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
        self._scale: LossScaler = DynamicScale(**options) if scale is None else scale

    def make_scaler(self) -> LossScaler:
        return copy.deepcopy(self._scale)


class BF16MixedPrecision(AutocastMixedPrecision):
    """bfloat16 autocast, as torch.autocast. bfloat16 has the range of float32, so the loss is not scaled.

    Its options, `cache_enabled`, `output_dtype`, `keep_fp32`, `sdpa_fp32` and `gather_in_half`, are those of
    `AutocastMixedPrecision`, which says what None means in them.
    """

    dtype = torch.bfloat16
