"""What a record says of the rounding in low-precision layers."""

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import FP8MixedPrecision, Int8MixedPrecision, MXFP8MixedPrecision, NVFP4MixedPrecision
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.numerics.record.recorded_run import read_run
from booster.numerics.reports.summary import summarise


def rounded(tmp_path, precision, x, steps=1, **record):
    """What a record has of the layer in the middle, which reads `x` itself, by (product, operand), of the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Linear(64, 64, bias=False), nn.Linear(64, 64))
    booster = Booster("cpu", precision)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with booster.record(tmp_path, **record):
        for _ in range(steps):
            booster.backward(model(x).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    run = read_run(tmp_path)
    return {(each.product, each.operand): each for each in run.rounded if each.name == "1"}, run


def by_hand(x, largest, smallest, block):
    """Shares of what becomes zero, and of what becomes 448, next to which is 416; the power of two cuts nothing off."""
    blocks = x.reshape(-1, block).double()
    scale = 2.0 ** torch.ceil(torch.log2(blocks.abs().amax(1, keepdim=True) / largest))
    size = (blocks / scale).abs()
    return float(((size <= smallest / 2) & (size > 0)).double().mean()), float((size >= largest - 16).double().mean())


def test_shares_of_an_mx_format_are_those_by_hand(tmp_path):
    x = torch.randn(32, 64) * 10.0 ** torch.linspace(-14, 0, 64)
    found, _ = rounded(tmp_path, MXFP8MixedPrecision(emulate=True, keep=()), x)
    underflow, top = by_hand(x.bfloat16(), 448.0, 2.0**-9, 32)
    entry = found["forward", "input"]
    assert entry.underflow == pytest.approx(underflow, abs=0.002)
    assert entry.top == pytest.approx(top, abs=0.001)
    assert entry.saturated == 0
    assert entry.underflow > 0.05


@pytest.mark.parametrize("kind", [FP8MixedPrecision, MXFP8MixedPrecision, NVFP4MixedPrecision, Int8MixedPrecision])
def test_each_operand_of_each_product_has_shares(kind, tmp_path):
    found, run = rounded(tmp_path, kind(emulate=True, keep=()), torch.randn(32, 64), steps=3, every=2)
    # The input of the model has no gradient.
    assert found.keys() == {
        ("forward", "input"),
        ("forward", "weight"),
        ("weight_grad", "gradient"),
        ("weight_grad", "input"),
    }
    assert {each.step for each in run.rounded} == {1, 2}
    assert ("input_grad", "weight") in {(each.product, each.operand) for each in run.rounded if each.name == "2"}
    assert all(0 <= share <= 1 for each in run.rounded for share in (each.underflow, each.saturated, each.top))
    assert summarise(run).as_dict()["rounded"][0]["top"] > 0


def test_a_product_that_is_wide_has_none(tmp_path):
    precision = MXFP8MixedPrecision(emulate=True, keep=(), weight_grad="bf16")
    found, _ = rounded(tmp_path, precision, torch.randn(32, 64))
    assert found.keys() == {("forward", "input"), ("forward", "weight")}


def test_an_outlier_pushes_its_neighbours_below_the_smallest_number(tmp_path):
    x = torch.randn(32, 64)
    x[:, 5] *= 1e4
    precision = NVFP4MixedPrecision(emulate=True, keep=())
    spread, _ = rounded(tmp_path / "a", precision, torch.randn(32, 64))
    outlier, _ = rounded(tmp_path / "b", NVFP4MixedPrecision(emulate=True, keep=()), x)
    assert outlier["forward", "input"].underflow > 0.2 > spread["forward", "input"].underflow


def test_a_closed_record_watches_no_layer(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    booster = Booster("cpu", MXFP8MixedPrecision(emulate=True, keep=()))
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    layers = [each for each in model.modules() if isinstance(each, LowPrecisionLinear)]
    with booster.record(tmp_path):
        assert all(len(layer.watchers) == 1 for layer in layers)
    assert all(layer.watchers == () for layer in layers)
