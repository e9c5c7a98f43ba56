"""What a rule of update is: the part of an optimizer's step that is the same whatever form weights and states have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

Group = Mapping[str, Any]
MOST_NUMBERS = 8
MOST_STATES = 3


@dataclass(frozen=True)
class Rule:
    """How optimizers of exactly the class `optimizer` update an element.

    optimizer: the class.
    states: names of the states of a group's elements, three at most, in the order in which `body` has them.
    numbers: the float64 row of a group, eight at most, "lr" the first of them.
    prepare: jit function of (row, step), a pointer to the row and the number of the step in float64, from 1; returns eight
        float64 numbers, once for each parameter.
    body: jit function of (weight, gradient, s0, s1, s2, h0 to h7, FLAGS), all float32; returns the new (weight, s0, s1, s2).
        Elements know nothing of each other.
    flags: what of a group is compiled into the kernel.
    counts: whether a parameter's state has a "step", float32 and 0-dim as torch's.
    begins_by_torch: whether torch makes a first step, since states do not begin at zero.
    refuses: why an optimizer of the class is none for the rule, as for an option that it does not know; None: it is one.
    """

    optimizer: type[Optimizer]
    states: Callable[[Group], tuple[str, ...]]
    numbers: Callable[[Group], tuple[float, ...]]
    prepare: Any
    body: Any
    flags: Callable[[Group], tuple[bool, ...]] = lambda group: ()
    counts: bool = True
    begins_by_torch: Callable[[Group], bool] = lambda group: False
    refuses: Callable[[Optimizer], str | None] = lambda optimizer: None

    def refusal(self, optimizer: Optimizer) -> str | None:
        """Return why kernels cannot step `optimizer` by this rule; None if they can."""
        refused = self.refuses(optimizer)
        if refused is not None:
            return refused
        for group in optimizer.param_groups:
            numbers, states = self.numbers({**group, "lr": 0.0}), self.states(group)
            if not 1 <= len(numbers) <= MOST_NUMBERS:
                return (
                    f"its rule makes {len(numbers)} numbers of a group, and can make 1 to {MOST_NUMBERS}, lr the first"
                )
            if len(states) > MOST_STATES:
                return f"its rule names {len(states)} states, {', '.join(states)}, and can have {MOST_STATES}"
        return None
