"""Transformer layers of torch are evaluated in the precision that they train in: its own path for that reads their weights."""

import pytest
import torch
from switching import PRECISIONS
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP8MixedPrecision


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.into, self.layers, self.out = nn.Linear(32, 32), nn.TransformerEncoder(layer, 1), nn.Linear(32, 4)

    def forward(self, x, mask=None):
        return self.out(self.layers(self.into(x), src_key_padding_mask=mask))


def boosted(precision, model):
    torch.manual_seed(0)
    return Booster("cpu", precision, half_products="native").boost(
        model := model(), torch.optim.SGD(model.parameters(), lr=0.1)
    )[0]


OTHERS = {
    "half": lambda: FP8MixedPrecision(emulate=True, weights="bf16"),
    "wide": lambda: FP8MixedPrecision(emulate=True, compute_dtype=torch.float32),
    "kept": lambda: BF16NaiveMixedPrecision(keep_fp32=nn.LayerNorm),
}
APART = {name: PRECISIONS[name] for name in ("tf32", "bf16", "fp16", "fp8", "int8")} | OTHERS


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("precision", APART.values(), ids=APART)
def test_an_encoder_is_evaluated_as_it_trains(precision, masked):
    model, x = boosted(precision(), Encoder), torch.randn(4, 8, 32)
    mask = torch.arange(8) >= torch.tensor([[8], [6], [5], [8]]) if masked else None
    trained = model(x, mask)
    with torch.no_grad():
        evaluated = model.eval()(x, mask)
    kept = slice(None) if mask is None else ~mask
    assert torch.equal(trained[kept], evaluated[kept])
    assert torch.backends.mha.get_fastpath_enabled()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.inner = nn.Linear(32, 32), nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        x = self.into(x).float()
        return self.inner(x, x, x, need_weights=False)[0]


def test_attention_alone_is_evaluated_as_it_trains():
    model, x = boosted("bf16", Attention), torch.randn(4, 8, 32)
    trained = model(x)
    with torch.no_grad():
        assert torch.equal(trained, model.eval()(x))


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_where_it_is_the_same_precision_the_path_stays(precision):
    model, seen = boosted(precision, Encoder), []
    model.into.register_forward_hook(lambda *_: seen.append(torch.backends.mha.get_fastpath_enabled()))
    model(torch.randn(4, 8, 32))
    assert seen == [True]


def test_a_switch_leaves_the_path_and_takes_it_again():
    model, seen = Encoder(), []
    booster = Booster("cpu", "fp32")
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.into.register_forward_hook(lambda *_: seen.append(torch.backends.mha.get_fastpath_enabled()))
    for precision in ("bf16", "fp32"):
        booster.switch(precision)
        model(torch.randn(4, 8, 32))
    assert seen == [False, True]
