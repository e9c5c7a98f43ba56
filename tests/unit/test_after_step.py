"""`MixedPrecision.after_step`: a strategy hears of every step, applied or skipped, from every kind of update."""

import copy

import pytest
import torch
from prescribed import DEVICE, HOST, loss_with, parameters, sgd
from torch import nn

from booster import Booster
from booster.mixed_precision import (
    FP32,
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
    apex_amp,
)

INF = float("inf")
STRATEGIES = {
    "fp32": (FP32, {}),
    "own": (MixedPrecision, {}),
    "fp16": (FP16TorchMixedPrecision, {"init_scale": 2.0**8}),
    "bf16": (BF16MixedPrecision, {}),
    "fp16_naive": (FP16NaiveMixedPrecision, {"initial_scale": 2.0**8}),
    "bf16_naive": (BF16NaiveMixedPrecision, {}),
    **{
        f"fp16_apex {level}": (
            FP16ApexMixedPrecision,
            {"opt_level": level, "loss_scale": "dynamic", "max_loss_scale": 2.0**8, "verbosity": 0},
        )
        for level in ("O0", "O1", "O2", "O3")
    },
}


def listening(base, **options):
    """A strategy like `base` that notes what it hears in `heard`, and the weights at that time in `weights`."""

    class Listening(base):
        heard, weights = [], []

        def convert(self, model):
            self.model = model
            return super().convert(model)

        def after_step(self, applied):
            assert not torch.is_grad_enabled()
            self.heard.append(applied)
            self.weights.append(self.model.weight.detach().clone())

    return Listening(**options)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_hears_of_every_step_once_with_the_weights_that_it_made(name, fused):
    base, options = STRATEGIES[name]
    precision = listening(base, **options)
    booster = Booster("cpu", precision, skip_nonfinite=True, fused_optimizer=fused)
    net = nn.Linear(4, 4)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    applied, weights = [], []
    for factor in (1.0, INF, 1.0, 1.0):
        booster.backward(model(torch.ones(2, 4)).float().square().mean() * factor, optimizer)
        applied.append(optimizer.step().applied)
        weights.append(net.weight.detach().clone())
        optimizer.zero_grad()
    assert applied == [True, False, True, True]
    assert precision.heard == applied
    assert all(torch.equal(a, b) for a, b in zip(precision.weights, weights, strict=True))


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_naive"])
def test_a_step_with_a_closure_and_one_without_gradients_are_heard_too(name):
    precision = listening(STRATEGIES[name][0])
    booster = Booster("cpu", precision)
    net = nn.Linear(4, 4)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        booster.backward(loss, optimizer)
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    optimizer.step()
    assert precision.heard == [True, True]


@pytest.mark.parametrize("decides", [HOST, DEVICE])
def test_a_decision_on_a_device_is_told_as_a_tensor_there_and_waits_for_nothing(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    heard = []
    optimizer._after_step = heard.append
    for grad in (0.5, INF, 0.5):
        optimizer.zero_grad()
        optimizer.backward(loss_with(params, [grad]))
        result = optimizer.step()
        if decides == DEVICE:
            assert isinstance(heard[-1], torch.Tensor)
            assert (heard[-1].dtype, heard[-1].shape) == (torch.bool, ())
            assert not isinstance(result._applied, bool)  # it was not read
    assert [bool(applied) for applied in heard] == [True, False, True]


def test_the_compiled_update_tells_too(monkeypatch):
    monkeypatch.setattr("booster.update.choice.torch.compile", lambda function, **options: function)
    precision = listening(FP16TorchMixedPrecision, init_scale=2.0**8)
    booster = Booster("cpu", precision, fused_optimizer="compile")
    net = nn.Linear(4, 4)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for factor in (1.0, INF, 1.0):
        booster.backward(model(torch.ones(2, 4)).square().mean() * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert precision.heard == [True, False, True]


def test_every_optimizer_of_a_strategy_tells_and_so_does_a_copy():
    precision = listening(BF16MixedPrecision)
    booster = Booster("cpu", precision)
    net = nn.Linear(4, 4)
    model, (first, second), *_ = booster.boost(
        net, [torch.optim.SGD([net.weight], lr=0.1), torch.optim.AdamW([net.bias], lr=0.1)]
    )
    booster.backward(model(torch.ones(2, 4)).square().mean(), [first, second])
    first.step()
    second.step()
    assert precision.heard == [True, True]
    copied_model, copied = copy.deepcopy((model, first))
    booster.backward(copied_model(torch.ones(2, 4)).square().mean(), copied)
    copied.step()
    assert len(precision.heard) == 3


def test_it_is_heard_before_an_error_for_too_many_skips():
    precision = listening(BF16MixedPrecision)
    booster = Booster("cpu", precision, skip_nonfinite=True, max_consecutive_skips=1)
    net = nn.Linear(4, 4)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    booster.backward(model(torch.ones(2, 4)).mean() * INF, optimizer)
    with pytest.raises(RuntimeError, match="optimizer steps in a row were skipped"):
        optimizer.step()
    assert precision.heard == [False]


def test_a_strategy_that_does_not_listen_costs_a_step_nothing():
    net = nn.Linear(4, 4)
    optimizer = Booster("cpu", "fp16").boost(net, torch.optim.SGD(net.parameters(), lr=0.1))[1]
    assert optimizer._after_step is None


def test_apex_s_own_interface_passes_it_on(monkeypatch):
    heard = []
    monkeypatch.setattr(FP16ApexMixedPrecision, "after_step", lambda self, applied: heard.append(applied))
    net = nn.Linear(4, 4)
    model, optimizer = amp_initialize(net)
    with apex_amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    apex_amp.shutdown()
    assert heard == [True]


def amp_initialize(net):
    return apex_amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), verbosity=0, max_loss_scale=16.0)
