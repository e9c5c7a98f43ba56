"""Loss scales: none, and the dynamic one of torch.amp with hysteresis and bounds, on the host or on a device.

Algorithm: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2. A scale multiplies the loss so that small
gradients survive float16; a step with gradients that overflow is skipped and the scale backs off, a run of clean steps lets
it grow. Hysteresis follows Megatron-LM: `hysteresis - 1` overflows are forgiven, and forgiveness is renewed only when
the scale grows. With hysteresis 1 the trajectory is that of `torch.amp.GradScaler`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from ctypes import c_float
from typing import Any

import torch

from booster.common import arguments
from booster.common.devices import HostCopy
from booster.common.torch_internals.optimizer_internals import update_scale_

SMALLEST_SCALE = 2.0**-126  # gradients are multiplied by its inverse, which float32 must hold


class LossScaler:
    """The interface of every scale, and the null object: no scaling.

    One of your own sets `enabled = True` and overrides `scale` and `update`, `state_dict` and `load_state_dict` if it has
    anything to resume with. It need not know where it runs: where steps are decided on a device, `on_device` has it follow.
    """

    enabled = False

    @property
    def scale(self) -> float:
        """The factor on the next loss. Reading it waits for the device where the scale lives on one."""
        return 1.0

    @property
    def factor(self) -> Any:
        """`scale` where it lives: a float, or a 0-dim tensor, for which the host does not wait."""
        return self.scale

    @property
    def min_scale(self) -> float | None:
        return None

    def describe(self) -> str:
        """The scale, in words for a report; waits for the device as `scale` does."""
        floor = " (its minimum)" if self.min_scale is not None and self.scale <= self.min_scale else ""
        return f"{self.scale:g}{floor}"

    def update(self, found_inf: Any) -> None:
        """Take note of one optimizer step: `found_inf` says whether its gradients held an inf or NaN.

        A bool; a 0-dim float tensor, 1 for yes, for what `on_device` returns.
        """

    def on_device(self, device: torch.device) -> LossScaler:
        """A form of this scale for steps that are decided on `device`; for a rule on the host, `HostRule`."""
        return HostRule(self) if self.enabled else self

    def state_dict(self) -> dict[str, Any]:
        """What is needed to resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave as `state`; raises ValueError for what does not fit."""
        if state:
            raise ValueError(
                f"the checkpoint holds loss-scaler state {sorted(state)}, but this precision has no loss scaler; "
                "resume with the precision that wrote it, or delete that entry to start over"
            )


class NoScale(LossScaler):
    """No scaling."""


class HostRule(LossScaler):
    """A scale with its rule on the host, for steps that are decided on a device.

    The rule learns what a step found when the scale is next read, from a copy that was then long under way.
    """

    enabled = True

    def __init__(self, host: LossScaler) -> None:
        self._host = host
        self._overflowed: HostCopy | None = None

    @property
    def host(self) -> LossScaler:
        """The scale, with every step counted; waits for the last step's decision."""
        overflowed, self._overflowed = self._overflowed, None
        if overflowed is not None:
            self._host.update(overflowed())
        return self._host

    @property
    def scale(self) -> float:
        return self.host.scale

    @property
    def min_scale(self) -> float | None:
        return self.host.min_scale

    def describe(self) -> str:
        return self.host.describe()

    def update(self, found_inf: torch.Tensor) -> None:
        # The step before is counted now: its copy had a whole step's time, so nothing waits.
        self._overflowed, before = HostCopy(found_inf), self._overflowed
        if before is not None:
            self._host.update(before())

    def state_dict(self) -> dict[str, Any]:
        return self.host.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.host.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"_host": self.host, "_overflowed": None}  # a copy on its way cannot be copied


