"""Adagrad with a decay of its learning rate."""

import triton
import triton.language as tl
from torch.optim import Adagrad

from booster.kernels.rule import Group, Rule


def _states(group: Group) -> tuple[str, ...]:
    return ("sum",)


def _numbers(group: Group) -> tuple[float, ...]:
    return tuple(float(group[name]) for name in ("lr", "lr_decay", "eps", "weight_decay"))


def _flags(group: Group) -> tuple[bool, ...]:
    return group["maximize"], group["weight_decay"] != 0


@triton.jit
def _prepare(row, step):
    lr = tl.load(row)
    rate = -(lr / (1.0 + (step - 1.0) * tl.load(row + 1)))
    return rate, tl.load(row + 2), tl.load(row + 3), lr, lr, lr, lr, lr


@triton.jit
def _body(w, g, total, s1, s2, rate, eps, decay, h3, h4, h5, h6, h7, FLAGS: tl.constexpr):
    if FLAGS & 1:
        g = -g
    if FLAGS & 2:
        g = g + decay * w
    total = total + g * g
    return w + tl.div_rn(rate * g, tl.sqrt_rn(total) + eps), total, s1, s2


RULES = [Rule(Adagrad, _states, _numbers, _prepare, _body, _flags)]
