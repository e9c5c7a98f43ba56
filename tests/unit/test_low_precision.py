"""Linear layers in 4 to 8 bits compute what a hand-written one does, say where they run, and keep what a model is."""

import copy
import itertools
import logging
import re
from contextlib import nullcontext
from pathlib import Path

import low_reference
import pytest
import torch
from recipes import EVERY_RECIPE, RECIPES
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.mixed_precision import (
    FP32,
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    Int8MixedPrecision,
    LowPrecision,
    MixedPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
    TF32MixedPrecision,
)
from booster.mixed_precision.half import HalfPrecision
from booster.mixed_precision.hardware import gives_float32_sums, multiplies_into_sums, sums_int8_exactly
from booster.mixed_precision.low_precision import conversion, operands
from booster.mixed_precision.low_precision.conversion import LinearConversion
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear, emulate, multiply_scaled, product
from booster.mixed_precision.low_precision.recipes import (
    FP8_RECIPES,
    INT8_RECIPE,
    MXFP8,
    GemmConfig,
    fp8_blocks_recipe,
    nvfp4_recipe,
)
from booster.number_formats.number_format import E2M1, round_to
from booster.number_formats.scaling import Scaling, rotated, scale_to

STRATEGIES = {
    "fp8": lambda **options: FP8MixedPrecision(emulate=True, **options),
    "fp8 rowwise": lambda **options: FP8MixedPrecision("rowwise", emulate=True, **options),
    "mxfp8": lambda **options: MXFP8MixedPrecision(emulate=True, **options),
    "nvfp4": lambda **options: NVFP4MixedPrecision(emulate=True, **options),
    "int8": lambda **options: Int8MixedPrecision(**options),
}
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)


