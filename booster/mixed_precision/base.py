"""The life of a precision, and the hooks by which one differs from another.

`Booster(mixed_precision=...)` makes or takes one object, and everything it does later asks that object:

    bind           once: the device, which may refuse it
    configure      at `boost`; mixed_precision/configure.py has the order
        check      may these models train so? Nothing is changed yet
        policy_for the dtypes, as data: what a plugin stores, gathers, reduces
        convert    swap modules, before the plugin places them
        keep_weights   float32 weights that placing rounds, for the masters
        place      the plugin's, by the policy alone; it never sees the precision
        make_update    what steps the placed parameters; None steps them as they are
        make_scaler    the loss scale of each optimizer
    forward_context, backward_context   around each pass of the run
    after_step     after each step of an optimizer, applied or skipped

A precision that rounds what models return, as a whole:

    class RoundedOutputs(MixedPrecision):
        policy = DtypePolicy(output=torch.bfloat16)

One that computes in float16, by autocast under a loss scale that never moves:

    class StaticScale(MixedPrecision):
        policy = DtypePolicy(compute=torch.float16, output=torch.float32)

        def make_scaler(self):
            return DynamicScale(init_scale=1024, min_scale=1024, max_scale=1024)

`MixedPrecision` has three parts: the ten hooks, which most precisions need few of; what else those of this library override,
such as `masters_on`; and what the library calls, which needs no overriding.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.interface.model import CriterionWrapper, ForwardPrecision, ModelWrapper
from booster.loss_scaler import LossScaler, NoScale
from booster.masters.compiled import can_compile_masters
from booster.masters.formats import STATES, MasterOptions
from booster.masters.offload import can_offload
from booster.masters.quantized_state import States
from booster.masters.update import choose_master_update
from booster.mixed_precision.configure import configure, master_update
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.mixed_precision.keep_fp32 import KeepFP32
from booster.mixed_precision.low_precision.conversion import LinearConversion
from booster.mixed_precision.policy import DtypePolicy, Placement
from booster.tensors.trees import HALF_DTYPES
from booster.update.choice import has_sound_kernel
from booster.update.context import UpdateContext, UpdateOptions
from booster.update.update import Update


class MixedPrecision:
    """A precision: how model and criterion compute, and whether the loss is scaled. This base class changes nothing.

    To write one, override what differs: `policy` or `policy_for` (dtypes as data), `forward_context` (entered around every
    forward, in the thread that runs it), `make_scaler`, `check` (refuse what cannot work), `convert` (swap modules, as a
    `conversion` does, an object that precisions of any kind may hold),
    `make_update` (how parameters are stepped), `after_step` (follow the weights). `configure` puts them together and seldom
    needs overriding. Pass an instance to `Booster`, or `register` the class under a name.

    A strategy may serve several models; it is bound to one device, that of the `Booster` it is given to.

    Attributes:
        policy: dtypes of a model, where they do not depend on it.
        kept: how states of optimizers are kept, and what is kept of the weights in float32.
        conversion: layers of another kind in place of the model's own.
        half_products: how products of half-precision tensors are computed, where the strategy makes any.
    """

    policy = DtypePolicy()
    kept = MasterOptions(master_weights="none")
    conversion: LinearConversion | None = None
    half_products: HalfProducts | None = None
    _keep_fp32: tuple[KeepFP32, ...] = ()
    _device: torch.device | None = None
    _choose_update: Callable[..., Update] = staticmethod(choose_master_update)

    # ---- the hooks: what a precision overrides

    def policy_for(self, model: nn.Module) -> DtypePolicy:
        """The policy that `model` is placed with, where it depends on the model."""
        if self.conversion is None:
            return self.policy
        return self.conversion.policy(model, self.policy, self.device, self._keep_fp32)

    def bind(self, device: torch.device) -> None:
        """Learn the `device`; `Booster` calls it. Raises ValueError if this precision cannot run there, or runs elsewhere."""
        if self._device not in (None, device):
            raise ValueError(
                f"this {type(self).__name__} object runs on {self._device} already; make another one for {device}"
            )
        self._device = device
        if self.conversion is not None:
            self.conversion.runs(device)

    def check(self, model: nn.Module) -> None:
        """Raise if `model`, or a criterion that is a module, cannot train under this precision. It is not changed yet."""

    def convert(self, model: nn.Module) -> nn.Module:
        """Swap modules of `model` or install hooks; runs before the plugin places it."""
        if self.conversion is not None:
            self.conversion.convert(model, self.device, self._keep_fp32)
        return model

    def revert(self, model: nn.Module) -> None:
        """Undo `convert` in `model`, in place, also in one that was placed since. To be overridden along with it."""
        # Modules that compute in float32 by `compute_in_fp32` are seen to by the caller.
        if self.conversion is not None:
            self.conversion.revert(model)

    def forward_context(self) -> AbstractContextManager[Any]:
        """A new context for one forward pass; what surrounds it, such as another precision's autocast, was left before."""
        return torch.autocast(self.device.type, self.policy.compute) if self.policy.compute else nullcontext()

    def backward_context(self) -> AbstractContextManager[Any]:
        """A new context for one backward pass, where activations may be recomputed; likewise."""
        return nullcontext()

    def make_scaler(self) -> LossScaler:
        """A new loss scaler; every boosted optimizer gets its own."""
        return NoScale()

    def make_update(
        self,
        optimizer: Optimizer,
        names: Mapping[torch.Tensor, str],
        weights: MutableMapping[torch.Tensor, torch.Tensor],
        *,
        compiled: bool,
    ) -> Callable[[UpdateContext], Update] | None:
        """What makes the update of `optimizer`, for `OptimizerWrapper`; None means that of parameters without masters.

        names: of the placed parameters. weights: what `keep_weights` gave, by placed parameter. compiled: to be compiled.
        """
        return master_update(self, optimizer, names, weights, compiled=compiled)

    def after_step(self, applied: bool | torch.Tensor) -> None:
        """Called after every `step()` of an optimizer under this precision, applied or skipped, on every rank alike.

        For what follows the weights: scales of a low format, a history of maxima. Gradients are not recorded inside.
        applied: whether parameters changed. Where only a device knows it, a 0-dim bool tensor there: `torch.where(applied,
        new, old)` waits for nothing, `if applied` for the device.
        """

    # ---- what the library's own precisions override besides

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Floating dtype that inputs of the model are cast to; None leaves them."""
        return None

    @property
    def output_dtype(self) -> torch.dtype | None:
        """Floating dtype of what model and criterion return; None leaves it."""
        return self.policy.output

    @property
    def products(self) -> str | None:
        """The format that products of float32 numbers read, where that is not the dtype of their operands."""
        return None

    @property
    def half_dtype(self) -> torch.dtype | None:
        """float16 or bfloat16, in which products are computed; None where they are not."""
        own = None if self.half_products is None else self.half_products.dtype
        return next((each for each in (self.policy.param, self.policy.compute, own) if each in HALF_DTYPES), None)

    def keep_weights(self, model: nn.Module, placement: Placement) -> dict[str, torch.Tensor]:
        """Weights of `model`, by name, that `placement` would lose and `make_update` wants; runs before it is placed."""
        return {}

    def wrap_model(self, placed: nn.Module) -> ModelWrapper:
        """The boosted model around `placed`."""
        return ModelWrapper(placed, self, input_dtype=self.input_dtype)

    def around_criterion(self) -> ForwardPrecision:
        """What criteria run under: this precision, unless they are to return another dtype."""
        return self

    def check_loss_id(self, loss_id: int) -> None:
        """Raise unless there is a loss scaler of the number `loss_id`."""
        if type(loss_id) is not int or loss_id != 0:
            raise ValueError(
                f"loss_id={arguments.shown(loss_id)} is not legal; {type(self).__name__} keeps one loss scaler, number 0"
            )

    def masters_on(self, device: torch.device) -> MasterOptions | None:
        """What the step of an optimizer goes through for parameters on `device`; None where it steps them as they are."""
        packs = self.kept.states != "fp32"
        return self.kept if packs or (self.kept.offload and can_offload(device)) else None

    def may_fuse(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer`, which holds placed parameters, may be switched to torch's fused kernel."""
        # Fused kernels have no half form for some optimizers; masters are float32 whatever the weights are.
        in_buckets = self.masters_on(self.device) is not None  # which are float32
        return in_buckets or has_sound_kernel(optimizer)

    def may_compile(self, optimizer: Optimizer) -> bool:
        """Whether `make_update` can compile the update of `optimizer`, given a compiler; one WARNING says why not."""
        options = self.masters_on(self.device)
        return options is None or can_compile_masters(optimizer, options)

    @property
    def is_rehearsal(self) -> bool:
        """Whether `device` only emulates this precision: its numbers, slower than the dtype that they are computed in."""
        return self.conversion is not None and not self.conversion.runs(self.device)

    def tell_no_rehearsal(self) -> None:
        """Log nothing from now on where a format is emulated, for callers that say so themselves."""

    @property
    def pins_during_run(self) -> bool:
        """Whether modules that overflow again and again are to compute in float32 from then on; `Booster` sees to it."""
        return False

    def keeping(self, names: Iterable[str]) -> MixedPrecision:
        """A new strategy like this one, bound to no device, that also keeps the modules of these `names` in float32.

        Raises TypeError for strategies without keep_fp32.
        """
        raise TypeError(
            f"{type(self).__name__} takes no keep_fp32; 'fp16', 'bf16', 'fp16_naive', 'bf16_naive' and the low precisions do"
        )

    def shown_options(self) -> dict[str, str]:
        """Return, as they are written, the options by which this precision differs from others of its class; `repr` shows
        them."""
        return {}

    def __repr__(self) -> str:
        options = {**self.shown_options(), "device": repr(str(self.device))}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in options.items())})"

    @property
    def release_refusal(self) -> str | None:
        """Why the update cannot step within backward, as release_gradients asks; None: it can."""
        if self.has_own_update:
            return f"{type(self).__name__} has its own update, which steps all at once"
        if self.kept.rounding == "stochastic":
            return "rounding='stochastic' draws its random numbers in the order of parameters, not in that of their gradients"
        return None

    @property
    def switch_refusal(self) -> str | None:
        """Why a run cannot go over to this precision, or from it to another, while it goes on; None: it can."""
        for cls in type(self).__mro__:
            if "revert" in vars(cls):
                return None
            if "convert" in vars(cls) and not cls.__module__.startswith("booster."):
                return f"{cls.__name__} converts models and has no revert(model) that undoes it"
        return None

    # ---- what the library does with it

    @property
    def device(self) -> torch.device:
        """Where models under this precision run; the CPU as long as no `Booster` has it."""
        return self._device or torch.device("cpu")

    def with_kept(self, *, states: States | None = None, offload: bool = False) -> MixedPrecision:
        """A strategy like this one that keeps states of optimizers so, see `MasterOptions`; this one, where it does already.

        states: None leaves them as they are kept. offload: keep states and masters in host memory between steps. Raises
        ValueError where states are kept in another way already, or where the strategy overrides `make_update`.
        """
        if states is not None:
            arguments.choice("states", states, STATES)
            if self.kept.states not in ("fp32", states):
                raise ValueError(
                    f"states is {states!r} for Booster and {self.kept.states!r} for {type(self).__name__}; give it once"
                )
        packed = states or self.kept.states
        kept = dataclasses.replace(self.kept, states=packed, offload=offload or self.kept.offload)
        if kept == self.kept:
            return self
        if self.has_own_update:
            if packed != self.kept.states:
                raise ValueError(
                    f"{type(self).__name__} steps parameters in its own way, which keeps states as they are; leave out "
                    f"states={states!r}, or use another precision, such as 'fp16', 'bf16', 'fp16_naive' or 'bf16_naive'"
                )
            raise ValueError(
                f"{type(self).__name__} steps parameters in its own way, which keeps states on the device; leave out "
                "offload_states=True, or use another precision, such as 'fp16', 'bf16', 'fp16_naive' or 'bf16_naive'"
            )
        # A copy, since the user may give the same object to two Boosters with other options.
        clone = copy.copy(self)
        clone.kept = kept
        return clone

    @property
    def has_own_update(self) -> bool:
        """Whether `make_update` is a strategy's own."""
        return type(self).make_update is not MixedPrecision.make_update

    @property
    def after_step_hook(self) -> Callable[[bool | torch.Tensor], None] | None:
        """`after_step`, or None where a strategy does not override it, so that a step calls nothing."""
        # A step counts its Python calls; a precision that does not override the hook costs none.
        return None if type(self).after_step is MixedPrecision.after_step else self.after_step

    def configure(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        criterion: Callable[..., Any] | None = None,
        *,
        placement: Placement | None = None,
        options: UpdateOptions | None = None,
    ) -> tuple[Any, Any, ModelWrapper | CriterionWrapper | None]:
        """Wrap `model`, `optimizer` and `criterion`, of which the last two may be None, so that they run under this precision.

        model: one, or several that the optimizers train together, which come as a list; each is placed by itself, and the
            names of parameters begin with its number then, as in an `nn.ModuleList`.
        placement: the parallelism; None is none.
        options: how optimizers step, of which several come as a list; None is the defaults of `Booster`.

        Order: check, convert, place, rebind the optimizers to the placed parameters, wrap. The user's objects are edited
        in place: parameters move to the device, optimizers may switch to their fused kernels.
        """
        return configure(self, model, optimizer, criterion, placement, options)
