"""What helps against the cause of a bad step, tried by replaying it; on several ranks all try the same together.

A module that computes in float32 for the time of a trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.common.random_states import random_state, set_random_state
from booster.numerics.diagnosis.cause import Cause, cause_of
from booster.numerics.diagnosis.meeting import Meeting, RanksApart
from booster.numerics.diagnosis.replay import Replay, StoppedElsewhere
from booster.ranks import agreement
from booster.tensors.cast_regions import CastMode, cast_floats, disabled
from booster.tensors.trees import HALF_DTYPES, map_tensors, tensors


@contextmanager
def in_float32(module: nn.Module | None, device_type: str, *, alike: bool = False) -> Iterator[None]:
    """Inside, `module`, if there is one, computes in float32 with its weights widened, and takes what it did before.

    It returns the half dtype of its weights, where they have one. alike: without, it returns the dtypes that it did before,
    as another rank expects them, and is computed twice to know them. Where its code wants half precision and raises, it
    computes as before: on several ranks, one that raises would leave others waiting.
    """
    if module is None:
        yield
        return
    changed = {child: child.__dict__.get("forward") for child in module.modules()}
    switch = _Switch()
    for child in changed:
        if child._parameters:
            child.__dict__["forward"] = _WithWideWeights(child, child.forward, switch)
    module.__dict__["forward"] = _Wide(module, module.forward, switch, device_type, alike)
    try:
        yield
    finally:
        for child, forward in changed.items():
            child.__dict__.pop("forward", None)
            if forward is not None:
                child.__dict__["forward"] = forward


class _Switch:
    """Whether weights are widened at present."""

    def __init__(self) -> None:
        self.is_on = False

    @contextmanager
    def turned(self, on: bool) -> Iterator[None]:
        before, self.is_on = self.is_on, on
        try:
            yield
        finally:
            self.is_on = before


class _Wide:
    """The forward of a module in float32; see `in_float32`."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], switch: _Switch, device_type: str, alike: bool
    ) -> None:
        self._module, self._forward, self._switch = module, forward, switch
        self._device_type, self._alike = device_type, alike

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Looked up now: sharded weights are gathered, in half, for the time of a call.
        half = next((param.dtype for param in self._module.parameters() if param.dtype in HALF_DTYPES), None)
        try:
            if not self._alike or half is not None:
                return cast_floats(self._wide(args, kwargs), half)
            before = random_state()
            with torch.no_grad(), self._switch.turned(False):
                dtypes = iter([tensor.dtype for tensor in tensors(self._forward(*args, **kwargs))])
            set_random_state(before)
            return map_tensors(lambda tensor: tensor.to(next(dtypes)), self._wide(args, kwargs))
        except (RuntimeError, TypeError, ValueError):  # as `keep_fp32` would find out too
            with self._switch.turned(False):
                return self._forward(*args, **kwargs)

    def _wide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        autocast: AbstractContextManager[Any] = (
            torch.autocast(self._device_type, enabled=False)
            if torch.is_autocast_enabled(self._device_type)
            else nullcontext()
        )
        with autocast, disabled(CastMode), self._switch.turned(True):
            return self._forward(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))


