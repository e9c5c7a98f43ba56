"""Forward and backward passes inside and outside of no_sync; parameters unfrozen after boost()."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from choices import plugins
from comparing import flat
from torch import nn

from booster import Booster
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin

PLUGINS = plugins("ddp", "zero1", "zero2", "fsdp", "dp", "dp zero")
ORDERS = [(forward, backward) for forward in ("in", "out") for backward in ("in", "out")]


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def built(plugin, precision="fp32", frozen=()):
    booster, model = Booster("cpu", precision, PLUGINS[plugin]() if plugin else None), net()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return booster, model, optimizer


def batch(step, rank):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def reference(world_size, steps):
    model = net()
    for step in steps:
        for rank in range(world_size):
            (model(batch(step, rank)).square().mean() / world_size).backward()
    return flat(model) - 0.5 * torch.cat([param.grad.flatten() for param in model.parameters()])


def one_pass(parts, step, rank, forward="out", backward="out"):
    booster, model, optimizer = parts

    def context(where):
        return booster.no_sync(model, optimizer) if where == "in" else nullcontext()

    with context(forward):
        loss = model(batch(step, rank)).float().square().mean()
    with context(backward):
        booster.backward(loss, optimizer)


def orders(rank, world_size, precision):
    """By plugin and order: the distance after a step at once, or what it raises; and after one more pass outside."""
    found = {}
    for plugin in PLUGINS:
        for order in ORDERS:
            parts = built(plugin, precision)
            _, model, optimizer = parts
            one_pass(parts, 0, rank, *order)
            try:
                optimizer.step()
                at_once = float((flat(model) - reference(world_size, [0])).abs().max())
            except RuntimeError as error:
                at_once = "no_sync" if "no_sync" in str(error) else str(error)
                one_pass(parts, 1, rank)
                optimizer.step()
                distance = float((flat(model) - reference(world_size, [0, 1])).abs().max())
                assert distance < (1e-6 if precision == "fp32" else 1e-2), (plugin, order, distance)
                optimizer.zero_grad()
                one_pass(parts, 2, rank, *order)
                optimizer.zero_grad()
                optimizer.step()  # there is nothing to step on, and nothing is held back
            found[f"{plugin}: forward {order[0]}, backward {order[1]}"] = at_once
    return found


@pytest.mark.slow_cases("bf16_naive")
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_gradients_of_every_order_arrive_or_the_step_says_that_they_do_not(ranks2, precision):
    for found in ranks2(orders, precision):
        silent = {key: value for key, value in found.items() if value != "no_sync"}
        assert all(value < (1e-6 if precision == "fp32" else 1e-2) for value in silent.values()), silent
        noticed = {key for key, value in found.items() if value == "no_sync"}
        # DistributedDataParallel decides in forward, the others in backward.
        assert noticed == {
            f"{plugin}: forward {forward}, backward {backward}"
            for plugin in PLUGINS
            for forward, backward in ORDERS
            if (forward if plugin in ("ddp", "zero1") else backward) == "in"
        }


def accumulated(rank, world_size, plugin):
    """Many passes, clips of state and reads in between: the last pass outside brings all of them together."""
    parts = built(plugin)
    booster, model, optimizer = parts
    for step in range(3):
        one_pass(parts, step, rank, *(("in", "in") if step < 2 else ("out", "out")))
        optimizer.state_dict()
    optimizer.step()
    return float((flat(model) - reference(world_size, range(3))).abs().max())


@pytest.mark.parametrize("plugin", list(PLUGINS))
def test_passes_inside_and_a_last_one_outside_add_up(ranks2, plugin):
    assert max(ranks2(accumulated, plugin)) < 1e-6


def kept_graph(rank, world_size):
    """By plugin: the distance after a step on two passes through one graph, or what it raises; and after one more pass."""
    found = {}
    for plugin in PLUGINS:
        booster, model, optimizer = parts = built(plugin)
        loss = model(batch(0, rank)).square().mean()
        booster.backward(loss / 2, optimizer, retain_graph=True)
        booster.backward(loss / 2, optimizer)
        try:
            optimizer.step()
            found[plugin] = float((flat(model) - reference(world_size, [0])).abs().max()) < 1e-6
        except RuntimeError as error:
            found[plugin] = "retain_graph=True" in str(error)
            assert plugin in ("ddp", "zero1"), "what every rank could have averaged is refused"
            one_pass(parts, 1, rank)
            optimizer.step()
            assert (flat(model) - reference(world_size, [0, 1])).abs().max() < 1e-6
    return found


def test_a_second_pass_through_a_graph_is_averaged_or_the_step_says_that_it_is_not(ranks2):
    assert ranks2(kept_graph) == [dict.fromkeys(PLUGINS, True)] * 2


def accumulated_from_the_first_step(rank, world_size, make, precision):
    booster, model = Booster("cpu", precision, make()), net()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(2):
        with booster.accumulate(model, optimizer, num_micro_batches=3):
            for number in range(3):
                loss = model(batch(3 * step + number, rank)).float().square().mean()
                booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("plugin", [TorchDDPPlugin, LowLevelZeroPlugin])
def test_a_static_graph_accumulates_from_the_first_step_on(ranks2, plugin, precision):
    static = ranks2(accumulated_from_the_first_step, partial(plugin, static_graph=True), precision)
    plain = ranks2(accumulated_from_the_first_step, plugin, precision)
    for one, other in zip(static, plain, strict=True):
        # The first group's gradients are averaged three times instead of once, and rounded as often.
        assert (one - other).abs().max() < (1e-6 if precision == "fp32" else 2**-7 * other.abs().max())


class Trained(nn.Module):
    """Called by a method, or by its members alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))

    def fit(self, booster, optimizer, x):
        booster.backward(self.forward(x).float().square().mean(), optimizer)


