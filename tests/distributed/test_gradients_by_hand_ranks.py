"""Gradients that a script changes between backward and step, on several ranks; every rank the same."""

import pytest
import torch
from choices import precisions
from comparing import flat
from matrix import hybrid
from small_job import net

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

RATE, HAND = 0.5, 0.25
PRECISIONS = {
    **precisions("fp32", "fp16", "bf16_naive", "fp16_naive split"),
    "O2": lambda: FP16ApexMixedPrecision("O2", max_loss_scale=2.0**10, verbosity=0),
}
PLUGINS = {
    "DDP": TorchDDPPlugin,
    "FSDP": TorchFSDPPlugin,
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1),
    "TP": lambda: hybrid(2, 2, 1).make(tp_size=2, pp_size=1, tp_plan={"0": "colwise", "2": "rowwise"}),
}


def write(param):
    param.grad.fill_(HAND)


def replace(param):
    param.grad = torch.full_like(param.grad, HAND)


def remove(param):
    param.grad = None


def boosted(precision, plugin):
    booster, model = Booster("cpu", PRECISIONS[precision](), PLUGINS[plugin]()), net()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=RATE))
    return booster, model, optimizer


def one_pass(booster, model, optimizer, seed=1):
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    booster.backward(model(inputs).float().square().mean(), optimizer)


def moved(precision, plugin, edit, shows, passes):
    booster, model, optimizer = boosted(precision, plugin)
    before = flat(model)
    for seed in range(passes):
        one_pass(booster, model, optimizer, seed)
    if shows:
        optimizer.unscale_grads()
    for param in model.parameters():
        edit(param)
        is_true = shows or (precision == "O2" and param.dtype == torch.float32)
        if param.grad is not None and not is_true:
            param.grad.mul_(optimizer.loss_scale)
    applied = optimizer.step().applied
    return applied, before - flat(model)


def every_case(rank, world_size, plugin):
    found = {}
    for precision in PRECISIONS:
        for edit in (write, replace, remove):
            for shows in (True, False):
                case = f"{precision}, {edit.__name__}, {shows}"
                try:
                    applied, change = moved(precision, plugin, edit, shows, passes=1)
                except RuntimeError as error:
                    found[case] = str(error)
                    continue
                expected = torch.full_like(change, 0.0 if edit is remove else RATE * HAND)
                right = torch.allclose(change, expected, rtol=0.0, atol=4e-3)
                found[case] = "right" if applied and right else f"applied {applied}, moved by {change[:4].tolist()}"
    return found


def sums_of_several_passes(rank, world_size, plugin):
    """What a step moves by, with and without a look at the gradients, and after they were doubled."""
    moves = []
    for shows, factor in ((False, 1.0), (True, 1.0), (True, 2.0)):
        booster, model, optimizer = boosted("O2", plugin)
        before = flat(model)
        for seed in range(3):
            one_pass(booster, model, optimizer, seed)
        if shows:
            optimizer.unscale_grads()
        if factor != 1.0:
            for param in model.parameters():
                param.grad.mul_(factor)
        optimizer.step()
        moves.append(before - flat(model))
    return moves


@pytest.mark.parametrize("plugin", ["DDP", "FSDP", "TP"])
def test_sums_of_several_passes_of_o2_can_be_looked_at_and_changed(ranks2, plugin):
    for plain, shown, doubled in ranks2(sums_of_several_passes, plugin):
        assert plain.abs().max() > 0.01
        assert torch.equal(plain, shown)
        torch.testing.assert_close(doubled, 2 * plain, rtol=0.0, atol=2e-3)


def refusals(rank, world_size):
    messages = []
    booster, model, optimizer = boosted("O2", "ZeRO-1")
    for seed in range(2):
        one_pass(booster, model, optimizer, seed)
    for param in model.parameters():
        param.grad.mul_(2.0)
    for action in (optimizer.unscale_grads, optimizer.step):
        try:
            action()
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_sums_of_which_each_rank_has_a_part_cannot_be_shown_nor_changed(ranks2):
    for messages in ranks2(refusals):
        assert len(messages) == 2
        assert all("b.accumulate()" in text for text in messages)


@pytest.mark.slow_cases("DDP")
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_step_is_that_of_the_gradients_which_were_put_there(ranks2, plugin):
    for found in ranks2(every_case, plugin):
        assert {case: what for case, what in found.items() if what != "right"} == {}
