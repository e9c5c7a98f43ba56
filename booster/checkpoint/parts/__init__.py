"""The parts of a checkpoint, in the order in which they are compared with a job."""

from __future__ import annotations

from booster.checkpoint.parts.modules import Chosen, Modules, PinnedModules, Scales
from booster.checkpoint.parts.optimizers import Optimizers
from booster.checkpoint.parts.others import Carried, Random, Stateful
from booster.checkpoint.parts.part import Part

PARTS: tuple[type[Part], ...] = (Modules, PinnedModules, Chosen, Scales, Optimizers, Stateful, Carried, Random)
