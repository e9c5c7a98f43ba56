"""Numerics one can see: what a run did, how close to the edges of its formats it is, what made a step bad, what to train in.

Four rooms, each with its own head:

    record      what a run writes of itself and reads back:  b.record("runs/first") ... read_run("runs/first")
    reports     what was recorded, summed up, compared and drawn:  report, compare, `booster report`
    diagnosis   a bad step replayed, and the operation named that began it:  b.diagnose(forward, optimizer)
    choosing    precisions, pinned modules and layers measured:  advise, auto_pins, time_layers

An example: a run in fp16 is slow to learn. In reading order, by what one would ask:

    b.record("runs/first")                 record: norms, scales and skips of each step; samples of gradients every 100
    booster report runs/first              reports: 31 % of the gradient of `head.weight` underflows at this loss scale
    b.diagnose(lambda: loss_of(x, y), optimizer)
                                           diagnosis: a skipped step began in `blocks.3.attn`, an overflow of its softmax
    auto_pins(model, batch, criterion, "fp16", bound=0.1)
                                           choosing: keep_fp32=("blocks.3.attn",) holds the bound, and nothing less does

They share what they look at. Records and diagnoses, and an autopilot too, listen to an optimizer's steps as a `StepListener`
(`booster/update/context.py`), which changes nothing that trains; reports and comparisons read what `record` wrote; and what
`diagnosis` names as a remedy, a `keep_fp32`, is what `choosing` finds by measuring before a run.

A tool: `Booster` imports it when it is asked for, and nothing below does. What may be touched: a line of a record has the form
of `record/record_file.py` `SCHEMA`, by which it is read back; nothing here may change a bit of what trains.
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
from booster.numerics.reports.terminal import Report, report

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