def error(got, expected):
    return float((got.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm())


def passes(layer, x, g, *, half=True):
    """Output and gradients of a forward and a backward pass."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        y = layer(x)
    y.backward(g.to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in layer.named_parameters()}}


def data(tokens=(3, 21), inputs=96, outputs=64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    linear = nn.Linear(inputs, outputs)
    with torch.no_grad():
        for param in linear.parameters():
            param.copy_(torch.randn(param.shape, generator=draw) / inputs**0.5)
    x = torch.randn(*tokens, inputs, generator=draw) * torch.logspace(-1, 1, inputs)
    return linear, x, torch.randn(*tokens, outputs, generator=draw) * 1e-3


@EVERY_RECIPE
@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
def test_a_layer_computes_what_one_by_hand_does(name, half):
    linear, x, g = data()
    expected = passes(low_reference.LowLinear(copy.deepcopy(linear), name), x, g, half=half)
    got = passes(LowPrecisionLinear.of(linear, RECIPES[name], kernels=False), x, g, half=half)
    for key in expected:
        # One rounding to bfloat16 that falls on the other side, or float32 sums in another order. Draws differ.
        bound = 2.0**-8 if half else 2e-6
        stochastic = name == "nvfp4" and key in ("x", "weight")
        assert got[key].dtype == expected[key].dtype, key
        assert error(got[key], expected[key]) < (0.3 if stochastic else bound), key


@EVERY_RECIPE
def test_autocast_says_the_dtype_and_touches_no_scale_nor_sum_in_either_pass(name):
    linear, x, g = data()
    layer, x = LowPrecisionLinear.of(linear, RECIPES[name], kernels=False), x.bfloat16()
    outside = passes(layer, x, g, half=False)
    with torch.autocast("cpu", torch.bfloat16):  # around backward, too
        inside = passes(layer, x, g)
    assert all(torch.equal(inside[key], outside[key]) for key in outside)


@EVERY_RECIPE
def test_what_a_layer_returns_is_right_on_average(name):
    """Two seeds of data: no product is biased, by a wrong scale or a lost row."""
    linear, x, g = data((256,), 128, 96)
    plain = passes(copy.deepcopy(linear), x, g, half=False)
    low = passes(LowPrecisionLinear.of(linear, RECIPES[name], kernels=False), x, g, half=False)
    for key, expected in plain.items():
        ratio = float((low[key] * expected).sum() / (expected * expected).sum())
        assert abs(ratio - 1) < 0.02, key


# Of output, gradient of the first weight, gradient of the input of Linear(64, 128), GELU, Linear(128, 64) in bfloat16, each
# relative to the same without rounding. The table of results/quality.md; torchao 0.18 has .051 .084 .075, .050 .064 .056,
# .050 .053 .056 for the three of fp8 and .015 .016 .015 for int8.
ERRORS = {
    "fp8": (0.052, 0.087, 0.085),
    "fp8 rowwise": (0.052, 0.059, 0.057),
    "fp8 rowwise_with_gw_hp": (0.052, 0.045, 0.057),
    "fp8 blocks": (0.052, 0.059, 0.057),
    "mxfp8": (0.052, 0.059, 0.057),
    "nvfp4 nearest": (0.208, 0.217, 0.223),
    "nvfp4": (0.208, 0.265, 0.267),
    "int8": (0.013, 0.015, 0.013),
}


@EVERY_RECIPE
def test_the_errors_of_two_layers_are_those_of_the_table(name):
    draw = torch.Generator().manual_seed(1)
    x, g = (torch.randn(256, 64, generator=draw).bfloat16() for _ in range(2))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    expected = passes(net, x, g, half=False)
    net[0], net[2] = (LowPrecisionLinear.of(net[i], RECIPES[name], kernels=False) for i in (0, 2))
    got = passes(net, x, g, half=False)
    errors = [error(got[key], expected[key]) for key in ("y", "0.weight", "x")]
    assert errors == pytest.approx(ERRORS[name], rel=0.15)


def test_gradients_that_are_rounded_stochastically_are_right_on_average_and_the_same_again():
    linear, x, g = data((64,), 64, 64)
    plain = passes(copy.deepcopy(linear), x, g, half=False)
    layer = LowPrecisionLinear.of(linear, RECIPES["nvfp4"], kernels=False)
    assert all(
        torch.equal(a, b) for a, b in zip(passes(layer, x, g).values(), passes(layer, x, g).values(), strict=True)
    )

    def average(layer, times=40):
        # Gradients that differ in nothing but the last bits draw anew.
        runs = [passes(layer, x, g * (1 + 2.0**-20 * i), half=False) for i in range(times)]
        return sum(run["x"] for run in runs) / times

    nearest = LowPrecisionLinear.of(linear, nvfp4_recipe(stochastic_rounding=False, hadamard=True), kernels=False)
    # What is left is the error of the weight, which is rounded to the nearest.
    rounded_weight = F.linear(g, scale_meant(linear.weight.detach(), (16, 16)).t())
    assert error(average(layer), rounded_weight) < 0.03 < error(average(nearest, 2), rounded_weight)
    assert error(average(layer), plain["x"]) < error(average(nearest, 2), plain["x"])


# Of a weight gradient, and of the mean of 16 that differ in nothing but the noise: benchmarks/results/quality.md.
@pytest.mark.parametrize(("stochastic", "one", "mean"), [(True, 0.166, 0.101), (False, 0.135, 0.135)])
@pytest.mark.parametrize("hadamard", [True, False])
def test_the_mean_of_many_gradients_is_nearer_where_rounding_is_stochastic(stochastic, hadamard, one, mean):
    draw = torch.Generator().manual_seed(0)
    x, g = torch.randn(512, 128, generator=draw), torch.randn(512, 128, generator=draw)
    recipe, exact = nvfp4_recipe(stochastic_rounding=stochastic, hadamard=hadamard), g.t() @ x
    how = {"dtype": torch.float32, "kernels": False}
    drawn = [product((g * (1 + 2.0**-20 * i)).t(), x.t(), recipe.weight_gradient, recipe, **how) for i in range(16)]
    assert error(drawn[0], exact) == pytest.approx(one, rel=0.05)
    assert error(sum(drawn) / 16, exact) == pytest.approx(mean, rel=0.05)


def scale_meant(x, block):
    scaled = scale_to(x, E2M1, Scaling(block, "e4m3"))
    return scaled.dequantize() * scaled.outer


def test_the_rotation_leaves_products_alone_and_spreads_outliers():
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(8, 64, generator=draw), torch.randn(5, 64, generator=draw)
    torch.testing.assert_close(rotated(a) @ rotated(b).t(), a @ b.t(), rtol=1e-5, atol=1e-5)
    spike = torch.zeros(1, 16)
    spike[0, 3] = 4.0
    assert torch.equal(rotated(spike).abs(), torch.ones(1, 16))
    assert len(set(rotated(spike).flatten().tolist())) == 2


HALF_ROADS = ["GPU's", "CPU's"]
"""How a product of operands in bfloat16 is summed in float32: given back so, or multiplied by the scales before rounding."""


def on_road(monkeypatch, road, seen):
    """Have `emulate` take a road of these, or None, whatever this machine is; `seen` gets the dtypes of what is multiplied."""
    right, scaled = torch.mm, torch.addmm
    fast = multiplies_into_sums()  # looked at before torch.addmm is another, by which it would ask itself

    def mm(a, b, *, out_dtype):
        seen.extend((a.dtype, b.dtype))
        return right(a.to(out_dtype), b.to(out_dtype))

    def addmm(c, a, b, *, beta, alpha):
        seen.extend((a.dtype, b.dtype))
        return scaled(c, a, b, beta=beta, alpha=alpha) if fast else (alpha * (a.float() @ b.float())).bfloat16()

    where = "booster.mixed_precision.low_precision.linear"
    monkeypatch.setattr(f"{where}.gives_float32_sums", lambda device: road == "GPU's")
    monkeypatch.setattr(f"{where}.multiplies_into_sums", lambda: road == "CPU's")
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)


@EVERY_RECIPE
@pytest.mark.parametrize("road", HALF_ROADS)
def test_operands_in_bfloat16_are_multiplied_as_those_in_float32_are(name, road, monkeypatch):
    """Sums of so few whole numbers are exact in float32."""
    how, recipe = RECIPES[name].output, RECIPES[name]
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, (n, 64), generator=draw).float() for n in (21, 34))
    for each in (a, b):
        each[:, ::16] = 6 if recipe.name == "nvfp4" else 3.5 if recipe.kernel != "int8" else 127
    with monkeypatch.context() as patch:
        on_road(patch, None, [])
        expected = product(a, b, how, recipe, dtype=torch.bfloat16, kernels=False)
    assert error(expected, a @ b.t()) < 2.0**-8
    seen = []
    on_road(monkeypatch, road, seen)
    assert torch.equal(product(a, b, how, recipe, dtype=torch.bfloat16, kernels=False), expected)
    if name != "fp8 blocks" and (road == "GPU's" or name in ("fp8", "nvfp4", "nvfp4 nearest")):
        assert set(seen) == {torch.bfloat16}
    else:
        assert not seen, (
            "scales of rows are multiplied in afterwards, of blocks before, where bfloat16 has no float32 ones"
        )


@EVERY_RECIPE
@pytest.mark.parametrize("road", HALF_ROADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_computes_the_same_whatever_its_operands_are_held_in(name, road, dtype, monkeypatch):
    linear, x, g = data((300,), 96, 64)
    layer, half = LowPrecisionLinear.of(linear, RECIPES[name], kernels=False), dtype == torch.bfloat16
    with monkeypatch.context() as patch:
        on_road(patch, None, [])
        expected = passes(layer, x, g, half=half)
    on_road(monkeypatch, road, [])
    got = passes(layer, x, g, half=half)
    for key in ("y", "x", "weight"):
        # Sums of at most 300 numbers in another order, and one rounding that may fall on the other side.
        sums = 300 * 2.0**-24 * float(expected[key].abs().max()) * 8
        torch.testing.assert_close(got[key], expected[key], rtol=2.0**-7 if half else 1e-5, atol=sums)
        assert (got[key] != expected[key]).float().mean() < 0.02 or not half


def test_a_factor_that_float32_does_not_hold_is_none(monkeypatch):
    on_road(monkeypatch, "CPU's", [])
    a = torch.ones(16, 16)
    for bad in (torch.inf, torch.nan):
        spoiled = a.clone()
        spoiled[2, 3] = bad
        y = product(spoiled, a, RECIPES["fp8"].output, RECIPES["fp8"], dtype=torch.bfloat16, kernels=False)
        assert y.isnan().all()
    tiny = product(
        a * 2.0**-60, a * 2.0**-60, RECIPES["fp8"].output, RECIPES["fp8"], dtype=torch.bfloat16, kernels=False
    )
    torch.testing.assert_close(tiny, torch.full((16, 16), 2.0**-116).bfloat16(), rtol=2.0**-7, atol=0)
    huge = product(a * 2.0**80, a * 2.0**80, RECIPES["fp8"].output, RECIPES["fp8"], dtype=torch.bfloat16, kernels=False)
    assert (huge == torch.inf).all()


def test_what_a_cpu_does_with_a_factor_is_looked_at(monkeypatch):
    right = torch.addmm
    monkeypatch.setattr("booster.mixed_precision.hardware.slow_products", lambda dtype: frozenset())
    assert multiplies_into_sums.__wrapped__()
    monkeypatch.setattr(torch, "addmm", lambda c, a, b, *, beta, alpha: right(c, a, b, beta=beta) * alpha)
    assert not multiplies_into_sums.__wrapped__(), "sums that are rounded first"
    monkeypatch.setattr("booster.mixed_precision.hardware.slow_products", lambda dtype: frozenset({"matrix product"}))
    assert not multiplies_into_sums.__wrapped__()
    assert not gives_float32_sums(torch.device("cpu"))


@pytest.mark.parametrize("name", ["fp8", "fp8 rowwise", "int8"])
def test_kernels_that_a_cpu_has_agree_with_the_emulation(name):
    linear, x, g = data((3, 7), 48, 32)  # 21 rows: filled up
    emulated = passes(LowPrecisionLinear.of(copy.deepcopy(linear), RECIPES[name], kernels=False), x, g)
    recipe = operands.for_device(RECIPES[name], torch.device("cpu"))
    try:
        run = passes(LowPrecisionLinear.of(linear, recipe, kernels=True), x, g)
    except NotImplementedError as error:  # torch 2.11 multiplies fp8 on GPUs alone
        if "aten::_scaled_mm_v2" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__} has no kernel of scaled_mm for CPUs")
    for key in run:
        torch.testing.assert_close(
            run[key], emulated[key], rtol=2.0**-7, atol=2.0**-7 * float(emulated[key].abs().mean())
        )


@pytest.mark.parametrize("length", [32, 1040, 1041, 16384])
def test_whole_numbers_are_summed_exactly_by_the_kernel_of_this_cpu_and_by_that_of_cpus_that_saturate(length):
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-127, 128, (32, length), generator=draw).float() for _ in range(2))
    a[:, 0] = b[:, 0] = 127
    a, b = a.abs().clamp(min=100), b.abs().clamp(min=100)  # large sums, that come back half of the way
    b[:, length // 2 :] *= -1
    left, right = (scale_to(each, INT8_RECIPE.output.left.format, Scaling("row")) for each in (a, b))
    exact = (left.values.double() @ right.values.double().t()).float() * left.scale * right.scale.t()
    assert torch.equal(operands.whole_numbers_in_float32(left, right), exact)
    if sums_int8_exactly():
        assert torch.equal(operands.whole_numbers(left, right), exact)


def test_int8_takes_another_kernel_where_sums_saturate(monkeypatch):
    """As where there is no VNNI: what is looked at is what torch computes, and the layers get what came out."""
    cpu = torch.device("cpu")
    monkeypatch.setattr("booster.mixed_precision.hardware.int_mm", lambda a, b: torch._int_mm(a, b).clamp(max=2**15))
    assert not sums_int8_exactly.__wrapped__()
    monkeypatch.setattr("booster.mixed_precision.low_precision.operands.sums_int8_exactly", lambda: False)
    _, model, _ = boosted(STRATEGIES["int8"]())
    assert {m.recipe.kernel for m in model.modules() if isinstance(m, LowPrecisionLinear)} == {"int8 in float32"}
    assert operands.for_device(INT8_RECIPE, torch.device("cuda")) is INT8_RECIPE
    assert operands.for_device(RECIPES["fp8"], cpu) is RECIPES["fp8"]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_forward_alone_accumulates_fast_and_only_where_it_may(recipe, fast, monkeypatch):
    """What the product of a CUDA device is given; a CPU's, in its place here, does the same either way."""
    passed = []

    def stand_in(a, b, *scales, use_fast_accum, output_dtype):
        passed.append(use_fast_accum)
        return (a.float() @ b.float()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", stand_in)
    linear, x, g = data((3, 7), 48, 32)
    precision = FP8MixedPrecision(recipe, emulate=True, fast_accumulation=fast)
    passes(LowPrecisionLinear.of(linear, precision.conversion.recipe, kernels=True), x, g)
    assert passed == [fast, False, False][: 2 if recipe == "rowwise_with_gw_hp" else 3]
    assert FP8MixedPrecision(recipe).conversion.recipe.output.fast_accumulation


def test_scales_lie_in_tiles_as_the_documentation_of_cublas_says():
    for rows, columns in ((128, 4), (130, 5), (32, 2), (300, 9)):
        scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0))
        across, expected = -(-columns // 4), torch.zeros(-(-rows // 128) * -(-columns // 4) * 512)
        for row in range(rows):
            for column in range(columns):
                tile = row // 128 * across + column // 4
                expected[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scale[row, column]
        assert torch.equal(operands.tiled(scale), expected)


def test_two_numbers_of_four_bits_lie_in_a_byte_the_first_one_below():
    values = round_to(torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) * 3, E2M1)
    bytes_ = operands.packed(values).view(torch.uint8)
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat([levels, -levels])  # by their bits
    assert torch.equal(numbers[(bytes_ & 15).long()], values[:, ::2])
    assert torch.equal(numbers[(bytes_ >> 4).long()], values[:, 1::2])


def test_rows_are_filled_up_for_kernels_without_changing_the_numbers(monkeypatch):
    """What a kernel for blocks is given means what is emulated; in place of one, which a CPU has not."""
    seen = []

    def stand_in(a, b):
        seen.append((a.values.shape, b.values.shape))
        return emulate(a, b, torch.bfloat16)

    monkeypatch.setattr(operands, "microscaled", stand_in)
    for name in ("mxfp8", "nvfp4"):
        linear, x, g = data((3, 7), 64, 96)
        emulated = passes(LowPrecisionLinear.of(copy.deepcopy(linear), RECIPES[name], kernels=False), x, g)
        run = passes(LowPrecisionLinear.of(linear, RECIPES[name], kernels=True), x, g)
        assert all(torch.equal(run[key], emulated[key]) for key in run)
    assert all(size % 32 == 0 for pair in seen for shape in pair for size in shape)
    assert len(seen) == 6


@EVERY_RECIPE
def test_an_empty_batch_and_a_frozen_weight_are_ordinary(name, monkeypatch):
    linear, x, g = data((0,))
    layer = LowPrecisionLinear.of(linear, RECIPES[name], kernels=False)
    empty = passes(layer, x, g)
    assert empty["y"].shape == (0, 64)
    assert (empty["weight"] == 0).all()
    linear, x, g = data()
    layer = LowPrecisionLinear.of(linear.requires_grad_(False), RECIPES[name], kernels=False)
    x.requires_grad_()
    made = []
    monkeypatch.setattr(
        "booster.mixed_precision.low_precision.linear.multiply_scaled",
        lambda *args, **options: made.append(args) or multiply_scaled(*args, **options),
    )
    layer(x).backward(g)
    assert x.grad is not None
    assert layer.weight.grad is None
    assert len(made) == 2, "no gradient without a use"


@EVERY_RECIPE
def test_a_single_vector_is_a_batch_of_one(name):
    linear, x, g = data((1,))
    one, alone = (
        passes(LowPrecisionLinear.of(copy.deepcopy(linear), RECIPES[name], kernels=False), *args)
        for args in ((x, g), (x[0], g[0]))
    )
    assert alone["y"].shape == (64,)
    assert all(torch.equal(alone[key].flatten(), one[key].flatten()) for key in one)


def test_gradients_of_gradients_are_refused():
    linear, x, _ = data()
    y = LowPrecisionLinear.of(linear, MXFP8, kernels=False)(x.requires_grad_())
    with pytest.raises(RuntimeError, match="gradients of gradients, and mxfp8 layers have none"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


# ---- where they run ----


def test_a_device_without_the_format_is_refused_with_the_way_out():
    for name, needs in (("fp8", "8.9"), ("mxfp8", "10.0"), ("nvfp4", "10.0")):
        with pytest.raises(
            ValueError, match=rf"{name}.* compute capability {needs}.*this is a CPU; .*\(emulate=True\)"
        ):
            Booster("cpu", name)
    Booster("cpu", "int8")
    Booster("cpu", FP8MixedPrecision(emulate="auto"))
    with pytest.raises(ValueError, match="this is a CPU"):
        FP8MixedPrecision().configure(net())


@pytest.mark.parametrize(
    ("capability", "has"),
    [
        ((7, 0), ""),
        ((8, 0), "int8"),
        ((8, 9), "fp8 int8"),
        ((9, 0), "fp8 fp8 blocks int8"),
        ((10, 0), "fp8 fp8 blocks mxfp8 nvfp4 int8"),
    ],
)
def test_what_a_gpu_has_goes_by_its_compute_capability(monkeypatch, capability, has):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Something")
    monkeypatch.setattr(operands, "fails", lambda recipe, device: "")
    device = torch.device("cuda", 0)
    lacking = {name: operands.lacks(RECIPES[name], device) for name in ("fp8", "fp8 blocks", "mxfp8", "nvfp4", "int8")}
    assert " ".join(name for name, said in lacking.items() if not said) == has
    assert all(
        said.endswith(f"NVIDIA Something has {capability[0]}.{capability[1]}") for said in lacking.values() if said
    )
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD's" in operands.lacks(RECIPES["fp8"], device)


PROBED = ["fp8", "fp8 rowwise", "fp8 rowwise_with_gw_hp", "fp8 blocks", "mxfp8", "nvfp4", "int8"]


def products_of(run):
    """A stand-in for `operands.multiply`, which a CPU has not for all: what is emulated, changed by `run`."""
    return lambda a, b, how, recipe: run(emulate(a, b, torch.bfloat16), a, how, recipe)


@pytest.mark.parametrize("name", PROBED)
def test_a_gpu_is_asked_for_each_product_that_a_recipe_makes(monkeypatch, name):
    """By what comes out, whatever the generation: one that refuses and one that is wrong are named, with the way out."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX Something")
    recipe, cpu, asked = RECIPES[name], torch.device("cpu"), []
    monkeypatch.setattr(operands, "multiply", products_of(lambda y, a, how, recipe: asked.append(how) or y))
    assert operands.fails.__wrapped__(recipe, cpu) == ""
    low = [how for how in (recipe.output, recipe.input_gradient, recipe.weight_gradient) if isinstance(how, GemmConfig)]
    assert asked == low

    def refuse(y, a, how, recipe):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul\nand more")

    monkeypatch.setattr(operands, "multiply", products_of(refuse))
    said = operands.fails.__wrapped__(recipe, cpu)
    assert said == (
        f"{recipe.name} cannot run on NVIDIA RTX Something, where the product of the output is refused: "
        "CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"
    )
    for wrong in (lambda y: y * 1.02, lambda y: y * torch.nan, lambda y: torch.cat([y[:64], y[:64]])):
        monkeypatch.setattr(
            operands, "multiply", products_of(lambda y, a, how, recipe, wrong=wrong: wrong(y) if how is low[-1] else y)
        )
        assert operands.fails.__wrapped__(recipe, cpu).endswith(" is wrong")
    monkeypatch.setattr(operands, "fails", lambda recipe, device: said)
    with pytest.raises(ValueError, match=r"where the product of the output is refused.*\(emulate=True\)"):
        LinearConversion(recipe, precision="X").runs(torch.device("cuda:0"))
    assert not LinearConversion(recipe, "auto").runs(torch.device("cuda:0"))


def as_cublas_reads(scale, kind, rows, length):
    """Scales of blocks of 128 from where cuBLAS's documentation says that they lie in memory, as rows x blocks of a matrix."""
    memory = torch.as_strided(scale, (scale.untyped_storage().nbytes() // 4,), (1,), 0)
    across = length // 128
    if kind is F.ScalingType.BlockWise1x128:
        return torch.stack([memory[block * rows : block * rows + rows] for block in range(across)], 1)
    filled = -(-across // 4) * 4
    blocks = [memory[down * filled : down * filled + across] for down in range(-(-rows // 128))]
    return torch.stack(blocks).repeat_interleave(128, 0)[:rows]


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("powers", [False, True])
def test_scales_of_blocks_lie_as_cublas_reads_them_whatever_their_number(monkeypatch, blocks, powers):
    """Those of 128 x 128 are filled up to a multiple of 4 along what is summed over; torch did not look once, and was wrong."""

    def scaled_mm(a, b, left, of_left, right, of_right, *, output_dtype):
        length = a.shape[1]
        a_scale = as_cublas_reads(left, of_left, a.shape[0], length)
        b_scale = as_cublas_reads(right, of_right, b.shape[1], length)
        a, b = (x.float() * s.repeat_interleave(128, 1) for x, s in ((a, a_scale), (b.t(), b_scale)))
        return (a @ b.t()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    recipe = fp8_blocks_recipe(power_of_two_scales=powers)
    draw = torch.Generator().manual_seed(0)
    spread = torch.logspace(-2, 2, 128 * blocks)
    a, b = (torch.randn(rows, 128 * blocks, generator=draw) * spread for rows in (21, 256))
    for how in (recipe.output, recipe.input_gradient, recipe.weight_gradient):
        for left, right in ((a, b), (a[:, : 128 * blocks - 40], b[:, : 128 * blocks - 40])):
            both = [product(left, right, how, recipe, dtype=torch.bfloat16, kernels=each) for each in (False, True)]
            torch.testing.assert_close(both[1], both[0], rtol=2.0**-7, atol=2.0**-7 * float(both[0].abs().mean()))


def hardware_table():
    """Rows of "Where they run" in docs/low_precision.md: what is in the first column, and a cell for each precision."""
    text = (Path(__file__).parents[2] / "docs" / "low_precision.md").read_text()
    lines = text.split("## Where they run")[1].split("##")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|"))
    return [
        pytest.param(
            row[0],
            {name: cell for names, cell in zip(head[1:], row[1:], strict=True) for name in names.split(", ")},
            id=row[0].split(" (")[0],
        )
        for row in rows
    ]


@pytest.mark.parametrize(("hardware", "cells"), hardware_table())
def test_the_table_of_hardware_says_what_precisions_do_there(monkeypatch, hardware, cells):
    makes = {
        "fp8": FP8MixedPrecision,
        "fp8 blocks": lambda **options: FP8MixedPrecision("blocks", **options),
        "mxfp8": MXFP8MixedPrecision,
        "nvfp4": NVFP4MixedPrecision,
        "int8": Int8MixedPrecision,
        "tf32": TF32MixedPrecision,
    }
    assert cells.keys() == makes.keys()
    capabilities = [tuple(map(int, each.split("."))) for each in re.findall(r"\d+\.\d", hardware)]
    monkeypatch.setattr(torch.version, "hip", "6.4" if hardware == "AMD" else None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: hardware)
    monkeypatch.setattr(HalfPrecision, "bind", MixedPrecision.bind)  # it asks the device itself
    refusing = True  # whether a product that is asked for is refused
    refused = {"fp8 blocks"} if hardware.startswith(("B200", "RTX 50")) else set()  # by torch, but for Hopper
    monkeypatch.setattr(
        operands,
        "fails",
        lambda recipe, device: (
            "no product" if recipe.name in refused or refusing and cells.get(recipe.name) == "asked" else ""
        ),
    )
    for capability in capabilities or [(9, 9)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        device = torch.device("cpu" if hardware == "CPU" else "cuda:0")
        for (name, make), refusing in itertools.product(makes.items(), (True, False)):
            allowed = make(emulate="auto")
            allowed.bind(device)
            cell = {"asked": "rehearses" if refusing else "runs"}.get(cells[name], cells[name])
            assert ("rehearses" if allowed.is_rehearsal else "runs") == cell, name
            with pytest.raises(ValueError, match="emulate=True") if allowed.is_rehearsal else nullcontext():
                make().bind(device)


def test_options_that_contradict_each_other_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="goes with weights='fp32'"):
        FP8MixedPrecision(weights="bf16", compute_dtype=torch.float32)
    with pytest.raises(ValueError, match="keep_fp32 says nothing"):
        MXFP8MixedPrecision(compute_dtype=torch.float32, keep_fp32=nn.LayerNorm)
    with pytest.raises(ValueError, match="power_of_two_scales=True goes with recipe='blocks'"):
        FP8MixedPrecision("rowwise", power_of_two_scales=True)
    with pytest.raises(TypeError, match="has no recipe"):
        LowPrecision()
    monkeypatch.setattr("booster.mixed_precision.low_precision.conversion.lacks", lambda recipe, device: "")
    with pytest.raises(ValueError, match="is for rehearsals"):
        Booster("cpu", FP8MixedPrecision(compute_dtype=torch.float32))


# ---- models ----


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(10, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32), "up": nn.Linear(32, 64), "down": nn.Linear(64, 32, bias=False)})
            for _ in range(2)
        )
        self.odd, self.back = nn.Linear(32, 30), nn.Linear(30, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x, recompute=False):
        x = self.embed(x)
        for block in self.blocks:
            if recompute:
                x = checkpoint(self.block, block, x, use_reentrant=False)
            else:
                x = self.block(block, x)
        return self.head(x + self.back(self.odd(x)))

    def block(self, block, x):
        return x + block["down"](F.gelu(block["up"](block["norm"](x))))


INNER = [f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")]


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, LowPrecisionLinear)]


def boosted(precision, model=None, **options):
    model = net() if model is None else model
    booster = Booster("cpu", precision, **options)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return booster, model, optimizer


def train(run, steps=3, recompute=False):
    booster, model, optimizer = run
    draw = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 10, generator=draw)
        loss = (model(x, recompute) - x[:, :4]).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow_cases("fp32-mxfp8", "fp32-int8")
@pytest.mark.crossed
@EVERY_STRATEGY
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_a_model_trains_and_has_the_names_and_dtypes_of_its_wide_precision(strategy, weights):
    run = boosted(STRATEGIES[strategy](weights=weights))
    plain = boosted("bf16" if weights == "fp32" else "bf16_naive")
    assert converted(run[1]) == INNER
    assert {name: p.dtype for name, p in run[1].named_parameters()} == {
        name: p.dtype for name, p in plain[1].named_parameters()
    }
    losses, expected = train(run, 20), train(plain, 20)
    assert losses != expected
    assert losses[-1] < losses[0] / 2
    assert losses == pytest.approx(expected, rel=0.5 if strategy == "nvfp4" else 0.15)


@EVERY_STRATEGY
def test_compute_dtype_float32_differs_by_the_products_alone(strategy):
    run = boosted(STRATEGIES[strategy](compute_dtype=torch.float32))
    seen = []
    run[1].blocks[0]["up"].register_forward_hook(lambda module, args, y: seen.append((args[0].dtype, y.dtype)))
    assert train(run, 2) == pytest.approx(train(boosted("fp32"), 2), rel=0.1)
    assert set(seen) == {(torch.float32, torch.float32)}


@pytest.mark.slow_cases("mxfp8", "int8")
@EVERY_STRATEGY
def test_checkpointed_activations_and_a_second_run_give_the_same_bits(strategy):
    first, again, recomputed = (boosted(STRATEGIES[strategy]()) for _ in range(3))
    losses = train(first)
    assert train(again) == losses
    assert train(recomputed, recompute=True) == losses
    for other in (again, recomputed):
        assert all(torch.equal(a, b) for a, b in zip(first[1].parameters(), other[1].parameters(), strict=True))


def test_a_run_resumes_to_the_bit_and_moves_between_precisions(tmp_path):
    whole, first, second = (boosted(STRATEGIES["nvfp4"]()) for _ in range(3))
    train(first, 2)
    first[0].save(tmp_path / "point", model=first[1], optimizer=first[2])
    second[0].load(tmp_path / "point", model=second[1], optimizer=second[2])
    train(whole, 2)
    assert train(second, 2) == train(whole, 2)
    wide = boosted("bf16", net(1))
    wide[0].load(tmp_path / "point", model=wide[1], optimizer=wide[2])
    assert all(torch.equal(a, b) for a, b in zip(wide[1].parameters(), first[1].parameters(), strict=True))
    wide[0].save(tmp_path / "wide", model=wide[1], optimizer=wide[2])
    back = boosted(STRATEGIES["fp8"](), net(2))
    back[0].load(tmp_path / "wide", model=back[1], optimizer=back[2])
    assert train(back, 2) == pytest.approx(train(wide, 2), rel=0.15)


def test_accumulation_sums_gradients_of_parts():
    booster, model, optimizer = boosted(STRATEGIES["mxfp8"]())
    x = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        booster.backward(model(x).square().mean() / 2, optimizer)
    twice = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    booster.backward(model(x).square().mean(), optimizer)
    for name, param in model.named_parameters():
        torch.testing.assert_close(twice[name], param.grad, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (None, INNER),
        ("blocks.0.*", ["embed", "head", "blocks.1.up", "blocks.1.down"]),
        (["**.down", "head"], ["embed", "blocks.0.up", "blocks.1.up"]),
        (lambda name, module: getattr(module, "bias", 0) is None, ["embed", "head", "blocks.0.up", "blocks.1.up"]),
        ((), ["embed", "head", *INNER]),
    ],
    ids=["first and last", "pattern", "patterns", "predicate", "nothing"],
)
def test_keep_says_what_stays_wide(keep, expected, caplog):
    model = net()
    model.embed, model.head = nn.Linear(16, 32), nn.Linear(32, 16)
    with caplog.at_level(logging.INFO, "booster.mixed_precision.low_precision.low_precisions"):
        _, model, _ = boosted(FP8MixedPrecision(keep=keep, emulate=True), model)
    assert sorted(converted(model)) == sorted(expected)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert line.startswith(f"fp8 tensorwise: {len(expected)} linear layers of Net converted; wide stay: ")
    assert "odd (32 -> 30, no multiples of 16)" in line
    assert ("embed (the first)" in line) == (keep is None)


@pytest.mark.parametrize(
    ("around", "options"),
    [
        (BF16MixedPrecision, {}),
        (BF16NaiveMixedPrecision, {"weights": "bf16"}),
        (MixedPrecision, {"compute_dtype": torch.float32}),
    ],
)
def test_a_low_precision_is_the_precision_around_its_layers_and_a_conversion(around, options):
    precision = around()
    precision.conversion = LinearConversion(
        FP8_RECIPES["rowwise"], emulate=True, dtype=options.get("compute_dtype", torch.bfloat16)
    )
    low = FP8MixedPrecision("rowwise", emulate=True, **options)
    mine, theirs = boosted(precision), boosted(low)
    assert converted(mine[1]) == converted(theirs[1]) == INNER
    assert train(mine) == train(theirs)
    for one, two in zip(mine[1].parameters(), theirs[1].parameters(), strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    assert precision.is_rehearsal


@pytest.mark.slow_cases("fp16_naive", "fp16")
@pytest.mark.parametrize(
    "make",
    [
        FP16TorchMixedPrecision,
        FP16NaiveMixedPrecision,
        *(lambda n=n: FP16ApexMixedPrecision(f"O{n}") for n in range(3)),
    ],
    ids=["fp16", "fp16_naive", "O0", "O1", "O2"],
)
def test_any_other_precision_may_hold_a_conversion_too(make):
    precision, plain = make(), boosted(make())
    precision.conversion = LinearConversion(INT8_RECIPE, emulate=True, keep=(), dtype=torch.float16)
    run = boosted(precision)
    assert converted(run[1]) == INNER
    assert converted(plain[1]) == []
    of_low, of_plain = train(run, steps=20), train(plain, steps=20)
    assert of_low != of_plain
    assert of_low[-1] < of_low[0] / 2
    assert of_low == pytest.approx(of_plain, rel=0.1)


def test_a_rehearsal_says_so_once(caplog):
    precision = FP8MixedPrecision(emulate="auto")
    booster = Booster("cpu", precision)
    for _ in range(2):
        booster.boost(net())
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "fp8 tensorwise is emulated on cpu: a rehearsal of its numbers, slower than the wide dtype"
    ]


def test_float32_modules_keep_their_linear_layers():
    _, model, _ = boosted(STRATEGIES["fp8"](keep_fp32="blocks.1"))
    assert converted(model) == INNER[:2]
    seen = []
    model.blocks[1]["up"].register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    model(torch.ones(2, 10))
    assert seen == [torch.bfloat16]  # a ModuleDict has no forward
    _, model, _ = boosted(STRATEGIES["fp8"](keep_fp32="blocks.1.up"))
    model.blocks[1]["up"].register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    model(torch.ones(2, 10))
    assert seen[-1] == torch.float32


def test_layers_that_are_more_than_linear_stay_as_they_are():
    class Mine(nn.Linear):
        pass

    model = net()
    model.blocks[0]["up"] = Mine(32, 64)
    torch.nn.utils.parametrizations.weight_norm(model.blocks[1]["up"])
    model.blocks[1]["down"].forward = lambda x: F.linear(x, model.blocks[1]["down"].weight)
    _, model, _ = boosted(STRATEGIES["fp8"](), model)
    assert converted(model) == ["blocks.0.down"]


def test_hooks_and_shared_layers_come_along():
    model = net()
    shared = model.blocks[0]["up"]
    model.blocks[1]["up"] = shared
    calls = []
    shared.register_forward_hook(lambda module, args, y: calls.append(type(module)))
    _, model, _ = boosted(STRATEGIES["mxfp8"](), model)
    assert model.blocks[0]["up"] is model.blocks[1]["up"]
    model(torch.ones(2, 10))
    assert calls == [LowPrecisionLinear] * 2
    assert shared.weight is model.blocks[0]["up"].weight


def test_a_model_without_a_layer_to_convert_is_refused_unchanged():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 30), nn.Linear(30, 16))
    with pytest.raises(
        ValueError, match=r"finds no linear layer to convert in Sequential; wide stay: 0 \(the first\); 1 \(16"
    ):
        boosted(STRATEGIES["fp8"](), model)
    assert [type(layer) for layer in model] == [nn.Linear] * 3
    with pytest.raises(ValueError, match="which has none"):
        boosted(STRATEGIES["fp8"](), nn.Conv2d(3, 3, 1))
    with pytest.raises(ValueError, match="keep='heads' selects no module of Net"):
        boosted(FP8MixedPrecision(keep="heads", emulate=True))
    with pytest.raises(ValueError, match=r"bf16_naive.*under FP8MixedPrecision that is weights='bf16'"):
        boosted(STRATEGIES["fp8"](), net().bfloat16())


@EVERY_STRATEGY
def test_a_model_that_is_one_linear_layer_is_refused_with_what_to_do(strategy):
    model = nn.Linear(64, 32)
    for keep in (None, ()):
        with pytest.raises(
            ValueError, match=r"in Linear; wide stay: the model itself \(no module holds it: put it into"
        ):
            boosted(STRATEGIES[strategy](keep=keep), model)
    assert type(model) is nn.Linear


# ---- the check of every converted layer ----


def broken(monkeypatch, forward):
    monkeypatch.setattr(LowPrecisionLinear, "forward", forward)
    model = net()
    with pytest.raises(RuntimeError) as raised:
        boosted(STRATEGIES["fp8"](), model)
    assert [type(module) for module in model.modules() if isinstance(module, nn.Linear)] == [nn.Linear] * 8
    return str(raised.value)


def test_a_layer_that_ignores_its_bias_is_found(monkeypatch):
    right = LowPrecisionLinear.forward

    def forward(self, x):
        return right(self, x) if self.bias is None else right(self, x) - self.bias.detach()

    said = broken(monkeypatch, forward)
    assert said.startswith(
        "'blocks.0.up' and 1 of its shape would not train right in fp8 tensorwise on cpu: the output is off"
    )


def test_a_bias_without_a_gradient_is_found(monkeypatch):
    def forward(self, x):
        bias, self._parameters["bias"] = self._parameters["bias"], None
        y = right(self, x)
        self._parameters["bias"] = bias
        return y if bias is None else y + bias.detach()

    right = LowPrecisionLinear.forward
    assert "'blocks.0.up' and 1 of its shape" in (said := broken(monkeypatch, forward))
    assert "no gradient of the bias" in said


def test_a_layer_that_does_not_round_is_found(monkeypatch):
    said = broken(monkeypatch, lambda self, x: F.linear(x.float(), self.weight, self.bias))
    assert "the output is not rounded at all" in said


def test_nan_in_a_gradient_is_found(monkeypatch):
    def nan_in_weight_gradient(a, b, how, recipe, **options):
        result = multiply_scaled(a, b, how, recipe, **options)
        return result * torch.nan if how is recipe.weight_gradient and len(a.values) == 32 else result

    monkeypatch.setattr("booster.mixed_precision.low_precision.linear.multiply_scaled", nan_in_weight_gradient)
    model = net()
    with pytest.raises(
        RuntimeError, match="'blocks.0.down' and 1 of its shape.*the gradient of the weight has inf or NaN"
    ):
        boosted(STRATEGIES["mxfp8"](), model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch's compiler about itself
def test_nan_that_only_a_compiled_layer_gives_is_found(monkeypatch):
    def nan_where_compiled(*args, **options):
        return multiply_scaled(*args, **options) * (torch.nan if torch.compiler.is_compiling() else 1.0)

    monkeypatch.setattr("booster.mixed_precision.low_precision.linear.multiply_scaled", nan_where_compiled)
    boosted(STRATEGIES["fp8 rowwise"]())
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="'blocks.0.up' and 1 of its shape.*the output, compiled, has inf or NaN"):
        boosted(STRATEGIES["fp8 rowwise"](), torch.compile(net(), backend="aot_eager"))
    torch.compiler.reset()


def test_a_pruned_layer_is_converted_with_its_mask():
    model = net()
    prune.l1_unstructured(model.blocks[0]["up"], "weight", 0.5)
    mask = model.blocks[0]["up"].weight_mask.clone()
    run = boosted(STRATEGIES["fp8"](), model)
    assert converted(run[1]) == INNER
    train(run, 2)
    assert torch.equal(run[1].blocks[0]["up"].weight == 0, mask == 0)


@EVERY_RECIPE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_right_layers_pass_the_check_and_no_generator_moves(name, dtype):
    for inputs, outputs, bias in ((32, 96, True), (256, 32, False)):
        layer = LowPrecisionLinear.of(nn.Linear(inputs, outputs, bias=bias), RECIPES[name], kernels=False)
        weights, state = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
        assert conversion.complaint(layer, torch.device("cpu"), dtype) == ""
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(value, weights[key]) for key, value in layer.state_dict().items())
        assert all(param.grad is None for param in layer.parameters())


