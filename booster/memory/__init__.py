"""What training takes of memory: estimated before the first step, by fake tensors, and measured after one."""

from booster.memory.drawn import picture, show
from booster.memory.estimate import Estimate, Plugin, compare, estimate, estimate_placed
from booster.memory.fitting import largest_batch, resized, what_to_change
from booster.memory.measure import Measured, measure
from booster.memory.named import Job, named_job

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
