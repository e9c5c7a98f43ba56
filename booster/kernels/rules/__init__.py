"""Rules of update that kernels know, by class of the optimizer. A new one is a file, and an entry."""

from torch.optim import Optimizer

from booster.kernels.rules import adagrad, adam, rmsprop, sgd
from booster.kernels.rules.rule import Rule

_RULES: dict[type[Optimizer], Rule] = {
    rule.optimizer: rule for module in (adam, sgd, rmsprop, adagrad) for rule in module.RULES
}


def register_rule(rule: Rule) -> None:
    """Step optimizers of exactly the class `rule.optimizer` by that rule from now on."""
    _RULES[rule.optimizer] = rule


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return the rule of `optimizer`; None where there is none for its class."""
    return _RULES.get(type(optimizer))
