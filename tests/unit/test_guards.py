"""What stands beside the boosted objects: the user's own optimizer and model, a GradScaler, gradients touched by hand."""

import copy
import gc
import logging
import pickle
import warnings

import pytest
import torch
from torch import nn

from booster import Booster

PRECISIONS = ("fp32", "bf16", "fp16", "fp16_naive", "bf16_naive")


def run(precision="bf16", make=torch.optim.SGD, net=None, **options):
    """(booster, model, optimizer, net, the user's optimizer, a batch)"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)) if net is None else net
    own = make(net.parameters(), lr=1e-2)
    b = Booster("cpu", precision, **options)
    model, optimizer, *_ = b.boost(net, own)
    return b, model, optimizer, net, own, torch.randn(16, 8)


def train(b, model, optimizer, x, steps=1):
    for _ in range(steps):
        b.backward(model(x).square().mean(), optimizer)
        assert optimizer.step().applied
        optimizer.zero_grad()


# ---------------------------------------------------------------------- a GradScaler


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bare", [True, False])
def test_a_grad_scaler_beside_a_boosted_optimizer_is_refused_and_says_what_to_delete(precision, make, bare):
    b, model, optimizer, _, _, x = run(precision, make)
    scaler = torch.amp.GradScaler("cpu")
    loss = model(x).square().mean()
    before = [param.clone() for param in model.parameters()]
    if bare:
        scaler.scale(loss).backward()
    else:
        b.backward(scaler.scale(loss), optimizer)
    with pytest.raises(RuntimeError, match=r"a GradScaler stepped.*Delete the GradScaler.*GradScaler\(enabled=False\)"):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    train(b, model, optimizer, x)  # as before: nothing is left of the scaler


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_grad_scaler_that_is_not_enabled_may_stay(precision):
    (b, model, optimizer, _, _, x), (_, twin, alone, *_) = run(precision), run(precision)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(3):
        b.backward(scaler.scale(model(x).square().mean()), optimizer)
        scaler.unscale_(optimizer)
        assert scaler.step(optimizer).applied
        scaler.update()
        optimizer.zero_grad()
        b.backward(twin(x).square().mean(), alone)
        alone.step()
        alone.zero_grad()
    assert all(map(torch.equal, twin.parameters(), model.parameters()))


# ---------------------------------------------------------------------- the user's own optimizer


@pytest.mark.parametrize("options", [{}, {"release_gradients": "exact"}, {"fused_optimizer": False}, {"states": "bf16"}])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_stepping_the_users_own_optimizer_is_refused(precision, options):
    b, model, optimizer, _, own, x = run(precision, **options)
    train_one = lambda: b.backward(model(x).square().mean(), optimizer)  # noqa: E731
    train_one()
    if not options.get("release_gradients"):
        with pytest.raises(RuntimeError, match=r"this SGD was given to boost\(\).*model, optimizer, \*_ ="):
            own.step()
    assert optimizer.step().applied
    with pytest.raises(RuntimeError, match="this SGD was given to boost"):
        own.step()
    with pytest.raises(RuntimeError, match="this SGD was given to boost"):
        own.step(lambda: torch.tensor(0.0))


def test_the_guard_of_an_optimizer_is_not_a_hook_of_the_users():
    # A hook of the user's must see true gradients, for which the loss scale is divided out beforehand.
    b, model, optimizer, _, own, x = run("fp16")
    b.backward(model(x).square().mean(), optimizer)
    before = model[0].weight.grad.clone()
    assert optimizer.step().applied
    assert torch.equal(before / 65536, model[0].weight.grad)  # torch's fused kernel divided, not a pass before it


def test_the_users_optimizer_is_free_again_when_the_boosted_one_is_gone():
    b, model, optimizer, _, own, x = run("fp32")
    train(b, model, optimizer, x)
    del optimizer
    gc.collect()
    model(x).square().mean().backward()
    own.step()


def test_a_copy_of_a_boosted_optimizer_guards_its_own_and_a_copy_of_the_users_is_free():
    b, model, optimizer, _, own, x = run("bf16")
    train(b, model, optimizer, x)
    clone = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="given to boost"):
        clone.unwrap().step()
    assert clone.step().applied
    copy.deepcopy(own).step()
    pickle.loads(pickle.dumps(own)).step()


def test_states_of_the_users_optimizer_are_made_by_torchs_checkpoint_functions():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    _, _, _, net, own, _ = run("fp32", torch.optim.AdamW)
    assert get_optimizer_state_dict(net, own)["state"]


def test_a_scheduler_made_before_boost_leaves_the_guard_in_place():
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    own = torch.optim.SGD(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(own, 1)
    b = Booster("cpu", "bf16")
    model, optimizer, *_, schedule = b.boost(net, own, lr_scheduler=schedule)
    train(b, model, optimizer, torch.randn(4, 8))
    schedule.step()
    with pytest.raises(RuntimeError, match="given to boost"):
        own.step()


# ---------------------------------------------------------------------- the user's own model


def test_the_users_own_model_called_in_training_is_told_once(caplog):
    b, model, optimizer, net, _, x = run("bf16")
    train(b, model, optimizer, x)
    assert not caplog.records
    for _ in range(3):
        net(x)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.name.startswith("booster")
    assert "the Sequential that was given to boost() was called in training" in record.message
    assert "model, optimizer, *_ = booster.boost(model, optimizer)" in record.message


def test_the_users_own_model_is_free_in_evaluation_without_gradients_and_inside_the_boosted_one(caplog):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x, again=True):
            return self.layer(x) + (self(x, again=False) if again else 0)

        def energy(self, x):
            return self(x).sum()

    b, model, optimizer, net, _, x = run("bf16", net=Net())
    train(b, model, optimizer, x)
    model.energy(x).detach()
    with torch.no_grad():
        net(x)
    net.eval()
    net(x)
    net.train().requires_grad_(False)
    net(x)
    assert not caplog.records


def test_what_watches_the_users_model_leaves_after_100_steps():
    b, model, optimizer, net, _, x = run("fp32")
    assert len(net._forward_pre_hooks) == 1
    train(b, model, optimizer, x, 99)
    assert len(net._forward_pre_hooks) == 1
    train(b, model, optimizer, x)
    assert not net._forward_pre_hooks


def test_a_copy_and_a_pickle_of_the_users_model_are_not_watched(caplog):
    b, model, optimizer, net, _, x = run("bf16")
    train(b, model, optimizer, x)
    copy.deepcopy(net)(x)
    pickle.loads(pickle.dumps(net))(x)
    twin = copy.deepcopy(model)
    twin(x)
    twin.unwrap()(x)
    assert not caplog.records
    net(x)
    assert len(caplog.records) == 1


def test_the_users_model_can_be_exported_at_any_time_and_scripted_when_it_was_asked_for():
    b, model, optimizer, net, _, x = run("fp32")
    train(b, model, optimizer, x)
    assert torch.equal(torch.export.export(net, (x,)).module()(x), net.eval()(x))
    assert b.unwrap(model) is net
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert torch.equal(torch.jit.script(net)(x), net(x))
        assert torch.equal(torch.jit.trace(net, (x,))(x), net(x))
