"""Under torch.compile low-precision layers are one graph that Inductor fuses, and the numbers are the same."""

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile

from booster import Booster
from booster.mixed_precision import MXFP8MixedPrecision
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.recipes import FP8_RECIPES, INT8_RECIPE, MXFP8

RECIPES = {
    "fp8": FP8_RECIPES["tensorwise"],
    "fp8 rowwise": FP8_RECIPES["rowwise"],
    "fp8 rowwise_with_gw_hp": FP8_RECIPES["rowwise_with_gw_hp"],
    "mxfp8": MXFP8,
    "int8": INT8_RECIPE,
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # of the compiler about itself


@pytest.fixture(autouse=True)
def anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def layers(name, dtype=torch.bfloat16, *, kernels=False, count=2):
    torch.manual_seed(0)
    each = (nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(count))
    return nn.Sequential(*(LowPrecisionLinear.of(linear, RECIPES[name], kernels=kernels) for linear in each))


def passes(run, model):
    draw = torch.Generator().manual_seed(1)
    x, g = (torch.randn(96, 64, generator=draw).to(model[0].weight.dtype) for _ in range(2))
    x.requires_grad_()
    model.zero_grad()
    y = run(x)
    y.backward(g)
    return [y.detach(), x.grad, *(param.grad for param in model.parameters())]


# What runs of two layers, forward and backward: the six products, and reductions, passes over a matrix and scalars between
# them. Inductor's own list after fusion, on a CPU; a GPU fuses the largest number of a row with what reads it.
KERNELS = {"fp8": 32, "fp8 rowwise": 42}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_the_compiler_sees_through_two_layers_and_fuses_them(name, monkeypatch):
    found = []

    def note(nodes):
        found.extend(type(each).__name__ for node in nodes for each in node.get_nodes())
        return nodes

    # What would be compiled by a C++ compiler is not, and not run: it is counted.
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, *source: lambda *args: None)
    model = layers(name, kernels=True)
    with config.patch(force_disable_caches=True, _post_fusion_custom_pass=note):
        passes(torch.compile(model, fullgraph=True, dynamic=False), model)
    assert found.count("ExternKernelSchedulerNode") == 6
    assert len(found) <= KERNELS[name]


# In bfloat16 a rehearsal on a CPU multiplies scales of matrices into sums, where it is not compiled.
DTYPES = {"fp8": torch.float32}


@pytest.mark.slow_cases("mxfp8")
@pytest.mark.parametrize(
    "name", [name if name in ("fp8", "mxfp8") else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_no_recipe_breaks_the_graph_and_its_operations_alone_give_the_same_bits(name):
    model = layers(name, DTYPES.get(name, torch.bfloat16), count=1)
    expected = passes(model, model)
    found = passes(torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager"), model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_layers_give_the_same_bits_where_halves_are_rounded_as_written(name):
    """By default the compiler leaves out roundings to bfloat16 inside what it fuses, as it does for any model."""
    model = layers(name, DTYPES.get(name, torch.bfloat16))
    expected = passes(model, model)
    with config.patch(emulate_precision_casts=True):
        found = passes(torch.compile(model, fullgraph=True, dynamic=False), model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("half_products", ["float32", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_compiled_model_of_emulated_layers_trains_as_it_does_eagerly(half_products):
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        booster = Booster("cpu", MXFP8MixedPrecision(emulate=True), half_products=half_products)
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        run = torch.compile(model, backend="eager") if compiled else model
        for _ in range(2):
            loss = run(torch.ones(8, 32)).square().mean()
            booster.backward(loss, optimizer)
            assert optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]
