"""Numerics one can see: what a run did, how close to the edges of its formats it is, what made a step bad."""

from booster.numerics.choosing.advice import Advice, Budget
from booster.numerics.choosing.advise import advise
from booster.numerics.choosing.layers import TimedLayers, TimedShape, time_layers
from booster.numerics.choosing.pins import Pins, auto_pins
from booster.numerics.diagnosis.diagnosis import Diagnosis
from booster.numerics.diagnosis.meeting import RanksApart
from booster.numerics.diagnosis.places import Numbers
from booster.numerics.diagnosis.trials import ReplayError
from booster.numerics.record.record import Record
from booster.numerics.record.run import Run, read_run
from booster.numerics.reports.compare import Comparison, compare
from booster.numerics.reports.table import Report, report

__all__ = [
    "Advice",
    "Budget",
    "Comparison",
    "Diagnosis",
    "Numbers",
    "Pins",
    "RanksApart",
    "Record",
    "ReplayError",
    "Report",
    "Run",
    "TimedLayers",
    "TimedShape",
    "advise",
    "auto_pins",
    "compare",
    "read_run",
    "report",
    "time_layers",
]