def around(rank, world_size, precision):
    """By plugin and way: how far ranks are apart after steps that did not go through the boosted model, or who is named."""
    found = {}
    for plugin in ("ddp", "zero1", "zero2"):
        for way in ("method", "members", "late"):
            booster = Booster("cpu", precision, PLUGINS[plugin]())
            model = Trained() if way != "members" else nn.ModuleList(Trained().children())
            model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
            try:
                if way == "method":
                    model.fit(booster, optimizer, batch(0, rank).to(next(model.parameters()).dtype))
                elif way == "members":
                    body, head = model
                    hidden = body(batch(0, rank).to(body.weight.dtype))
                    booster.backward(head(hidden).float().square().mean(), optimizer)
                else:
                    losses = [model(batch(step, rank)).float().square().mean() for step in range(2)]
                    for loss in losses:
                        booster.backward(loss, optimizer)
                optimizer.step()
                own = flat(model)
                others = [torch.empty_like(own) for _ in range(world_size)]
                torch.distributed.all_gather(others, own)
                found[f"{plugin}, {way}"] = max(float((own - other).abs().max()) for other in others)
            except RuntimeError as error:
                found[f"{plugin}, {way}"] = str(error)
                optimizer.zero_grad()
                if way != "members":
                    booster.backward(model(batch(0, rank)).float().square().mean(), optimizer)
                    optimizer.step()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_ranks_stay_alike_or_are_told_whose_gradient_passes_around_the_model_left(ranks2, precision):
    for found in ranks2(around, precision):
        noticed = {key: value for key, value in found.items() if value != 0.0}
        assert all("weight is not averaged over the ranks" in str(value) for value in noticed.values()), noticed
        assert {f"{plugin}, {way}" for plugin in ("ddp", "zero1") for way in ("method", "members", "late")} <= set(
            noticed
        )


def unfrozen(rank, world_size, plugin, precision, late_group):
    booster, model = Booster("cpu", precision, PLUGINS[plugin]()), net()
    late = [model.get_parameter(name) for name in ("0.weight", "0.bias")]
    for param in late:
        param.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad or not late_group]
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(params, lr=0.5))
    parts = booster, model, optimizer
    one_pass(parts, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    before = flat(model)
    for name in ("0.weight", "0.bias"):
        model.get_parameter(name).requires_grad_(True)
    if late_group:
        optimizer.add_param_group({"params": [model.get_parameter(name) for name in ("0.weight", "0.bias")]})
    one_pass(parts, 1, rank)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error), torch.equal(flat(model), before)
    every = [torch.empty_like(before) for _ in range(world_size)]
    torch.distributed.all_gather(every, flat(model))
    return float((every[0] - every[1]).abs().max()), not torch.equal(every[0], before)


@pytest.mark.crossed
@pytest.mark.parametrize("late_group", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("plugin", list(PLUGINS))
def test_parameters_unfrozen_after_boost_are_trained_alike_or_refused(ranks2, plugin, precision, late_group):
    for drift, moved_rightly in ranks2(unfrozen, plugin, precision, late_group):
        assert moved_rightly
        if plugin in ("ddp", "zero1", "zero2"):
            assert "0." in drift
            assert "requires_grad_() before boost()" in drift
        else:
            assert drift == 0.0
