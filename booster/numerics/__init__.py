"""Numerics one can see: what a run did, how close to the edges of its formats it is, and where two runs part."""

from booster.numerics.record import Record
from booster.numerics.run import Run, read_run

__all__ = ["Record", "Run", "read_run"]
