"""The real apex.amp behind `Booster`, where it is installed: it patches model and optimizer, and this drives its passes.

`choose_backend` decides between it and the engine of this library. Few installations still have an apex with apex.amp.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.common.installed import ApexFinding, find_apex
from booster.interface.model import CriterionWrapper, ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.loss_scaler import LossScaler
from booster.mixed_precision.configure import wrap_criterion
from booster.mixed_precision.fp32 import FP32
from booster.mixed_precision.policy import Placement
from booster.model.params import named_parameters
from booster.update.application import Application, StepScalars
from booster.update.backward import BackwardPass
from booster.update.context import OptimizerState, UpdateContext, UpdateOptions
from booster.update.decision import Norms, StepFields, StepResult
from booster.update.gradients import Gradients
from booster.update.host import HostDecision, HostNorms
from booster.update.update import Update


class RealScales(LossScaler):
    """The loss scales that apex keeps."""

    enabled = True

    def __init__(self, amp: Any) -> None:
        self._amp = amp

    @property
    def scale(self) -> float:
        return self.of(0)

    def of(self, loss_id: int) -> float:
        return float(self._amp._amp_state.loss_scalers[loss_id].loss_scale())

    def state_dict(self) -> dict[str, Any]:
        return self._amp.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._amp.load_state_dict(state)


class RealGradients(Gradients):
    """The gradients of an optimizer that apex patched, which unscales them by itself."""

    scaler: RealScales
    takes_bare = True

    def __init__(self, context: UpdateContext, norms: Norms, amp: Any) -> None:
        super().__init__(context, norms)
        self._amp = amp
        self._pass: BackwardPass | None = None
        self._context: Any = None

    def reset(self, scale: Any) -> None:
        super().reset(scale)
        self.checks_finite = self.skip_nonfinite

    def scale_for(self, loss_id: int) -> float:
        return self.scaler.of(loss_id) if self._prescribed is None else self._prescribed

    def before_backward(self, scale: Any, this: BackwardPass | None = None) -> None:
        self._pass = this = this or BackwardPass([self])
        self.loss_scale, self.factor, self.read = float(scale), None, []
        if this.members[0] is self:
            optimizers = [member.optimizer for member in this.members]
            device = optimizers[0].param_groups[0]["params"][0].device
            # apex scales a loss that it is given; the engine is started with the scale instead.
            self._context = self._amp.scale_loss(
                torch.zeros((), dtype=torch.float32, device=device),
                optimizers,
                loss_id=this.loss_id,
                delay_unscale=this.delayed,
            )
            self._context.__enter__()

    def after_backward(self, loss: torch.Tensor | None) -> None:
        super().after_backward(loss)
        # apex unscales when its context ends, after the last member of the pass.
        self.scale = 1.0
        this, self._pass = self._pass, None
        if this is not None and this.members[-1] is self:
            first: Any = this.members[0]
            context, first._context = first._context, None
            context.__exit__(None, None, None)

    def abandon_backward(self) -> None:
        self._pass = None
        context, self._context = self._context, None
        if context is not None:
            reason = RuntimeError("the backward pass raised")
            context.__exit__(type(reason), reason, None)

    def require_backward(self) -> None:
        pass


class RealApplication(Application):
    """Steps an optimizer that apex patched, on gradients as they would be unscaled."""

    def step(self, gradients: Gradients, params: list[torch.Tensor], scalars: StepScalars) -> bool:
        gradients.unscale()
        self.optimizer.step()
        return True


class RealUpdate(Update):
    """The update of an optimizer; apex replaces its `step` after an overflow."""

    def step(self) -> StepResult:
        stash = getattr(self.optimizer, "_amp_stash", None)
        if not getattr(stash, "already_patched", False):
            return super().step()
        self.optimizer.step()  # the one that only says that it skips
        fields = StepFields(loss_scale=self.gradients.loss_scale, skipped_reason="nonfinite_grad")
        self.gradients.reset(self.gradients.scale)
        return StepResult(False, fields)


def make_real_update(context: UpdateContext, amp: Any) -> RealUpdate:
    """Make the update of an optimizer that `amp`, the real apex.amp, patched."""
    gradients = RealGradients(context, HostNorms(context), amp)
    return RealUpdate(gradients, HostDecision(gradients, RealApplication(context)), OptimizerState(context))


def configure(
    amp: Any,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    criterion: Callable[..., Any] | None,
    *,
    arguments: Mapping[str, Any],
    scale_window: int,
    placement: Placement,
    device: torch.device,
    options: UpdateOptions,
    after_step: Callable[[bool | torch.Tensor], None] | None = None,
) -> tuple[ModelWrapper, Any, ModelWrapper | CriterionWrapper | None]:
    """As `MixedPrecision.configure`, by apex's initialize with `arguments`, which comes before the placement."""
    if not placement.is_whole:
        raise ValueError(
            "backend='apex' is NVIDIA's own apex.amp, which knows no parameters that are divided among ranks; use "
            "backend='native' with this plugin"
        )
    model = model.to(device)
    optimizers: list[Any] = []
    if optimizer is None:
        model = amp.initialize(model, **arguments)
    elif isinstance(optimizer, Sequence):
        model, optimizers = amp.initialize(model, list(optimizer), **arguments)
    else:
        model, patched = amp.initialize(model, optimizer, **arguments)
        optimizers = [patched]
    for each in optimizers:
        _accept_set_to_none(each)
    # apex's initialize takes no window.
    for scaler in amp._amp_state.loss_scalers:
        scaler._scale_seq_len = scale_window
    plain = FP32()  # apex casts by itself
    policy = plain.policy_for(model)
    boosted = ModelWrapper(placement.place(model, policy, device), plain)
    boosted_criterion = wrap_criterion(plain, criterion, device)
    names = {param: name for name, param in named_parameters(boosted).items()}
    update = functools.partial(make_real_update, amp=amp)
    wrapped = [
        OptimizerWrapper(
            UpdateContext(optimizer=each, scaler=RealScales(amp), names=names, group=placement.group, options=options),
            update,
            after_step=after_step,
        )
        for each in optimizers
    ]
    return boosted, (wrapped if isinstance(optimizer, Sequence) else next(iter(wrapped), None)), boosted_criterion


