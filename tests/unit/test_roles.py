"""The three products of a low-precision layer, each in the recipe or wide, and layers that stay wide by their place."""

import pytest
import torch
from switching import Net
from torch import nn

from booster import Booster
from booster.mixed_precision import (
    Blocks,
    Ends,
    FP8MixedPrecision,
    Int8MixedPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
)
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.recipes import HighPrecision

KINDS = [FP8MixedPrecision, MXFP8MixedPrecision, NVFP4MixedPrecision, Int8MixedPrecision]


def results(precision):
    """Output, gradient of the input and gradient of the weight of the layer in the middle."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64))
    booster, kept = Booster("cpu", precision), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    model[1].register_forward_hook(lambda _, __, y: kept.update(forward=y.detach()))
    model[1].register_full_backward_hook(lambda _, grads, __: kept.update(input_grad=grads[0]))
    booster.backward((model(torch.randn(32, 64)) * torch.linspace(-1, 1, 64)).sum(), optimizer)
    return kept | {"weight_grad": model[1].weight.grad}


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("role", ["forward", "input_grad", "weight_grad"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_product_alone_becomes_wide(kind, role, dtype):
    low, mixed = results(kind(emulate=True)), results(kind(emulate=True, **{role: dtype}))
    wide = results("bf16")
    same = {name for name in low if torch.equal(low[name], mixed[name])}
    # A forward that is another one moves nothing behind it here: the loss is linear in the output.
    assert role not in same
    assert same == low.keys() - {role}
    if dtype == "bf16":
        assert torch.equal(mixed[role], wide[role])
    assert (mixed[role] - wide[role]).norm() < (low[role] - wide[role]).norm()


def test_a_share_of_blocks_is_the_fraction_that_was_written():
    assert len(Blocks(first=0.28).names_in(nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(25)))) == 7


def test_the_precision_shows_its_roles_and_places():
    shown = repr(NVFP4MixedPrecision(emulate=True, forward="bf16", keep=(Ends(), Blocks(last=0.15))))
    assert "forward='bf16'" in shown
    assert "keep=(Ends(), Blocks(first=0, last=0.15))" in shown


def converted(keep, blocks=10):
    model = nn.Sequential(
        nn.Linear(64, 64), *(nn.Sequential(nn.Linear(64, 64)) for _ in range(blocks)), nn.Linear(64, 64)
    )
    model = Booster("cpu", MXFP8MixedPrecision(emulate=True, keep=keep)).boost(model)[0]
    return [int(name.split(".")[0]) for name, module in model.named_modules() if isinstance(module, LowPrecisionLinear)]


@pytest.mark.parametrize(
    ("keep", "low"),
    [
        (None, range(1, 11)),
        (Ends(), range(1, 11)),
        (Blocks(last=0.15), [0, *range(1, 9), 11]),
        ((Ends(), Blocks(last=0.15)), range(1, 9)),
        ((Ends(), Blocks(first=2, last=1)), range(3, 10)),
        ((Ends(), Blocks(first=0.01)), range(2, 11)),
    ],
)
def test_layers_stay_wide_by_the_place_of_their_block(keep, low):
    assert converted(keep) == list(low)


def test_the_preset_is_that_of_the_publication():
    precision = NVFP4MixedPrecision.preset("nvidia-2025", emulate=True, forward="bf16")
    recipe = precision.conversion.recipe
    assert precision.conversion.keep == (Ends(), Blocks(last=0.15))
    assert isinstance(recipe.output, HighPrecision)
    assert recipe.weight_gradient.left.hadamard
    assert recipe.weight_gradient.right.hadamard
    assert recipe.input_gradient.left.stochastic


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: MXFP8MixedPrecision(forward="bf16", input_grad="bf16", weight_grad="fp32"), "leave no product in"),
        (lambda: FP8MixedPrecision(gather_in_fp8=True, forward="bf16"), "gather_in_fp8=True rounds weights"),
        (lambda: Blocks(), "selects nothing"),
    ],
)
def test_roles_and_places_that_are_none_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_blocks_of_a_model_without_blocks_are_refused():
    with pytest.raises(ValueError, match="has no blocks that repeat"):
        Booster("cpu", MXFP8MixedPrecision(emulate=True, keep=Blocks(last=1))).boost(nn.Sequential(nn.Linear(64, 64)))


def test_a_switch_changes_the_roles_alone():
    model = Net(nn.LayerNorm)
    booster = Booster("cpu", NVFP4MixedPrecision(emulate=True))
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.switch(NVFP4MixedPrecision(emulate=True, forward="bf16"))
    assert isinstance(model.blocks[0].up.recipe.output, HighPrecision)
