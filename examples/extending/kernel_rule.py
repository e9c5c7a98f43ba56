"""How Triton kernels step an optimizer of your own is one file: signed momentum (Bernstein et al. 2018), and its rule.

    def rule(cls):  # called where kernels are asked for, so that only there Triton is imported
        from kernel_rule import signum_rule
        return signum_rule(cls)

    booster.register_elementwise(Signum, states={"momentum": "signed"}, rule=rule)

It serves every form of weights and states. `prepare` makes numbers of a group in float64 once a step; `body` steps elements.
"""

import torch
import triton
import triton.language as tl

from booster.kernels.rule import Rule


class Signum(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    m.mul_(group["beta"]).add_(p.grad * (1 - group["beta"]))
                    p.add_(m.sign(), alpha=-group["lr"])


@triton.jit
def prepare(row, step):
    beta = tl.load(row + 1)
    none = beta * 0.0
    return -tl.load(row), beta, 1.0 - beta, none, none, none, none, none


@triton.jit
def body(w, g, m, s1, s2, lr, beta, rise, h3, h4, h5, h6, h7, FLAGS: tl.constexpr):
    m = m * beta + g * rise
    return w + lr * tl.where(m > 0.0, 1.0, tl.where(m < 0.0, -1.0, 0.0)), m, s1, s2


def signum_rule(cls):
    return Rule(
        cls,
        states=lambda group: ("momentum",),
        numbers=lambda group: (float(group["lr"]), float(group["beta"])),  # lr first
        prepare=prepare,
        body=body,
        counts=False,  # its state has no "step"
    )
