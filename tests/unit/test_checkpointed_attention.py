"""Activation checkpointing of attention: what backward recomputes is what forward computed, in every precision."""

from contextvars import Context

import pytest
import torch
from counts import count
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.mixed_precision import (
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    half_products,
)

pytestmark = pytest.mark.usefixtures("nothing_compiled")

SCALE = 2.0**8
APEX = {
    "O0": ("O0", {}),
    "O1": ("O1", {}),
    "O2": ("O2", {}),
    "O3": ("O3", {}),
    "O2 in float32": ("O2", {"cast_model_type": torch.float32}),
    "O2 in bfloat16": ("O2", {"cast_model_type": torch.bfloat16, "master_weights": False, "loss_scale": 1.0}),
}
PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=SCALE),
    "bf16": lambda: "bf16",
    "bf16, half attention": lambda: BF16MixedPrecision(sdpa_fp32=False),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=SCALE),
    "bf16_naive": lambda: "bf16_naive",
    "bf16_naive, half attention": lambda: BF16NaiveMixedPrecision(sdpa_fp32=False),
    **{
        f"fp16_apex {name}": lambda level=level, options=options: FP16ApexMixedPrecision(
            level, max_loss_scale=SCALE, verbosity=0, **options
        )
        for name, (level, options) in APEX.items()
    },
}


class Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Sdpa(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, block, how):
        super().__init__()
        self.first, self.block, self.how = nn.Linear(8, 8), block(), how

    def forward(self, x):
        x = self.first(x)
        if self.how is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.how == "reentrant")


@pytest.mark.crossed
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("block", [Multihead, Sdpa])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_checkpointed_attention_trains_as_it_does_without(precision, block, how):
    def train(how):
        torch.manual_seed(0)
        model = Model(block, how)
        booster = Booster("cpu", PRECISIONS[precision]())
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            booster.backward(model(torch.randn(2, 5, 8)).float().square().mean(), optimizer)
            assert optimizer.step().applied
            optimizer.zero_grad()
        return [param.detach() for param in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(how), train(None), strict=True))


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", None])
@pytest.mark.parametrize("block", [Multihead, Sdpa])
@pytest.mark.parametrize("precision", ["bf16", "bf16_naive"])
def test_a_backward_pass_looks_for_attention_only_where_it_is_computed_again(precision, block, how):
    def looked():
        model = Model(block, how)
        booster = Booster("cpu", precision)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        booster.backward(model(torch.randn(2, 5, 8)).float().square().mean(), optimizer)  # the first looks at more
        loss = model(torch.randn(2, 5, 8)).float().square().mean()
        return count(lambda: booster.backward(loss, optimizer), inside=half_products.__path__[0])

    # That is to ask whether to look. In its own context, since what other tests computed again counts too.
    assert (Context().run(looked) > 5) == (how is not None)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("precision", ["bf16", "bf16_naive", "fp16_naive"])
def test_attention_is_computed_again_as_it_was_where_another_booster_goes_backward(precision, how):
    def gradients(how):
        torch.manual_seed(0)
        body, head = Model(Sdpa, how), nn.Linear(8, 8)
        one, other = Booster("cpu", precision), Booster("cpu", precision)
        body, *_ = one.boost(body, torch.optim.SGD(body.parameters(), lr=0.1))
        head, optimizer, *_ = other.boost(head, torch.optim.SGD(head.parameters(), lr=0.1))
        other.backward(head(body(torch.randn(2, 64, 8))).float().square().mean(), optimizer)
        return [param.grad for param in body.parameters()]

    found, expected = Context().run(gradients, how), gradients(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