class _WithWideWeights:
    """The forward of a module whose own half parameters are float32 for its time."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], switch: _Switch) -> None:
        self._module, self._forward, self._switch = module, forward, switch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = self._module._parameters
        before = dict(own)
        half = [name for name, param in before.items() if param is not None and param.dtype in HALF_DTYPES]
        if not self._switch.is_on:
            return self._forward(*args, **kwargs)
        try:
            for name in half:
                own[name] = _Widened.apply(before[name])
            # Of a module inside that is kept in float32, half activations may come.
            return self._forward(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))
        finally:
            own.update(before)


class _Widened(torch.autograd.Function):
    """A half parameter in float32. Its gradient is not narrowed as it is: a parameter kept in float32 has one in float32."""

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


@dataclass(frozen=True)
class Evidence:
    """What one replay shows, on all ranks alike but for `own`.

    bad: whether any rank's loss or gradient was. cause: that all ranks name. own: of this rank's bad numbers, as it sees it.
    loss: the mean of the ranks that have one. largest_gradient: of all ranks, with its loss scale.
    """

    bad: bool
    cause: Cause | None
    own: Cause | None
    loss: float | None
    largest_gradient: float


class ReplayError(RuntimeError):
    """Another rank could not replay the step."""


class Trials:
    """Replays of one step on all ranks of `group`, and what they agree that it shows. Made on all of them together."""

    def __init__(self, replay: Replay, group: dist.ProcessGroup | None, device_type: str) -> None:
        self._replay = replay
        self._group = group
        self._device_type = device_type
        self._rank = dist.get_rank() if group is not None else 0
        self._meeting = None if group is None else Meeting.of(group)

    def run(self, **how: Any) -> Evidence:
        """Replay on all ranks. If it raises on any, all raise: there its own error, elsewhere `ReplayError`.

        Raises `RanksApart` where others wait in a collective for a rank that raised.
        """
        problem: Exception | None = None
        own: Cause | None = None
        try:
            outcome = self._replay.run(agree=self._meet, **how)
            own = cause_of(outcome, self._rank)
            report: dict[str, Any] = {"bad": outcome.bad, "loss": outcome.loss, "largest": outcome.largest_gradient}
            report["cause"] = None if own is None else own.dump()
        except StoppedElsewhere:
            report = {"error": ""}
        except RanksApart:
            raise
        except Exception as error:
            problem = error  # raised once the others know
            report = {"error": f"{type(error).__name__}: {error}"}
        told = agreement.gather(report, self._group)
        if problem is not None:
            raise problem
        for rank, each in enumerate(told):
            if each.get("error"):
                raise ReplayError(f"rank {rank} of the group could not replay the step: {each['error']}")
        causes = [Cause.read(each["cause"]) for each in told if each["cause"] is not None]
        losses = [each["loss"] for each in told if each["loss"] is not None]
        return Evidence(
            bad=any(each["bad"] for each in told),
            cause=min(causes, key=lambda cause: cause.order, default=None),
            own=own,
            loss=sum(losses) / len(losses) if losses else None,
            largest_gradient=max(each["largest"] for each in told),
        )

    def _meet(self, failed: bool) -> bool:
        return failed if self._meeting is None else self._meeting.any(failed)

    def first(self) -> Evidence:
        """Replay the step as it is."""
        self._first = self.run()
        return self._first

    def largest_scale(self, cause: Cause) -> float | None:
        """Return the largest loss scale found, a power of two below this one and at least 1, at which all is finite."""
        scale, overflow = self._replay.scale, cause
        for _ in range(_MAX_SCALES):
            scale = 2.0 ** math.floor(math.log2(scale)) / 2.0 ** _excess(overflow)
            if scale < 1.0:
                return None
            shown = self.run(scale=scale)
            if not shown.bad:
                return scale
            found = shown.cause
            if found is None or found.kind != "overflow" or found.direction != "backward":
                return None
            overflow = found
        return None

    def module_in_float32(self, cause: Cause) -> str | None:
        """Return the innermost module around the cause that, computed in float32, makes all finite."""
        named = self._replay.modules
        for name in reversed(cause.chain):
            in_stages = self._replay.is_partial
            if not agreement.any_rank(name in named, self._group) or (
                in_stages and self.is_root(name)
            ):  # no rank calls all of it
                continue
            module = named.get(name)  # None where another stage has it
            try:
                shown = self.run(within=partial(in_float32, module, self._device_type, alike=in_stages))
            except (RuntimeError, TypeError, ValueError):
                continue
            if not shown.bad:
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
                repair.update(own.repair)
            shown = self.run(repair=frozenset(repair))
            if not shown.bad:
                return True
            if shown.cause is None:
                return False
            named, own = shown.cause, shown.own
        return False


def _excess(cause: Cause) -> int:
    """By how many powers of two the result of the cause is too large for its format; at least 1."""
    if not cause.exact or not math.isfinite(cause.exact):
        return 1
    largest = torch.finfo(getattr(torch, cause.dtype)).max
    return max(1, math.ceil(math.log2(cause.exact / largest)))
