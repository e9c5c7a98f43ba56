"""From a step that can be replayed to its `Diagnosis`: what helps against the cause is tried by replays, on all ranks together.

Three things are tried: a smaller loss scale, one module in float32 (`in_float32`), and zeros in place of what the cause made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.common.arguments import dtype_name
from booster.common.snapshot import attributes, random_state, set_random_state
from booster.numerics.diagnosis.diagnosis import Cause, CauseKind, Diagnosis, cause_of
from booster.numerics.diagnosis.replay import RanksApart, Replay, ReplayBarrier, StoppedElsewhere
from booster.ranks import agreement
from booster.tensors.cast_regions import CastMode, cast_floats, disabled
from booster.tensors.trees import HALF_DTYPES, map_tensors, tensors


@contextmanager
def in_float32(module: nn.Module | None, device_type: str, *, same_dtypes: bool = False) -> Iterator[None]:
    """Inside, `module`, if there is one, computes in float32 with its weights cast, and takes what it did before.

    It returns the half-precision dtype of its weights, where they have one. Where its code wants half precision and raises, it
    computes as before: on several ranks, one that raises would leave others waiting.

    same_dtypes: without such weights, it returns the dtypes that it did before, as another rank expects them, and is computed
        twice to know them.
    """
    if module is None:
        yield
        return
    # In the instances' dicts, because assigning an attribute of a Module goes through its `__setattr__`.
    before = {child: child.__dict__.get("forward") for child in module.modules()}
    whole = _Float32Forward(module, device_type, same_dtypes)
    for child in before:
        if child._parameters:
            child.__dict__["forward"] = partial(_forward_with_float32_weights, child, child.forward, whole)
    whole.forward = module.forward
    module.__dict__["forward"] = whole
    try:
        yield
    finally:
        for child, forward in before.items():
            child.__dict__.pop("forward", None)
            if forward is not None:
                child.__dict__["forward"] = forward


class _Float32Forward:
    """The forward of a module in float32; see `in_float32`.

    Attributes:
        forward: what it calls, in which the modules inside cast their weights while `casts` is set.
    """

    forward: Callable[..., Any]

    def __init__(self, module: nn.Module, device_type: str, same_dtypes: bool) -> None:
        self._module, self._device_type, self._same_dtypes = module, device_type, same_dtypes
        self.casts = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Asked now: sharded weights are gathered, in half precision, for the time of a call.
        half = next((param.dtype for param in self._module.parameters() if param.dtype in HALF_DTYPES), None)
        try:
            if not self._same_dtypes or half is not None:
                return cast_floats(self._in_float32(args, kwargs), half)
            before = random_state()
            # Once as before, only to see which dtypes it returns; random numbers are put back afterwards.
            with torch.no_grad(), attributes([self], casts=False):
                dtypes = iter([tensor.dtype for tensor in tensors(self.forward(*args, **kwargs))])
            set_random_state(before)
            return map_tensors(lambda tensor: tensor.to(next(dtypes)), self._in_float32(args, kwargs))
        except (RuntimeError, TypeError, ValueError):  # as `keep_fp32` would find out too
            with attributes([self], casts=False):
                return self.forward(*args, **kwargs)

    def _in_float32(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_on = torch.is_autocast_enabled(self._device_type)
        autocast = torch.autocast(self._device_type, enabled=False) if is_on else nullcontext()
        with autocast, disabled(CastMode), attributes([self], casts=True):
            return self.forward(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))


def _forward_with_float32_weights(
    module: nn.Module, forward: Callable[..., Any], whole: _Float32Forward, *args: Any, **kwargs: Any
) -> Any:
    """Call `forward` of `module`; the module's own half-precision parameters are float32 meanwhile, if `whole` casts."""
    if not whole.casts:
        return forward(*args, **kwargs)
    own: dict[str, Any] = module._parameters
    before = dict(own)
    try:
        for name, param in before.items():
            if param is not None and param.dtype in HALF_DTYPES:
                own[name] = _AsFloat32.apply(param)
        # A module inside that is kept in float32 may give half-precision activations.
        return forward(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))
    finally:
        own.update(before)


class _AsFloat32(torch.autograd.Function):
    """A half-precision parameter in float32, with a gradient cut at its largest number.

    A parameter that is kept in float32 has a float32 gradient, which would not overflow there.
    """

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor) -> torch.Tensor:
        ctx.dtype = param.dtype
        return param.float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        largest = torch.finfo(ctx.dtype).max
        return grad.clamp(-largest, largest).to(ctx.dtype)


