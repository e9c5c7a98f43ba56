"""Optimizers that evaluate the loss themselves."""

from typing import Any

import pytest
import torch
from torch import nn

from booster import Booster


def regression() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    return nn.Linear(3, 1), x, x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.25


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-8), ("bf16", 1e-2)])
@pytest.mark.parametrize("clip", [False, True])
def test_lbfgs_converges_and_clips_inside_the_closure_take_effect(precision, bound, clip):
    model, x, y = regression()
    booster = Booster("cpu", precision)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.MSELoss())
    norms = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        booster.backward(loss, optimizer)
        if clip:
            norms.append(float(optimizer.clip_grad_by_norm(1.0)))
        return loss

    results = [optimizer.step(closure) for _ in range(5)]
    assert all(result.applied for result in results)
    assert results[0].loss.item() > 1.0
    assert closure().item() < bound
    assert (results[-1].grad_norm is None) == (not clip)
    if clip:
        assert max(norms) > 1.0
        largest = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        assert float(largest) <= 1.0 + 1e-6


def test_the_gradients_that_the_optimizer_sees_are_clipped():
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    booster = Booster("cpu")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = -model(torch.full((1, 4), 3.0)).sum()
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        return loss

    result = optimizer.step(closure)
    assert result.loss.item() == 0.0
    assert result.grad_norm == pytest.approx(6.0)
    assert torch.allclose(model.weight, torch.full((1, 4), 0.5))


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SGD])
def test_a_closure_under_a_loss_scale_is_refused_with_the_way_out(make: Any):
    model, *_ = regression()
    booster = Booster("cpu", "fp16")
    model, optimizer, *_ = booster.boost(model, make(model.parameters()))
    with pytest.raises(RuntimeError, match="cannot run under a loss scaler.*Use mixed_precision='fp32' or 'bf16'"):
        optimizer.step(lambda: torch.tensor(0.0))


def test_a_closure_with_skip_nonfinite_is_refused_with_the_way_out():
    model, *_ = regression()
    booster = Booster("cpu", skip_nonfinite=True)
    model, optimizer, *_ = booster.boost(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(RuntimeError, match="skip_nonfinite=False"):
        optimizer.step(lambda: torch.tensor(0.0))
