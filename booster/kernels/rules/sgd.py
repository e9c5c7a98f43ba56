"""SGD with momentum, dampened or not, and nesterov."""

import triton
import triton.language as tl
from torch.optim import SGD

from booster.kernels.rule import Group, Rule


def _states(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] != 0 else ()


def _numbers(group: Group) -> tuple[float, ...]:
    return tuple(float(group[name]) for name in ("lr", "momentum", "weight_decay", "dampening"))


def _flags(group: Group) -> tuple[bool, ...]:
    return group["momentum"] != 0, group["nesterov"], group["maximize"], group["weight_decay"] != 0


def _begins_by_torch(group: Group) -> bool:
    # The first gradient is not dampened.
    return bool(group["momentum"] != 0 and group["dampening"] != 0)


@triton.jit
def _prepare(row, step):
    lr = tl.load(row)
    none = lr * 0.0
    return -lr, tl.load(row + 1), tl.load(row + 2), 1.0 - tl.load(row + 3), none, none, none, none


@triton.jit
def _body(w, g, b, s1, s2, lr, momentum, decay, rise, h4, h5, h6, h7, FLAGS: tl.constexpr):
    if FLAGS & 4:
        g = -g
    if FLAGS & 8:
        g = g + decay * w
    if FLAGS & 1:
        b = b * momentum + g * rise
        if FLAGS & 2:
            g = g + momentum * b
        else:
            g = b
    return w + lr * g, b, s1, s2


RULES = [Rule(SGD, _states, _numbers, _prepare, _body, _flags, counts=False, begins_by_torch=_begins_by_torch)]
