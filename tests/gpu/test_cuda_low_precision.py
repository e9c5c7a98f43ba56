"""On a CUDA device that has the format: its kernels agree with their emulation, up to the rounding of the output."""

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn

from booster import Booster
from booster.kernels import matrices
from booster.mixed_precision import FP8MixedPrecision, Int8MixedPrecision
from booster.mixed_precision.low_precision import operands
from booster.mixed_precision.low_precision.conversion import complaint
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear, product
from booster.mixed_precision.low_precision.operands import lacks
from booster.mixed_precision.low_precision.recipes import (
    FP8_RECIPES,
    INT8_RECIPE,
    MXFP8,
    GemmConfig,
    fp8_blocks_recipe,
    nvfp4_recipe,
)

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (37, 96), (640, 1040)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_matrices_are_rounded_by_kernels_to_the_bits_of_torchs_operations(recipe, shape, dtype, monkeypatch, caplog):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    x = torch.randn(*shape, device="cuda", dtype=dtype)
    x[-1, 3] = torch.inf
    for how in (recipe.output, recipe.input_gradient, recipe.weight_gradient):
        for operand in (how.left, how.right) if isinstance(how, GemmConfig) else ():
            if not operands._has_kernel(x, operand):
                assert recipe.name.startswith("nvfp4"), caplog.text
                continue
            for each in (x, x.t(), x[::2]):
                found = operands.quantized(each, operand)
                with monkeypatch.context() as patch:
                    patch.setattr(matrices, "TAKEN_ON", ())
                    expected = operands.quantized(each, operand)
                assert matrices.same(found, expected, operand.format)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_a_model_is_converted_where_it_pays_by_the_rule_and_by_measuring(name):
    device = torch.device("cuda", torch.cuda.current_device())
    if lacks(FP8_RECIPES[name], device):
        pytest.skip(lacks(FP8_RECIPES[name], device))

    def low(**options):
        with device:
            model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8192), nn.Linear(8192, 8192))
        model, *_ = Booster(device, FP8MixedPrecision(name, keep=(), **options)).boost(model)
        layers = {name: each for name, each in model.unwrap().named_modules() if isinstance(each, LowPrecisionLinear)}
        return [name for name, each in layers.items() if not each.in_high_precision]

    assert low(convert="all") == ["0", "1", "2"]
    assert low() == (["1", "2"] if name == "tensorwise" else ["2"])
    measured = low(convert="measured", tokens=16384)
    assert "2" in measured
    assert "0" not in measured


def test_int8_is_measured_too():
    device = torch.device("cuda", torch.cuda.current_device())
    with device:
        model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096), nn.Linear(64, 64))
    precision = Int8MixedPrecision(keep=(), convert="measured", tokens=8192)
    with suppress(ValueError):  # where nothing gains
        Booster(device, precision).boost(model)
    assert precision.conversion._times.keys() == {(4096, 4096), (64, 64)}
