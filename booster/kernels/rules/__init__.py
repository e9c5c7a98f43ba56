"""Rules of update that kernels know, by class of the optimizer: torch's, and what `register_elementwise` adds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from booster.kernels.rule import Rule
from booster.kernels.rules import adagrad, adam, rmsprop, sgd
from booster.kernels.rules.lion import lion_rule
from booster.model.optimizer_kinds import declared_rule

_RULES: Mapping[type[Optimizer], Rule] = {
    rule.optimizer: rule for module in (adam, sgd, rmsprop, adagrad) for rule in module.RULES
}
_NAMED: Mapping[Any, Callable[[type[Optimizer]], Rule]] = {"lion": lion_rule}


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return the rule of `optimizer`; None where there is none for its class.

    Raises TypeError or ValueError where what was registered makes none for it."""
    kind: Any = type(optimizer)  # its metaclass says nothing of hashes
    declared = declared_rule(kind)
    return _RULES.get(kind) if declared is None else _made(declared, kind)


@functools.cache
def _made(declared: Any, kind: Any) -> Rule:
    rule = _NAMED[declared](kind) if isinstance(declared, str) else declared(kind)
    if not isinstance(rule, Rule):
        raise TypeError(
            f"register_elementwise({kind.__name__}, rule=...) was given a function that returns a {type(rule).__name__}; it "
            "returns a booster.kernels.rule.Rule"
        )
    if rule.optimizer is not kind:
        raise ValueError(
            f"register_elementwise({kind.__name__}, rule=...) was given a function that returns the rule of "
            f"{rule.optimizer.__name__}; make it Rule(optimizer={kind.__name__}, ...), or "
            f"dataclasses.replace(rule, optimizer={kind.__name__})"
        )
    return rule
