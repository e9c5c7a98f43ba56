"""Lion, of which torch has none: the rule of a class whose groups have lr, betas and weight_decay, decoupled.

Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms". Taken by `register_elementwise(Lion, rule="lion")`.
"""

import triton
import triton.language as tl
from torch.optim import Optimizer

from booster.kernels.rule import Group, Rule


def _states(group: Group) -> tuple[str, ...]:
    return ("exp_avg",)


def _numbers(group: Group) -> tuple[float, ...]:
    return float(group["lr"]), *map(float, group["betas"]), float(group["weight_decay"])


def _refuses(optimizer: Optimizer) -> str | None:
    if getattr(optimizer, "decoupled_wd", False):
        return (
            "its decay is divided by the first lr (decoupled_weight_decay=True), which the rule of Lion does not know"
        )
    for group in optimizer.param_groups:
        for name in ("lr", "betas", "weight_decay"):
            if name not in group:
                return f"its groups have no {name}, which the rule of Lion reads"
        for name, value in group.items():
            if value is True:
                return f"it was built with {name}=True, which the rule of Lion does not know"
    return None


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
    return Rule(kind, _states, _numbers, _prepare, _body, counts=False, refuses=_refuses)
