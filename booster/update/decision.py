"""The rule by which a step is made or skipped, and what a host, a device and kernels do of it in their own way;

With `norm`, the norm of the gradients as they are, multiplied by `current_scale`, and `pending`, the factor of pending clips::

    true norm    = norm / current_scale * pending
    found_inf    = norm is inf or NaN, on any rank, of any optimizer that shares the backward pass
    clip factor  = min(1, max_norm / (true norm + 1e-6)), 1 where the norm is not finite
    grad_scale   = current_scale / (pending * clip factor)  what the optimizer divides by
    next scale   = that of `DynamicScale.update(found_inf)`
    found_inf: weights, states and step counts stay as they are, and so do the gradients; else the optimizer steps

Three executions follow it. The host (`host.py`) has Python numbers, and does not call the optimizer on a skip. A device
(`device.py`) has 0-dim tensors that nothing waits for, and the optimizer's fused kernel heeds them. Triton kernels
(`kernels/launches.py`, `decide`) compute all of it in one launch. One table of numbers holds the three together:
`tests/unit/test_decision_rule.py`.

What steps did is a `StepResult` each, and the counters of a `StepHistory`, which raises after too many skips.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.loss_scaler import LossScaler
from booster.ranks import agreement
from booster.tensors.trees import map_tensors
from booster.update.context import UpdateContext
from booster.update.in_backward_pass import InBackwardPass

SkippedReason = Literal["nonfinite_loss", "nonfinite_grad"]


class StepFields(NamedTuple):
    """The fields of a `StepResult` that are not needed to go on."""

    loss_scale: float
    grad_norm: float | None = None
    skipped_reason: SkippedReason | None = None
    culprit: tuple[str, ...] = ()
    num_zeros_in_grad: int | None = None


Copy = Callable[[torch.Tensor], torch.Tensor]


class Applied(Protocol):
    """Whether a step was applied, which a device knows: a call waits for it.

    ready: whether a call would not wait. on_device: the answer, 0-dim. map_tensors: the same of copies of tensors.
    """

    def __call__(self) -> bool: ...
    def ready(self) -> bool: ...
    def on_device(self) -> torch.Tensor: ...
    def map_tensors(self, copy: Copy) -> Applied: ...


class NonFiniteParams(Protocol):
    """Names of the parameters with an inf or NaN in their gradients; waits for the device. A named tuple, so that
    `StepResult.map_tensors` finds what it reads."""

    def __call__(self) -> tuple[str, ...]: ...


class SkipReport(Protocol):
    """Why a step was skipped, and those names; likewise."""

    def __call__(self) -> tuple[SkippedReason, tuple[str, ...]]: ...


@dataclass(frozen=True, eq=False)
class LazyStepFields:
    """The fields of a step that a device decided, read when somebody asks.

    Attributes:
        loss_scale, grad_norm, num_zeros: numbers, or 0-dim tensors.
        report: why it was skipped, if it was.
    """

    loss_scale: Any
    grad_norm: Any = None
    report: SkipReport | None = None
    num_zeros: Any = None

    def __call__(self, applied: bool) -> StepFields:
        norm = None if self.grad_norm is None else float(self.grad_norm)
        fields = StepFields(loss_scale=float(self.loss_scale), grad_norm=norm)
        if applied and self.num_zeros is not None:
            return fields._replace(num_zeros_in_grad=int(self.num_zeros))
        if applied or self.report is None:
            return fields
        reason, culprit = self.report()
        return fields._replace(skipped_reason=reason, culprit=culprit)

    @property
    def pending(self) -> dict[str, torch.Tensor]:
        """Those that live on a device, by name."""
        numbers = {"loss_scale": self.loss_scale, "grad_norm": self.grad_norm}
        return {name: value for name, value in numbers.items() if isinstance(value, torch.Tensor)}


class StepResult:
    """The outcome of `optimizer.step()`; true if parameters were updated.

    applied: whether the optimizer changed the parameters.
    skipped_reason: why it did not: None, "nonfinite_loss" (the forward pass made an inf or NaN) or "nonfinite_grad" (an
        overflow).
    culprit: names of the parameters with an inf or NaN in the gradient.
    grad_norm: of the unscaled gradients before clipping; None where the step did not look at them.
    loss_scale: the scale that this step's gradients carried; 1.0 without a loss scaler.
    loss: what the closure returned, where ranks share gradients the mean over them; None without one.
    num_zeros_in_grad: zero gradient elements of this rank; None unless the precision was asked to count them.
    is_known: whether `applied` would not wait.
    decision: `applied` without waiting, a 0-dim bool tensor where a device decides.
    pending: numbers that still lie on a device, 0-dim, by name; None in the constructor is none.
    fields: of the constructor: a `StepFields`, or what makes one when it is read.

    Where the decision lives on a device, `applied` waits for that one flag and the other fields for the device, each when
    first read; until then nothing waits.
    """

    __slots__ = ("_applied", "_fields", "loss", "pending")

    def __init__(
        self,
        applied: bool | Applied,
        fields: StepFields | Callable[[bool], StepFields],
        *,
        loss: Any = None,
        pending: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._applied = applied
        self._fields = fields
        self.loss = loss
        self.pending = {} if pending is None else pending
        """Numbers of the fields that live on a device, 0-dim, for those who want copies of them without waiting."""

    @property
    def applied(self) -> bool:
        """Return whether the optimizer changed the parameters."""
        if not isinstance(self._applied, bool):
            self._applied = self._applied()
        return self._applied

    @property
    def is_known(self) -> bool:
        """Return whether `applied` would not wait."""
        return isinstance(self._applied, bool) or self._applied.ready()

    @property
    def decision(self) -> bool | torch.Tensor:
        """Return what `applied` says, without waiting: a 0-dim bool tensor on the device where the decision lives on one."""
        return self._applied if isinstance(self._applied, bool) else self._applied.on_device()

    @property
    def grad_norm(self) -> float | None:
        """Norm of the unscaled gradients before clipping; None where the step did not look at them, as torch's own.

        It looks under a loss scaler, after a clip and with `skip_nonfinite`. The gradients are those after the last
        backward, and the norm type is that of the first `clip_grad_by_norm` since then, else 2.
        """
        return self._read().grad_norm

    @property
    def loss_scale(self) -> float:
        """The scale that this step's gradients carried; 1.0 without a loss scaler."""
        return self._read().loss_scale

    @property
    def skipped_reason(self) -> SkippedReason | None:
        """Return why the step was skipped: None, "nonfinite_loss" or "nonfinite_grad"."""
        return self._read().skipped_reason

    @property
    def culprit(self) -> tuple[str, ...]:
        """Names of the parameters with an inf or NaN in the gradient when the step was skipped."""
        # Those of any rank where hosts decide, of this one where devices do: names would have to be waited for.
        return self._read().culprit

    @property
    def num_zeros_in_grad(self) -> int | None:
        """How many gradient elements of this rank were zero; None unless the precision was asked to count them."""
        return self._read().num_zeros_in_grad

    def without_loss(self) -> StepResult:
        """This result, or a copy that does not hold the loss of a closure, and with it a graph."""
        return self if self.loss is None else StepResult(self._applied, self._fields, pending=self.pending)

    def with_zeros(self, number: int | None) -> StepResult:
        """This result of a step that was applied, with `number` of zeros."""
        return StepResult(True, self._read()._replace(num_zeros_in_grad=number))

    def map_tensors(self, copy: Copy) -> StepResult:
        """Return the same result, of `copy` of each tensor that is not read yet, for who is about to overwrite them.

        Raises TypeError for a result that is read by another way.
        """

        def by_itself(value: Any) -> Any:  # what holds tensors that are not read later, such as parameters
            return value.map_tensors(copy) if hasattr(value, "map_tensors") else NotImplemented

        applied = map_tensors(copy, self._applied, instead=by_itself)
        if isinstance(self._fields, StepFields):
            return StepResult(applied, self._fields, loss=self.loss)
        if not isinstance(self._fields, LazyStepFields):
            raise TypeError(f"a step result that is read by {type(self._fields).__name__} cannot be copied")
        # Waits for nothing.
        fields = map_tensors(copy, self._fields, instead=by_itself)
        return StepResult(applied, fields, loss=self.loss, pending=fields.pending if self.pending else None)

    def _read(self) -> StepFields:
        if not isinstance(self._fields, StepFields):
            self._fields = self._fields(self.applied)
        return self._fields

    def __bool__(self) -> bool:
        return self.applied

    def __repr__(self) -> str:
        loss = self.loss.item() if isinstance(self.loss, torch.Tensor) and self.loss.numel() == 1 else self.loss
        fields = ", ".join(f"{name}={value!r}" for name, value in self._read()._asdict().items())
        return f"StepResult(applied={self.applied}, {fields}, loss={loss!r})"


