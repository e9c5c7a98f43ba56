"""Scales and clip factors reach gradients as precisely as their dtype allows: numbers are never rounded to half, nor double
ones to float32."""

import pytest
import torch
from prescribed import DEVICE, HOST, boost, loss_with, parameters
from torch import nn
from torch.optim import SGD

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision, FP16NaiveMixedPrecision
from booster.tensors.grads import scale_values, unscale_values

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
RATIOS = {
    "below float16": (1.1e-8, 6e4),
    "above float16": (2.0**18 + 5, 1e-3),
    "between two bfloat16": (1.0037, 1.9921875),
}


@pytest.mark.parametrize("how", ["number", "tensor", "unscaled", "checked"])
@pytest.mark.parametrize("case", RATIOS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_multiplication_rounds_once(dtype, case, how):
    ratio, value = RATIOS[case]
    values = [torch.full((33,), value, dtype=dtype), torch.full((4, 5), -value, dtype=dtype)]
    expected = [(tensor.double() * ratio).to(dtype) for tensor in values]
    if how in ("number", "tensor"):
        scale_values(values, ratio if how == "number" else torch.tensor(ratio, dtype=torch.float64))
    else:
        assert not unscale_values(values, ratio, check=how == "checked")
    for ours, theirs in zip(values, expected, strict=True):
        rtol = 0 if dtype in DTYPES[:2] else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0)


def test_a_check_finds_inf_and_nan_in_every_dtype():
    for dtype in DTYPES:
        for bad in (float("inf"), float("nan")):
            assert unscale_values([torch.ones(3, dtype=dtype), torch.tensor([1.0, bad], dtype=dtype)], 0.5, check=True)


NAIVE = {
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**16),
    "fp16_naive without masters": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**16, master_weights="none"),
    "bf16_naive": lambda: "bf16_naive",
    "O3": lambda: FP16ApexMixedPrecision("O3", loss_scale=2.0**10, verbosity=0),
}


def boosted(precision):
    booster = Booster("cpu", NAIVE[precision]())
    net = nn.Linear(8, 8, bias=False)
    nn.init.zeros_(net.weight)
    model, optimizer, *_ = booster.boost(net, SGD(net.parameters(), lr=1.0))
    return booster, model, optimizer


def backward(booster, model, optimizer, value):
    """Every gradient becomes `value`."""
    booster.backward(loss_with([model.weight], [torch.full((8, 8), value, dtype=model.weight.dtype)]), optimizer)


@pytest.mark.parametrize("precision", NAIVE)
def test_gradients_of_half_parameters_survive_clip_and_unscale(precision):
    weights = []
    for unscale in (False, True):
        booster, model, optimizer = boosted(precision)
        backward(booster, model, optimizer, 0.9)
        optimizer.clip_grad_by_norm(0.003)  # with the scale, a ratio that float16 does not hold
        if unscale:
            optimizer.unscale_grads()
        assert optimizer.step()
        weights.append(model.weight.detach().double())
    expected = torch.full((8, 8), -0.003 / 8, dtype=torch.float64)
    eps = 2.0**-7 if precision == "bf16_naive" else 2.0**-9
    torch.testing.assert_close(weights[0], expected, rtol=eps, atol=0)
    torch.testing.assert_close(weights[1], expected, rtol=eps, atol=0)


@pytest.mark.parametrize("precision", NAIVE)
def test_gradients_that_were_unscaled_take_a_further_backward_pass(precision):
    booster, model, optimizer = boosted(precision)
    backward(booster, model, optimizer, 0.25)
    optimizer.unscale_grads()
    backward(booster, model, optimizer, 0.25)
    assert optimizer.step()
    torch.testing.assert_close(
        model.weight.double(), torch.full((8, 8), -0.5, dtype=torch.float64), rtol=2.0**-8, atol=0
    )


@pytest.mark.parametrize("scale", [None, 1000.0])
@pytest.mark.parametrize("way", ["step", "unscale", "hook", "clip value"])
@pytest.mark.parametrize(("decides", "fused"), [(HOST, True), (HOST, False), (DEVICE, True)])
def test_clips_of_double_gradients_are_double(decides, way, scale, fused):
    params = [nn.Parameter(param.detach().double()) for param in parameters((3, 4), 5, fill=0.0)]
    grads = [torch.full((3, 4), 0.7, dtype=torch.float64), torch.full((5,), 1.9, dtype=torch.float64)]
    optimizer = boost(SGD(params, lr=1.0, fused=fused), scale, decides)
    if way == "hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.backward(loss_with(params, grads))
    optimizer.clip_grad_by_norm(0.3)
    if way == "unscale":
        optimizer.unscale_grads()
    if way == "clip value":
        optimizer.clip_grad_by_value(1e9)
    assert optimizer.step()
    norm = (12 * 0.7**2 + 5 * 1.9**2) ** 0.5
    # A scale of 1000 is no power of two, so that seeds and gradients round, to double.
    for param, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(param.detach(), -grad * 0.3 / (norm + 1e-6), rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch's compiler about itself
def test_a_compiled_step_of_double_parameters_keeps_clip_and_rate_double():
    def train(how):
        torch.manual_seed(0)
        net = nn.Linear(3, 3).double()
        booster = Booster("cpu", fused_optimizer=how)
        model, optimizer, *_ = booster.boost(net, SGD(net.parameters(), lr=0.0123, momentum=0.9))
        for _ in range(3):
            optimizer.zero_grad()
            booster.backward(model(torch.ones(2, 3).double()).square().sum(), optimizer)
            optimizer.clip_grad_by_norm(0.1)
            optimizer.step()
        return net.weight

    torch.testing.assert_close(train("compile"), train(False), rtol=1e-12, atol=0)
