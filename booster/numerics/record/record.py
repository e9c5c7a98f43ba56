"""Records while they are written: `Records` opens them for one Booster, and each `Record` listens to the steps of optimizers.

A step's numbers may live on a device. They are copied to the host while training goes on, and the line of the step waits in a
queue until its copies are there.
"""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.common.installed import version_of
from booster.common.snapshot import attributes
from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.mixed_precision import MixedPrecision
from booster.numerics.record.layer_counts import ActivationCounts, OperandCounts, PendingCounts, check_patterns
from booster.numerics.record.record_file import SCHEMA, LineFile
from booster.numerics.record.samples import PendingRows, Sample
from booster.plugin import Plugin
from booster.ranks.agreement import DistCoordinator
from booster.update.context import StepListener
from booster.update.decision import StepResult
from booster.update.update import Update

_logger = logging.getLogger(__name__)
Line = dict[str, Any]
Tracker = Callable[[dict[str, float], int], Any]

_MOST_PENDING = 64  # steps; a device further behind is waited for


class Record:
    """A record that is being written: `Booster.record` makes it, and every optimizer step adds to it.

    folder, every, activations, tracker: those of `Booster.record`; None likewise.
    precision, plugin, device: those of the `Booster`.

    Nothing in a step waits for a device: numbers that live on one are copied while training goes on, and their lines are
    written some steps later. The reasons for a skip are read from the device when its line is written. A context manager:
    leaving it closes the record.
    """

    def __init__(
        self,
        folder: Path,
        *,
        precision: MixedPrecision,
        plugin: Plugin,
        device: torch.device,
        every: int | None = None,
        activations: Sequence[str] = (),
        tracker: Tracker | None = None,
    ) -> None:
        self.folder = folder
        self.every = every
        self._counters: list[ActivationCounts | OperandCounts] = [] if every is None else [OperandCounts()]
        if activations and every is not None:
            self._counters.insert(0, ActivationCounts(activations))
        self._sampled_next: dict[str, bool] = {}
        self._policy = precision.policy
        self._group = plugin.group
        ranks = DistCoordinator()
        self._file = LineFile(folder, ranks.rank)
        self._tracker = tracker
        self._tracker_failed = False
        self._number = 0
        self._optimizers: list[weakref.ref[OptimizerWrapper]] = []
        self._pending: deque[_PendingStep] = deque()
        self.latest: dict[str, float] = {}
        """The numbers of the last step written, by name, as a tracker gets them."""
        self._close = weakref.finalize(self, _finish, self._file, self._pending)
        self.write([_header(ranks, precision, plugin, device)])

    def attach(self, optimizer: OptimizerWrapper) -> None:
        """Write down what `optimizer` does from now on, under its number, from 0."""
        update_of(optimizer).gradients.listeners.append(_RecordListener(self, str(self._number)))
        self._optimizers.append(weakref.ref(optimizer))
        self.expect(str(self._number), self.every is not None)
        self._number += 1

    def attach_model(self, model: ModelWrapper) -> None:
        """Count what the chosen modules of `model` compute from now on."""
        for counter in self._counters:
            counter.attach(model)

    def on_precision_switch(
        self, precision: MixedPrecision, models: Sequence[ModelWrapper], said: str, why: str
    ) -> None:
        """Write, while the record is open, that the run goes on in `precision`, as `said`, and `why`; count in the layers that
        `models` have now."""
        self._policy = precision.policy
        for counter in self._counters:  # the switch replaced layers
            counter.detach()
            for model in models:
                counter.attach(model)
        # Waits for the device.
        self.flush()
        optimizers = [optimizer for each in self._optimizers if (optimizer := each()) is not None]
        step = max((optimizer.num_steps for optimizer in optimizers), default=0)
        self.write([{"kind": "switch", "step": step, "time": time.time(), "precision": said, "why": why}])

    def write(self, lines: Sequence[Line]) -> None:
        """Write `lines`, where the record is open still, and end it where the disk refuses."""
        if self.closed:
            return
        try:
            self._file.write(lines)
        except OSError as error:  # as of a full disk
            # Close the file, say why, and let the training go on
            _logger.warning("the record in %s ends here, and training goes on: %s", self.folder, error)
            # Else the end of the process would try to write the rest.
            self._close.detach()
            self._pending.clear()
            self._file.close()
            for counter in self._counters:
                counter.detach()

    def expect(self, name: str, sampled: bool) -> None:
        """Say whether the next step of the optimizer `name` is `sampled`."""
        self._sampled_next[name] = sampled
        for counter in self._counters:
            counter.on = any(self._sampled_next.values())

    def collect(self, loss_scale: Any) -> list[PendingCounts]:
        """Return what was counted in layers since the last call. loss_scale: of the backward pass."""
        return [counter.collect(loss_scale) for counter in self._counters]

    def is_sampled(self, update: Update, number: int, first: bool) -> bool:
        """Whether gradients and weights are sampled in step `number` of `update`, the `first` of this process or another."""
        # The first step of a process as well: after a resume one sees at once whether numbers go on as before.
        if self.closed or self.every is None or not (first or number % self.every == 0):
            return False
        # Where all ranks hold the same, one of them does it.
        return update.shards.sharded or self._group is None or dist.get_rank(self._group) == 0

    def format_of(self, update: Update, param: torch.Tensor) -> torch.dtype:
        """The dtype in which backward passes of `update` compute the gradient of `param`, as far as the precision says."""
        policy = self._policy
        if param.dtype != torch.float32:
            return param.dtype
        if policy.compute is not None:
            return policy.compute
        if policy.param is not None:
            # A float32 weight under it is a kept one, or the shard of one that is gathered in half precision.
            return policy.param if update.shards.sharded else param.dtype
        # Under float16 autocast weights are float32, and what overflows is the gradient in half on its way to them.
        return torch.float16 if update.gradients.scaler.enabled else param.dtype

    def paused(self) -> AbstractContextManager[None]:
        """A context in which nothing is counted in layers."""
        return attributes(self._counters, on=False)

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def flush(self) -> None:
        """Write all steps made so far. Waits for the device."""
        self._write_pending(wait=True)

    def close(self) -> None:
        """Write all steps made so far and close the file; later steps are not written. Waits for the device."""
        if not self.closed:
            self.flush()
            self._close()
        for counter in self._counters:
            counter.detach()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def add(self, step: _PendingStep) -> None:
        """Write `step` as soon as its numbers are there."""
        self._pending.append(step)
        self._write_pending(wait=False)

    def _write_pending(self, *, wait: bool) -> None:
        while self._pending and (wait or len(self._pending) > _MOST_PENDING or self._pending[0].ready()):
            lines = self._pending.popleft().lines()
            self.write(lines)
            if self.closed:
                return
            for line in lines:
                if line["kind"] == "step":
                    self.latest = flat(line)
                    self._call_tracker(line["step"])

    def _call_tracker(self, step: int) -> None:
        """Call the tracker. Where it raises, as of a network that is gone, training goes on: the other ranks would wait."""
        if self._tracker is None:
            return
        try:
            self._tracker(dict(self.latest), step)
        except Exception:
            if not self._tracker_failed:
                # One traceback: it may be called in each of a million steps.
                self._tracker_failed = True
                _logger.warning(
                    "the tracker of the record in %s raised in step %d; training goes on, and so does the record. It is called "
                    "in later steps too, and what it raises there is not logged again",
                    self.folder,
                    step,
                    exc_info=True,
                )


