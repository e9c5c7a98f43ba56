"""The gradients of one optimizer from backward to step: their scale, the clips that wait, and the decision to step.

Nothing here writes a gradient unless it must. One read of the *scaled* gradients, their norm, tells overflow and clip
factor; scale and clip reach a fused optimizer as one number, `grad_scale`, others as one multiplication. Where the numbers
live, on the host or on a device, is what the two subclasses differ in.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.loss_scaler import LossScaler
from booster.model.params import load_states
from booster.ranks import agreement
from booster.shards import Shards
from booster.tensors.grads import gradient_values, own_memory, scale_in_graph, scale_values
from booster.tensors.trees import HALF_DTYPES
from booster.update.backward import BackwardPass, JointDecision
from booster.update.fused import FusedKernel
from booster.update.outcome import StepFields, StepListener, StepResult, UpdateOptions
from booster.update.parts import Parts
from booster.update.release import Release
from booster.update.touched import EVERY, FIRST, ScaledGradients

_logger = logging.getLogger(__name__)
_WHOLE = nullcontext()  # where parameters are whole, `local()` changes nothing
_DTYPE = attrgetter("dtype")  # of every parameter in every step, without a Python call for each


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What an update is made from.

    names: the name of each parameter, for reports. group: where ranks agree on found_inf; None means alone. shards: what
    this rank holds of the parameters; whatever touches gradients runs inside its `local()`. switched: the optimizer's fused
    kernel was not the user's choice.
    """

    optimizer: Optimizer
    scaler: LossScaler
    names: Mapping[torch.Tensor, str] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None
    shards: Shards = None  # type: ignore[assignment]
    options: UpdateOptions = UpdateOptions()
    switched: bool = False

    def __post_init__(self) -> None:
        if self.shards is None:
            object.__setattr__(self, "shards", Shards(self.optimizer))


