"""Penalties on gradients, which differentiate through a backward pass, in every precision."""

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import (
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    apex_amp,
)

SCALE = 2.0**10
PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=SCALE),
    "bf16": lambda: "bf16",
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=SCALE),
    "bf16_naive": lambda: "bf16_naive",
    **{
        f"fp16_apex {level}": lambda level=level: FP16ApexMixedPrecision(
            level, loss_scale=None if level in ("O1", "O2") else "dynamic", max_loss_scale=SCALE, verbosity=0
        )
        for level in ("O0", "O1", "O2", "O3")
    },
}
TOLERANCE = {"fp32": 1e-5, "fp16_apex O0": 1e-5, "bf16": 0.1, "bf16_naive": 0.1}
WEIGHT = 0.5


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def changes(before, model):
    return torch.cat([(p.detach().float() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])


def expected():
    model = net()
    before = [param.detach().clone() for param in model.parameters()]
    loss = model(batch()).square().mean()
    grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    (loss + WEIGHT * sum(grad.square().sum() for grad in grads)).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return changes(before, model)


def penalty_of_grad(booster, model, optimizer):
    loss = model(batch()).float().square().mean()
    grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    booster.backward(loss + WEIGHT * sum(grad.float().square().sum() for grad in grads), optimizer)


def penalty_of_accumulated(booster, model, optimizer):
    booster.backward(model(batch()).float().square().mean(), optimizer, create_graph=True)
    optimizer.unscale_grads()
    params = apex_amp.master_params(optimizer)  # the parameters, but under O2
    booster.backward(WEIGHT * sum(param.grad.float().square().sum() for param in params), optimizer)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.crossed
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", [penalty_of_grad, penalty_of_accumulated])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_penalty_is_what_it_is_in_float32(precision, way, fused):
    model = net()
    before = [param.detach().clone() for param in model.parameters()]
    booster = Booster("cpu", PRECISIONS[precision](), fused_optimizer=fused)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    way(booster, model, optimizer)
    assert optimizer.step().applied
    reference = expected()
    error = float((changes(before, model) - reference).norm() / reference.norm())
    assert error < TOLERANCE.get(precision, 1e-2)
    optimizer.zero_grad()