class _PendingStep:
    """Lines of one step; its numbers may be on their way from a device.

    line: what is known.
    numbers: 0-dim tensors by key.
    result: asked, once they are there, for what only a skip has.
    sample, layers: what was counted in this step, if it was sampled.
    """

    def __init__(
        self,
        line: Line,
        numbers: Mapping[str, torch.Tensor],
        result: StepResult,
        sample: Sample | None,
        layers: Sequence[PendingCounts],
    ) -> None:
        self._line, self._result, self._sample, self._layers = line, result, sample, layers
        self._keys = list(numbers)
        self._numbers = PendingRows(number.detach().double().reshape(1) for number in numbers.values())

    def ready(self) -> bool:
        counted = all(each.ready() for each in self._layers) and (self._sample is None or self._sample.ready())
        return self._numbers.ready() and counted

    def lines(self) -> list[Line]:
        values = [value for (value,) in self._numbers.rows()]
        line = {**self._line, **dict(zip(self._keys, values, strict=True))}
        result = self._result
        line["applied"] = result.applied
        for key in ("loss_scale", "grad_norm"):
            if key not in line:
                line[key] = getattr(result, key)
        if result.num_zeros_in_grad is not None:
            line["num_zeros_in_grad"] = result.num_zeros_in_grad
        if not result.applied:
            line["reason"], line["culprit"] = result.skipped_reason, list(result.culprit)
        # A clip that did not bind is left out, as a step without one.
        if line.get("clip") == 1.0:
            del line["clip"]
        counted = [] if self._sample is None else self._sample.lines(line["applied"])
        counted += [own for each in self._layers for own in each.lines()]
        return [line, *({**own, "optimizer": line["optimizer"], "step": line["step"]} for own in counted)]


