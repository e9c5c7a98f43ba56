"""The parts of a checkpoint: what it says of each kind of object, how that is compared with a job, and how it is given back.

One class serves both ways, because what is saved and what is loaded must agree. A save makes one of each class and calls
`collect`. A load makes one of each and calls, on all of them, `compare` (list what differs, request tensors), `prepare` (make
state dicts of what was read), then each of their `steps` by `turn` (hand a state to an object that may refuse it, with its
way back), and `finish` (what cannot fail).

An example: the loss scale grew since a checkpoint was saved, and the user's scheduler refuses its state.

    Modules.compare, Optimizers.compare, StatefulObjects.compare, ...      nothing differs; tensors are read
    Optimizers.steps      the optimizer reads its state; `undo` gets what gives the old one back
    StatefulObjects.steps   the scheduler raises: `undo` runs, last first, on all ranks, and the loss scale is as it was

The files:

    part.py         `Part`, `SaveContext` (what one rank puts in), `LoadContext` (a checkpoint, and who loads it).
    module_weights.py
                    weights and buffers; what a precision keeps of a model: pins, choices of layers, histories of scales.
    optimizers.py   states, master weights and loss scale, by names of parameters.
    run_objects.py  loaders, schedulers and `extra`; errors that rounded gradients carry; random states.

A new part goes into one of them and into `PARTS`. Its keys in the tree are its own; a load must take a tree without them.
"""

from __future__ import annotations

from booster.checkpoint.parts.module_weights import LayerChoices, Modules, PinnedModules, ScaleHistory
from booster.checkpoint.parts.optimizers import Optimizers
from booster.checkpoint.parts.part import Part
from booster.checkpoint.parts.run_objects import ErrorFeedback, Random, StatefulObjects

# In the order in which they are compared with a job, which is that of the differences in an error.
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
