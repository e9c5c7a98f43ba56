"""`torch.distributed.checkpoint.state_dict` knows torch's keys alone: what it would drop is an error, not a loss."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from booster import Booster
from booster.mixed_precision import (
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)

LOSES = {
    "fp16": (lambda: FP16TorchMixedPrecision(init_scale=2.0**10), "the loss scale"),
    "fp16_naive": (lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10), "masters and the loss scale"),
    "fp16_naive split": (
        lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10, master_weights="split"),
        "masters and the loss scale",
    ),
    "bf16_naive": (BF16NaiveMixedPrecision, "masters"),
    "bf16_naive kahan": (lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"), "masters"),
    "bf16_naive stochastic": (
        lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
        "random state",
    ),
    "O1": (lambda: FP16ApexMixedPrecision("O1", max_loss_scale=2.0**10, verbosity=0), "the loss scale"),
    "O2": (lambda: FP16ApexMixedPrecision("O2", max_loss_scale=2.0**10, verbosity=0), "masters and the loss scale"),
}
KEEPS = {
    "fp32": lambda: "fp32",
    "bf16": lambda: "bf16",
    "bf16_naive none": lambda: BF16NaiveMixedPrecision(master_weights="none"),
}


def trained(precision, steps=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    booster = Booster("cpu", precision())
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(steps):
        torch.manual_seed(step)
        booster.backward(model(torch.randn(4, 6)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return booster, model, optimizer


@pytest.mark.parametrize("get", [get_state_dict, get_optimizer_state_dict])
@pytest.mark.parametrize("precision", LOSES)
def test_what_would_be_lost_is_named(precision, get):
    make, lost = LOSES[precision]
    booster, model, optimizer = trained(make)
    with pytest.raises(RuntimeError, match=rf"{lost}[\s\S]*Booster\.save"):
        get(booster.unwrap(model), optimizer)
    assert "booster" in optimizer.state_dict()  # which any other caller gets


def everything(model, optimizer):
    """Weights, counters, scale and learning rate, as one would see that something moved."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = (
        optimizer.num_applied,
        optimizer.num_skipped,
        optimizer.progress,
        str(optimizer._update.gradients.scaler.state_dict()),
    )
    return weights, (*numbers, optimizer.param_groups[0]["lr"], all(p.grad is None for p in model.parameters()))


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("precision", LOSES)
def test_nothing_moves_where_a_fresh_optimizer_is_refused(precision, load):
    booster, model, optimizer = trained(LOSES[precision][0], steps=0)
    weights, numbers = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=r"Booster\.save[\s\S]*Booster\.load"):
        if load:
            states = {"state": {}, "param_groups": []}
            set_state_dict(booster.unwrap(model), optimizer, model_state_dict={}, optim_state_dict=states)
        else:
            get_state_dict(booster.unwrap(model), optimizer)
    after, numbers_after = everything(model, optimizer)
    assert numbers == numbers_after
    assert all(torch.equal(value, after[name]) for name, value in weights.items())


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("precision", KEEPS)
def test_the_states_that_torch_makes_for_a_fresh_optimizer_are_no_step_of_the_run(precision, make, scheduled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizer = make(model.parameters(), lr=0.01, weight_decay=0.1)
    booster = Booster("cpu", KEEPS[precision](), clip_grad_norm=1.0)
    model, optimizer, *_ = booster.boost(model, optimizer)
    if scheduled:  # torch's puts its own function in the place of `step`
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weights, numbers = everything(model, optimizer)
    get_state_dict(booster.unwrap(model), optimizer)
    after, numbers_after = everything(model, optimizer)
    assert numbers == numbers_after
    assert all(torch.equal(value, after[name]) for name, value in weights.items())


@pytest.mark.parametrize("precision", KEEPS)
def test_without_anything_to_lose_it_works(precision):
    booster, model, optimizer = trained(KEEPS[precision])
    model_state, state = get_state_dict(booster.unwrap(model), optimizer)
    expected = {name: value.clone() for name, value in model_state.items()}
    _, other, made = trained(KEEPS[precision], steps=3)
    set_state_dict(other.unwrap(), made, model_state_dict=model_state, optim_state_dict=state)
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    for one, two in zip(optimizer.state_dict()["state"].values(), made.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(value, two[key]) for key, value in one.items())
