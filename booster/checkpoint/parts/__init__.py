"""The parts of a checkpoint, in the order in which they are compared with a job."""

from __future__ import annotations

from booster.checkpoint.parts.modules import LayerChoices, Modules, PinnedModules, ScaleHistory
from booster.checkpoint.parts.optimizers import Optimizers
from booster.checkpoint.parts.part import Part
from booster.checkpoint.parts.run_objects import ErrorFeedback, Random, StatefulObjects

PARTS: tuple[type[Part], ...] = (
    Modules,
    PinnedModules,
    LayerChoices,
    ScaleHistory,
    Optimizers,
    StatefulObjects,
    ErrorFeedback,
    Random,
)
