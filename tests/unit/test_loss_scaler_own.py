"""Loss scales of one's own, through the update that decides on the host and the one that decides on the device."""

import copy
import math

import pytest
import torch
from prescribed import DEVICE, HOST, boost, loss_with, parameters
from torch import nn
from torch.optim import SGD

from booster import Booster
from booster.loss_scaler import DeviceScale, DynamicScale, LossScaler, NoScale, StaticScale
from booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.update.decision import LossScaleError

both = pytest.mark.parametrize("decides", [HOST, DEVICE])
OVERFLOWS = [False, False, True, False, True, True, False, False, False]


DYNAMIC = {
    "init_scale": 8.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "hysteresis": 3,
    "min_scale": 0.5,
    "max_scale": 2.0**20,
}


class Thirds(LossScaler):
    """Falls to a third on overflow, adds 10 after a clean step; insists on bools."""

    enabled = True

    def __init__(self):
        self.value = 900.0
        self.seen = []

    @property
    def scale(self):
        return self.value

    def update(self, found_inf):
        assert isinstance(found_inf, bool)
        self.seen.append(found_inf)
        self.value = self.value / 3 if found_inf else self.value + 10

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Fixed(LossScaler):
    enabled = True
    scale = 1024.0


class Impatient(DynamicScale):
    """A DynamicScale with another rule: it grows after every clean step."""

    def update(self, found_inf):
        super().update(found_inf)
        if not found_inf:
            self._scale *= 1.5


class Halved(DynamicScale):
    """A DynamicScale that is used at half of what it says."""

    @property
    def scale(self):
        return super().scale / 2


class Warmed(Impatient):
    """Inherits the rule of its base."""


SCALES = {
    "interface": Thirds,
    "fixed": Fixed,
    "update overridden": lambda: Impatient(init_scale=512.0),
    "scale overridden": lambda: Halved(init_scale=512.0),
    "inherited": lambda: Warmed(init_scale=512.0),
    "static": lambda: StaticScale(512.0),
    "dynamic": lambda: DynamicScale(init_scale=512.0, growth_interval=2),
}


def run(make, decides, overflows=OVERFLOWS):
    """(scale before each step, what was skipped, weight after each step, scaled gradients of each backward)."""
    params = parameters(3, fill=0.0)
    optimizer = boost(SGD(params, lr=0.1, fused=True), make(), decides)
    rows = []
    for overflow in overflows:
        scale = optimizer.loss_scale
        optimizer.zero_grad()
        optimizer.backward(loss_with(params, [math.inf if overflow else 0.5]))
        scaled = params[0].grad[0].item()
        result = optimizer.step()
        rows.append((scale, result.applied, result.loss_scale, round(params[0][0].item(), 5), scaled))
    return rows, optimizer


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_acts_alike_on_host_and_device(name):
    host, device = (run(SCALES[name], decides)[0] for decides in (HOST, DEVICE))
    assert device == host
    for (scale, applied, reported, _, scaled), overflow in zip(host, OVERFLOWS, strict=True):
        assert reported == pytest.approx(scale)
        assert applied is not overflow
        assert overflow or scaled == pytest.approx(0.5 * scale)


@both
def test_a_rule_is_called_once_for_each_step_with_a_bool(decides):
    scaler = Thirds()
    _, optimizer = run(lambda: scaler, decides)
    assert optimizer.loss_scale == pytest.approx(scaler.scale)
    assert scaler.seen == OVERFLOWS


@both
def test_a_rule_that_is_never_read_is_called_for_each_step_too(decides):
    scaler = Thirds()
    params = parameters(3)
    optimizer = boost(SGD(params, lr=0.1, fused=True), scaler, decides, max_consecutive_skips=None)
    optimizer._update.gradients.scaler.update(torch.tensor(0.0) if decides == DEVICE else False)
    optimizer._update.gradients.scaler.update(torch.tensor(1.0) if decides == DEVICE else True)
    assert optimizer.state_dict()["booster"]["loss_scaler"] == {"value": pytest.approx(910 / 3)}
    assert scaler.seen == [False, True]