class _RecordListener(StepListener):
    """Listens to one optimizer; see `StepListener`."""

    def __init__(self, record: Record, name: str) -> None:
        self._record = record
        self._name = name
        self._losses: list[torch.Tensor] = []
        self._clip: Any = None
        self._sample: Sample | None = None
        self._layers: Sequence[PendingCounts] = ()
        self._first = True

    @property
    def closed(self) -> bool:
        """Whether the listener may be dropped."""
        return self._record.closed

    def after_backward(self, loss: torch.Tensor | None) -> None:
        if loss is not None and not self._record.closed:
            self._losses.append(loss)

    def before_step(self, update: Update, number: int) -> None:
        # The step resets what gradients carry, so it is read before.
        self._clip = update.gradients.factors[1]
        record = self._record
        if record.is_sampled(update, number, self._first):
            self._sample = Sample(update, lambda param: record.format_of(update, param))
            self._layers = record.collect(update.gradients.factors[2])
        self._first = False

    def after_step(self, update: Update, number: int, result: StepResult) -> None:
        losses, self._losses = self._losses, []
        clip, self._clip = self._clip, None
        sample, self._sample = self._sample, None
        layers, self._layers = self._layers, ()
        if self._record.closed:
            return
        if sample is not None:
            sample.after(result.decision)
        # Layers count while the next forward runs, so they have to know before it begins.
        self._record.expect(self._name, self._record.is_sampled(update, number + 1, False))
        line: Line = {"kind": "step", "optimizer": self._name, "step": number, "time": time.time()}
        numbers: dict[str, Any] = {**({} if clip is None else {"clip": clip}), **result.pending}
        if losses:
            mean = torch.stack([loss.double().reshape(()) for loss in losses]).mean() if len(losses) > 1 else losses[0]
            numbers["loss"] = mean
        elif isinstance(result.loss, (float, torch.Tensor)):  # that of a closure
            numbers["loss"] = result.loss
        for key, value in list(numbers.items()):
            if not isinstance(value, torch.Tensor):
                line[key] = float(numbers.pop(key))
            # A closure may return anything; a line holds numbers.
            elif value.numel() != 1:
                del numbers[key]
        rates = [group.get("lr") for group in update.optimizer.param_groups]
        # Reading it would wait for the device in every step.
        if not any(isinstance(rate, torch.Tensor) and rate.is_cuda for rate in rates):
            line["lr"] = [_rate(rate) for rate in rates]
        self._record.add(_PendingStep(line, numbers, result.without_loss(), sample, layers))


def _header(ranks: DistCoordinator, precision: MixedPrecision, plugin: Plugin, device: torch.device) -> Line:
    return {
        "kind": "run",
        "schema": SCHEMA,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "time": time.time(),
        "precision": repr(precision),
        "plugin": type(plugin).__name__,
        "format": str(precision.policy.compute or precision.policy.param or torch.float32).removeprefix("torch."),
        "device": str(device),
        "booster": version_of("booster-amp"),
        "torch": str(torch.__version__),
    }


