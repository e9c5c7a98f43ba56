"""The records that one Booster is writing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from booster import arguments
from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.mixed_precision import MixedPrecision
from booster.numerics.activations import check_patterns
from booster.numerics.record import Record, Tracker
from booster.plugin import Plugin


class Records:
    """Opens records, and attaches to each what is boosted before and after. See `Booster.record`."""

    def __init__(self, precision: MixedPrecision, plugin: Plugin, device: torch.device) -> None:
        self._precision, self._plugin, self._device = precision, plugin, device
        self._open: list[Record] = []

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
        _attach(record, models, optimizers)
        self._open.append(record)
        return record

    def follow(self, model: ModelWrapper, criterion: Any, optimizers: Iterable[OptimizerWrapper]) -> None:
        """Write down what these do too, in every record that is open."""
        for record in self._open:
            _attach(record, [model], optimizers)


def _attach(record: Record, models: Iterable[ModelWrapper], optimizers: Iterable[OptimizerWrapper]) -> None:
    for optimizer in optimizers:
        record.attach(optimizer)
    for model in models:
        record.attach_model(model)
