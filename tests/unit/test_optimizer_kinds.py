"""What is known of an optimizer is one row: its kind, its states and what they are when packed, and what a load asks for."""

import inspect

import pytest
import torch
from torch import nn

from booster import Booster
from booster.masters.quantized_state import QuantizedState
from booster.mixed_precision import BF16NaiveMixedPrecision
from booster.model.optimizers import OPTIMIZERS, OptimizerInfo, granularity_of, info_of


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, as somebody might write it."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"], state["exp_avg"] = torch.zeros(()), torch.zeros_like(param)
                state["step"] += 1
                average = state["exp_avg"]
                param.sub_(group["lr"] * (first * average + (1 - first) * param.grad).sign_())
                average.lerp_(param.grad, 1 - second)


def boosted():
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    precision = BF16NaiveMixedPrecision(master_weights="split", states="8bit")
    b = Booster("cpu", precision)
    model, optimizer, *_ = b.boost(model, Lion(model.parameters()))
    for _ in range(2):
        b.backward(model(torch.randn(4, 64)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_one_row_adds_an_optimizer(monkeypatch):
    with pytest.raises(ValueError, match="Lion"):
        boosted()
    monkeypatch.setitem(OPTIMIZERS, Lion, OptimizerInfo(states={"exp_avg": "signed"}))
    optimizer = boosted()
    assert granularity_of(optimizer.unwrap()) == "elementwise"
    kept = [value for state in optimizer.unwrap().state.values() for value in state.values()]
    assert any(isinstance(value, QuantizedState) for value in kept)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    del state["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match=r"lacks \['exp_avg'\], which Lion reads in every step"):
        optimizer.load_state_dict(state)


OPTIONS = {"amsgrad": True, "momentum": 0.9, "centered": True}
STEPPED = [cls for cls in OPTIMIZERS if cls is not torch.optim.Muon]


@pytest.mark.parametrize("cls", STEPPED)
@pytest.mark.parametrize("with_options", [False, True])
def test_a_row_names_the_states_that_torch_keeps(cls, with_options):
    row, taken = OPTIMIZERS[cls], inspect.signature(cls).parameters
    options = {name: value for name, value in OPTIONS.items() if with_options and name in taken}
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = cls([param], lr=1e-2, **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    state = {name: value for name, value in optimizer.state[param].items() if value is not None}
    if row.shapes((3, 2)):
        assert {name: value.shape for name, value in state.items() if name != "step"}.items() <= row.shapes(
            (3, 2)
        ).items()
        return
    group = optimizer.param_groups[0]
    assert info_of(optimizer).read(group) == set(state)
    assert {name for name in row.states if name in state} == {
        name for name, value in state.items() if getattr(value, "shape", ()) == param.shape
    }