class DynamicScale(LossScaler):
    """A loss scale that backs off on overflow and grows after `growth_interval` clean steps, as GradScaler's, as host floats.

    init_scale: the factor on the first loss.
    growth_factor: what the scale is multiplied by to grow.
    backoff_factor: what it is multiplied by after an overflow.
    growth_interval: steps without overflow after which it grows.
    hysteresis: so many overflows, counted anew when the scale grows, until it backs off; each before skips its step alone.
    min_scale: the scale stays at or above it; None is 2**-126, where torch's would go on to zero.
    max_scale: the scale stays at or below it; None is no bound.

    Values are rounded to float32 as torch's kernel does. `min_scale == max_scale == init_scale` makes it static: steps
    that overflow are still skipped. Raises ValueError for an option out of range.
    """

    enabled = True

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float | None = None,
        max_scale: float | None = None,
    ) -> None:
        check_scale_options(
            init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale
        )
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = int(growth_interval)
        self.hysteresis = int(hysteresis)
        self._min_scale = None if min_scale is None else _float32(min_scale)
        self.max_scale = None if max_scale is None else _float32(max_scale)
        self._scale = _float32(init_scale)
        self._growth_tracker = 0
        self._hysteresis_tracker = 0

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def min_scale(self) -> float | None:
        return self._min_scale

    @property
    def floor(self) -> float:
        """Return what the scale never backs off below."""
        return SMALLEST_SCALE if self._min_scale is None else self._min_scale

    def update(self, found_inf: Any) -> None:
        if found_inf:
            self._growth_tracker = 0
            if self.hysteresis > 1:  # else there is nothing to count
                self._hysteresis_tracker += 1
            # The count goes on after a backoff, so that every further overflow backs off until the scale grows.
            if self.hysteresis == 1 or self._hysteresis_tracker >= self.hysteresis:
                # Not above the present scale: one that was loaded may lie below the minimum.
                self._scale = max(_float32(self._scale * self.backoff_factor), min(self.floor, self._scale))
            return
        self._growth_tracker += 1
        if self._growth_tracker >= self.growth_interval:
            self._growth_tracker = 0
            self._hysteresis_tracker = 0
            scale = _float32(self._scale * self.growth_factor)
            if self.max_scale is not None:
                scale = min(scale, max(self.max_scale, self._scale))
            # As torch's kernel: a scale that would be inf stays where it is.
            if math.isfinite(scale):
                self._scale = scale

    def on_device(self, device: torch.device) -> LossScaler:
        """A `DeviceScale` on `device`, unless a subclass overrides the rule."""
        classes = type(self).__mro__
        subclasses = classes[: classes.index(DynamicScale)]
        # A subclass that changes the rule keeps it, on the host; tensors would follow the rule of this class.
        own = any(name in vars(base) for base in subclasses for name in _RULE)
        return super().on_device(device) if own else DeviceScale(self, device)

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore scale and counters from `state`; options such as growth_interval stay those of this object.

        Also reads the state of a `torch.amp.GradScaler`. Raises ValueError, changing nothing, if a value is missing or
        out of range.
        """
        scale, growth, hysteresis = _read_state(state)
        self._scale, self._growth_tracker = scale, growth
        self._hysteresis_tracker = hysteresis if self.hysteresis > 1 else 0


# What `DeviceScale` takes from a DynamicScale as it is, or does in tensors in its place.
_RULE = ("update", "scale", "factor", "floor", "min_scale", "describe", "state_dict", "load_state_dict")


class StaticScale(DynamicScale):
    """A loss scale that never moves; steps with gradients that overflow are still skipped.

    scale: the factor on every loss.
    """

    def __init__(self, scale: float = 2.0**16) -> None:
        if not (arguments.is_number(scale) and _is_scale(scale)):
            raise ValueError(arguments.refusal("scale", scale, "at least 2**-126, and finite in float32"))
        super().__init__(init_scale=scale, min_scale=scale, max_scale=scale)


class DeviceScale(LossScaler):
    """A `DynamicScale` with scale and counters as tensors on one device. `update` takes a 0-dim float tensor.

    `tensor` is replaced, never written to, on every update: a reference taken at backward stays what it was.
    """

    enabled = True

    def __init__(self, host: DynamicScale, device: torch.device) -> None:
        self._options = host
        self._device = device
        self._zero = torch.zeros((), dtype=torch.int64, device=device)
        self._growth, self._backoff = (
            # In float64, so that the product is rounded to float32 once, as on the host.
            torch.tensor(factor, dtype=torch.float64, device=device)
            for factor in (host.growth_factor, host.backoff_factor)
        )
        self.tensor: torch.Tensor
        self._lent: torch.Tensor | None = None
        self._growth_tracker: torch.Tensor
        self._hysteresis_tracker: torch.Tensor
        self._load(host.state_dict())

    @property
    def scale(self) -> float:
        return float(self.tensor)

    @property
    def factor(self) -> torch.Tensor:
        return self.tensor if self.tensor is not self._lent else self.tensor.clone()

    def lend(self, tensor: torch.Tensor | None) -> None:
        """While the scale is `tensor`, which a graph writes to, `factor` is a copy of it."""
        self._lent = tensor

    @property
    def min_scale(self) -> float | None:
        return self._options.min_scale

    @property
    def trackers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Clean steps since the scale last moved, and overflows since it last grew, int64."""
        return self._growth_tracker.to(torch.int64), self._hysteresis_tracker

    @property
    def rule(self) -> tuple[float, ...]:
        """Growth and backoff factor, growth interval, hysteresis, floor and largest scale."""
        own = self._options
        largest = math.inf if own.max_scale is None else own.max_scale
        return own.growth_factor, own.backoff_factor, own.growth_interval, own.hysteresis, own.floor, largest

    def hold_tensors(self, scale: torch.Tensor, growth: torch.Tensor, hysteresis: torch.Tensor) -> None:
        """Take what a kernel made of a step by `rule` in the place of `update`."""
        self.tensor, self._growth_tracker, self._hysteresis_tracker = scale, growth, hysteresis

    def update(self, found_inf: torch.Tensor) -> None:
        # On a device each line is a launch, and so is each number that is not there.
        options, before, overflowed = self._options, self.tensor, found_inf.reshape(())
        # One launch of torch's kernel where its rule is the same; the lines below need about ten.
        if self._as_torch:
            clean, self.tensor = self._growth_tracker.to(torch.int32), before.clone()
            update_scale_(
                self.tensor, clean, overflowed, options.growth_factor, options.backoff_factor, options.growth_interval
            )
            self.tensor.clamp_min_(SMALLEST_SCALE)
            self._growth_tracker = clean
            return
        overflowed = overflowed > 0
        growth = torch.where(overflowed, self._zero, self._growth_tracker.to(torch.int64) + 1)
        grows = growth >= options.growth_interval
        backed_off = _times(before, self._backoff).clamp_min_(options.floor).minimum(before)
        grown = _times(before, self._growth)
        if options.max_scale is not None:
            grown = grown.clamp_max_(options.max_scale).maximum(before)
        else:
            grown = torch.where(grown < math.inf, grown, before)
        backs_off = overflowed
        if options.hysteresis > 1:
            hysteresis = self._hysteresis_tracker + overflowed
            backs_off = overflowed & (hysteresis >= options.hysteresis)
            self._hysteresis_tracker = torch.where(grows, self._zero, hysteresis)
        self.tensor = torch.where(grows, grown, torch.where(backs_off, backed_off, before))
        self._growth_tracker = torch.where(grows, self._zero, growth)

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": float(self.tensor),
            "growth_tracker": int(self._growth_tracker),
            "hysteresis_tracker": int(self._hysteresis_tracker),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `DynamicScale.load_state_dict`."""
        self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        scale, growth, hysteresis = _read_state(state)
        self.tensor = torch.tensor(scale, dtype=torch.float32, device=self._device)
        self._growth_tracker = torch.tensor(growth, dtype=torch.int64, device=self._device)
        own = self._options
        forgiven = hysteresis if own.hysteresis > 1 else 0
        self._hysteresis_tracker = torch.tensor(forgiven, dtype=torch.int64, device=self._device)
        bounded = own.min_scale is not None or own.max_scale is not None
        # Torch's kernel waits for a count that is the interval, and knows neither bounds nor hysteresis.
        self._as_torch = own.hysteresis == 1 and not bounded and growth < own.growth_interval


def _times(scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The float32 `scale` times a float64 `factor`, rounded once."""
    return torch.mul(scale, factor, out=torch.empty_like(scale))