def _accept_set_to_none(optimizer: Any) -> None:
    """The `zero_grad` that apex puts on an optimizer with masters takes no argument."""
    patched = optimizer.__dict__.get("zero_grad")
    if patched is not None:

        @functools.wraps(patched)
        def zero_grad(set_to_none: bool = True) -> None:
            patched()

        optimizer.zero_grad = zero_grad


_logger = logging.getLogger(__name__)

LAST_COMMIT = "e13873debc4699d39c6861074b9a3b2a02327f92"

_WHY_NOT = {
    "absent": "apex is not installed",
    "without_amp": (
        "the apex at {location} has no apex.amp: NVIDIA removed it on 2025-05-08, and its last commit with it is "
        f"{LAST_COMMIT[:8]}"
    ),
    "unrelated": (
        "the package called apex at {location} is a web toolkit from PyPI and not NVIDIA's, which is not on PyPI; "
        "`pip uninstall apex` removes it"
    ),
    "unknown": "the package called apex at {location} is not NVIDIA's",
}


class Backend(NamedTuple):
    """amp: the module apex.amp, or None for the own engine. reason: why."""

    amp: Any
    reason: str


def choose_backend(asked: str, device: torch.device, *, patches: bool, alone: bool, keywords: set[str]) -> Backend:
    """The engine for models on `device`, and one log line that says so.

    asked: "native", "apex" or "auto", which takes apex where it can work: on CUDA, in a process `alone`, an apex.amp
    that has `keywords` and, if it `patches` functions, casts a weight twice. Nothing that is not NVIDIA's is imported.
    Raises ImportError for "apex" where there is none that works.
    """
    if asked == "native":
        chosen = Backend(None, "as backend='native' asks")
        finding = ApexFinding("absent")
    else:
        finding = find_apex()
        chosen = _find(finding, device, asked, patches=patches, alone=alone, keywords=keywords)
    if asked == "apex" and chosen.amp is None:
        raise ImportError(
            f"backend='apex' needs an apex with apex.amp, but {chosen.reason}. Build commit {LAST_COMMIT} of "
            "github.com/NVIDIA/apex (the `apex` of PyPI is another project), or use backend='native', which needs no apex"
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        # The `apex` of PyPI is another project, which a user may have taken for NVIDIA's.
        level = logging.WARNING if finding.kind == "unrelated" else logging.INFO
        engine = "its own engine" if chosen.amp is None else "the real apex.amp"
        _logger.log(level, "fp16_apex runs on %s: %s", engine, chosen.reason)
    return chosen


def _find(
    finding: ApexFinding, device: torch.device, asked: str, *, patches: bool, alone: bool, keywords: set[str]
) -> Backend:
    if finding.kind != "with_amp":
        return Backend(None, _WHY_NOT[finding.kind].format(location=finding.location))
    if asked == "auto" and not alone:
        return Backend(None, "the apex.amp that is installed knows nothing of how ranks share this model")
    if asked == "auto" and device.type != "cuda":
        return Backend(None, "the apex.amp that is installed runs on CUDA only, and the model does not")
    try:
        amp = importlib.import_module("apex.amp")
        missing = keywords - set(inspect.signature(amp.initialize).parameters)
        if missing:
            return Backend(None, f"the apex.amp at {finding.location} has no {sorted(missing)}")
    except Exception as error:  # undefined symbols, missing kernels, whatever an old build does
        return Backend(None, f"the apex.amp at {finding.location} does not import: {type(error).__name__}: {error}")
    if patches:
        try:
            utils = importlib.import_module("apex.amp.utils")
            param, cache = nn.Parameter(torch.ones(1, dtype=torch.float32, device=device)), {}  # type: ignore[var-annotated]
            for _ in range(2):
                utils.cached_cast(utils.maybe_half, param, cache)
        except Exception as error:
            return Backend(
                None,
                f"the apex.amp at {finding.location} fails with this torch when a weight is used twice: "
                f"{type(error).__name__}: {error}",
            )
    return Backend(amp, f"found at {finding.location}")
