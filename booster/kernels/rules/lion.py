"""Lion, of which torch has none: the rule of a class whose groups have lr, betas and weight_decay, decoupled.

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms". Registered by `register_rule(lion_rule(Lion))`.
"""

import triton
import triton.language as tl
from torch.optim import Optimizer

from booster.kernels.rules.rule import Group, Rule


def _states(group: Group) -> tuple[str, ...]:
    return ("exp_avg",)


def _numbers(group: Group) -> tuple[float, ...]:
    return float(group["lr"]), *map(float, group["betas"]), float(group["weight_decay"])


@triton.jit
def _prepare(row, step):
    lr = tl.load(row)
    beta1 = tl.load(row + 1)
    beta2 = tl.load(row + 2)
    return 1.0 - lr * tl.load(row + 3), beta1, 1.0 - beta1, beta2, 1.0 - beta2, -lr, lr, lr


@triton.jit
def _body(w, g, m, s1, s2, keep, beta1, rise1, beta2, rise2, lr, h6, h7, FLAGS: tl.constexpr):
    direction = m * beta1 + g * rise1
    sign = tl.where(direction > 0.0, 1.0, tl.where(direction < 0.0, -1.0, 0.0))
    return w * keep + lr * sign, m * beta2 + g * rise2, s1, s2


def lion_rule(kind: type[Optimizer]) -> Rule:
    """Return the rule of a class `kind` that keeps "exp_avg" and counts no steps, as lion_pytorch's Lion."""
    return Rule(kind, _states, _numbers, _prepare, _body, counts=False)
