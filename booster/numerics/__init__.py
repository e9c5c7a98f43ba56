"""Numerics one can see: what a run did, how close to the edges of its formats it is, what made a step bad, what to train in.

Four rooms, each with its own head:

    record      what a run writes of itself and reads back:  b.record("runs/first") ... read_run("runs/first")
    reports     what was recorded, summed up, compared and drawn:  report, compare, `booster report`
    diagnosis   a bad step replayed, and the operation named that began it:  b.diagnose(forward, optimizer)
    choosing    precisions, pinned modules and layers measured:  advise, auto_pins, time_layers

They share what they look at. Records and diagnoses, and an autopilot too, listen to an optimizer's steps as a `StepListener`
(`booster/update/context.py`), which changes nothing that trains; reports and comparisons read what `record` wrote; and what
`diagnosis` names as a remedy, a `keep_fp32`, is what `choosing` finds by measuring before a run.

A tool: `Booster` imports it when it is asked for, and nothing below does.
"""

from booster.numerics.choosing.advice import Advice, Budget
from booster.numerics.choosing.advise import advise
from booster.numerics.choosing.pin_search import Pins, auto_pins
from booster.numerics.choosing.timed_layers import TimedLayers, TimedShape, time_layers
from booster.numerics.diagnosis.diagnosis import Diagnosis
from booster.numerics.diagnosis.places import Numbers
from booster.numerics.diagnosis.replay import RanksApart
from booster.numerics.diagnosis.trials import ReplayError
from booster.numerics.record.record import Record
from booster.numerics.record.recorded_run import Run, read_run
from booster.numerics.reports.compare import Comparison, compare
from booster.numerics.reports.gradient_report import Report, report

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
