"""The optimization levels of apex.amp as a precision, and its update: a step is skipped, once, after an overflow in one of its
backward passes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.common.torch_internals.tensor_internals import BatchNorm, add_state_dict_hook
from booster.interface.model import CriterionWrapper, ForwardPrecision, ModelWrapper
from booster.loss_scaler import LossScaler
from booster.masters.formats import MasterOptions
from booster.masters.master_state import MasterState
from booster.masters.masters import Masters
from booster.masters.update import MasterApplication
from booster.mixed_precision.apex import real
from booster.mixed_precision.apex.apex_gradients import ApexGradients, ApexMasterGradients
from booster.mixed_precision.apex.apex_options import (
    check_dtypes,
    check_fused,
    check_rest,
    holds_half,
    match_dtypes,
    planned_dtypes,
    resolve,
    warn_of_static_scale,
)
from booster.mixed_precision.apex.o1 import O1Casts, Registered
from booster.mixed_precision.apex.real import choose_backend
from booster.mixed_precision.apex.scale import ApexScale, ApexScales
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.mixed_precision.policy import DtypePolicy, InProcess, Placement, half_policy
from booster.model.modules import bare
from booster.tensors.cast_regions import CastFunctions, cast_floats, casts_as_now, disable_casts, nest_contexts
from booster.tensors.trees import is_container
from booster.update.application import Application
from booster.update.context import OptimizerState, UpdateContext, UpdateOptions
from booster.update.decision import SkippedReason, StepFields, StepResult
from booster.update.host import HostDecision, HostNorms
from booster.update.update import Update


class ApexUpdate(Update):
    """An update that skips its step, once, after an overflow in one of the backward passes.

    verbose: log skipped steps.
    """

    gradients: ApexGradients

    def __init__(
        self, gradients: ApexGradients, application: Application, kept: OptimizerState, *, verbose: bool
    ) -> None:
        super().__init__(gradients, HostDecision(gradients, application), kept)
        self._verbose = verbose

    def step(self) -> StepResult:
        gradients = self.gradients
        gradients.check_complete()
        overflow = gradients.overflow
        if overflow is None:
            with disable_casts():  # O1's, in a session
                return super().step()
        loss_scale, culprit = gradients.loss_scale, gradients.clear_overflow()
        if self._verbose:
            _logger.info(
                "Gradient overflow.  Skipping step, loss scaler %s reducing loss scale to %s",
                overflow.loss_id,
                gradients.scaler[overflow.loss_id].scale,
            )
        reason: SkippedReason = "nonfinite_grad" if overflow.finite_loss else "nonfinite_loss"
        gradients.reset(gradients.scale)
        return StepResult(False, StepFields(loss_scale=loss_scale, skipped_reason=reason, culprit=culprit))

    def step_with_closure(self, closure: Callable[[], Any]) -> StepResult:
        # The closure runs the model, with casts; the step around it must not cast the optimizer's arithmetic.
        cast_again = casts_as_now()

        def cast() -> Any:
            with cast_again():
                return closure()

        with disable_casts():
            return super().step_with_closure(cast)


def make_apex_update(context: UpdateContext, *, masters: Masters | None, verbose: bool) -> ApexUpdate:
    """Make the update of an optimizer under apex, of `masters` where there are any."""
    norms = HostNorms(context)
    if masters is None:
        return ApexUpdate(ApexGradients(context, norms), Application(context), OptimizerState(context), verbose=verbose)
    gradients = ApexMasterGradients(context, norms, masters)
    return ApexUpdate(
        gradients, MasterApplication(context, masters=masters), MasterState(context, masters), verbose=verbose
    )


_logger = logging.getLogger(__name__)


class FP16ApexMixedPrecision(MixedPrecision):
    """The levels O0 to O3 of NVIDIA's apex.amp, on CPU and CUDA, whether apex is installed or not.

    opt_level: "O0" float32; "O1" float32 weights, casts around torch functions; "O2" half weights, float32 BatchNorm and
        masters; "O3" half.
    cast_model_type: dtype of the weights, False to leave them; None takes the level's default.
    patch_torch_functions: cast around torch functions; None takes the level's default.
    keep_batchnorm_fp32: keep BatchNorm in float32; None takes the level's default.
    master_weights: keep float32 masters behind half weights; None takes the level's default.
    loss_scale: "dynamic", or a static number; None takes the level's default.
    cast_model_outputs: dtype of what models return; None is float32 for a model that is cast, else what it computes.
    num_losses: loss scales, see `Booster.backward(loss_id=...)`.
    verbosity: 1 logs the options and every skipped step, 0 does not.
    min_loss_scale: a dynamic scale stays at or above it; None is no bound.
    max_loss_scale: a dynamic scale stays at or below it.
    scale_window: steps without overflow after which a dynamic scale doubles.
    backend: "native" runs this library's levels, "apex" the apex that is installed, "auto" apex where it can, else native.
    Errors and their order are those of apex, see `apex_options.resolve`.

    What was recorded of apex wins over what other precisions do: a static scale lets inf into the weights, scales move
    with every backward, and may fall below 1.
    """

    half_products: HalfProducts

    def __init__(
        self,
        opt_level: str = "O1",
        cast_model_type: torch.dtype | Literal[False] | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: torch.dtype | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        scale_window: int = 2000,
        backend: Literal["auto", "native", "apex"] = "auto",
    ) -> None:
        overrides: dict[str, Any] = {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
        }
        self.options = resolve(opt_level, **overrides)
        check_rest(cast_model_outputs, num_losses, verbosity, min_loss_scale, max_loss_scale, scale_window, backend)
        self._verbosity = verbosity
        self._backend = backend
        self._real: Any = None  # apex.amp once a model was boosted with it
        self._boosted_any = False
        self._arguments: dict[str, Any] = {
            "opt_level": opt_level,
            **overrides,
            "cast_model_outputs": cast_model_outputs,
            "num_losses": num_losses,
            "verbosity": verbosity,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
        }
        self._scale_window = scale_window
        self._o1 = O1Casts()
        self.scales = ApexScales(
            [
                ApexScale(self.options.loss_scale, minimum=min_loss_scale, maximum=max_loss_scale, window=scale_window)
                for _ in range(num_losses)
            ]
        )
        dtype = self.options.model_dtype
        half = torch.float16 if self.options.patch_torch_functions else dtype
        self.half_products = HalfProducts(half)
        # apex.amp refuses F.binary_cross_entropy with another message, in cast_rules.
        self.half_products.refuses_probabilities = False
        output = cast_model_outputs or (torch.float32 if dtype is not None else None)
        self.policy = DtypePolicy(param=dtype, output=output, half_buffers=None)  # as apex casts
        if verbosity > 0 and (not dist.is_initialized() or dist.get_rank() == 0):
            _logger.info(self.options.report())
        warn_of_static_scale(self.options)

    # ------------------------------------------------------------------ models

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.options.model_dtype

    def policy_for(self, model: nn.Module) -> DtypePolicy:
        policy = super().policy_for(model)
        if not self.options.keep_batchnorm_fp32 or policy.param in (None, torch.float32):
            return policy
        if is_affine_batch_norm("", bare(model)):
            return dataclasses.replace(policy, param=torch.float32)
        half = half_policy(model, policy.param, keep_fp32=is_affine_batch_norm, output=policy.output)
        return dataclasses.replace(policy, keep_fp32=half.keep_fp32)

    def check(self, model: nn.Module) -> None:
        for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                if tensor.dtype == torch.float16:
                    raise RuntimeError(
                        f"Found {kind} {name} with type torch.float16, expected torch.float32. With fp16_apex you do not "
                        "need to call .half() on your model, no matter what optimization level you choose"
                    )

    def check_optimizer(self, optimizer: Optimizer, models: Iterable[nn.Module], device: torch.device) -> None:
        """Raise if `optimizer` cannot step the parameters of `models` in the dtypes that they will have on `device`."""
        planned = planned_dtypes((model, self.policy_for(model)) for model in models)
        if not self.short_circuits:
            check_dtypes(optimizer, planned)
        if not self.options.master_weights:
            check_fused(optimizer, planned, device)

    def convert(self, model: nn.Module) -> nn.Module:
        if self.policy.param == torch.float16:
            save_in_float32(bare(model))
        return super().convert(model)

    @property
    def switch_refusal(self) -> str | None:
        return "the levels of apex change functions, scales and steps as apex does, for a whole run"

    def wrap_model(self, placed: nn.Module) -> ModelWrapper:
        return ApexModel(placed, self, input_dtype=self.input_dtype)

    def around_criterion(self) -> ForwardPrecision:
        alike = copy.copy(self)
        alike.policy = dataclasses.replace(self.policy, output=None)  # what it returns is left alone
        return alike

    def configure(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        criterion: Callable[..., Any] | None = None,
        *,
        placement: Placement | None = None,
        options: UpdateOptions | None = None,
    ) -> tuple[Any, Any, ModelWrapper | CriterionWrapper | None]:
        placement = InProcess() if placement is None else placement
        # Once for all models of the strategy: apex initialises once, and its loss scalers are global.
        if not self._boosted_any:
            self._real = choose_backend(
                self._backend,
                self.device,
                patches=self.options.patch_torch_functions,
                alone=placement.group is None,
                keywords=set(self._arguments),
            ).amp
            self._boosted_any = True
        elif self._real is not None:
            raise RuntimeError(
                "the real apex.amp initialises once, and has done so for the first model; use backend='native' for several"
            )
        if self._real is not None and self._o1.registers:
            raise RuntimeError(
                "functions are registered with this strategy, and the real apex.amp would not cast their arguments; use "
                "backend='native'"
            )
        if self._real is not None and self.conversion is not None:
            raise RuntimeError(
                "this strategy holds a conversion, and the real apex.amp casts functions that such layers do not call; use "
                "backend='native'"
            )
        if self._real is None:
            models = list(model) if isinstance(model, Sequence) else [model]
            for each in models:
                self.check(each)
            several = optimizer if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
            for held in [] if placement.stores_float32 else several:
                self.check_optimizer(held, models, self.device)
            return super().configure(model, optimizer, criterion, placement=placement, options=options)
        if isinstance(model, Sequence):
            raise RuntimeError(
                "boost got a list of models, and the real apex.amp is given one here; use backend='native' for several"
            )
        return real.configure(
            self._real,
            model,
            optimizer,
            criterion,
            arguments=self._arguments,
            scale_window=self._scale_window,
            placement=placement,
            device=self.device,
            options=options or UpdateOptions(),
            after_step=self.after_step_hook,
        )

    # ------------------------------------------------------------------ forward and backward

    def forward_context(self) -> AbstractContextManager[Any]:
        if self.options.patch_torch_functions:
            return self._o1.forward_context(self.device.type, self.half_products)
        return self.half_products.forward_context(self.device.type) or nullcontext()

    def backward_context(self) -> AbstractContextManager[Any]:
        if self.options.patch_torch_functions:
            return self._o1.backward_context(self.device.type, self.half_products)
        return self.half_products.backward_context(self.device.type)

    def disable_casts(self) -> AbstractContextManager[None]:
        """Inside, torch functions and models of this precision run without the casts of O1."""
        return self._o1.disable()

    def register_half_function(self, module: Any, name: str) -> None:
        """Under O1, cast floating arguments of the function `name` of `module` to float16; see `Registered.add`."""
        self._o1.register(module, name, "half")

    def register_float_function(self, module: Any, name: str) -> None:
        """Under O1, cast half arguments of the function `name` of `module` to float32; see `Registered.add`."""
        self._o1.register(module, name, "float")

    def register_promote_function(self, module: Any, name: str) -> None:
        """Under O1, cast half arguments of the function `name` of `module` to float32 if another is; see `Registered.add`."""
        self._o1.register(module, name, "promote")

    def use_registered(self, registered: Registered) -> None:
        """Cast by `registered` instead of by what was registered so far."""
        self._o1.use(registered)

    def casts(self) -> CastFunctions:
        """A new mode that casts as O1 does; to be entered inside autocast."""
        return self._o1.mode(self.device.type)

    def session_context(self) -> AbstractContextManager[Any]:
        """`casts`, and around them what widens products, where any are; to be entered inside autocast without its cache."""
        wide = self.half_products.forward_context(self.device.type)
        return self.casts() if wide is None else nest_contexts(wide, self.casts())

    # ------------------------------------------------------------------ optimizers

    @property
    def short_circuits(self) -> bool:
        """Whether a backward pass is torch's own: no scale, and nothing to do for masters."""
        return not self.options.master_weights and self.scales[0].is_null

    def make_scaler(self) -> LossScaler:
        """The loss scales, which all optimizers share."""
        return self.scales

    def check_loss_id(self, loss_id: int) -> None:
        self.scales[loss_id]

    def may_fuse(self, optimizer: Optimizer) -> bool:
        # Torch's fused SGD on CPU leaves most elements of float16 parameters as they are.
        return bool(self.options.master_weights) or self.device.type != "cpu" or not holds_half(optimizer)

    def may_compile(self, optimizer: Optimizer) -> bool:
        _logger.warning(
            'fused_optimizer="compile" does not apply to this %s: fp16_apex looks at gradients after every backward; it is '
            "stepped as with fused_optimizer=True",
            type(optimizer).__name__,
        )
        return False

    def make_update(
        self,
        optimizer: Optimizer,
        names: Mapping[torch.Tensor, str],
        weights: Mapping[torch.Tensor, torch.Tensor],
        *,
        compiled: bool,
    ) -> Callable[[UpdateContext], Update]:
        if not self.short_circuits:
            check_dtypes(optimizer)
        masters: Masters | None = None
        if self.options.master_weights:
            masters = Masters(optimizer, names, MasterOptions(master_weights="fp32"))
        else:
            match_dtypes(optimizer)
        return functools.partial(make_apex_update, masters=masters, verbose=self._verbosity > 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_real": None}  # a module, which does not pickle

    def __repr__(self) -> str:
        return f"{type(self).__name__}(opt_level={self.options.opt_level!r}, device={str(self.device)!r})"


def is_affine_batch_norm(name: str, module: nn.Module) -> bool:
    """A predicate for `keep_fp32`: what keep_batchnorm_fp32 keeps."""
    return isinstance(module, BatchNorm) and module.affine


class ApexModel(ModelWrapper):
    """As `ModelWrapper`; cast are also float64 tensors, objects with a method `to`, and collections of any type."""

    @staticmethod
    def _cast(tree: Any, dtype: torch.dtype | None) -> Any:  # type: ignore[override]
        return tree if dtype is None else _cast(tree, dtype)

    _cast_in = _cast


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return cast_floats(tree, dtype, float64=True, instead=functools.partial(_cast_object, dtype=dtype))


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


def save_in_float32(model: nn.Module) -> None:
    """Make `state_dict()` of `model` and of each of its modules give float32 for float16 tensors. Repeating it is harmless."""
    for module in model.modules():
        add_state_dict_hook(module, _widen_own)


def _widen_own(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name in (*module._parameters, *module._buffers):
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
            state_dict[prefix + name] = value.float()
