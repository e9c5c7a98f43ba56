"""Learning-rate schedules, in `lr_scheduler.py`, and experts of a `ModuleList` as one module, in `stacked_experts.py`.

All schedules take `(optimizer, total_steps, ...)`, under the names and arguments that Colossal-AI gave them. Steps are counted
from 0, the rate of a step is the one in force while it is taken, and after `total_steps` the rate stays where it is.

An example, a warmup of two steps and a cosine down to 0 over the other eight:

    schedule = CosineAnnealingWarmupLR(optimizer, total_steps=10, warmup_steps=2)     # lr=1.0
    step      0    1    2    3    ...  9     10 and later
    rate      0.5  1.0  1.0  0.96 ...  0.04  0.0

Most are closed forms, subclasses of `ClosedFormLR`: the rate follows from the step and the options alone. A schedule that
loads a state goes on with the options of that state, and an option that is set afterwards takes effect at once. To add one,
write `curve`, which gives the rate after the warmup, and `__init__` with its options; its name goes into `__all__`. Six are
torch's own schedules with an end.

What may be touched: a curve is held to numbers of its paper or of torch by `tests/unit/test_lr_scheduler.py`, also where a
run is resumed in the middle. Attributes of a schedule without a leading underscore are its state dict, and checkpoints compare
their names: do not rename them. `booster/interface/scheduler.py`, which checks states that are loaded, recognises closed forms
by their base class.
"""

from booster.nn import lr_scheduler
from booster.nn.stacked_experts import StackedExperts, stack_experts

__all__ = ["StackedExperts", "lr_scheduler", "stack_experts"]
