"""A fused projection that tensor parallelism divides part by part is whole in a checkpoint, and divided again when loaded."""

import pytest
import torch
from comparing import whole
from runs import differing
from torch import nn

from booster import Booster
from booster.plugin import HybridParallelPlugin, SingleDevice
from booster.plugin.tensor_parallel.linear_styles import Colwise


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(q * k.tanh() + v)


def boosted(tp_size, seed):
    torch.manual_seed(seed)
    plugin = SingleDevice()
    if tp_size > 1:
        plugin = HybridParallelPlugin(tp_size, 1, tp_plan={"qkv": Colwise(num_parts=3), "out": "rowwise"})
    booster, model = Booster("cpu", "bf16", plugin), Fused()
    return booster, *booster.boost(model, torch.optim.AdamW(model.parameters()))[:2]


def step(booster, model, optimizer):
    booster.backward(model(torch.linspace(-1, 1, 16).view(2, 8)).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def wholes(model, optimizer):
    states = {
        f"{name} {key}": whole(value)
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }
    return {name: whole(param) for name, param in model.named_parameters()} | states


def saved(rank, world_size, folder):
    parts = boosted(world_size, 0)
    step(*parts)
    parts[0].save(folder, *parts[1:])
    return wholes(*parts[1:])


def loaded(rank, world_size, folder):
    parts = boosted(world_size, 1)
    step(*parts)
    parts[0].load(folder, *parts[1:])
    return wholes(*parts[1:])


@pytest.mark.parametrize(("source", "target"), [(2, 1), (1, 2), (2, 2)])
def test_a_divided_fused_projection_moves(ranks2, tmp_path, source, target):
    on = {1: lambda function: [function(0, 1, str(tmp_path))], 2: lambda function: ranks2(function, str(tmp_path))}
    expected = on[source](saved)[0]
    assert expected["qkv.weight"].shape == expected["qkv.weight exp_avg"].shape == (24, 8)
    for found in on[target](loaded):
        assert differing(expected, found) == []
