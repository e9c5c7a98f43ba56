"""Half precision throughout: parameters, activations and gradients; the optimizer steps float32 masters of them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from booster.ground import arguments
from booster.interface.model import CriterionWrapper, ModelWrapper
from booster.loss_scaler import DynamicScale, LossScaler, check_scale, check_scale_options
from booster.masters.compiled import can_compile_masters
from booster.masters.masters import Masters
from booster.masters.options import MasterOptions, MasterWeights, Rounding
from booster.masters.packing import States
from booster.masters.update import choose_master_update
from booster.mixed_precision.base import MixedPrecision, Placement
from booster.mixed_precision.buffers import BufferAverage
from booster.mixed_precision.half_products import HalfProducts
from booster.mixed_precision.keep_fp32 import KeepFP32, is_batch_norm, normalise_keep_fp32
from booster.mixed_precision.new_tensors import NewTensors
from booster.mixed_precision.policy import DtypePolicy, half_policy
from booster.model.meta import arrive
from booster.model.modules import PlacedModule, bare
from booster.tensors.cast_regions import both
from booster.update.base import Job, Update
from booster.update.outcome import UpdateOptions


class NaiveMixedPrecision(MixedPrecision):
    """Parameters, activations and gradients in `dtype`. Base of `fp16_naive` and `bf16_naive`.

    log_num_zeros_in_grad: count zero gradient elements for `StepResult.num_zeros_in_grad`, one read of them a step.
    clip_grad_norm: clip to this norm inside every `step()`; 0 does not. verbose: log changes of the loss scale and the
    number of zeros through the logger of `booster.masters.update`. output_to_fp32: the model returns float32.
    keep_fp32: modules that keep float32 parameters and compute in it, by type, name pattern or predicate (see
    `KeptModules`); BatchNorm by default. sync_buffer: average floating buffers over the ranks that share the batch at
    every forward in training. master_weights, rounding, states: see `MasterOptions`. sdpa_fp32: as `AutocastMixedPrecision`.
    default_dtype: tensors that forward makes without saying in which dtype, as by `torch.zeros`, are `dtype` too, and not
    float32, which half weights do not multiply with.

    A model that arrives in float32 lends its weights to the masters before it is cast; one in half gives what it has.
    """

    dtype: torch.dtype
    half_products: HalfProducts

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
    ) -> None:
        arguments.flag("output_to_fp32", output_to_fp32)
        self._count_zeros = arguments.flag("log_num_zeros_in_grad", log_num_zeros_in_grad)
        self._max_norm = float(arguments.number("clip_grad_norm", clip_grad_norm, least=0, fix="0 is off"))
        self._verbose = arguments.flag("verbose", verbose)
        self._keep_fp32 = normalise_keep_fp32(keep_fp32)
        self._sync_buffer = arguments.flag("sync_buffer", sync_buffer)
        self._masters = MasterOptions(master_weights=master_weights, rounding=rounding, states=states)
        self._default_dtype = arguments.flag("default_dtype", default_dtype)
        if not hasattr(self, "dtype"):
            raise TypeError(
                f"{type(self).__name__} has no dtype; use FP16NaiveMixedPrecision or BF16NaiveMixedPrecision"
            )
        self.half_products = HalfProducts(self.dtype, sdpa_fp32)
        self.policy = DtypePolicy(param=self.dtype, output=torch.float32 if output_to_fp32 else None)

    @property
    def input_dtype(self) -> torch.dtype:
        return self.dtype

    def policy_for(self, model: nn.Module) -> DtypePolicy:
        policy = half_policy(model, self.dtype, keep_fp32=self._keep_fp32, output=self.policy.output)
        return dataclasses.replace(policy, store=self._store)

    def master_options_on(self, device: torch.device) -> MasterOptions:
        return self._masters

    @property
    def states(self) -> States:
        return self._masters.states

    def _keeping_states(self, states: States) -> NaiveMixedPrecision:
        clone = copy.copy(self)
        clone._masters = dataclasses.replace(self._masters, states=states)
        return clone

    @property
    def offloads_states(self) -> bool:
        return self._masters.offload

    def _offloading_states(self) -> NaiveMixedPrecision:
        clone = copy.copy(self)
        clone._masters = dataclasses.replace(self._masters, offload=True)
        return clone

    @property
    def _store(self) -> torch.dtype | None:
        # Where a plugin shards, float32 shards are the masters, unless another form of them was asked for by name.
        return self.dtype if self._masters.master_weights in ("split", "split24", "none") else None

    def bind(self, device: torch.device) -> None:
        super().bind(device)
        if device.type == "cuda" and self.dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
            name = torch.cuda.get_device_name(device)
            raise ValueError(f"bfloat16 does not run on {name}; use mixed_precision='fp16_naive' or 'fp32'")

    def keeping(self, names: Iterable[str]) -> NaiveMixedPrecision:
        clone = copy.deepcopy(self)
        clone._device, clone._keep_fp32 = None, (*self._keep_fp32, *names)
        return clone

    def forward_context(self) -> AbstractContextManager[Any]:
        device_type = "cpu" if self._device is None else self._device.type
        inner = self.half_products.forward_context(device_type) or nullcontext()
        return both(NewTensors(self.dtype), inner) if self._default_dtype else inner

    def backward_context(self) -> AbstractContextManager[Any]:
        inner = self.half_products.backward_context("cpu" if self._device is None else self._device.type)
        return both(NewTensors(self.dtype), inner) if self._default_dtype else inner

    def keep_weights(self, model: nn.Module, placement: Placement) -> dict[str, torch.Tensor]:
        if placement.stores_float32 and self._store is None:
            return {}
        arrive(model, self.device)
        placement.synchronise(model)
        wide = (torch.float32, torch.float64)
        return {
            name: param.detach()  # keeps the storage that casting takes from the parameter
            for name, param in bare(model).named_parameters()
            if param.requires_grad and param.dtype in wide
        }

    def may_fuse(self, optimizer: Optimizer) -> bool:
        return True  # it is float32 that is stepped

    def may_compile(self, optimizer: Optimizer) -> bool:
        return can_compile_masters(optimizer, self._masters)

    def make_update(
        self,
        optimizer: Optimizer,
        names: Mapping[torch.Tensor, str],
        weights: Mapping[torch.Tensor, torch.Tensor],
        *,
        compiled: bool,
    ) -> Callable[[Job], Update]:
        return self._update_of(Masters(optimizer, names, self._masters, sources=weights, compiled=compiled), compiled)

    def make_released_update(
        self,
        optimizer: Optimizer,
        names: Mapping[torch.Tensor, str],
        weights: Mapping[torch.Tensor, torch.Tensor],
    ) -> Callable[[Job], Update]:
        return self._update_of(Masters(optimizer, names, self._masters, sources=weights, released=True), False)

    def _update_of(self, masters: Masters, compiled: bool) -> Callable[[Job], Update]:
        return functools.partial(
            choose_master_update,
            masters=masters,
            count_zeros=self._count_zeros,
            verbose=self._verbose,
            compiled=compiled,
        )

    @property
    def release_refusal(self) -> str | None:
        if self._masters.rounding == "stochastic":
            return "rounding='stochastic' draws its random numbers in the order of parameters, not in that of their gradients"
        return None

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        criterion: Callable[..., Any] | None = None,
        *,
        placement: Placement | None = None,
        options: UpdateOptions | None = None,
    ) -> tuple[ModelWrapper, Any, ModelWrapper | CriterionWrapper | None]:
        options = options or UpdateOptions()
        if self._max_norm:
            if options.clip_grad_norm not in (0.0, self._max_norm):
                raise ValueError(
                    f"clip_grad_norm is {options.clip_grad_norm} for Booster and {self._max_norm} for "
                    f"{type(self).__name__}; give it once"
                )
            options = dataclasses.replace(options, clip_grad_norm=self._max_norm)
        boosted = super().configure(model, optimizer, criterion, placement=placement, options=options)
        placed = boosted[0].module
        if self._sync_buffer and isinstance(placed, PlacedModule) and placed.is_partial:
            raise ValueError(
                f"sync_buffer=True of {type(self).__name__} averages buffers where the model is called, and a pipeline "
                "does not call it; leave it False, or use pp_size=1"
            )
        if self._sync_buffer and placement is not None and placement.group is not None:
            boosted[0].register_forward_pre_hook(BufferAverage(placement.group))
        return boosted


class FP16NaiveMixedPrecision(NaiveMixedPrecision):
    """float16 with a loss scale. initial_scale to max_scale are those of `DynamicScale`, with Megatron-LM's hysteresis:
    `hysteresis - 1` overflows are forgiven, and forgiveness is renewed only when the scale grows. dynamic_grad_scale:
    False keeps the scale at `initial_scale`; steps that overflow are still skipped. scale: the loss scale as an object in
    their place; every boosted optimizer gets a copy of it. Other options: `NaiveMixedPrecision`.
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
        )
        arguments.flag("dynamic_grad_scale", dynamic_grad_scale)
        check_scale_options(
            initial_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            min_scale if dynamic_grad_scale else None,
            max_scale if dynamic_grad_scale else None,
            initial="initial_scale",
        )
        options: dict[str, Any] = {
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
        }
        bounds: dict[str, Any] = {"min_scale": min_scale, "max_scale": max_scale}
        if scale is not None:
            more = {"initial_scale": initial_scale, "dynamic_grad_scale": dynamic_grad_scale}
            check_scale(scale, {**more, **options, **bounds}, FP16NaiveMixedPrecision)
        if not dynamic_grad_scale:
            bounds = {"min_scale": initial_scale, "max_scale": initial_scale}
        own = DynamicScale(init_scale=initial_scale, **options, **bounds)
        self._scale: LossScaler = own if scale is None else scale

    def make_scaler(self) -> LossScaler:
        return copy.deepcopy(self._scale)


class BF16NaiveMixedPrecision(NaiveMixedPrecision):
    """bfloat16, which has the range of float32, so the loss is not scaled. Options: `NaiveMixedPrecision`."""

    dtype = torch.bfloat16
