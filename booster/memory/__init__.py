"""What training takes of memory: estimated before the first step, by fake tensors, and measured after one."""

from booster.memory.estimate import Estimate, Plugin, compare, estimate
from booster.memory.measure import Measured, measure

__all__ = ["Estimate", "Measured", "Plugin", "compare", "estimate", "measure"]
