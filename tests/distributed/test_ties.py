"""Numbers halfway between two bfloat16 ones: loading rounds them as training does, alike on all ranks."""

import copy

import pytest
import torch
from choices import plugins
from runs import differing
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision

PLUGINS = plugins("single", "DDP", "ZeRO-1", "ZeRO-2")


def boosted(plugin, seed, *, trained=True, **options):
    """Every weight is a tie, half of them above an even number."""
    torch.manual_seed(seed)
    booster = Booster("cpu", BF16NaiveMixedPrecision(**options), PLUGINS[plugin]())
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    with torch.no_grad():
        for param in model.parameters():
            param.view(torch.int32).bitwise_and_(~0xFFFF).bitwise_or_(0x8000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if trained else None
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def weights(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def saved_and_loaded(rank, world_size, plugin, folder):
    booster, model, optimizer = boosted(plugin, 0)
    booster.save(folder, model, optimizer)
    other, again, its = boosted(plugin, 1)
    other.load(folder, again, its)
    return differing(weights(model), weights(again))


@pytest.mark.parametrize("plugin", ["DDP", "ZeRO-1", "ZeRO-2"])
def test_a_checkpoint_brings_back_the_very_weights(ranks2, tmp_path, plugin):
    assert ranks2(saved_and_loaded, plugin, str(tmp_path)) == [[], []]


def states_of_other_rounding(rank, world_size, plugin):
    """Of all weights after the optimizer's state is loaded: the model's was rounded by torch's own cast."""
    booster, model, optimizer = boosted(plugin, 0)
    expected, state = weights(model), copy.deepcopy(optimizer.state_dict())
    other, again, its = boosted(plugin, 1)
    masters = state["booster"]["masters"]["weights"]
    again.load_state_dict({name: value.bfloat16() for name, value in masters.items()})
    its.load_state_dict(state)
    return differing(expected, weights(again))


@pytest.mark.parametrize("plugin", ["DDP", "ZeRO-1", "ZeRO-2"])
def test_weights_follow_their_masters_on_every_rank(ranks2, plugin):
    assert ranks2(states_of_other_rounding, plugin) == [[], []]


def float32_weights(rank, world_size, plugin):
    """Of a model that is given float32 weights: before and after the masters take them over."""
    booster, model, optimizer = boosted(plugin, 0)
    expected = weights(model)
    other, again, its = boosted(plugin, 1)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()["booster"]["masters"]["weights"]))
    before = differing(expected, weights(again))
    its.state_dict()  # in which the masters take over what was loaded
    return before, differing(expected, weights(again))


@pytest.mark.parametrize("plugin", ["DDP", "ZeRO-1", "ZeRO-2"])
def test_float32_weights_are_rounded_when_they_are_loaded(ranks2, plugin):
    assert ranks2(float32_weights, plugin) == [([], []), ([], [])]


@pytest.mark.parametrize("options", [{}, {"master_weights": "fp32"}], ids=["split", "fp32"])
def test_a_model_without_an_optimizer_gets_the_weights_that_were_trained(tmp_path, options):
    booster, model, optimizer = boosted("single", 0, **options)
    booster.save(tmp_path, model, optimizer)
    other, again, _ = boosted("single", 1, trained=False, **options)
    other.load(tmp_path, again)
    assert differing(weights(model), weights(again)) == []


def test_not_a_number_is_not_rounded_to_one(tmp_path):
    booster, model, optimizer = boosted("single", 0)
    state = {name: value.float() for name, value in weights(model).items()}
    state["0.bias"].view(torch.int32)[:] = 0x7FFFFFFF
    state["1.bias"][:] = 1.0 + 2**-20
    model.load_state_dict(state)
    assert model[0].bias.isnan().all()
    assert (model[1].bias == 1).all()
