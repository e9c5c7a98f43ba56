"""Rules by which kernels step an element: those of torch's optimizers, Lion's, and what `register_elementwise` adds.

A rule is two Triton functions. `prepare` runs once for each parameter and step, in float64: it makes up to eight numbers of a
row of the group's options and the number of the step. `body` runs for every element, in float32. Signatures: `rule.Rule`.
Both compute in the order of torch's single-tensor implementations, so that results agree to an ulp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import triton
import triton.language as tl
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from booster.kernels.arithmetic import power
from booster.kernels.rule import Group, Rule
from booster.model.optimizers import declared_rule


def _options(*names: str) -> Callable[[Group], tuple[float, ...]]:
    """Return what makes the row of a group from options that are numbers."""
    return lambda group: tuple(float(group[name]) for name in names)


# ---------------------------------------------------------------------- SGD with momentum, dampened or not, and nesterov


@triton.jit
def _prepare_sgd(row, step):
    lr = tl.load(row)
    none = lr * 0.0
    return -lr, tl.load(row + 1), tl.load(row + 2), 1.0 - tl.load(row + 3), none, none, none, none


@triton.jit
def _sgd(w, g, b, s1, s2, lr, momentum, decay, rise, h4, h5, h6, h7, FLAGS: tl.constexpr):
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


_SGD = Rule(
    SGD,
    lambda group: ("momentum_buffer",) if group["momentum"] != 0 else (),
    _options("lr", "momentum", "weight_decay", "dampening"),
    _prepare_sgd,
    _sgd,
    lambda group: (group["momentum"] != 0, group["nesterov"], group["maximize"], group["weight_decay"] != 0),
    counts=False,
    # Torch does not dampen the first gradient, so its momentum begins elsewhere than at zero.
    begins_by_torch=lambda group: bool(group["momentum"] != 0 and group["dampening"] != 0),
)

# ---------------------------------------------------------------------- Adam and AdamW, with amsgrad and maximize


def _adam_states(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _adam_numbers(group: Group) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    decoupled = group["decoupled_weight_decay"]
    return tuple(map(float, (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], decoupled)))


def _adam_flags(group: Group) -> tuple[bool, ...]:
    return group["amsgrad"], group["maximize"], group["weight_decay"] != 0, group["decoupled_weight_decay"]


@triton.jit
def _prepare_adam(row, step):
    lr = tl.load(row)
    beta1 = tl.load(row + 1)
    beta2 = tl.load(row + 2)
    decay = tl.load(row + 4)
    decay = tl.where(tl.load(row + 5) != 0.0, 1.0 - lr * decay, decay)
    size = -(lr / (1.0 - power(beta1, step)))
    root = tl.sqrt(1.0 - power(beta2, step))
    return decay, 1.0 - beta1, beta2, 1.0 - beta2, size, root, tl.load(row + 3), lr


@triton.jit
def _adam(w, g, m, v, most, decay, rise, beta2, rise2, size, root, eps, lr, FLAGS: tl.constexpr):
    if FLAGS & 2:
        g = -g
    if FLAGS & 4:
        if FLAGS & 8:
            w = w * decay
        else:
            g = g + decay * w
    # torch's lerp takes the other formula from a weight of a half on.
    m = tl.where(rise < 0.5, m + rise * (g - m), g - (g - m) * (1.0 - rise))
    v = v * beta2 + rise2 * g * g
    square = v
    if FLAGS & 1:
        most = tl.where((v > most) | (v != v), v, most)
        square = most
    w = w + tl.div_rn(size * m, tl.div_rn(tl.sqrt_rn(square), root) + eps)
    return w, m, v, most


# ---------------------------------------------------------------------- RMSprop with momentum, centered or not


def _rmsprop_states(group: Group) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))


@triton.jit
def _prepare_rmsprop(row, step):
    lr = tl.load(row)
    alpha = tl.load(row + 1)
    return -lr, alpha, 1.0 - alpha, tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), lr, lr


@triton.jit
def _rmsprop(w, g, v, s1, s2, lr, alpha, rise, eps, momentum, decay, h6, h7, FLAGS: tl.constexpr):
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


_RMSPROP = Rule(
    RMSprop,
    _rmsprop_states,
    _options("lr", "alpha", "eps", "momentum", "weight_decay"),
    _prepare_rmsprop,
    _rmsprop,
    lambda group: (group["momentum"] > 0, group["centered"], group["maximize"], group["weight_decay"] != 0),
)

# ---------------------------------------------------------------------- Adagrad with a decay of its learning rate


@triton.jit
def _prepare_adagrad(row, step):
    lr = tl.load(row)
    rate = -(lr / (1.0 + (step - 1.0) * tl.load(row + 1)))
    return rate, tl.load(row + 2), tl.load(row + 3), lr, lr, lr, lr, lr


@triton.jit
def _adagrad(w, g, total, s1, s2, rate, eps, decay, h3, h4, h5, h6, h7, FLAGS: tl.constexpr):
    if FLAGS & 1:
        g = -g
    if FLAGS & 2:
        g = g + decay * w
    total = total + g * g
    return w + tl.div_rn(rate * g, tl.sqrt_rn(total) + eps), total, s1, s2


_ADAGRAD = Rule(
    Adagrad,
    lambda group: ("sum",),
    _options("lr", "lr_decay", "eps", "weight_decay"),
    _prepare_adagrad,
    _adagrad,
    lambda group: (group["maximize"], group["weight_decay"] != 0),
)

# ---------------------------------------------------------------------- Lion, by name: torch has none
# Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"; of classes with lr, betas, weight_decay in their groups.


def _refuses_lion(optimizer: Optimizer) -> str | None:
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
def _prepare_lion(row, step):
    lr = tl.load(row)
    beta1 = tl.load(row + 1)
    beta2 = tl.load(row + 2)
    return 1.0 - lr * tl.load(row + 3), beta1, 1.0 - beta1, beta2, 1.0 - beta2, -lr, lr, lr


@triton.jit
def _lion(w, g, m, s1, s2, keep, beta1, rise1, beta2, rise2, lr, h6, h7, FLAGS: tl.constexpr):
    direction = m * beta1 + g * rise1
    sign = tl.where(direction > 0.0, 1.0, tl.where(direction < 0.0, -1.0, 0.0))
    return w * keep + lr * sign, m * beta2 + g * rise2, s1, s2


def lion_rule(kind: type[Optimizer]) -> Rule:
    """Return the rule of a class `kind` that keeps "exp_avg" and counts no steps, as lion_pytorch's Lion."""

    def numbers(group: Group) -> tuple[float, ...]:
        return float(group["lr"]), *map(float, group["betas"]), float(group["weight_decay"])

    return Rule(kind, lambda group: ("exp_avg",), numbers, _prepare_lion, _lion, counts=False, refuses=_refuses_lion)


# ---------------------------------------------------------------------- which rule an optimizer has

_ADAMS = (Rule(kind, _adam_states, _adam_numbers, _prepare_adam, _adam, _adam_flags) for kind in (Adam, AdamW))
_RULES: Mapping[type[Optimizer], Rule] = {rule.optimizer: rule for rule in (*_ADAMS, _SGD, _RMSPROP, _ADAGRAD)}
_NAMED: Mapping[Any, Callable[[type[Optimizer]], Rule]] = {"lion": lion_rule}


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return the rule of `optimizer`, None without one for its class. Raises TypeError or ValueError where a registered one
    makes none."""
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
