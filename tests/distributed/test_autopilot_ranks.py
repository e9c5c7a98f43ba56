"""Ranks that see different data decide alike."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import planted
from booster import Booster
from booster.interface.model import extras_of
from booster.mixed_precision import Autopilot, NVFP4MixedPrecision, PrecisionSchedule
from booster.plugin import HybridParallelPlugin, SingleDevice, TorchDDPPlugin


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
    pilot = extras_of(model).pins
    return pilot.state_dict(), pilot.noise, [param.detach().clone() for param in own.parameters()]


def test_ranks_decide_alike_on_the_sums_of_all(run_on_ranks):
    (first, noise, params), (second, other_noise, others) = run_on_ranks(decided, 2)
    assert first == second
    assert first["names"] == ["blocks.0.up", "blocks.1.up"]
    assert noise == other_noise
    assert all(torch.equal(one, two) for one, two in zip(params, others, strict=True))


def flown(rank, world_size, stages, steps=3):
    """A run with outliers in its last layers; the bad layer is on the last stage."""
    torch.manual_seed(0)
    features = 64
    own = nn.Sequential(
        nn.Linear(features, features),
        nn.ReLU(),
        nn.Linear(features, features),
        nn.ReLU(),
        nn.LayerNorm(features),
        nn.Linear(features, features),
        nn.ReLU(),
        nn.Linear(features, 16),
    )
    with torch.no_grad():
        own[4].bias[planted.OUTLIERS] = planted.HUGE
        own[5].weight[:, planted.OUTLIERS] = 0.0
    plugin = HybridParallelPlugin(tp_size=1, pp_size=stages, num_microbatches=2) if stages > 1 else SingleDevice()
    booster = Booster("cpu", Autopilot(NVFP4MixedPrecision(emulate=True, keep=()), every=2), plugin)
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
    model, optimizer, criterion, *_ = booster.boost(own, optimizer, nn.CrossEntropyLoss())
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(32, features, generator=generator), torch.randint(16, (32,), generator=generator)
        if stages > 1:
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        else:
            booster.backward(criterion(model(batch[0]), batch[1]), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    pilot = extras_of(model).pins
    return pilot.state_dict(), pilot.share, pilot.looks


def refused(rank, world_size):
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2)
    with pytest.raises(ValueError, match="because the stages of a pipeline send activations"):
        Booster("cpu", PrecisionSchedule({0: "fp32", 2: "bf16"}), plugin)
    return True


def test_a_schedule_beside_a_pipeline_is_refused_by_the_constructor(run_on_ranks):
    assert run_on_ranks(refused, 2) == [True, True]


def test_stages_of_a_pipeline_decide_alike_what_one_device_decides(run_on_ranks):
    (first, *more), (second, *others) = run_on_ranks(flown, 2, 2)
    assert first == second
    assert more == others
    alone, *its = flown(0, 1, 1)
    assert first["names"] == alone["names"] == ["5"]
    assert more == its
    assert [key for *key, _ in first["noise"]] == [key for *key, _ in alone["noise"]]
