"""Which weights autocast's products alone read: rounding those before they are gathered changes no bit."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, weight_norm

from booster import Booster
from booster.mixed_precision import BF16MixedPrecision, DtypePolicy, FP16TorchMixedPrecision
from booster.mixed_precision.half_products.product_choice import product_modules
from booster.mixed_precision.policy import gathered_modules


def named(**modules):
    return nn.ModuleDict(modules)


def test_linear_and_convolution_layers_are_products_and_norms_and_embeddings_are_not():
    model = named(
        linear=nn.Linear(2, 2),
        conv=nn.Conv2d(2, 2, 1),
        up=nn.ConvTranspose1d(2, 2, 1),
        norm=nn.LayerNorm(2),
        table=nn.Embedding(2, 2),
        batch=nn.BatchNorm1d(2),
        cell=nn.GRU(2, 2),
        relu=nn.ReLU(),
    )
    assert product_modules(model) == {"linear", "conv", "up"}
    assert product_modules(nn.Linear(2, 2)) == {""}


def test_attention_is_one_product_with_its_projection_or_none():
    assert product_modules(named(mha=nn.MultiheadAttention(4, 2))) == {"mha", "mha.out_proj"}
    assert product_modules(named(mha=nn.MultiheadAttention(4, 2, kdim=3, vdim=3))) == {"mha", "mha.out_proj"}
    assert product_modules(named(mha=nn.MultiheadAttention(4, 2, add_bias_kv=True))) == set()  # joined to the keys


class Standardised(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean(), bias)


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) + self.weight.sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Standardised(2, 2, 1),
        lambda: Doubled(2, 2),
        lambda: nn.Linear(2, 2).double(),
        lambda: nn.Linear(2, 2).half().requires_grad_(False),
    ],
)
def test_a_layer_that_reads_its_weight_otherwise_or_in_another_dtype_is_no_product(make):
    assert product_modules(named(layer=make())) == set()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_weight_that_is_computed_of_others_is_no_product():
    assert product_modules(named(layer=weight_norm(nn.Linear(2, 2)))) == set()
    layer = nn.Linear(2, 2, bias=False)
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    assert product_modules(named(layer=layer)) == set()


def test_a_shared_weight_is_a_product_where_all_its_modules_are():
    model = named(table=nn.Embedding(3, 2), head=nn.Linear(2, 3), one=nn.Linear(2, 2), two=nn.Linear(2, 2))
    model.one.weight = model.two.weight
    assert product_modules(model) == {"head", "one", "two"}
    model.head.weight = model.table.weight
    assert product_modules(model) == {"one", "two"}
    model.two.forward = lambda x: x @ model.two.weight.T
    assert product_modules(model) == set()


def test_what_keep_fp32_takes_out_of_autocast_is_no_product():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    precision = FP16TorchMixedPrecision(keep_fp32="1", gather_in_half=True)
    assert gathered_modules(precision.convert(model), precision.policy) == {"0"}
    own = DtypePolicy(compute=torch.float16, gather=torch.float16, keep_fp32=frozenset({"1.0"}))
    assert gathered_modules(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), own) == {"0"}


def test_the_option_is_in_the_policy_and_off_by_default():
    assert FP16TorchMixedPrecision().policy.gather is None
    assert FP16TorchMixedPrecision(gather_in_half=True).policy.gather == torch.float16
    assert BF16MixedPrecision(gather_in_half=True).policy.gather == torch.bfloat16
    assert gathered_modules(nn.Linear(2, 2), BF16MixedPrecision().policy) == set()
    # Gathered in what is computed in anyway: no module is set apart.
    assert gathered_modules(nn.Linear(2, 2), DtypePolicy(param=torch.float16, gather=torch.float16)) == set()


def test_a_dtype_that_would_round_weights_is_refused():
    for policy in ({}, {"compute": torch.bfloat16}, {"param": torch.float32, "compute": torch.float16}):
        with pytest.raises(ValueError, match=r"gather=torch.float16 is not what is computed in.*choose param="):
            DtypePolicy(gather=torch.float16, **policy)
    with pytest.raises(ValueError, match="gather=3 is not what is computed in"):
        DtypePolicy(gather=3)


def test_where_nothing_is_gathered_nothing_changes():
    losses = []
    for precision in (BF16MixedPrecision(), BF16MixedPrecision(gather_in_half=True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        booster = Booster("cpu", precision)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(torch.ones(2, 4)).square().sum()
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append([loss, *model.parameters()])
        assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert all(torch.equal(one, other) for one, other in zip(*losses, strict=True))
