"""Products of low precisions, of fake tensors of a GPU, meet what torch demands there of shapes, strides and dtypes."""

import itertools

import pytest
import torch

from booster.common.torch_internals.tensor_internals import FakeTensorMode
from booster.mixed_precision.low_precision import operands
from booster.mixed_precision.low_precision.linear import product
from booster.mixed_precision.low_precision.recipes import (
    FP8_RECIPES,
    INT8_RECIPE,
    MXFP8,
    fp8_blocks_recipe,
    nvfp4_recipe,
)

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a build of torch for CUDA, and no GPU; `make versions` has some"
)
RECIPES = {
    **{recipe.name: recipe for recipe in (*FP8_RECIPES.values(), MXFP8, INT8_RECIPE)},
    "fp8 blocks": fp8_blocks_recipe(power_of_two_scales=False),
    "nvfp4": nvfp4_recipe(stochastic_rounding=True, hadamard=True),
}


def products(recipe, tokens, inputs, outputs):
    """The three products of a layer, of fake tensors of a GPU."""
    with FakeTensorMode():
        x, g = (torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16) for n in (inputs, outputs))
        weight = torch.empty(outputs, inputs, device="cuda")
        made = (
            (x, weight, recipe.output),
            (g, weight.t(), recipe.input_gradient),
            (g.t(), x.t(), recipe.weight_gradient),
        )
        return [product(a, b, how, recipe, dtype=torch.bfloat16, kernels=True).shape for a, b, how in made]


@pytest.mark.parametrize("name", RECIPES)
def test_products_of_any_layer_and_number_of_tokens_meet_the_demands_of_a_gpu(name):
    recipe = RECIPES[name]
    for tokens, ins, outs in itertools.product((1, 37, 128, 640), (1, 5), (1, 2)):
        inputs, outputs = ins * recipe.multiple, outs * recipe.multiple
        assert products(recipe, tokens, inputs, outputs) == [(tokens, outputs), (tokens, inputs), (outputs, inputs)]


def test_a_layout_that_a_gpu_refuses_is_refused_here(monkeypatch):
    monkeypatch.setattr(operands, "column_major", lambda x: x.scale)
    with pytest.raises(RuntimeError, match="blockwise scaling"):
        products(RECIPES["fp8 blocks"], 64, 1280, 256)