@both
@pytest.mark.parametrize("name", ["interface", "update overridden", "dynamic"])
def test_a_scale_resumes_and_is_copied_with_its_optimizer(name, decides):
    expected, _ = run(SCALES[name], decides)
    _, optimizer = run(SCALES[name], decides, OVERFLOWS[:5])
    state = optimizer.state_dict()
    params = parameters(3)
    resumed = boost(SGD(params, lr=0.1, fused=True), SCALES[name](), decides)
    resumed.load_state_dict(state)
    assert resumed.loss_scale == pytest.approx(expected[5][0])
    assert copy.deepcopy(optimizer).loss_scale == pytest.approx(expected[5][0])


@both
def test_a_report_describes_a_scale_of_ones_own(decides):
    class Named(Thirds):
        def describe(self):
            return f"{self.scale:g} of mine"

    params = parameters(3)
    optimizer = boost(SGD(params, lr=0.1, fused=True), Named(), decides, max_consecutive_skips=1)
    optimizer.backward(loss_with(params, [math.inf]))
    with pytest.raises(LossScaleError, match="loss scale 300 of mine"):
        optimizer.step().applied  # noqa: B018
        optimizer.sync()


def test_a_scale_that_is_not_enabled_and_not_one_is_refused():
    class Forgotten(LossScaler):
        scale = 1024.0

    with pytest.raises(ValueError, match=r"Forgotten has a scale of 1024 and enabled = False.*set enabled = True"):
        boost(SGD(parameters(3), lr=0.1), Forgotten())


def test_only_the_rule_itself_moves_into_tensors():
    device = torch.device("cpu")
    assert isinstance(DynamicScale().on_device(device), DeviceScale)
    assert isinstance(StaticScale().on_device(device), DeviceScale)
    assert not isinstance(Warmed().on_device(device), DeviceScale)


def test_no_scale_is_a_class_of_its_own():
    assert isinstance(NoScale(), LossScaler)
    assert not isinstance(DynamicScale(), NoScale)
    assert NoScale().on_device(torch.device("cpu")).scale == 1.0
    with pytest.raises(ValueError, match=r"^scale=0.0 is not legal"):
        StaticScale(0.0)


PRECISIONS = [FP16TorchMixedPrecision, FP16NaiveMixedPrecision]
with_a_scale = pytest.mark.parametrize("precision", PRECISIONS, ids=["fp16", "fp16_naive"])


@with_a_scale
@pytest.mark.parametrize("name", SCALES)
def test_a_precision_takes_a_scale_as_an_object_and_each_optimizer_gets_its_own(precision, name):
    scale = SCALES[name]()
    before = scale.scale
    booster = Booster("cpu", precision(scale=scale))
    optimizers = []
    for _ in range(2):
        net = nn.Linear(3, 2)
        model, optimizer, *_ = booster.boost(net, SGD(net.parameters(), lr=0.1))
        assert optimizer.loss_scale == before
        optimizers.append((model, optimizer))
    model, optimizer = optimizers[0]
    booster.backward(model(torch.full((1, 3), math.inf)).sum(), optimizer)
    assert not optimizer.step()
    twin = SCALES[name]()
    twin.update(True)
    assert optimizer.loss_scale == pytest.approx(twin.scale)
    assert optimizers[1][1].loss_scale == scale.scale == before


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        *((FP16TorchMixedPrecision, {name: value}) for name, value in DYNAMIC.items()),
        *((FP16NaiveMixedPrecision, {name: value}) for name, value in DYNAMIC.items() if name != "init_scale"),
        (FP16NaiveMixedPrecision, {"initial_scale": 8.0}),
        (FP16NaiveMixedPrecision, {"dynamic_grad_scale": False}),
    ],
)
def test_a_scale_and_options_of_another_are_refused_together(precision, options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"scale=StaticScale\(...\) was given together with {name}="):
        precision(scale=StaticScale(4.0), **options)
