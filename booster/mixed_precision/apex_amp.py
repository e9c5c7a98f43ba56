"""apex's own interface, for scripts that were written to it: replace `from apex import amp` by

    from booster.mixed_precision import apex_amp as amp

It runs on `FP16ApexMixedPrecision`, wherever torch does. As in apex the state belongs to the module: `initialize` begins a
`Session`, which all other functions use, and the next `initialize` ends it: optimizers of the earlier one then follow the
new loss scales, as in apex, unless the options of these differ. Under O1 the casts hold from then on in the thread that called
`initialize`, also for losses between model and `scale_loss`; `shutdown` ends them.

What differs from apex: models and optimizers come back wrapped, not patched, so use what `initialize` returns. The groups of an
optimizer hold the model's parameters at every level; masters are what `master_params` gives. `optimizer.zero_grad` takes
`set_to_none`, and `optimizer.state_dict()` holds masters and loss scales too. Messages go to `logging`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.torch_internals.autograd_internals import default_device_mode, function_modes, num_function_modes
from booster.interface.optimizer import OptimizerWrapper, gradients_of
from booster.interface.transparent import refuse_torchscript
from booster.mixed_precision.apex.apex_gradients import ApexGradients, ApexMasterGradients
from booster.mixed_precision.apex.apex_precision import FP16ApexMixedPrecision
from booster.mixed_precision.apex.o1 import Registered, float_function, half_function, promote_function
from booster.mixed_precision.configure import choose_half_products
from booster.model.params import describe_optimizer_wrapper
from booster.tensors.cast_regions import nest_contexts
from booster.update.backward import BackwardPass
from booster.update.context import UpdateContext, UpdateOptions

_logger = logging.getLogger(__name__)


class Session:
    """What `initialize` began. precision: None as long as nothing was initialised, or with enabled=False."""

    def __init__(self) -> None:
        self.initialized = False
        self.precision: FP16ApexMixedPrecision | None = None
        self.registered = Registered()
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._gradients: weakref.WeakKeyDictionary[ApexGradients, None] = weakref.WeakKeyDictionary()
        self._casts = ExitStack()
        self._thread: int | None = None  # which casts, as long as one does
        self._num_modes = 0  # by which it does

    def check_entry(self, precision: FP16ApexMixedPrecision, device_type: str) -> None:
        """Raise RuntimeError where `precision` would begin to cast inside contexts that end before the session does."""
        self._check_thread()
        own = self._thread is not None
        # The mode of torch.set_default_device comes and goes below all others; that of `with torch.device` does not.
        modes = sum(mode is not default_device_mode() for mode in function_modes()) - own * self._num_modes
        autocast = torch.is_autocast_enabled(device_type) and not own
        if precision.options.patch_torch_functions and (modes > 0 or autocast):
            raise RuntimeError(
                "amp.initialize with opt_level='O1' was called inside another context, such as torch.autocast(...) or "
                "torch.device(...). Its casts last until amp.shutdown(), so they cannot begin there; call it outside"
            )

    def start(self, precision: FP16ApexMixedPrecision | None) -> None:
        self._close()
        self.initialized = True
        self.precision = precision
        if precision is None:
            return
        precision.use_registered(self.registered)
        self.registered = Registered()
        others = 0
        for gradients in list(self._gradients):
            # As in apex, where one state serves all: optimizers of before move on with the new scales.
            if gradients.scaler.is_alike(precision.scales):
                gradients.scaler = precision.scales
            else:
                others += 1
        if others:
            _logger.warning(
                "%d optimizer(s) of an earlier amp.initialize keep their own loss scales, because this one has other options "
                "for them. amp.state_dict() holds those of this one; those of the others are in each optimizer's state_dict()",
                others,
            )

    def cast_from_now_on(self) -> None:
        """Enter O1 for this thread, without autocast's cache: nothing would clear it in time."""
        if self.precision is not None and self.precision.options.patch_torch_functions:
            autocast = torch.autocast(self.precision.device.type, torch.float16, cache_enabled=False)
            before = num_function_modes()
            self._casts.enter_context(nest_contexts(autocast, self.precision.session_context()))
            self._num_modes = num_function_modes() - before
            self._thread = threading.get_ident()

    def end(self) -> None:
        """Boosted optimizers keep the loss scales that they have."""
        self._close()
        self._gradients.clear()

    def claim(self, optimizers: Sequence[Any]) -> None:
        """Raise RuntimeError for an optimizer that was given to `initialize` before."""
        for optimizer in optimizers:
            if isinstance(optimizer, OptimizerWrapper) or optimizer in self._seen:
                raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
        self._seen.update(optimizers)

    def register_gradients(self, gradients: ApexGradients) -> None:
        """Give `gradients` the loss scales of the next session too, if it has the same options for them."""
        self._gradients[gradients] = None

    def _check_thread(self) -> None:
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                "the casts of O1 hold in the thread that called amp.initialize, and only that thread can end them; call "
                "amp.initialize and amp.shutdown there"
            )

    def _close(self) -> None:
        self._check_thread()
        self._casts.close()
        self._thread = None
        self.initialized = False
        self.precision = None