class Update(ABC):
    """State of one optimizer's gradients; see the module docstring."""

    scaler: LossScaler

    def __init__(self, job: Job) -> None:
        scaler = job.scaler
        if not scaler.enabled and scaler.scale != 1.0:
            raise ValueError(
                f"{type(scaler).__name__} has a scale of {scaler.scale:g} and enabled = False, so nothing would be scaled; set "
                "enabled = True in the class"
            )
        self.optimizer = job.optimizer
        self.kernel = FusedKernel(job.optimizer, switched=job.switched)
        self.shards = job.shards
        self.scaler = scaler
        self.joint = JointDecision([self])
        self.names = job.names
        self._group = job.group
        self._skip_nonfinite = job.options.skip_nonfinite
        self._scale: Any = None  # what .grad is multiplied by; None: no gradients that we know of
        self._present: list[torch.Tensor] | None = None  # `params()`, within a step
        self._copies: tuple[list[int], torch.Tensor] | None = None  # of parts, and the same where norms are
        self.release: Release | None = None
        self.listeners: list[StepListener] = []
        self._num_steps = 0
        self._told_touched = False
        self.note_dtypes()
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not listened to: who listens, such as an open record, knows this one.
        return {**self.__dict__, "listeners": [], "noted": None}

    def reset(self) -> None:
        """Forget what belongs to one step."""
        self._factor: Any = None  # product of the clip factors not yet applied
        self._measured: list[Any] = []  # norms read since the last backward; they tell found_inf
        self._reported_norm: Any = None
        self._check = self.scaler.enabled or self._skip_nonfinite
        self._num_backwards = 0
        self.noted: ScaledGradients | None = None  # scaled gradients, as the last backward pass left them
        self._differentiable = False  # a graph may lead through gradients at rest
        self._loss_scale: Any = 1.0  # of this step's backward passes
        self.losses: list[torch.Tensor] = []
        if len(self.joint.updates) > 1:
            self.joint.updates.remove(self)
            self.joint = JointDecision([self])
        self.joint.found = None

    @contextmanager
    def set_aside(self, scale: float) -> Iterator[None]:
        """Inside, the update is as before any pass, nobody listens, and losses are multiplied by `scale`; afterwards
        it is what it was."""
        before, found = dict(self.__dict__), self.joint.found
        self.joint = JointDecision([self])
        self.reset()
        self._scale = None
        self.listeners = []
        self.release = None
        self.__dict__["scale_for"] = lambda loss_id: scale
        try:
            yield
        finally:
            self.__dict__.clear()
            self.__dict__.update(before)
            self.joint.found = found

    @property
    def num_backwards(self) -> int:
        """How many backward passes there were since the last step."""
        return self._num_backwards

    decides_on_device = False
    piles_up = False
    """Whether gradients can be there that no step may use yet although a backward pass has ended."""

    @property
    def found_is_shared(self) -> bool:
        """Whether `found` already speaks for all ranks."""
        return False

    @property
    def all_finite(self) -> bool:
        """Whether it is known without a collective that no rank has an inf or NaN; the same on every rank."""
        return False

    keeps_masters = False
    """Whether float32 numbers stand behind half parameters."""

    def has_master(self, param: torch.Tensor) -> bool:
        """Return whether float32 numbers of this update's stand behind `param`, a whole parameter, as checkpoints keep them."""
        return False

    def forget_gradients(self, set_to_none: bool = True) -> None:
        """The gradients were zeroed."""
        if self.shards.shares:
            self.shards.clear_gradients(set_to_none)
        self.reset()
        self._scale = None

    @property
    @abstractmethod
    def next_scale(self) -> Any:
        """The scale for the next loss: a float, or a 0-dim tensor where it lives on a device."""

    def scale_for(self, loss_id: int) -> Any:
        """The scale for the next loss of that number, as `next_scale`."""
        return self.next_scale

    def before_backward(self, scale: Any, this: BackwardPass | None = None) -> None:
        """Bring gradients that exist already to `scale`, pending clips applied, so that new ones add to them. this: the pass
        that begins; None means one for this update alone, of loss 0, complete."""
        if self.noted is not None:
            self.compare_noted()
        if self.release is not None:  # it steps within the pass
            self._check_full([param for param in self._all_params() if param.requires_grad])
        if self.shards.sharded:
            self.shards.even_out()
        if not self.decides_on_device:
            scale = float(scale)
        if self._scale is not None and (self._factor is not None or not _same(self._scale, scale)):
            self._multiply(scale / self._scale * self._pending)
        self._differentiable = self._differentiable or (this is not None and this.create_graph)
        self._scale = self._loss_scale = scale
        self._factor = None
        self._measured = []
        self._reported_norm = None
        self.joint.found = None

    def after_backward(self, loss: torch.Tensor | None) -> None:
        """loss: None where another pipeline stage computes it."""
        self._num_backwards += 1
        if self.scaler.enabled and (self._num_steps < FIRST or self._num_steps % EVERY == 0):
            self._note_scaled()
        if self._check and loss is not None:
            self.losses.append(loss.detach())
        for listener in self.listeners:
            listener.after_backward(None if loss is None else loss.detach())

    def note_dtypes(self) -> None:
        """Note whether parameters are float32 now, so that a step can tell if they were made half since."""
        self._is_full = HALF_DTYPES.isdisjoint(map(_DTYPE, self._all_params()))

    def _note_scaled(self) -> None:
        if not _same(self._known_scale, 1.0):
            self.noted = ScaledGradients(self._all_params())

    def compare_noted(self) -> None:
        """One WARNING if somebody else wrote to gradients that are noted; they are noted no longer."""
        noted, self.noted = self.noted, None
        params = [] if noted is None or self._told_touched else noted.touched()
        if params:
            self._told_touched = True
            _logger.warning(
                "the gradient of %s%s was changed between booster.backward and step() while it was multiplied by the loss "
                "scale, as by torch's clip_grad_norm_, by a loss.backward() of its own, or by hand: what is added or compared "
                "with a bound there is thousands of times too small. Clip with optimizer.clip_grad_by_norm(max_norm), pass "
                "every loss to booster.backward, and call optimizer.unscale_grads() before writing to .grad",
                self.name_of(params[0]),
                f" (and of {len(params) - 1} others)" if len(params) > 1 else "",
            )

    def abandon_backward(self) -> None:
        """The pass raised; `after_backward` is not called."""

    def unscale(self) -> None:
        """Make `.grad` what it would be without a scale, pending clips applied. Calling it again does nothing."""
        with self.shards.local():
            self._unscale()

    def _unscale(self) -> None:
        if self._nobody_has_gradients():
            return
        self._require_backward()
        if self._check and not self._measured:
            self._true_norm(2.0)
        if self._factor is not None or not _same(self._known_scale, 1.0):
            self._multiply(self._pending / self._known_scale)
        self._scale = 1.0
        self._factor = None

    def clip_norm(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, *, asked: bool = True
    ) -> torch.Tensor:
        """Scale gradients down so that their norm is at most `max_norm`; returns the norm before, unscaled, 0-dim.

        asked: by a call of the user's, which is refused where no backward pass came before it."""
        with self.shards.local() if self.shards.sharded else _WHOLE:
            self._present = self._find_params()
            try:
                unsure = not self._num_backwards if self.shards.sharded else not self._present
                if unsure and self._nobody_has_gradients():
                    if asked:
                        self._refuse_early_clip("clip_grad_by_norm")
                    return torch.tensor(0.0, dtype=torch.float32)
                if self.piles_up or not self._num_backwards:
                    self._require_backward()
                self._check = True
                norm = self._true_norm(norm_type)
            finally:
                self._present = None
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {float(norm)}, so it cannot be clipped. Under a "
                "loss scaler this is ordinary: leave error_if_nonfinite=False and the step is skipped"
            )
        self._factor = self._clipped(norm, max_norm)
        return norm if isinstance(norm, torch.Tensor) else torch.tensor(norm, dtype=torch.float32)

    @abstractmethod
    def clip_value(self, clip_value: float) -> None:
        """Clamp the unscaled gradients to [-clip_value, clip_value]. A step with non-finite gradients is skipped."""

    @property
    def carried(self) -> tuple[Any, Any, Any]:
        """Before a step: what gradients are multiplied by, the clip factor that waits, and the scale of the last backward
        pass. Floats, or 0-dim tensors where they live on a device."""
        return self._known_scale, self._pending, self._loss_scale

    @abstractmethod
    def found(self) -> Any:
        """Return whether this rank's gradients hold an inf or NaN: a bool, or a 0-dim tensor."""

    def _measure_once(self) -> None:
        """Read the gradients, if nobody has since the last backward pass."""
        if not self._measured:
            with self.shards.local() if self.shards.sharded else _WHOLE:  # another optimizer's step may ask
                self._true_norm(2.0)

    @abstractmethod
    def blame(self) -> Callable[[], tuple[str, ...]]:
        """Return what names the parameters with an inf or NaN in their gradients, also after `reset`."""

    def step(self) -> StepResult:
        """Update the parameters unless the gradients of any rank are not finite, then the loss scale."""
        if self.release is not None:
            self.release.check_weights()
            if self.release.pending:
                return self._finish_release(self.release)
        with self.shards.local() if self.shards.sharded else _WHOLE:
            self._present = self._find_params()
            self._num_steps += 1
            try:
                if self._is_full and not HALF_DTYPES.isdisjoint(map(_DTYPE, self._present)):
                    self._check_full(self._present)
                unsure = not self._num_backwards if self.shards.sharded else not self._present
                if unsure and self._nobody_has_gradients():
                    self._step_optimizer()
                    scale = self.next_scale
                    self.reset()
                    return StepResult(True, lambda applied: StepFields(loss_scale=float(scale)))
                if self.piles_up or not self._num_backwards:
                    self._require_backward()
                result = self._decide_and_apply()
            finally:
                self._present = None
        # What a device skipped is published as it was: to know would be to wait.
        if self.shards.sharded and (self.decides_on_device or result.applied):
            self.shards.publish()
        self.reset()
        return result

    def _finish_release(self, release: Release) -> StepResult:
        """Do what a step does besides updating parameters, which were updated within backward."""
        try:
            result = self._decide_and_apply()
        finally:
            release.pending = False
        # What came before a gradient that is not finite may have been stepped.
        if self.shards.sharded and (result.applied or release.mode == "previous_norm"):
            self.shards.publish()
        self.reset()
        self._scale = None
        return result

    @property
    def released(self) -> bool:
        """Whether the last backward pass has used its gradients, so that `step` has none to use."""
        return self.release is not None and self.release.pending

    def make_parts(self) -> Parts | None:
        """Return what makes the next step in parts, within backward; None where this update steps all at once."""
        return None

    def look_at_part(self, params: Sequence[torch.Tensor]) -> None:
        """A part of a step that is made of parts is next to be stepped: `params`, with their gradients."""

    @contextmanager
    def present(self, params: list[torch.Tensor]) -> Iterator[None]:
        """Inside, `params()` are these."""
        before, self._present = self._present, params
        try:
            yield
        finally:
            self._present = before

    def step_with_closure(self, closure: Callable[[], Any]) -> StepResult:
        """Step an optimizer that evaluates the loss itself, without a loss scale; clips inside the closure take effect."""
        self._refuse_closure()

        def clipped() -> Any:
            loss = closure()
            self.unscale()
            self.kernel.prepare(self.params())
            return loss

        loss = self.optimizer.step(clipped)
        norm = None if self._reported_norm is None else float(self._reported_norm)
        self.reset()
        self._scale = 1.0
        return StepResult(True, StepFields(loss_scale=1.0, grad_norm=norm), loss=loss)

    def _refuse_closure(self) -> None:
        name = f"{type(self.optimizer).__name__}.step(closure)"
        if self.release is not None:
            raise RuntimeError(
                f"{name} would use gradients after their backward pass, and release_gradients={self.release.mode!r} frees them "
                "within it; call booster.backward and step() without a closure, or use release_gradients=False"
            )
        if self.shards.sharded:
            raise RuntimeError(
                f"{name} cannot run on shards of the parameters; call booster.backward and step() without it"
            )
        if self._skip_nonfinite:
            raise RuntimeError(
                f"{name} computes and uses its gradients in one go, so skip_nonfinite=True cannot look at them; call "
                "booster.backward and step() without a closure, or use Booster(skip_nonfinite=False)"
            )

    @property
    def state(self) -> Any:
        """The optimizer's state, by the parameters that the user knows."""
        return self.shards.view_state(self._state)

    @property
    def _state(self) -> Any:
        return self.optimizer.state

    def optimizer_state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`state_dict` of what the optimizer's groups hold."""
        return self.optimizer.state_dict(), {}

    def give_back(self) -> dict[torch.Tensor, torch.Tensor]:
        """Leave the optimizer as `boost` found it, but for its states, which are by this rank's parts of parameters where ranks
        divide them; return the float32 numbers behind half parameters, each laid out as its parameter is.

        A collective where ranks divide parameters flat. This update is at its end.
        """
        with self.shards.local():
            values = self._dissolve()
        self.kernel.give_up()
        return self.shards.widen_masters(values)

    def rounding_state(self) -> dict[str, Any]:
        """Return the random state of rounding, where this update rounds by chance, to be given to `load_rounding`."""
        return {}

    def load_rounding(self, state: Mapping[str, Any]) -> None:
        """Continue the random numbers of rounding where `rounding_state` was taken; does nothing where none are drawn."""

    def _dissolve(self) -> dict[torch.Tensor, torch.Tensor]:
        """Have the states by what the groups hold; return the masters likewise. Inside `local()`."""
        return {}

    def read_optimizer_state_dict(self, state_dict: dict[str, Any], own: Mapping[str, Any]) -> Callable[[], None]:
        """`load_state_dict` into what the optimizer's groups hold; own: what `optimizer_state_dict` gave besides.

        Containers of the optimizer may change, but no tensor; what is returned does the rest, and does not fail.
        """
        load_states(self.optimizer, state_dict)
        return lambda: None

    def watch(self, model: nn.Module) -> None:
        """Take over what masters can use of weights that are loaded into `model`."""

    def weights_in_model(self) -> list[str]:
        """Names of trained parameters that are their own masters. Not inside `local()`."""
        return []

    def master_tensors(self) -> list[torch.Tensor]:
        """Return what is kept beside half weights."""
        return []

    def wait_for_copies(self) -> None:
        """Wait until what the last step sent to the host's memory, if anything, has arrived there."""

    def read_masters(self, masters: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[torch.Tensor, torch.Tensor]]:
        """Of masters of whole parameters, the part that is kept besides, and values of parameters that are their own masters.

        Not inside `local()`. Raises ValueError, with nothing changed, if there is no use for them or bits would be lost.
        """
        if masters["weights"]:
            raise ValueError(
                "the optimizer state holds float32 master weights, but this precision keeps none; resume with the precision "
                "that wrote it, or delete state['booster']['masters'] to go on from the rounded weights"
            )
        return masters, {}

    @abstractmethod
    def _decide_and_apply(self) -> StepResult:
        """Step or skip with gradients at hand, update the scale, and set `_scale` to what `.grad` carries now."""

    @abstractmethod
    def _measure(self, values: list[torch.Tensor], norm_type: float) -> Any:
        """Norm over `values`, which may be none: an object whose `total` is it."""

    @abstractmethod
    def _clipped(self, norm: Any, max_norm: float) -> Any:
        """The pending factor after a clip of gradients whose true norm is `norm`: torch's max_norm / (norm + 1e-6)."""

    @property
    def _pending(self) -> Any:
        return 1.0 if self._factor is None else self._factor

    @property
    def _known_scale(self) -> Any:
        return 1.0 if self._scale is None else self._scale

    def params(self) -> list[torch.Tensor]:
        """Parameters that have a gradient, in the order of the groups."""
        return self._find_params() if self._present is None else self._present

    def _find_params(self) -> list[torch.Tensor]:
        found = []
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    found.append(param)
        return found

    def gradients(self, *, written: bool = False) -> list[torch.Tensor]:
        """The gradients that `step` will use, one for each of `params()`; `written`: to be written to, whole."""
        if not written:
            return gradient_values(self._find_params() if self._present is None else self._present)
        params = self.shards.written(self.params())
        own_memory(params)
        return gradient_values(params)

    def all_or_none(self, what: str) -> AbstractContextManager[None]:
        """Context whose error on one rank of those that step together is raised on all; see `agreement.all_or_none`."""
        return agreement.all_or_none(self._group, what)

    def require_alike(self, text: str, what: str) -> None:
        """Raise ValueError, on all ranks that step together, if they differ in `text`, which tells `what`."""
        agreement.require_alike(text, what, self._group)

    @property
    def closure_refusal(self) -> str | None:
        """Return why `step(closure)` cannot run; None if it can."""
        if not self.scaler.enabled:
            return None
        return (
            f"{type(self.optimizer).__name__}.step(closure) cannot run under a loss scaler: the decision to skip falls after "
            "backward, inside the closure. Use mixed_precision='fp32' or 'bf16', or, if the optimizer does not need a closure, "
            "call booster.backward(loss, optimizer) and then step()"
        )

    def check_known(self, params: list[torch.Tensor]) -> None:
        """Raise ValueError if ranks share gradients and one of `params` belongs to no boosted model."""
        if self._group is not None and any(param not in self.names for param in params):
            raise ValueError(
                "the added parameters belong to no boosted model, so their gradients would not be synchronised among ranks; "
                "make them parameters of the model before boost()"
            )

    def culprits(self, indices: list[int], params: list[torch.Tensor]) -> tuple[str, ...]:
        return tuple(self.name_of(params[index]) for index in indices)

    def name_of(self, param: torch.Tensor) -> str:
        """The qualified name of `param`, for reports."""
        return self.names.get(param, f"a parameter of shape {tuple(param.shape)}")

    def _nobody_has_gradients(self) -> bool:
        """Return whether no rank has a gradient; a collective where ranks hold shards and there was no backward."""
        if self.shards.sharded and self._num_backwards:
            return False  # a rank without any joins the collectives of the others
        here = float(bool(self.params()))
        return not (agreement.largest(here, self._group) if self.shards.sharded else here)

    @property
    def looks(self) -> bool:
        """Return whether the next step looks at these gradients of its own accord."""
        return self._check

    @property
    def _checks(self) -> bool:
        """Return whether this step looks at its gradients, or is bound by another optimizer that does."""
        joint = self.joint
        return self._check or joint.found is not None or any(update.looks for update in joint.updates)

    def _true_norm(self, norm_type: float) -> Any:
        """Norm of the gradients as they would be unscaled, clips applied: one read of them. Inside `local()`."""
        with torch.no_grad():
            measured = self._measure(self.gradients(), norm_type)
        self._measured.append(measured)
        norm = measured.total
        if self._factor is not None:
            norm = norm * self._factor
        if not _same(self._known_scale, 1.0):
            norm = norm / self._scale
        if self._reported_norm is None:
            self._reported_norm = norm
        return norm

    def _shared_total(self, norms: torch.Tensor, norm_type: float) -> torch.Tensor:
        """The norm over all ranks from those of the tensors here, where ranks hold shards: 0-dim, float64, one collective.

        It is the same on every rank, and not finite if any rank holds an inf or NaN. norms: of `params()`, may be empty.
        """
        if math.isinf(norm_type):
            # NaN does not survive a MAX on every backend.
            largest = norms.double().amax() if norms.numel() else norms.new_zeros((), dtype=torch.float64)
            return agreement.shared(largest.nan_to_num(math.inf, math.inf), self._group, dist.ReduceOp.MAX)
        copies = self.shards.copies_of(self._find_params() if self._present is None else self._present)
        if self._copies is None or self._copies[0] != copies:
            self._copies = copies, torch.tensor(copies, dtype=torch.float64).to(norms.device)
        powers = norms.double() ** norm_type / self._copies[1]
        return agreement.shared(powers.sum(), self._group, dist.ReduceOp.SUM) ** (1.0 / norm_type)

    def _step_optimizer(self) -> None:
        self.optimizer.step()

    def _multiply(self, ratio: Any) -> None:
        with self.shards.local() if self.shards.sharded else _WHOLE:
            if self._differentiable:
                self._leave_graph()
                scale_in_graph(self.gradients(written=True), ratio)
            else:
                scale_values(self.gradients(written=True), ratio)

    def _leave_graph(self) -> None:
        """Replace gradients that a graph may have saved by copies, which can be written to and lead back into it."""
        for param in self.shards.written(self.params()):
            if param.grad is not None and param.grad.requires_grad:
                with torch.enable_grad():
                    param.grad = param.grad.clone()

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _check_full(self, params: list[torch.Tensor]) -> None:
        """Raise RuntimeError if all parameters were float32 or float64, and some of `params` are half now."""
        half = [param for param in params if param.dtype in HALF_DTYPES] if self._is_full else []
        if half:
            raise RuntimeError(
                f"{self.name_of(half[0])} was float32 at boost() and is {half[0].dtype} now, as after model.half() or "
                "model.to(dtype): no float32 master stands behind it, and small updates would be lost. Leave the weights as "
                "they are, since the precision casts what it computes; for half weights with masters use "
                "mixed_precision='fp16_naive' or 'bf16_naive'"
            )

    def _refuse_early_clip(self, method: str) -> None:
        """Raise RuntimeError where the user clips and no backward pass has brought gradients since the last step."""
        if not self._num_backwards:
            raise RuntimeError(
                f"{method}() came before booster.backward(loss, optimizer), or after step() and zero_grad(): there are no "
                "gradients, so nothing would be clipped. Call it between backward and step(); Booster(clip_grad_norm=...) "
                "clips in every step by itself"
            )

    def _require_backward(self) -> None:
        if self.scaler.enabled and self._num_backwards == 0:
            raise RuntimeError(
                "there are gradients, but no booster.backward(loss, optimizer) since the last step: under a loss scaler those "
                "of a bare loss.backward() are not scaled, and those of the last step have been used. Call "
                "booster.backward(loss, optimizer) instead, and name every optimizer that will step on that loss: "
                "booster.backward(loss, [optimizer_a, optimizer_b])"
            )


def _same(scale: Any, other: Any) -> bool:
    if isinstance(scale, torch.Tensor) or isinstance(other, torch.Tensor):
        return scale is other
    return scale == other
