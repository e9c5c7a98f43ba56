"""The real apex.amp behind `Booster`: it patches model and optimizer, and this drives its backward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface.model import CriterionWrapper, ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.loss_scaler import LossScaler
from booster.mixed_precision.base import FP32
from booster.mixed_precision.placement import Placement
from booster.params import named_parameters
from booster.update.backward import BackwardPass
from booster.update.base import Job
from booster.update.host import HostUpdate
from booster.update.options import UpdateOptions
from booster.update.outcome import StepFields, StepResult


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


class RealUpdate(HostUpdate):
    """The update of an optimizer that apex patched: it unscales, and replaces `step` after an overflow, by itself."""

    scaler: RealScales

    def __init__(
        self,
        job: Job,
        *,
        amp: Any,
    ) -> None:
        super().__init__(job)
        self._amp = amp
        self._pass: BackwardPass | None = None
        self._context: Any = None

    def reset(self) -> None:
        super().reset()
        self._check = self._skip_nonfinite

    def scale_for(self, loss_id: int) -> float:
        return self.scaler.of(loss_id)

    def before_backward(self, scale: Any, this: BackwardPass | None = None) -> None:
        self._pass = this = this or BackwardPass([self])
        self._loss_scale, self._factor, self._measured = float(scale), None, []
        if this.updates[0] is self:
            optimizers = [update.optimizer for update in this.updates]
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
        self._scale = 1.0
        this, self._pass = self._pass, None
        if this is not None and this.updates[-1] is self:
            first: Any = this.updates[0]
            context, first._context = first._context, None
            context.__exit__(None, None, None)

    def abandon_backward(self) -> None:
        self._pass = None
        context, self._context = self._context, None
        if context is not None:
            reason = RuntimeError("the backward pass raised")
            context.__exit__(type(reason), reason, None)

    def step(self) -> StepResult:
        stash = getattr(self.optimizer, "_amp_stash", None)
        if not getattr(stash, "already_patched", False):
            return super().step()
        self.optimizer.step()  # the one that only says that it skips
        fields = StepFields(loss_scale=self._loss_scale, skipped_reason="nonfinite_grad")
        self.reset()
        return StepResult(False, fields)

    def _apply(self, grad_scale: float) -> float:
        self.unscale()
        self._step_optimizer()
        return 1.0

    def _require_backward(self) -> None:
        pass


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
    for scaler in amp._amp_state.loss_scalers:
        scaler._scale_seq_len = scale_window
    plain = FP32()  # apex casts by itself
    policy = plain.policy_for(model)
    boosted = ModelWrapper(placement.place(model, policy, device), plain)
    boosted_criterion = plain._wrap_criterion(criterion, device)
    names = {param: name for name, param in named_parameters(boosted).items()}
    update = functools.partial(RealUpdate, amp=amp)
    wrapped = [
        OptimizerWrapper(
            Job(optimizer=each, scaler=RealScales(amp), names=names, group=placement.group, options=options),
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
