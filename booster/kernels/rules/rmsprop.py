"""RMSprop with momentum, centered or not."""

import triton
import triton.language as tl
from torch.optim import RMSprop

from booster.kernels.rule import Group, Rule


def _states(group: Group) -> tuple[str, ...]:
    names = ["square_avg"]
    if group["momentum"] > 0:
        names.append("momentum_buffer")
    if group["centered"]:
        names.append("grad_avg")
    return tuple(names)


def _numbers(group: Group) -> tuple[float, ...]:
    return tuple(float(group[name]) for name in ("lr", "alpha", "eps", "momentum", "weight_decay"))


def _flags(group: Group) -> tuple[bool, ...]:
    return group["momentum"] > 0, group["centered"], group["maximize"], group["weight_decay"] != 0


@triton.jit
def _prepare(row, step):
    lr = tl.load(row)
    alpha = tl.load(row + 1)
    return -lr, alpha, 1.0 - alpha, tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), lr, lr


@triton.jit
def _body(w, g, v, s1, s2, lr, alpha, rise, eps, momentum, decay, h6, h7, FLAGS: tl.constexpr):
    if FLAGS & 4:
        g = -g
    if FLAGS & 8:
        g = g + decay * w
    v = v * alpha + rise * g * g
    square = v
    if FLAGS & 2:  # its mean comes after the momentum, where there is any
        mean = s1
        if FLAGS & 1:
            mean = s2
        mean = tl.where(rise < 0.5, mean + rise * (g - mean), g - (g - mean) * (1.0 - rise))
        square = v - mean * mean
        if FLAGS & 1:
            s2 = mean
        else:
            s1 = mean
    root = tl.sqrt_rn(square) + eps
    if FLAGS & 1:
        s1 = s1 * momentum + tl.div_rn(g, root)
        w = w + lr * s1
    else:
        w = w + tl.div_rn(lr * g, root)
    return w, v, s1, s2


RULES = [Rule(RMSprop, _states, _numbers, _prepare, _body, _flags)]