def check_scale(scale: Any, others: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise TypeError unless `scale` is a `LossScaler`, ValueError if arguments `others` of `function` make another scale."""
    if not isinstance(scale, LossScaler):
        legal = "a LossScaler, such as DynamicScale(init_scale=1024.0) or StaticScale(1024.0)"
        raise TypeError(arguments.refusal("scale", scale, legal, "None for the options of the scale"))
    defaults = inspect.signature(function).parameters
    both = [f"{name}={value!r}" for name, value in others.items() if value != defaults[name].default]
    if both:
        raise ValueError(
            f"scale={type(scale).__name__}(...) was given together with {', '.join(both)}, which make a scale of their own; "
            "give either, such as scale=DynamicScale(...) with these options"
        )


def _float32(value: float) -> float:
    return float(c_float(float(value)).value)


def _read_state(state: dict[str, Any]) -> tuple[float, int, int]:
    if not isinstance(state, Mapping) or "scale" not in state:
        given = sorted(map(str, state)) if isinstance(state, Mapping) else repr(state)
        raise ValueError(
            f"the loss-scaler state lacks 'scale', it is {given}; pass what state_dict() of a booster loss scaler or of "
            "torch.amp.GradScaler gave"
        )
    scale = state["scale"]
    # The second is the name in a GradScaler's state.
    growth = state.get("growth_tracker", state.get("_growth_tracker", 0))
    hysteresis = state.get("hysteresis_tracker", 0)
    if not arguments.is_number(scale) or not _is_scale(float(scale)):
        raise ValueError(
            f"the loss-scaler state holds scale={scale!r}, which is not a number of at least 2**-126 that is finite in "
            "float32"
        )
    for name, count in (("growth_tracker", growth), ("hysteresis_tracker", hysteresis)):
        if not arguments.is_whole(count) or count < 0:
            raise ValueError(f"the loss-scaler state holds {name}={count!r}, which is not a whole number of at least 0")
    return _float32(float(scale)), growth, hysteresis


def _is_scale(value: float) -> bool:
    return SMALLEST_SCALE <= _float32(value) < math.inf


def check_scale_options(
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float | None,
    max_scale: float | None,
    *,
    initial: str = "init_scale",
) -> None:
    """Raise TypeError or ValueError for options that `DynamicScale` cannot have. initial: what the first one is called."""
    arguments.number(initial, init_scale)
    if not _is_scale(init_scale):
        raise ValueError(arguments.refusal(initial, init_scale, "at least 2**-126, and finite in float32"))
    arguments.number("growth_factor", growth_factor, above=1)
    arguments.number("backoff_factor", backoff_factor, above=0, below=1)
    arguments.count("growth_interval", growth_interval)
    arguments.count("hysteresis", hysteresis)
    if min_scale is not None:
        arguments.number("min_scale", min_scale, also="None")
        if not (_is_scale(min_scale) and min_scale <= init_scale):
            legal = f"at least 2**-126 and at most {initial}={init_scale}"
            raise ValueError(arguments.refusal("min_scale", min_scale, legal, "None"))
    if max_scale is not None:
        arguments.number("max_scale", max_scale, infinite=True, also="None")
        if not max_scale >= init_scale:
            raise ValueError(arguments.refusal("max_scale", max_scale, f"at least {initial}={init_scale}", "None"))