class LossScaleError(RuntimeError):
    """Too many optimizer steps in a row were skipped because gradients were not finite."""


class StepHistory:
    """Counters of one optimizer's steps, and what waits for the outcome of the last ones.

    max_consecutive_skips: so many skips in a row raise `LossScaleError` in `sync`; None never does.

    Attributes:
        progress: steps applied in this process, which no checkpoint restores.
        last: the last result.
        scaler: of the next steps, which the message describes.
        waiting: steps that are not counted yet, each with what waits for it.
        num_syncs: how often all were to be counted.
    """

    def __init__(self, max_consecutive_skips: int | None, scaler: LossScaler) -> None:
        self.num_steps = 0
        self.num_applied = 0
        self.num_consecutive_skips = 0
        self.progress = 0
        self.last: StepResult | None = None
        self._max_consecutive_skips = max_consecutive_skips
        self.scaler = scaler
        self.waiting: list[tuple[StepResult, list[Callable[[], None]]]] = []
        self.num_syncs = 0
        self._is_syncing = False

    def record(self, result: StepResult) -> None:
        """Record a step; its outcome need not be known yet."""
        self.num_steps += 1
        self.last = result if result.loss is None else result.without_loss()
        self.waiting.append((self.last, []))

    def when_synced(self, action: Callable[[], None]) -> None:
        """Run `action` once the last step's outcome is known to the host: now, or at the next `sync()`."""
        if self.waiting:
            self.waiting[-1][1].append(action)
        else:
            action()

    def sync(self, result: StepResult | None = None, *, ready_only: bool = False) -> None:
        """Count the steps that wait, waiting for the outcome of each, then run what waited for it. Raises `LossScaleError`.

        result: of a step that is not recorded yet. ready_only: count those alone that are known without waiting."""
        if result is not None:
            self.num_steps += 1
            # A loss keeps its graph alive, and with it every activation.
            self.last = result if result.loss is None else result.without_loss()
            self.waiting.append((self.last, []))
        if self._is_syncing:  # what waited asks about the step it waited for
            return
        self._is_syncing = True
        self.num_syncs += not ready_only
        try:
            while self.waiting:
                result, deferred = self.waiting[0]
                if ready_only and not result.is_known:
                    return
                applied = result._applied is True or result.applied
                del self.waiting[0]
                if applied:
                    self.num_applied += 1
                    self.progress += 1
                    self.num_consecutive_skips = 0
                else:
                    self.num_consecutive_skips += 1
                # A scheduler steps only after a step that was applied.
                for action in deferred:
                    action()
                if (
                    self._max_consecutive_skips is not None
                    and self.num_consecutive_skips >= self._max_consecutive_skips
                ):
                    raise LossScaleError(self._report(result))
        finally:
            self._is_syncing = False

    def state_dict(self) -> dict[str, int]:
        """The counters, without `progress`."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, counters: dict[str, int]) -> None:
        """Restore what `read_counters` found."""
        for name in _COUNTERS:
            setattr(self, name, counters[name])

    def _report(self, result: StepResult) -> str:
        number = self.num_steps - len(self.waiting)
        last = number - self.num_consecutive_skips
        return (
            f"{self.num_consecutive_skips} optimizer steps in a row were skipped, up to step {number}; "
            f"{f'the last finite one was step {last}' if last else 'none was finite'}. Reason: {result.skipped_reason}; "
            f"not finite: {', '.join(result.culprit) or 'gradients of another rank'}; loss scale {self.scaler.describe()}. "
            "Look at these parameters' module and its inputs, lower the learning rate, keep the module in float32 "
            "(keep_fp32=...), or raise Booster(max_consecutive_skips=...), which is "
            f"{self._max_consecutive_skips}"
        )


def read_counters(state: Mapping[str, Any]) -> dict[str, int]:
    """The counters in `state`; raises ValueError if one is missing or no whole number, or if they contradict each other."""
    missing = [name for name in _COUNTERS if name not in state]
    if missing:
        raise ValueError(f"step counters {missing} are missing; there are {sorted(map(str, state))}")
    counters = {name: state[name] for name in _COUNTERS}
    for name, count in counters.items():
        if not arguments.is_whole(count) or count < 0:
            raise ValueError(f"{name}={count!r} is not a whole number of at least 0")
    if counters["num_applied"] + counters["num_consecutive_skips"] > counters["num_steps"]:
        raise ValueError(
            f"the step counters contradict each other, more were applied and skipped than done: {counters}"
        )
    return counters


_COUNTERS = ("num_steps", "num_applied", "num_consecutive_skips")


Gradients = Any  # of `update.gradients`, which imports this file
Application = Any  # of `update.application`, likewise


class Norms(ABC):
    """How the norms of one optimizer's gradients are read. What was read is kept with the gradients, in `Gradients.read`.

    gradients: a `Gradients`."""

    on_device = False
    """Whether scale, norms and clip factors are 0-dim tensors, not waited for, and not Python numbers."""
    defers_clips = False
    """Whether a clip that no call of the user's asked for can wait, unread, for the decision."""

    def __init__(self, context: UpdateContext) -> None:
        self.optimizer = context.optimizer
        self.shards = context.shards
        self.group = context.group
        self._copies: tuple[list[int], torch.Tensor] | None = None  # of parts, and the same where norms are

    @abstractmethod
    def read(self, gradients: Any, norm_type: float) -> tuple[Any, Any]:
        """Read `gradients` once. Returns what was read, with the norm of what is in `.grad` as `total`, and the norm as it
        would be unscaled, clips applied. Inside `local()`."""

    @abstractmethod
    def found_inf(self, read: Sequence[Any]) -> Any:
        """Return whether one of `read` had an inf or NaN: a bool, or a 0-dim tensor."""

    @abstractmethod
    def nonfinite_params(self, gradients: Any) -> NonFiniteParams:
        """Return what names the parameters with an inf or NaN in what was read, also after it is forgotten."""

    @abstractmethod
    def clipped(self, norm: Any, max_norm: float, factor: Any) -> Any:
        """The clip factor that waits after a clip of gradients of the true norm `norm`: torch's max_norm / (norm + 1e-6).

        factor: the one that waited before, or None."""

    @abstractmethod
    def clamp(self, gradients: Any, clip_value: float) -> None:
        """Clamp `gradients`, as they would be unscaled, to [-clip_value, clip_value]. Inside `local()`."""

    @property
    def found_inf_is_global(self) -> bool:
        """Whether what `found_inf` tells speaks for all ranks already."""
        return False

    def all_finite(self, read: Sequence[Any]) -> bool:
        """Whether it is known without a collective that no rank has an inf or NaN; the same on every rank."""
        return False

    def shared_total(self, norms: torch.Tensor, norm_type: float, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm over all ranks from those of the tensors here, where ranks hold shards: 0-dim, float64, one collective.

        norms: of `params`, may be empty."""
        if math.isinf(norm_type):
            # NaN does not survive a MAX on every backend: it travels as inf, and inf as the largest number.
            largest = norms.double().amax() if norms.numel() else norms.new_zeros((), dtype=torch.float64)
            sent = largest.nan_to_num(math.inf, sys.float_info.max)
            total = agreement.all_reduce(sent, self.group, dist.ReduceOp.MAX)
            return torch.where(total.isinf(), math.nan, torch.where(total == sys.float_info.max, math.inf, total))
        # A replica is summed on each rank that holds it, and counts once.
        copies = self.shards.num_replicas(params)
        if self._copies is None or self._copies[0] != copies:
            self._copies = copies, torch.tensor(copies, dtype=torch.float64).to(norms.device)
        # It is the same on every rank, and not finite if any rank holds an inf or NaN.
        powers = norms.double() ** norm_type / self._copies[1]
        return agreement.all_reduce(powers.sum(), self.group, dist.ReduceOp.SUM) ** (1.0 / norm_type)


class Decision(ABC):
    """Steps or skips by what was read of `gradients`, and tells their loss scale. application: what steps."""

    on_device = False
    """Whether the host does not know what was decided when `step` returns."""

    def __init__(self, gradients: Gradients, application: Application) -> None:
        self.gradients = gradients
        self.application = application

    @abstractmethod
    def step(self, params: list[torch.Tensor]) -> tuple[StepResult, Any]:
        """Step or skip `params`, which have gradients, and update the loss scale. Returns also what `.grad` is multiplied by.

        Inside `local()`. Where a pass has used its gradients, what it left is counted, and nothing stepped."""

    def held_by(self, graph: list[Any]) -> AbstractContextManager[None]:
        """Return a context in which a step is recorded: what its launches read by address, if any do, is put into `graph`."""
        return nullcontext()

    def backward_pass(self, gradients: Gradients) -> InBackwardPass:
        """Return what uses `gradients` in a backward pass, where that is asked for."""
        return InBackwardPass(gradients)

    def prepare_gradual(self) -> None:
        """A step that is made of parts, within backward, begins."""

    def read_part(self, params: Sequence[torch.Tensor]) -> None:
        """A part of a step that is made of parts is next to be stepped: `params`, with their gradients."""