_MAX_FAULTS = 4  # that may be mended one after another before giving up
_MAX_SCALES = 12
_HALF_NAMES = frozenset(map(dtype_name, HALF_DTYPES))


@dataclass(frozen=True)
class ReplayFindings:
    """What one replay found, on all ranks alike but for `own`.

    Attributes:
        bad: any rank's loss or gradient was.
        cause: that all ranks name.
        own: of this rank's bad numbers, as it sees it.
        loss: the mean of the ranks that have one.
        largest_gradient: of all ranks, with its loss scale.
    """

    bad: bool
    cause: Cause | None
    own: Cause | None
    loss: float | None
    largest_gradient: float


class ReplayError(RuntimeError):
    """Another rank could not replay the step."""


class ReplayTrials:
    """Replays of one step on all ranks of `group`, and what they agree on. Made on all of them together."""

    def __init__(self, replay: Replay, group: dist.ProcessGroup | None, device_type: str) -> None:
        self._replay = replay
        self._group = group
        self._device_type = device_type
        self._rank = dist.get_rank() if group is not None else 0
        self._barrier = None if group is None else ReplayBarrier.of(group)

    def run(self, **how: Any) -> ReplayFindings:
        """Replay on all ranks. If it raises on any, all raise: there its own error, elsewhere `ReplayError`."""
        problem: Exception | None = None
        own: Cause | None = None
        try:
            outcome = self._replay.run(agree=self._any_failed, **how)
            own = cause_of(outcome, self._rank)
            report: dict[str, Any] = {"bad": outcome.bad, "loss": outcome.loss, "largest": outcome.largest_gradient}
            report["cause"] = None if own is None else dataclasses.asdict(own)
        except StoppedElsewhere:
            report = {"error": ""}
        # Others wait in a collective for a rank that raised, and no message would reach them.
        except RanksApart:
            raise
        except Exception as error:
            problem = error  # raised once the others know
            report = {"error": f"{type(error).__name__}: {error}"}
        # Also where this rank raised: the others wait for its report.
        reports = agreement.gather(report, self._group)
        if problem is not None:
            raise problem
        for rank, each in enumerate(reports):
            if each.get("error"):
                raise ReplayError(f"rank {rank} of the group could not replay the step: {each['error']}")
        causes = [Cause.read(each["cause"]) for each in reports if each["cause"] is not None]
        losses = [each["loss"] for each in reports if each["loss"] is not None]
        return ReplayFindings(
            bad=any(each["bad"] for each in reports),
            # The first one in time, and among ranks the same one for all.
            cause=min(causes, key=lambda cause: cause.order, default=None),
            own=own,
            loss=sum(losses) / len(losses) if losses else None,
            largest_gradient=max(each["largest"] for each in reports),
        )

    def _any_failed(self, failed: bool) -> bool:
        return failed if self._barrier is None else self._barrier.any(failed)

    def first(self) -> ReplayFindings:
        """Replay the step as it is."""
        self._first = self.run()
        return self._first

    def largest_scale(self, cause: Cause) -> float | None:
        """Return the largest loss scale found, a power of two below this one and at least 1, at which all is finite."""
        scale, overflow = self._replay.scale, cause
        for _ in range(_MAX_SCALES):
            # Scales are powers of two, which lose no bits; the overflow says how many of them are too many.
            scale = 2.0 ** math.floor(math.log2(scale)) / 2.0 ** _excess(overflow)
            if scale < 1.0:
                return None
            findings = self.run(scale=scale)
            if not findings.bad:
                return scale
            cause_there = findings.cause
            if cause_there is None or cause_there.kind != "overflow" or cause_there.direction != "backward":
                return None
            overflow = cause_there
        return None

    def module_in_float32(self, cause: Cause) -> str | None:
        """Return the innermost module around the cause that, computed in float32, makes all finite."""
        named = self._replay.modules
        for name in reversed(cause.modules):
            in_stages = self._replay.is_partial
            if not agreement.any_rank(name in named, self._group):
                continue
            if in_stages and self.is_root(name):  # no rank calls all of it
                continue
            module = named.get(name)  # None where another stage has it
            try:
                findings = self.run(within=partial(in_float32, module, self._device_type, same_dtypes=in_stages))
            except (RuntimeError, TypeError, ValueError):
                continue
            if not findings.bad:
                return name
        return None

    def is_root(self, name: str) -> bool:
        """Return whether `name` is that of a whole boosted model."""
        return self._replay.modules.get(name) in self._replay.roots

    def is_mended(self, cause: Cause) -> bool:
        """Return whether all is finite once what the cause made, and after it what other causes made, is replaced by zeros."""
        repair: set[int] = set()
        named, own = cause, self._first.own
        for _ in range(_MAX_FAULTS):
            if named.foreign:
                return False
            if own is not None and own.is_alike(named):
                # Every rank replaces its own numbers of the same cause; ids differ from rank to rank.
                repair.update(own.repair)
            findings = self.run(repair=frozenset(repair))
            if not findings.bad:
                return True
            if findings.cause is None:
                return False
            named, own = findings.cause, findings.own
        return False