def flat(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a step's line by name, for trackers: no texts, no lists; `applied` is 1 or 0."""
    numbers = {
        key: float(line[key]) for key in ("loss", "loss_scale", "grad_norm", "clip") if line.get(key) is not None
    }
    numbers["applied"] = float(line["applied"])
    rates = line.get("lr") or []
    for index, rate in enumerate(rates):
        if rate is not None:
            numbers["lr" if len(rates) == 1 else f"lr/{index}"] = float(rate)
    prefix = "" if line["optimizer"] == "0" else f"optimizer {line['optimizer']}/"
    return {f"{prefix}{key}": value for key, value in numbers.items()}


def _rate(rate: Any) -> float | None:
    """A learning rate as a line has it; None of a group without one, and where it is no number that a line can say."""
    value = math.nan if rate is None else float(rate)
    return value if math.isfinite(value) else None


def _finish(file: LineFile, waiting: deque[_PendingStep]) -> None:
    """Write pending steps and close the file, also when the interpreter ends with the record open."""
    try:
        while waiting:
            file.write(waiting.popleft().lines())
    except OSError as error:
        _logger.warning("the last lines of the record in %s are not written: %s", file.path.parent, error)
    file.close()


class Records:
    """Opens records, and attaches to each what is boosted before and after. See `Booster.record`."""

    def __init__(self, precision: MixedPrecision, plugin: Plugin, device: torch.device) -> None:
        self._precision, self._plugin, self._device = precision, plugin, device
        self._open: list[Record] = []

    def add_measurement(self, model: int, look: Any) -> None:
        """Write into every open record what an autopilot measured in the `model`-th boosted model, and changed."""
        own, measured = {"time": time.time(), "model": model}, look._asdict()
        changes = measured.pop("changes")
        lines = [{"kind": "look", **own, **measured}]
        lines += [{"kind": "pilot", **own, **change._asdict()} for change in changes]
        for record in self._open:
            record.write(lines)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which what layers compute is of no step, and is not counted."""
        with ExitStack() as stack:
            for record in self._open:
                stack.enter_context(record.paused())
            yield

    def on_precision_switch(
        self, precision: MixedPrecision, models: Sequence[ModelWrapper], said: str, why: str
    ) -> None:
        """Write into every open record that the run goes on in `precision`, as `said`, and `why`."""
        self._precision = precision
        for record in self._open:
            if not record.closed:
                record.on_precision_switch(precision, models, said, why)

    def open(
        self,
        folder: str | os.PathLike[str],
        models: Sequence[ModelWrapper],
        optimizers: Iterable[OptimizerWrapper],
        *,
        every: int | None,
        activations: str | Sequence[str],
        tracker: Tracker | None,
    ) -> Record:
        """Begin a record of `models` and `optimizers`."""
        root = arguments.path("folder", folder)
        every = None if every is None else arguments.count("every", every, what="of steps", also="None for never")
        patterns = [activations] if isinstance(activations, str) else activations
        if not isinstance(patterns, (list, tuple)) or not all(isinstance(p, str) and p.strip() for p in patterns):
            raise TypeError(arguments.refusal("activations", activations, "a name of modules, or several in a list"))
        if patterns and every is None:
            raise ValueError(
                f"activations={activations!r} are looked at in samples, and every=None takes none; pass a number"
            )
        if tracker is not None:
            arguments.function("tracker", tracker, "a function of the numbers by name and of the step", also="None")
        self._open = [record for record in self._open if not record.closed]
        # Two records would write over each other's lines.
        if any(record.folder.resolve() == root.resolve() for record in self._open):
            raise ValueError(
                f"this Booster records in {root} already; close that record first, or choose another folder"
            )
        if patterns and models:
            check_patterns(patterns, models)
        record = Record(
            root,
            precision=self._precision,
            plugin=self._plugin,
            device=self._device,
            every=every,
            activations=patterns,
            tracker=tracker,
        )
        self._open.append(record)
        for optimizer in optimizers:
            record.attach(optimizer)
        for model in models:
            record.attach_model(model)
        return record

    def attach(self, model: ModelWrapper, criterion: Any, optimizers: Iterable[OptimizerWrapper]) -> None:
        """Write down what these do too, in every record that is open."""
        for record in self._open:
            for optimizer in optimizers:
                record.attach(optimizer)
            record.attach_model(model)
