"""Layers that are measured are the same on all ranks, whatever each of them measures."""

import dataclasses

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import Int8MixedPrecision
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PLUGINS = {"ddp": TorchDDPPlugin, "zero": lambda: LowLevelZeroPlugin(stage=2), "fsdp": TorchFSDPPlugin}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 16))


def boosted(name, rank):
    """To rank 0 layers of 32 -> 32 are faster, and to rank 1 all others."""

    def timer(layer, x, g):
        fast = (layer.in_features == layer.out_features) == (rank == 0)
        return (1.0 if fast else 3.0) if isinstance(layer, LowPrecisionLinear) else 2.0

    precision = Int8MixedPrecision(convert="measured", tokens=8, keep=())
    precision.conversion = dataclasses.replace(precision.conversion, timer=timer)
    booster, model = Booster("cpu", precision, PLUGINS[name]()), net()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.05))
    return booster, model, optimizer


def low(model):
    layers = {name: each for name, each in model.unwrap().named_modules() if isinstance(each, LowPrecisionLinear)}
    return [name for name, each in layers.items() if not each.in_high_precision]


def chosen(rank, world_size, name, folder):
    found = []
    for turn in range(2):
        # The second time it is the other rank that comes first.
        booster, model, optimizer = boosted(name, rank if turn == 0 else 1 - rank)
        if turn:
            found.append(low(model))
            booster.load(folder, model, optimizer)
        booster.backward(model(torch.randn(4, 16)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if not turn:
            booster.save(folder, model, optimizer)
        found.append(low(model))
    return found


@pytest.mark.parametrize("name", PLUGINS)
def test_all_ranks_take_what_the_first_measured_and_what_a_checkpoint_says(ranks2, name, tmp_path):
    for found in ranks2(chosen, name, str(tmp_path)):
        assert found == [["1"], ["0", "2", "3"], ["1"]]
