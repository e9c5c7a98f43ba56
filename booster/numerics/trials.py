"""What helps against the cause of a bad step, tried by replaying it; on several ranks all try the same together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.cast_regions import CastMode, disabled
from booster.casting import HALF_DTYPES, cast_floats
from booster.communicate import exchange
from booster.numerics.cause import Cause, cause_of
from booster.numerics.replay import Outcome, Replay
from booster.update import agreement

_MAX_FAULTS = 4  # that may be mended one after another before giving up
_MAX_SCALES = 12


class Trials:
    """Replays of one step on all ranks of `group`, and what they agree that it shows."""

    def __init__(self, replay: Replay, group: dist.ProcessGroup | None, device_type: str) -> None:
        self._replay = replay
        self._group = group
        self._device_type = device_type
        self._rank = dist.get_rank() if group is not None else 0

    def run(self, **how: Any) -> tuple[Outcome, bool, Cause | None]:
        """Replay; returns this rank's outcome, whether any rank's was bad, and the cause that all ranks name."""
        outcome = self._replay.run(**how)
        own = cause_of(outcome, self._rank)
        told = exchange(b"" if own is None else own.dump(), self._group)
        causes = [Cause.read(data) for data in told if data]
        bad = bool(agreement.largest(float(outcome.bad), self._group))
        return outcome, bad, min(causes, key=lambda cause: cause.order) if causes else None

    def largest_scale(self, cause: Cause) -> float | None:
        """Return the largest loss scale found, a power of two below this one and at least 1, at which all is finite."""
        scale, overflow = self._replay.scale, cause
        for _ in range(_MAX_SCALES):
            scale = 2.0 ** math.floor(math.log2(scale)) / 2.0 ** _excess(overflow)
            if scale < 1.0:
                return None
            _, bad, found = self.run(scale=scale)
            if not bad:
                return scale
            if found is None or found.kind != "overflow" or found.direction != "backward":
                return None
            overflow = found
        return None

    def module_in_float32(self, cause: Cause) -> str | None:
        """Return the innermost module around the cause that, computed in float32, makes all finite."""
        named = self._replay.modules
        for name in [name for name in reversed(cause.chain) if name in named]:
            module = named[name]
            try:
                _, bad, _ = self.run(within=lambda module=module: in_float32(module, self._device_type))
            except (RuntimeError, TypeError, ValueError):
                continue  # its code wants half precision, as `keep_fp32` would find out too
            if not bad:
                return name
        return None

    def is_root(self, name: str) -> bool:
        """Return whether `name` is that of a whole boosted model."""
        return self._replay.modules[name] in self._replay.roots

    def is_mended(self, cause: Cause) -> bool:
        """Return whether all is finite once what the cause made, and after it what other causes made, is replaced by zeros."""
        repair: list[int] = []
        for _ in range(_MAX_FAULTS):
            if cause.foreign:
                return False
            if cause.rank == self._rank:
                repair += [cause.index] + ([cause.key] if cause.key else [])
            _, bad, found = self.run(repair=frozenset(repair))
            if not bad:
                return True
            if found is None:
                return False
            cause = found
        return False


@contextmanager
def in_float32(module: nn.Module, device_type: str) -> Iterator[None]:
    """Inside, `module` computes in float32 with its weights widened, and takes and returns what it did before."""
    half = next((param.dtype for param in module.parameters() if param.dtype in HALF_DTYPES), None)
    changed = {child: child.__dict__.get("forward") for child in module.modules()}
    for child in changed:
        if any(p is not None and p.dtype in HALF_DTYPES for p in child._parameters.values()):
            child.__dict__["forward"] = _WithWideWeights(child, child.forward)
    module.__dict__["forward"] = _Wide(module.forward, device_type, half)
    try:
        yield
    finally:
        for child, forward in changed.items():
            child.__dict__.pop("forward", None)
            if forward is not None:
                child.__dict__["forward"] = forward


class _Wide:
    """The forward of a module in float32; floating outputs become `output`, where that is given."""

    def __init__(self, forward: Callable[..., Any], device_type: str, output: torch.dtype | None) -> None:
        self._forward, self._device_type, self._output = forward, device_type, output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        autocast: AbstractContextManager[Any] = (
            torch.autocast(self._device_type, enabled=False)
            if torch.is_autocast_enabled(self._device_type)
            else nullcontext()
        )
        with autocast, disabled(CastMode):
            result = self._forward(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))
        return cast_floats(result, self._output)


class _WithWideWeights:
    """The forward of a module whose own half parameters are float32 for its time."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = self._module._parameters
        before = dict(own)
        try:
            for name, param in before.items():
                if param is not None and param.dtype in HALF_DTYPES:
                    own[name] = _Widened.apply(param)
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


def _excess(cause: Cause) -> int:
    """By how many powers of two the result of the cause is too large for its format; at least 1."""
    if not cause.exact or not math.isfinite(cause.exact):
        return 1
    largest = torch.finfo(getattr(torch, cause.dtype)).max
    return max(1, math.ceil(math.log2(cause.exact / largest)))
