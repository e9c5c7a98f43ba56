"""Choosing a precision by training a few steps in each."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.devices import resolve_device
from booster.common.snapshot import seeded
from booster.mixed_precision import LowPrecision, MixedPrecision, TF32MixedPrecision, available, make
from booster.mixed_precision.hardware import KINDS
from booster.numerics.choosing.advice import IN_FLOAT32, Advice, Budget, Row, ranked
from booster.numerics.choosing.trained_subject import (
    GradientError,
    LossAndGradients,
    Subject,
    Task,
    gradient_error,
    product_ratio,
)

_SETTLING = 5  # float32 steps between the two points at which gradients are compared
_WARM_UP = 2
_LEAST_ROUNDS = 3
_OF_OLD_SCRIPTS = "fp16_apex"  # fp16 as scripts for apex have it


def advise(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    criterion: Callable[..., Any],
    optimizer_fn: Callable[[nn.Module], Optimizer],
    *,
    device: str | torch.device | None = None,
    precisions: Sequence[str | MixedPrecision] | None = None,
    steps: int = 20,
    seed: int = 0,
    budget: Budget | None = None,
) -> Advice:
    """Train a few steps in every precision, and say which to take: by time, peak memory, and errors against float32.

    model_fn, optimizer_fn: make a model, and the optimizer of a model; called once or more for each precision, with all random
        generators at `seed`.
    batch: (inputs..., target), or a mapping that the model takes by keyword and the criterion whole.
    criterion: a function of output and target.
    device: as for `Booster`; None likewise.
    precisions: names or objects; None means all of `available()` but "fp16_apex", which is fp16 for old scripts. float32 is
        always measured. What this device does not have and can emulate is rehearsed: errors only.
    steps: timed ones of each precision, in turns with as many of float32; fewer where `budget` wants it, at least 3.
    budget: bounds, see `Budget`; None means `Budget()`.

    Gradients are compared at the first weights and after 5 float32 steps; the worse counts. Two equal float32 models say
    what differences in time mean nothing. At most two models are held at a time, and copies of the weights and
    gradients of float32 at these points. Random states, grad mode and the arguments
    are afterwards what they were. For one process: on several ranks each would measure for itself.

    Raises TypeError or ValueError for wrong arguments, and what the model raises in float32.
    """
    arguments.function("model_fn", model_fn, "a function that makes a torch.nn.Module")
    arguments.function("criterion", criterion, "a function of output and target")
    arguments.function("optimizer_fn", optimizer_fn, "a function that makes the optimizer of a model")
    where = resolve_device(device)
    arguments.count("steps", steps, least=_LEAST_ROUNDS)
    arguments.count("seed", seed, least=0, most=2**63 - 2)
    budget = Budget() if budget is None else arguments.instance("budget", budget, Budget, "a Budget, or None")
    # The precisions by what rows call them
    if precisions is None:
        precisions = [name for name in _in_order(available()) if name != _OF_OLD_SCRIPTS]
    if isinstance(precisions, str) or not isinstance(precisions, Sequence) or not precisions:
        legal = "names or MixedPrecision objects, in a list"
        raise TypeError(arguments.refusal("precisions", precisions, legal, also="None for all"))
    named: dict[str, str | MixedPrecision] = {}
    for each in precisions:
        make(each, "an entry of precisions")  # raises for what is no precision
        if each is None or (isinstance(each, str) and each in named):
            raise ValueError(f"precisions has {each!r} twice, or as None; name each once")
        name = each if isinstance(each, str) else type(each).__name__
        count = sum(other == name or other.startswith(f"{name} ") for other in named)
        named[f"{name} {count + 1}" if count else name] = each
    with seeded(seed, where) as begin, torch.enable_grad():
        task = Task(model_fn, batch, criterion, optimizer_fn, where, seed, begin)
        measurement = _Measurement(task, budget, steps)
        rows = [measurement.of_fp32()] + [
            measurement.of(name, given) for name, given in named.items() if name != "fp32"
        ]
    best, ordered, reasons = ranked(rows, budget, measurement.noise)
    given = None if best is None else named.get(best, best)
    return Advice(
        best=best,
        precision=None if given is None else make(given),
        rows=ordered,
        reasons=reasons,
        noise=measurement.noise,
        device=str(where),
    )


def _in_order(names: Sequence[str]) -> list[str]:
    """Those that are most often the answer first: a budget may end before the last."""
    first = ("fp32", "bf16", "bf16_naive", "tf32", "fp16", "fp16_naive")
    return [name for name in first if name in names] + [name for name in names if name not in first]


@dataclass(frozen=True)
class _Point:
    """Weights at which gradients are compared, as a state dict, and the float32 gradients there."""

    weights: dict[str, Any]
    exact: LossAndGradients


class _Measurement:
    """Measures one precision after another, each in turns with float32. noise: see `Advice`; known after `of_fp32`."""

    noise = 0.0

    def __init__(self, task: Task, budget: Budget, steps: int) -> None:
        self._task, self._steps = task, steps
        self._end = math.inf if budget.seconds is None else time.perf_counter() + budget.seconds
        self._fp32 = make("fp32")
        self._fp32.bind(task.device)
        self._points: list[_Point] = []
        self._whole = ""

    def of_fp32(self) -> Row:
        """Measure float32 against itself, and keep what the others are compared with."""
        first = Subject(self._task, self._fp32)
        self._whole = type(first.model.unwrap()).__name__
        self._reference = first
        self._points.append(self._point(first))
        for _ in range(_SETTLING):
            first.step()
        self._points.append(self._point(first))
        peak, held = first.memory()
        ratios, seconds = self._in_turns(Subject(self._task, self._fp32))
        middle, quartiles = _spread(ratios)
        # 1.57 IQR / sqrt(n) is how far medians of alike samples may be apart (McGill, Tukey and Larsen 1978).
        self.noise = max(abs(middle - 1.0), 1.57 * (quartiles[1] - quartiles[0]) / math.sqrt(len(ratios)))
        return Row(
            name="fp32",
            status="measured",
            seconds=seconds,
            ratio=1.0,
            quartiles=quartiles,
            peak=peak,
            held=held.held,
            loss_error=0.0,
            gradient_error=0.0,
            cosine=1.0,
            finite=all(point.exact.finite for point in self._points),
        )

    def of(self, name: str, given: str | MixedPrecision) -> Row:
        """Measure the precision `given`; whatever keeps it from training is said in its row."""
        if time.perf_counter() > self._end:
            return Row(name=name, status="left out", note="the budget of time was used up")
        try:
            # `given`, bound to `device`, or its rehearsal where it cannot run there; an object of the user's stays as
            # it is. Rows say which precisions are rehearsed.
            precision = copy.deepcopy(make(given))
            precision.tell_no_rehearsal()
            try:
                precision.bind(self._task.device)
            except ValueError:
                if not isinstance(given, str) or not isinstance(precision, (LowPrecision, TF32MixedPrecision)):
                    raise
                precision = type(precision)(emulate=True)
                precision.tell_no_rehearsal()
                precision.bind(self._task.device)
            return self._measured(name, precision)
        except (ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                return Row(name=name, status="refused", note="out of memory, next to the float32 model")
            return Row(name=name, status="refused", note=str(error).strip().splitlines()[0])

    def _measured(self, name: str, precision: MixedPrecision) -> Row:
        later = Subject(self._task, precision, self._points[1].weights).gradients()
        trained = Subject(self._task, precision)
        at_points = [trained.gradients(), later]
        errors = [self._error(result, point) for result, point in zip(at_points, self._points, strict=True)]
        worst = max(errors, key=lambda error: error.relative)
        measured: dict[str, Any] = {
            "name": name,
            "loss_error": max(
                _relative(result.loss, point.exact.loss) for result, point in zip(at_points, self._points, strict=True)
            ),
            "gradient_error": worst.relative,
            "cosine": worst.cosine,
            "layers": worst.layers,
            "loss_scale": min(result.loss_scale for result in at_points),
            "finite": all(result.finite for result in at_points),
        }
        if precision.is_rehearsal:
            return Row(status="rehearsed", **measured)
        for _ in range(_WARM_UP):
            trained.step()
        peak, held = trained.memory()
        trained.num_skipped = 0
        ratios, seconds = self._in_turns(trained)
        middle, quartiles = _spread(ratios)
        dtype = precision.policy.param or precision.policy.compute
        widened = frozenset() if precision.half_products is None else precision.half_products.kinds
        widened = widened if self._task.device.type == "cpu" else frozenset()
        dtype = None if "matrix product" in widened else dtype
        return Row(
            status="measured",
            note=f"{'products' if len(widened) == len(KINDS) else ', '.join(sorted(widened))} {IN_FLOAT32}"
            if widened
            else "",
            product=None if dtype is None else product_ratio(dtype, self._task.device),
            seconds=seconds,
            ratio=middle,
            quartiles=quartiles,
            peak=peak,
            held=held.held,
            skipped=trained.num_skipped,
            **measured,
        )

    def _point(self, reference: Subject) -> _Point:
        return _Point(copy.deepcopy(dict(reference.model.state_dict())), reference.gradients())

    def _error(self, result: LossAndGradients, point: _Point) -> GradientError:
        return gradient_error(result.grads, point.exact.grads, whole=self._whole)

    def _in_turns(self, other: Subject) -> tuple[list[float], float]:
        """Return the ratio of each pair of steps, of `other` and of float32, and the median of the seconds of `other`."""
        for each in (self._reference, other):
            each.step()
        ratios, seconds = [], []
        for turn in range(self._steps):
            if turn >= _LEAST_ROUNDS and time.perf_counter() > self._end:
                break
            # Which of the two comes first alternates: the second finds warm caches.
            pair = (other, self._reference) if turn % 2 else (self._reference, other)
            times = {subject: subject.timed_step() for subject in pair}
            ratios.append(times[other] / times[self._reference])
            seconds.append(times[other])
        return ratios, statistics.median(seconds)


def _spread(ratios: Sequence[float]) -> tuple[float, tuple[float, float]]:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, (low, high)


def _relative(value: float, exact: float) -> float:
    if value == exact:
        return 0.0
    return abs(value - exact) / abs(exact) if exact and math.isfinite(value) else math.inf
