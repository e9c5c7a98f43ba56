"""torch's own transformer encoder in half, by each of its roads, against float64: within what roundings come to there."""

import copy
import functools

import pytest
import torch
from models_in_half import EPS, MARGIN, relative_error, widening
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision.half_products import half_sums

ROWS, LENGTH, SEEN = 16, 64, 48  # 1,024 terms in each gradient of a bias
PADDING = torch.arange(LENGTH).expand(ROWS, LENGTH) >= SEEN
HOW = ["train", "train, mask", "eval", "eval, mask", "by sample"]
QUICK = {("train", "bf16_naive"), ("train, mask", "fp16"), ("eval, mask", "fp16_naive"), ("by sample", "bf16_naive")}


def made():
    torch.manual_seed(0)
    # Of a smooth activation: see `models_in_half.make` on the corner of ReLU.
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, activation="gelu", batch_first=True)
    x, by = torch.randn(2, ROWS, LENGTH, 32).bfloat16().float()  # which no precision rounds
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), x, by


def weighed(model, x, by, padding=None):
    """What the model returns for what is no padding, times numbers of either sign."""
    out, by = model(x, src_key_padding_mask=padding), by.to(x.dtype)
    return out * by if padding is None else (out * by)[:, :SEEN]


@functools.cache
def in_float64(masked):
    """Value and gradients, and how many eps they are off where each tensor on the way is by one."""
    net, x, by = made()
    run = functools.partial(weighed, x=x.double(), by=by, padding=PADDING if masked else None)
    net = net.double()
    most, value = widening(net, run), run(net)
    value.sum().backward()
    return most, {"value": value.detach()} | {key: param.grad for key, param in net.named_parameters()}


def by_sample(model, x, by):
    """Gradients by `vmap(grad(functional_call))`, of all samples together."""

    def loss(params, one, weight):
        return (torch.func.functional_call(model, params, (one[None],)).float() * weight).sum()

    params = {key: param.detach() for key, param in model.named_parameters()}
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, by)
    return {key: each.double().sum(0) for key, each in found.items()}


def excesses(precision, how):
    """Of value and gradients on a road, those beyond `MARGIN` of what roundings come to and float32 sums of all rows."""
    net, x, by = made()
    model, *_ = Booster("cpu", precision).boost(copy.deepcopy(net))
    if how == "by sample":
        found = by_sample(model, x, by)
    else:
        with torch.set_grad_enabled(how.startswith("train")):
            value = weighed(model.train(how.startswith("train")), x, by, PADDING if "mask" in how else None)
        found = {"value": value.detach()}
        if value.requires_grad:
            value.sum().backward()
            found |= {key: param.grad for key, param in model.named_parameters()}
    most, right = in_float64("mask" in how)
    errors = {key: relative_error(each, right[key]) for key, each in found.items()}
    bounds = {key: MARGIN * most[key] * EPS[precision] + ROWS * LENGTH * 2.0**-24 for key in found}
    return {key: error / bounds[key] for key, error in errors.items() if not error <= bounds[key]}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize(
    ("how", "precision"),
    [
        pytest.param(how, precision, marks=[] if (how, precision) in QUICK else [pytest.mark.slow])
        for how in HOW
        for precision in EPS
    ],
)
def test_an_encoder_computes_what_float64_does_as_far_as_the_format_goes(how, precision):
    assert not excesses(precision, how)


@pytest.mark.parametrize("precision", ["bf16_naive", "fp16_naive"])
def test_a_sum_of_halves_in_one_norm_is_beyond_that(monkeypatch, precision):
    monkeypatch.delitem(half_sums.FLOAT32_SUMS, F.layer_norm)
    monkeypatch.delitem(half_sums.FLOAT32_SUMS, torch.layer_norm)
    assert "layers.1.norm2.bias" in excesses(precision, "train")
