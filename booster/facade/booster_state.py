"""What one Booster is made of. The methods of `Booster` that other files of this room hold take it as their `self`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from booster.checkpoint.run_checkpoints import RunCheckpoints
from booster.facade.accumulation import Accumulations
from booster.facade.precision_run import PrecisionRun
from booster.facade.switch import BoostedObjects
from booster.interface.optimizer import OptimizerWrapper
from booster.mixed_precision import MixedPrecision
from booster.mixed_precision.low_precision.autopilot import Measurement
from booster.mixed_precision.schedule import Phase
from booster.model.params import local_shard
from booster.plugin import Plugin
from booster.update.context import UpdateOptions

if TYPE_CHECKING:
    from booster.numerics.diagnosis.replay import Replay
    from booster.numerics.diagnosis.skips import SkipWatcher
    from booster.numerics.record.record import Records

Optimizers = OptimizerWrapper | Sequence[OptimizerWrapper]


class DisplayedLoss:
    """The loss next to a bar of progress: that of the last backward pass, which is read once a second.

    Reading waits for the device.
    """

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._read = -math.inf
        self.words = ""

    def keep(self, loss: torch.Tensor) -> None:
        """Keep `loss`, of one element, without its graph, until the next one."""
        self._loss = local_shard(loss.detach())  # of a DTensor: who reads it reads it alone

    def text(self, *, now: bool = False) -> str:
        """Return the loss in words, as it was when it was last read; `now` reads it."""
        if self._loss is not None and (now or time.monotonic() - self._read >= 1.0):
            self.words = f"loss {self._loss.item():.4g}"
            self._read = time.monotonic()
        return self.words


class BoosterState:
    """What the methods of a Booster share; `Booster.__init__` makes it.

    Attributes:
        device, plugin: as `Booster` was given them, or what it chose.
        _options: what every update is made with.
        _boosted: what `boost` returned, as long as the user keeps it.
        _accumulations: open groups of micro-batches, and passes that leave gradients unsynchronised.
        _run: the precision now, and what changes it.
        _checkpoints: what saves and loads share: a thread that writes, and requests to stop.
        _records, _watcher: the open records, and what replays skipped steps; None where there is none.
        _shown_loss: the loss next to a bar of progress, once there is a bar.
        backward, accumulate, load, capturable: of `Booster`, or of the user's subclass, for methods that call them.
    """

    device: torch.device
    plugin: Plugin
    _options: UpdateOptions
    _boosted: BoostedObjects
    _accumulations: Accumulations
    _run: PrecisionRun
    _checkpoints: RunCheckpoints
    _records: Records | None
    _watcher: SkipWatcher | None
    _shown_loss: DisplayedLoss | None
    if TYPE_CHECKING:
        backward: Callable[..., None]
        accumulate: Callable[..., AbstractContextManager[Any]]
        load: Callable[..., Any]
        capturable: Callable[..., list[str]]

    @property
    def precision(self) -> MixedPrecision:
        """What is trained in now."""
        return self._run.precision

    def _remember_measurement(self, model: int, measurement: Measurement) -> None:
        if self._records is not None:
            self._records.add_measurement(model, measurement)

    def _remember_precision(self, phase: Phase, why: str) -> None:
        self._checkpoints.set_facts(precision=repr(phase.precision))
        if self._records is not None:
            self._records.on_precision_switch(phase.precision, self._boosted.wrappers(), repr(phase), why)

    def _replay(self, forward: Callable[[], Any], optimizers: Sequence[OptimizerWrapper], scale: float) -> Replay:
        from booster.numerics.diagnosis.replay import Replay

        own = self._boosted
        return Replay(forward, optimizers, own.labelled(), list(own.criteria), scale, self._unrecorded)

    def _unrecorded(self) -> AbstractContextManager[Any]:
        """A context in which records look at no layer."""
        return nullcontext() if self._records is None else self._records.paused()
