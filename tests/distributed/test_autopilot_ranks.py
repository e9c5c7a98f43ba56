"""Ranks that see different data decide alike."""

import torch
import torch.nn.functional as F

from benchmarks import planted
from booster import Booster
from booster.interface.model import pins_of
from booster.mixed_precision import Autopilot, NVFP4MixedPrecision
from booster.plugin import TorchDDPPlugin


def decided(rank, world_size):
    torch.manual_seed(0)
    own = planted.GPT()
    booster = Booster("cpu", Autopilot(NVFP4MixedPrecision(emulate=True), every=3), TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(own, torch.optim.AdamW(own.parameters(), lr=3e-3))
    for step in range(4):
        planted.outlier(own, step)
        x, y = own.batch(torch.Generator().manual_seed(10 * step + rank))
        booster.backward(F.cross_entropy(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    pilot = pins_of(model)
    return pilot.state_dict(), pilot.noise, [param.detach().clone() for param in own.parameters()]


def test_ranks_decide_alike_on_the_sums_of_all(run_on_ranks):
    (first, noise, params), (second, other_noise, others) = run_on_ranks(decided, 2)
    assert first == second
    assert first["names"] == ["blocks.0.up", "blocks.1.up"]
    assert noise == other_noise
    assert all(torch.equal(one, two) for one, two in zip(params, others, strict=True))
