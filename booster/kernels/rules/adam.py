"""Adam and AdamW, with amsgrad and maximize."""

import triton
import triton.language as tl
from torch.optim import Adam, AdamW

from booster.kernels.arithmetic import power
from booster.kernels.rule import Group, Rule


def _states(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _numbers(group: Group) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    decoupled = group["decoupled_weight_decay"]
    return tuple(map(float, (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], decoupled)))


def _flags(group: Group) -> tuple[bool, ...]:
    return group["amsgrad"], group["maximize"], group["weight_decay"] != 0, group["decoupled_weight_decay"]


@triton.jit
def _prepare(row, step):
    lr = tl.load(row)
    beta1 = tl.load(row + 1)
    beta2 = tl.load(row + 2)
    decay = tl.load(row + 4)
    decay = tl.where(tl.load(row + 5) != 0.0, 1.0 - lr * decay, decay)
    size = -(lr / (1.0 - power(beta1, step)))
    root = tl.sqrt(1.0 - power(beta2, step))
    return decay, 1.0 - beta1, beta2, 1.0 - beta2, size, root, tl.load(row + 3), lr


@triton.jit
def _body(w, g, m, v, most, decay, rise, beta2, rise2, size, root, eps, lr, FLAGS: tl.constexpr):
    if FLAGS & 2:
        g = -g
    if FLAGS & 4:
        if FLAGS & 8:
            w = w * decay
        else:
            g = g + decay * w
    m = tl.where(rise < 0.5, m + rise * (g - m), g - (g - m) * (1.0 - rise))
    v = v * beta2 + rise2 * g * g
    square = v
    if FLAGS & 1:
        most = tl.where((v > most) | (v != v), v, most)
        square = most
    w = w + tl.div_rn(size * m, tl.div_rn(tl.sqrt_rn(square), root) + eps)
    return w, m, v, most


RULES = [Rule(kind, _states, _numbers, _prepare, _body, _flags) for kind in (Adam, AdamW)]
