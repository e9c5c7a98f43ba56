"""Numerics one can see: what a run did, how close to the edges of its formats it is, what made a step bad."""

from booster.numerics.diagnosis import Diagnosis
from booster.numerics.numbers import Numbers
from booster.numerics.record import Record
from booster.numerics.run import Run, read_run

__all__ = ["Diagnosis", "Numbers", "Record", "Run", "read_run"]