def _excess(cause: Cause) -> int:
    """Return by how many powers of two the result of the cause is too large for its format; at least 1."""
    if not cause.exact or not math.isfinite(cause.exact):
        return 1
    largest = torch.finfo(getattr(torch, cause.dtype)).max
    # Known where the replay computed the result in a wider format: saves a trial for each power of two.
    return max(1, math.ceil(math.log2(cause.exact / largest)))


def power_of_two(value: float) -> str:
    """Return `value` as people write loss scales: "2**13"."""
    mantissa, exponent = math.frexp(value)
    return f"2**{exponent - 1}" if mantissa == 0.5 else f"{value:g}"


def diagnose(replay: Replay, *, group: dist.ProcessGroup | None, device: torch.device) -> Diagnosis:
    """Replay the step, name the first bad number, and try what helps.

    A collective: all ranks of `group` call it alike.
    """
    trials = ReplayTrials(replay, group, device.type)
    findings = trials.first()
    cause = findings.cause
    fields: dict[str, Any] = {"loss": findings.loss, "loss_scale": replay.scale}
    if not findings.bad:
        largest = f"{findings.largest_gradient:.3g}"
        finite = (
            f"Every number that reached the loss or a gradient was finite, the largest gradient {largest}. "
            "What made the step bad is not in this computation, or not with these random numbers."
        )
        return Diagnosis(kind=None, **fields, notes=(finite,))
    if cause is None:
        untraced = "The loss or a gradient is not finite, but no operation of the replay made it so."
        return Diagnosis(kind=None, **fields, notes=(untraced,))
    kind, remedies = cause.kind, []
    if kind == "overflow" and cause.direction == "backward" and replay.scale > 1.0:
        scale = trials.largest_scale(cause)
        if scale is not None:
            kind = "loss_scale"
            remedies.append(f"finite at scale {power_of_two(scale)}")
    if kind in ("overflow", "operation", "loss_scale") and (
        cause.dtype in _HALF_NAMES or any(numbers.dtype in _HALF_NAMES for numbers in cause.inputs)
    ):
        module = trials.module_in_float32(cause)
        if module is not None:
            remedies.append(
                "finite with mixed_precision='fp32'" if trials.is_root(module) else f"finite with keep_fp32={module!r}"
            )
    certain = bool(remedies) or trials.is_mended(cause) or (cause.alone and not cause.foreign)
    fields |= {
        "kind": kind,
        "remedies": tuple(remedies),
        "certain": certain,
        "advice": _advice(cause, kind),
    }
    return Diagnosis(**{field.name: getattr(cause, field.name) for field in dataclasses.fields(Diagnosis)} | fields)


def _advice(cause: Cause, kind: CauseKind | None) -> tuple[str, ...]:
    if kind == "data":
        rows = f"rows {', '.join(map(str, cause.rows))} of it" if cause.rows else "it"
        return (f"repair or drop {rows} before the step",)
    if kind == "weights":
        return ("load a checkpoint from before, or set these numbers anew",)
    operation = (cause.of or cause.operation).partition(".")[2]
    for names, text in _BY_OPERATION.items():
        if operation in names:
            return (text,)
    return ()


_BY_OPERATION = {
    ("log", "log2", "log10", "log1p"): "keep the argument above zero, as by x.clamp_min(1e-6)",
    ("div", "div_", "reciprocal"): (
        "keep the divisor away from zero, in a format that holds the small number added to it"
    ),
    ("sqrt", "rsqrt", "pow", "norm", "linalg_vector_norm"): (
        "add a small number under the root: its slope at zero is infinite"
    ),
    ("_softmax", "_log_softmax", "_safe_softmax"): "let every row have an entry that is not -inf",
    ("exp", "exp_", "expm1"): "subtract the maximum first, or use logsumexp, softmax or softplus",
}
