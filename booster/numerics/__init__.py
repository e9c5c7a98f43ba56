"""Numerics one can see: what a run did, how close to the edges of its formats it is, what made a step bad."""

from booster.numerics.advice import Advice, Budget
from booster.numerics.advise import advise
from booster.numerics.compare import Comparison, compare
from booster.numerics.diagnosis import Diagnosis
from booster.numerics.numbers import Numbers
from booster.numerics.pins import Pins, auto_pins
from booster.numerics.record import Record
from booster.numerics.run import Run, read_run
from booster.numerics.table import Report, report

__all__ = [
    "Advice",
    "Budget",
    "Comparison",
    "Diagnosis",
    "Numbers",
    "Pins",
    "Record",
    "Report",
    "Run",
    "advise",
    "auto_pins",
    "compare",
    "read_run",
    "report",
]