def test_deep_copies_go_on_alone():
    booster, model, optimizer = boosted(STRATEGIES["fp8"]())
    twin, _ = copy.deepcopy((model, optimizer))
    before = twin.blocks[0]["up"].weight.detach().clone()
    train((booster, model, optimizer), 1)
    assert converted(twin) == INNER
    assert torch.equal(twin.blocks[0]["up"].weight, before)
    assert not torch.equal(model.blocks[0]["up"].weight, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch's compiler about itself
@pytest.mark.parametrize("strategy", ["fp8", "mxfp8", "nvfp4", "int8"])
def test_a_compiled_model_computes_the_same(strategy):
    torch.compiler.reset()

    def losses(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        booster = Booster("cpu", STRATEGIES[strategy](keep=()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # With dynamic shapes torch 2.13 fails an assertion of its compiler where a mode surrounds a function's backward.
        model = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
        model, optimizer, *_ = booster.boost(model, optimizer)
        seen = []
        for step in range(3):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
            booster.backward(loss := (model(x) - x).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(loss.detach()))
        return seen

    assert losses(True) == pytest.approx(losses(False), rel=0.02)


def test_bf16_is_what_surrounds_the_layers():
    precision = STRATEGIES["fp8"]()
    assert precision.policy == BF16MixedPrecision().policy


class Wide(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("precision", "shown"),
    [
        (FP8MixedPrecision(), "FP8MixedPrecision(recipe='tensorwise', device='cpu')"),
        (
            FP8MixedPrecision("tensorwise", gather_in_fp8=True, emulate="auto", keep=(Wide, "head*")),
            "FP8MixedPrecision(recipe='tensorwise', gather_in_fp8=True, emulate='auto', keep=(Wide, 'head*'), device='cpu')",
        ),
        (
            FP8MixedPrecision("rowwise", emulate=True, keep=(), weights="bf16", keep_fp32="norm"),
            "FP8MixedPrecision(recipe='rowwise', emulate=True, keep=(), weights='bf16', keep_fp32=('norm',), device='cpu')",
        ),
        (
            NVFP4MixedPrecision(hadamard=False, emulate=True, compute_dtype=torch.float32),
            "NVFP4MixedPrecision(hadamard=False, emulate=True, compute_dtype=torch.float32, device='cpu')",
        ),
        (
            NVFP4MixedPrecision(stochastic_rounding=False),
            "NVFP4MixedPrecision(stochastic_rounding=False, device='cpu')",
        ),
        (
            FP8MixedPrecision("rowwise", fast_accumulation=False),
            "FP8MixedPrecision(recipe='rowwise', fast_accumulation=False, device='cpu')",
        ),
        (Int8MixedPrecision(), "Int8MixedPrecision(device='cpu')"),
        (Int8MixedPrecision().keeping(["norm"]), "Int8MixedPrecision(keep_fp32=('norm',), device='cpu')"),
        (
            FP8MixedPrecision(emulate=True).keeping(["norm"]),
            "FP8MixedPrecision(recipe='tensorwise', emulate=True, keep_fp32=('norm',), device='cpu')",
        ),
        (TF32MixedPrecision(emulate=True), "TF32MixedPrecision(emulate=True, device='cpu')"),
        (FP32(products="bfloat16"), "FP32(products='bfloat16', device='cpu')"),
        (FP32(), "FP32(device='cpu')"),
    ],
)
def test_a_precision_shows_the_options_that_it_was_given(precision, shown):
    assert repr(precision) == shown
