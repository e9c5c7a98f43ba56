"""The files of `examples/extending`: short, and each works through what the library has for it."""

from pathlib import Path

import pytest
import torch
from extending import FOLDER, load
from prescribed import DEVICE, HOST, boost, loss_with, parameters
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16TorchMixedPrecision

INF = float("inf")


@pytest.mark.parametrize("path", [FOLDER / "precision.py", FOLDER / "loss_scale.py"], ids=lambda path: path.stem)
def test_an_extension_is_one_short_file(path: Path):
    assert len(path.read_text().splitlines()) < 60
    assert "_update" not in path.read_text()  # nothing private


def scales_of(decides, steps):
    params = parameters(4)
    optimizer = boost(torch.optim.SGD(params, lr=0.1, fused=True), load("loss_scale").Sawtooth(2.0**8), decides)
    scales, applied = [], []
    for grad in steps:
        optimizer.zero_grad()
        scales.append(optimizer.loss_scale)
        optimizer.backward(loss_with(params, [grad]))
        assert params[0].grad[0] == grad * torch.tensor(scales[-1])
        applied.append(optimizer.step().applied)
    return scales, applied, params[0].detach(), optimizer.state_dict()["booster"]["loss_scaler"]


def test_the_loss_scale_acts_alike_on_the_host_and_on_a_device():
    steps = [1.0, 1.0, INF, 1.0, INF, INF, 1.0]
    host, device = scales_of(HOST, steps), scales_of(DEVICE, steps)
    assert host[0] == device[0]
    assert host[1] == device[1] == [grad != INF for grad in steps]
    assert torch.equal(host[2], device[2])
    assert host[3] == device[3]
    assert host[0][:4] == pytest.approx([256.0, 261.12, 266.3424, 66.5856])


def test_the_loss_scale_resumes():
    def start():
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        booster = Booster("cpu", FP16TorchMixedPrecision(scale=load("loss_scale").Sawtooth()))
        model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        return booster, model, optimizer

    def train(booster, model, optimizer, steps):
        for _ in range(steps):
            booster.backward((model(torch.ones(2, 4)) - 1).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    whole, first, second = start(), start(), start()
    train(*whole, 6)
    train(*first, 3)
    second[1].load_state_dict(first[1].state_dict())
    second[2].load_state_dict(first[2].state_dict())
    train(*second, 3)
    assert second[2].loss_scale == whole[2].loss_scale == pytest.approx(2.0**12 * 1.02**6)
    assert all(torch.equal(a, b) for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True))


def test_fp8_scales_follow_applied_steps_only():
    precision = load("precision")
    booster = Booster("cpu", precision.FP8(), skip_nonfinite=True)
    net = nn.Sequential(nn.Linear(4, 4))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.01))
    seen = []
    for size, factor in ((1.0, 1.0), (2.0, INF), (3.0, 1.0)):
        booster.backward(model(torch.full((2, 4), size)).square().mean() * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(net[0].largest))
    assert seen == [1.0, 1.0, 3.0]
