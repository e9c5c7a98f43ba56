"""What training takes of memory: estimated before the first step, on fake tensors, and measured after one.

An estimate has two halves. What stays between steps is counted: weights, gradients, states and masters; a few steps of a copy
of the optimizer on a thousand elements say how many bytes an element takes. What comes and goes within a step is followed: a
forward and a backward pass run on fake tensors, which have a dtype, a shape and a storage but no memory, under a mode that adds
up the storages alive. So for a model of 1 M parameters in bf16 with AdamW on one rank::

    step_memory     states 8 bytes an element, masters none        ->  states  8 MB
    fake_passes     weights 4 MB, gradients 4 MB                   ->  held   16 MB
                    activations and gradients at the highest point ->  peak   12 MB + highest

Ranks are not started. What a rank holds under ZeRO is a division by their number; what DDP's and ZeRO's buckets, and
`fully_shard`'s all-gathers and reduce-scatters, take for a while is made as fake tensors at the time at which they make it. The
referee is docs/measured/memory.md: estimates next to what an allocator's record says of real steps.

In reading order:

    estimate              `Estimate`, `estimate`, `compare`, and `estimate_placed` for a Booster's own plugin; what fits into a
                          memory, the largest batch, what to change first
    fake_passes           forward and backward on fake tensors
    pass_memory           what `fully_shard` gathers and reduces; `release_gradients`: when each gradient is complete
    measured_memory       what a boosted model holds now; `StorageTracker`, the mode that follows storages; `step_memory`: what
                          steps of an optimizer hold and take, from a small copy of it
    estimate_table        estimates as a table and as a picture
    named_jobs            jobs by name, of timm, transformers or a file, for `booster estimate` and `booster advise`

A tool: `Booster.estimate_memory`, `Booster.memory`, `booster.numerics.choosing` and the command line use it, and nothing below
does. When a plugin moves what it allocates, `pass_memory` moves with it.
"""

from booster.memory.estimate import (
    Estimate,
    Plugin,
    compare,
    estimate,
    estimate_placed,
    largest_batch,
    resized,
    what_to_change,
)
from booster.memory.estimate_table import picture, show
from booster.memory.measured_memory import Measured, measure
from booster.memory.named_jobs import Job, named_job

__all__ = [
    "Estimate",
    "Job",
    "Measured",
    "Plugin",
    "compare",
    "estimate",
    "estimate_placed",
    "largest_batch",
    "measure",
    "named_job",
    "picture",
    "resized",
    "show",
    "what_to_change",
]
