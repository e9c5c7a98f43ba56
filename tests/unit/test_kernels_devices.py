"""Parameters on several devices are stepped by kernels, a table on each, by one decision. There is one device here: what tells
devices apart is patched, and everything is laid out, measured and decided as on several."""

import math

import pytest
import torch
from interpreted import gradients, held, interpreted, pair, step_on
from torch import nn
from torch.optim import SGD

from booster.kernels.eligibility import _refusal
from booster.loss_scaler import NoScale
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.update.context import UpdateContext, UpdateOptions

pytestmark = interpreted
FORMS = {
    "fp32": "fp32",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2.0**4, growth_interval=2, hysteresis=1),
    "masters": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**4, hysteresis=1),
    "split24, 8bit": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit", keep_fp32=()),
    "stochastic": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
}


def make_model():
    return nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 65), nn.Linear(65, 3))


def adamw(params):
    held = list(params)
    return torch.optim.AdamW([{"params": held[:3]}, {"params": held[3:], "weight_decay": 0.1, "lr": 3e-3}], lr=1e-2)


def spread(step, monkeypatch, number=None):
    """Have parameters of a boosted model lie on `number` devices, in turns; None: each group on its own, as no bucket of
    masters is of several groups or devices."""
    from booster.kernels import steps

    groups = step[2].param_groups
    if number is None:
        places = {id(param): place for place, group in enumerate(groups) for param in group["params"]}
    else:
        places = {id(param): place % number for place, param in enumerate(step[1].parameters())}
    monkeypatch.setattr(steps, "_DEVICE", lambda param: places[id(param)])


def tables(step):
    return step[2]._update.decision.steps._sets[0].tables.each


@pytest.mark.parametrize("bad", ["none", "on the first", "on another"])
@pytest.mark.parametrize("form", FORMS)
def test_steps_on_several_devices_are_those_on_one(form, bad, monkeypatch):
    found = []
    number = 3 if form in ("fp32", "fp16") else 2
    for several in (False, True):
        step = pair(make_model, adamw, FORMS[form], clip_grad_norm=0.05, skip_nonfinite=True)[1]
        params = list(step[1].parameters())
        with monkeypatch.context() as patched:
            if several:
                spread(step, patched, number if number == 3 else None)
            results = []
            for index in range(5):
                grads = gradients(params, index)
                if index == 2 and bad != "none":
                    grads[0 if bad == "on the first" else 4].view(-1)[1] = math.inf
                result = step_on(*step, grads)
                results.append((result.applied, result.loss_scale, result.culprit))
            assert [table.num_tiles > 0 for table in tables(step)] == [True] * (number if several else 1)
            assert [each[0] for each in results] == [bad == "none" or index != 2 for index in range(5)]
        found.append((results, result.grad_norm, held(step[2])))
    (results, norm, (weights, states)), (same, other, (others, theirs)) = found
    assert results == same
    assert norm == pytest.approx(other, rel=1e-12)
    for own, another in zip(weights, others, strict=True):  # the norm is added up in another order, in float64
        torch.testing.assert_close(own, another, rtol=2.0**-23, atol=1e-10)
    for own, another in zip(states, theirs, strict=True):
        assert own.keys() == another.keys()
        for name in own:
            torch.testing.assert_close(own[name], another[name], rtol=2.0**-22, atol=1e-12)


def test_the_first_device_decides_where_it_has_no_gradient(monkeypatch):
    step = pair(make_model, lambda params: SGD(params, lr=0.1), "fp16", clip_grad_norm=0.05)[1]
    params = list(step[1].parameters())
    spread(step, monkeypatch, 2)
    grads = gradients(params, 0)
    grads[::2] = [None] * len(grads[::2])
    before = [param.detach().clone() for param in params]
    assert step_on(*step, grads).grad_norm == pytest.approx(float(torch.cat([g.view(-1) for g in grads[1::2]]).norm()))
    assert [table.num_tiles > 0 for table in tables(step)] == [False, True]
    assert [torch.equal(param, old) for param, old in zip(params, before, strict=True)] == [True, False] * 4


def test_each_device_measures_decides_and_updates_and_nothing_is_read_on_the_host(monkeypatch):
    from test_kernels_steps import launched

    step = pair(make_model, adamw, "fp32", clip_grad_norm=0.05)[1]
    params = list(step[1].parameters())
    spread(step, monkeypatch, 2)
    step_on(*step, gradients(params, 0))
    step[2].sync()
    with monkeypatch.context() as patched:
        names, reads = launched(step, gradients(params, 1), patched)
    assert names == ["measure", "add_up", "measure", "add_up", "decide", "update", "decide", "update"]
    assert reads == {}


def test_devices_of_several_types_are_refused_by_name():
    step = pair(make_model, adamw, "fp32")[1]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))], 0.1)
    context = UpdateContext(optimizer=optimizer, scaler=NoScale(), options=UpdateOptions())
    assert _refusal(step[2]._update, None, context, torch.device("cpu")) == (
        "its parameters lie on devices of several types, cpu, meta"
    )
