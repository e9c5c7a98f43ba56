"""On a CUDA device that has the format: its kernels agree with their emulation, up to the rounding of the output."""

import copy

import pytest
import torch
from torch import nn

from booster.mixed_precision.low_precision.kernels import lacks
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear, product
from booster.mixed_precision.low_precision.recipes import (
    FP8_RECIPES,
    INT8_RECIPE,
    MXFP8,
    fp8_blocks_recipe,
    nvfp4_recipe,
)
from booster.mixed_precision.low_precision.self_check import complaint

pytestmark = pytest.mark.gpu

RECIPES = [
    *FP8_RECIPES.values(),
    fp8_blocks_recipe(power_of_two_scales=False),
    fp8_blocks_recipe(power_of_two_scales=True),
    MXFP8,
    nvfp4_recipe(stochastic_rounding=True, hadamard=True),
    INT8_RECIPE,
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("shape", [(64, 128, 256), (37, 96, 64), (1, 32, 32), (640, 640, 384)], ids=str)
def test_kernels_agree_with_their_emulation(recipe, shape):
    device = torch.device("cuda", torch.cuda.current_device())
    if lacks(recipe, device):
        pytest.skip(lacks(recipe, device))
    tokens, inputs, outputs = shape
    if inputs % recipe.multiple or outputs % recipe.multiple:
        pytest.skip(f"{recipe.name} converts multiples of {recipe.multiple}")
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, device=device)
    x, g = (torch.randn(tokens, n, device=device, dtype=torch.bfloat16) for n in (inputs, outputs))
    results = []
    for kernels in (False, True):
        layer = LowPrecisionLinear.of(copy.deepcopy(linear), recipe, kernels=kernels)
        each = x.clone().requires_grad_()
        y = layer(each)
        y.backward(g)
        results.append((y.detach(), each.grad, layer.weight.grad, layer.bias.grad))
        assert complaint(layer, device, torch.bfloat16) == ""
    for emulated, run in zip(*results, strict=True):
        torch.testing.assert_close(run, emulated, rtol=2.0**-6, atol=2.0**-6 * float(emulated.float().abs().mean()))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_an_emulation_by_products_of_halves_is_that_by_products_of_float32(recipe, monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    a, b = (torch.randn(rows, 640, device=device) for rows in (64, 256))
    results = []
    for halves in (True, False):
        if not halves:
            monkeypatch.setattr("booster.mixed_precision.low_precision.linear.gives_float32_sums", lambda device: False)
        results.append(product(a, b, recipe.output, recipe, dtype=torch.bfloat16, kernels=False))
    torch.testing.assert_close(*results, rtol=2.0**-7, atol=2.0**-12 * float(results[1].float().abs().max()))