__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "shutdown",
    "state_dict",
]

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


_session = Session()


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    half_products: Literal["auto", "native", "float32"] = "auto",
) -> Any:
    """Wrap models and optimizers; returns models, or (models, optimizers) if there are any. A list comes back as a list.

    models: one, or a list; they stay on their device, and are to be wrapped for data parallelism afterwards.
    optimizers: one, or a list; None is none.
    enabled: False returns everything as it is.
    half_products: as for `Booster`.

    The other options, `opt_level`, `cast_model_type`, `patch_torch_functions`, `keep_batchnorm_fp32`, `master_weights`,
    `loss_scale`, `cast_model_outputs`, `num_losses` (for `loss_id` of `scale_loss`), `verbosity`, `min_loss_scale` and
    `max_loss_scale`, are those of `FP16ApexMixedPrecision`, which says what None means in them.

    Errors are those of `FP16ApexMixedPrecision`.
    """
    arguments.flag("enabled", enabled)
    if not enabled:
        _session.start(None)
        return models if optimizers is None else (models, optimizers)
    precision = FP16ApexMixedPrecision(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
        num_losses=num_losses,
        verbosity=verbosity,
        min_loss_scale=min_loss_scale,
        max_loss_scale=max_loss_scale,
        backend="native",
    )
    given_optimizers = [] if optimizers is None else _as_list(optimizers, Optimizer, "optimizer")
    given_models = _as_list(models, nn.Module, "model")
    for model in given_models:
        refuse_torchscript(model, "model")
        if isinstance(model, _WRAPPERS):
            raise RuntimeError(
                f"Incoming model is an instance of {type(model).__name__}. Parallel wrappers should only be applied to the "
                "model(s) AFTER the model(s) have been returned from amp.initialize."
            )
    for model in given_models:
        precision.check(model)
    param = next((param for model in given_models for param in model.parameters()), None)
    device = torch.device("cpu") if param is None else param.device
    choose_half_products(precision, half_products, device)
    for optimizer in given_optimizers:
        precision.check_optimizer(optimizer, given_models, device)
    _session.check_entry(precision, device.type)
    # After all checks: an optimizer that was refused may be given again.
    _session.claim(given_optimizers)
    _session.start(precision)
    precision.bind(device)
    boosted = [precision.configure(model)[0] for model in given_models]
    # Read after `configure`, which may have replaced parameters by half ones.
    names: dict[torch.Tensor, str] = {p: name for model in boosted for name, p in model.named_parameters()}
    wrapped = [_wrap(optimizer, precision, names) for optimizer in given_optimizers]
    for optimizer in wrapped:
        _session.register_gradients(_gradients_of(optimizer))
    _session.cast_from_now_on()
    result = boosted if isinstance(models, list) else boosted[0]
    if optimizers is None:
        return result
    return result, (wrapped if isinstance(optimizers, list) else wrapped[0])


@contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Yield the scaled loss, to call `backward()` on; on leaving, gradients are unscaled and the scale moves.

    loss: of one element.
    optimizers: what `initialize` returned, one or a sequence; the scale is the smallest of theirs.
    loss_id: which of `num_losses` loss scales.
    delay_unscale: leave gradients scaled, for all but the last pass of an accumulation.
    delay_overflow_check: do not look for overflows, which then reach the weights.
    model: not used, as in apex; None is as good.
    Raises RuntimeError before `initialize`, IndexError for a loss_id beyond num_losses. If the body raises, gradients are as
    they were before it.
    """
    if not _session.initialized:
        raise RuntimeError(
            "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized. "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) must be called before `with amp.scale_loss`."
        )
    precision = _session.precision
    if precision is None:
        yield loss
        return
    arguments.instance("loss", loss, torch.Tensor, "a tensor")
    arguments.flag("delay_unscale", delay_unscale)
    arguments.flag("delay_overflow_check", delay_overflow_check)
    several = isinstance(optimizers, Sequence) and not isinstance(optimizers, (str, bytes))
    given = optimizers if several else [optimizers]
    members = [_gradients_of(optimizer) for optimizer in given]
    own = [member.scaler[loss_id] for member in members] or [precision.scales[loss_id]]
    # The smallest, because one loss is multiplied for all optimizers.
    scale = min((one.scale for one in own if not one.is_null), default=1.0)
    this = BackwardPass(members, loss_id=loss_id, delayed=delay_unscale, checked=not delay_overflow_check)
    for member in members:
        member.before_backward(scale, this)
    try:
        # In float32: a half loss would overflow under its own scale.
        yield loss.float() if scale == 1.0 else loss.float() * scale
    except BaseException:
        for member in members:
            member.abandon_backward()
        raise
    for member in members:
        member.after_backward(loss)
    torch.clear_autocast_cache()


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters that `optimizer` steps: float32 masters where it has them, with the gradients of the next step.

    Clip those: `clip_grad_norm_(amp.master_params(optimizer), max_norm)`.
    """
    gradients = next(iter(gradients_of([optimizer])), None) if isinstance(optimizer, OptimizerWrapper) else None
    if isinstance(gradients, ApexMasterGradients):
        yield from gradients.master_params()
        return
    arguments.instance("optimizer", optimizer, Optimizer, "an optimizer")
    # An optimizer that is not boosted steps what it has.
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """`{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}`, added to `destination` unless that is None."""
    state = {} if _session.precision is None else _session.precision.scales.amp_state_dict()
    if destination is None:
        return state
    arguments.instance("destination", destination, MutableMapping, "a dict to add to, or None")
    destination.update(state)
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what `state_dict` gave; entries beyond num_losses are left out with a WARNING.

    Raises RuntimeError for entries that are no loss scaler's, after loading the others.
    """
    # As apex: without an initialized session there is nothing to load into.
    if _session.precision is not None:
        _session.precision.scales.load_amp_state_dict(state_dict)


def disable_casts() -> AbstractContextManager[None]:
    """Context without the casts of O1."""
    return nullcontext() if _session.precision is None else _session.precision.disable_casts()


def register_half_function(module: Any, name: str) -> None:
    """Under O1, from the next `initialize` on, cast floating arguments of the function `name` of `module` to float16."""
    _session.registered.add(module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """Under O1, from the next `initialize` on, cast half arguments of the function `name` of `module` to float32."""
    _session.registered.add(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Under O1, from the next `initialize` on, cast arguments of the function `name` of `module` to their widest dtype."""
    _session.registered.add(module, name, "promote")


def shutdown() -> None:
    """End the session: casts stop, and `scale_loss` raises until the next `initialize`. Boosted objects go on working."""
    _session.end()


def _as_list(given: Any, kind: type, noun: str) -> list[Any]:
    if isinstance(given, kind):
        return [given]
    if not isinstance(given, list):
        raise TypeError(f"{noun}s must be either a single {noun} or a list of {noun}s{_wrapper(given, kind)}.")
    wrong = [entry for entry in given if not isinstance(entry, kind)]
    if wrong:
        raise TypeError(
            f"{noun}s must be either a single {noun} or a list of {noun}s, got {type(wrong[0]).__name__} in it"
            f"{_wrapper(wrong[0], kind)}."
        )
    return given


def _wrapper(given: Any, kind: type) -> str:
    """What to say about an object that holds an optimizer, such as apex's LARC."""
    described = describe_optimizer_wrapper(given) if kind is Optimizer else ""
    return f"; got {described}" if described else ""


def _wrap(optimizer: Optimizer, precision: FP16ApexMixedPrecision, names: dict[torch.Tensor, str]) -> OptimizerWrapper:
    context = UpdateContext(
        optimizer=optimizer,
        scaler=precision.make_scaler(),
        names=names,
        options=UpdateOptions(max_consecutive_skips=None),
    )
    make_update = precision.make_update(optimizer, names, {}, compiled=False)
    return OptimizerWrapper(
        context, make_update, backward_context=precision.backward_context, after_step=precision.after_step_hook
    )


def _gradients_of(optimizer: Any) -> ApexGradients:
    gradients = next(iter(gradients_of([optimizer])), None) if isinstance(optimizer, OptimizerWrapper) else None
    if not isinstance(gradients, ApexGradients):
        raise TypeError(
            f"scale_loss needs the optimizer that amp.initialize returned, got {arguments.described(optimizer)}; write "
            "model, optimizer = amp.initialize(model, optimizer, ...), and give it as optimizers"
        )
    return gradients
