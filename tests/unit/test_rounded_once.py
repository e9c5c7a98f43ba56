"""Low-precision layers round each operand once, keep bytes for backward, and compute what products by themselves do."""

import copy
import random
from unittest import mock

import pytest
import torch
from comparing import same
from recipes import EVERY_RECIPE, RECIPES
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from booster.mixed_precision.low_precision import linear
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear, product
from booster.mixed_precision.low_precision.operands import QuantizedWeights

ROLES = ("recipe", "recipe", "recipe", "bf16", "fp32")


def layer_of(recipe, inputs, outputs, *, bias=True, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return LowPrecisionLinear.of(nn.Linear(inputs, outputs, bias=bias, dtype=dtype), recipe, kernels=False)


def results(layer, x, g, run=None):
    """Output and gradients of a forward and a backward pass."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    layer.zero_grad()
    y = (run or layer)(x)
    if y.requires_grad:
        y.backward(g)
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def by_products(layer, x, g):
    """The same, of products that round both of their operands, each by itself."""
    how, weight = {"dtype": x.dtype, "kernels": layer.kernels}, layer.weight.detach()
    tokens, grads = x.detach().reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    recipe = layer.recipe
    y = product(tokens, weight, recipe.output, recipe, **how).view(g.shape)
    bias = layer.bias
    found = {"y": y if bias is None else y + bias.detach().to(x.dtype), "x": None, "weight": None}
    if x.requires_grad:
        found["x"] = product(grads, weight.t(), recipe.input_gradient, recipe, **how).view(x.shape)
    if layer.weight.requires_grad:
        of_weight = product(grads.t(), tokens.t(), recipe.weight_gradient, recipe, **how)
        found["weight"] = of_weight.to(weight.dtype)
    if bias is not None:
        found["bias"] = g.reshape(-1, g.shape[-1]).sum(0).to(bias.dtype)
    return found


def drawn(seed):
    """A random layer, its input and the gradient of its output, and how it is called; what was drawn as a text."""
    draw = random.Random(seed)
    name = draw.choice([*RECIPES])
    roles = [draw.choice(ROLES) for _ in range(3)]
    recipe = RECIPES[name].with_dtypes(*roles)
    inputs, outputs = (recipe.multiple * draw.choice((1, 2, 3, 5, 8)) for _ in range(2))
    shape = draw.choice([(), (0,), (1,), (7,), (16,), (33,), (2, 3, 5), (64,), (0, 4)])
    dtype, weights = (draw.choice((torch.bfloat16, torch.float32)) for _ in range(2))
    layer = layer_of(recipe, inputs, outputs, bias=draw.random() < 0.5, seed=seed, dtype=weights)
    layer.weight.requires_grad_(draw.random() < 0.8)
    x, g = torch.randn(*shape, inputs) * 10 ** draw.uniform(-3, 3), torch.randn(*shape, outputs)
    if draw.random() < 0.1 and x.numel():
        x.view(-1)[draw.randrange(x.numel())] = draw.choice((torch.inf, torch.nan))
    x = x.to(dtype).requires_grad_(draw.random() < 0.8)
    how = draw.choice(("plain", "checkpoint", "reentrant", "not contiguous"))
    said = f"seed {seed}: {recipe.name}, {inputs} -> {outputs}, {shape}, {dtype}, weights {weights}, {how}"
    return layer, x, g.to(dtype), how, said


def check(seed):
    layer, x, g, how, said = drawn(seed)
    if how == "not contiguous" and x.dim() > 1:
        x, g = (each.detach().transpose(0, -1).contiguous().transpose(0, -1) for each in (x, g))
        x.requires_grad_(seed % 5 > 0)
    expected = by_products(layer, x, g)
    run = layer
    if how in ("checkpoint", "reentrant"):
        run = lambda x: checkpoint(layer, x, use_reentrant=how == "reentrant")  # noqa: E731
    if how == "reentrant" and not x.requires_grad:
        return
    got = results(layer, x, g, run)
    got["bias"] = expected.get("bias") if layer.bias is not None else None  # which no recipe rounds
    assert same({key: got[key] for key in expected}, expected), said


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("seed", range(60))
def test_a_random_layer_computes_what_products_that_round_by_themselves_do(seed):
    check(seed)


class Twins(nn.Module):
    """A layer, and maybe another of other biases that shares its weight; both are read in every pass."""

    def __init__(self, layer, other):
        super().__init__()
        self.one = layer
        self.other = other

    def forward(self, x):
        return self.one(x) if self.other is None else self.one(x) - 0.5 * self.other(x)


def group(seed, *, keeps, backend=None):
    """Outputs and gradients of a random layer's groups of 1 to 4 micro-batches, with whatever is done between two of them.

    keeps: whether the rounded weight is kept. backend: of the compiler, if its graphs run. And what was drawn.
    """
    layer, x, g, how, said = drawn(seed)
    draw = random.Random(f"group {seed}")
    other = None
    if draw.random() < 0.4:
        other = copy.deepcopy(layer)
        other.weight = layer.weight
    model, kept, found = Twins(layer, other), QuantizedWeights() if keeps else None, {}
    for each in (layer, other):
        if each is not None:
            each.weights = kept
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    micro, writes = draw.randint(1, 4), []
    for step in range(2):
        for number in range(micro):
            write = draw.choice(("none", "none", "in place", "other memory"))
            writes.append(write)
            with torch.no_grad():
                if write == "in place":
                    layer.weight.mul_(-1.5)
                elif write == "other memory":
                    layer.weight.data = layer.weight.data * 0.75
            tokens = (x.detach() * (1 + number)).requires_grad_(x.requires_grad)
            if how == "checkpoint" or (how == "reentrant" and tokens.requires_grad):
                y = checkpoint(run, tokens, use_reentrant=how == "reentrant")
            else:
                y = run(tokens)
            if y.requires_grad:
                y.backward(g)
            found[f"y {step} {number}"], found[f"x {step} {number}"] = y.detach(), tokens.grad
        if keeps:
            kept.forget()
        with torch.no_grad():  # the step, as some write it
            layer.weight.data.mul_(1.25)
    found |= {name: param.grad for name, param in model.named_parameters()}
    return found, f"{said}, {'tied, ' if other else ''}{micro} micro-batches, writes {writes}"


def check_group(seed):
    (kept, said), (anew, _) = group(seed, keeps=True), group(seed, keeps=False)
    assert same(kept, anew), said


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("seed", range(12))
def test_groups_of_micro_batches_keep_a_rounded_weight_and_change_no_bit(seed):
    check_group(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_2000_random_layers_do():
    for seed in range(60, 2060):
        check(seed)
        check_group(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad", "ignore::DeprecationWarning", "ignore::UserWarning"
)
def test_the_graphs_of_50_of_them_compute_the_same_bits():
    """The compiler's graph, its operations run one by one: in float32, as a rehearsal on a CPU multiplies scales into sums of
    bfloat16 where it is not compiled."""
    for seed in range(60, 2060, 40):
        torch.compiler.reset()
        with mock.patch.object(linear, "multiplies_into_sums", return_value=False):
            (compiled, said), (eager, _) = group(seed, keeps=True, backend="aot_eager"), group(seed, keeps=True)
        assert same(compiled, eager), said
    torch.compiler.reset()


# All kinds of scales, wide products, one row, none, odd shapes, tied, frozen, checkpointed, 1 to 4 micro-batches.
BY_INDUCTOR = [60, 62, 65, 104, 176, 185, 195, 310, 435, 560, 685, 810, 935, 1060]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad", "ignore::DeprecationWarning", "ignore::UserWarning"
)
def test_what_inductor_makes_of_some_of_them_computes_the_same_bits():
    """But for gradients of biases, which are sums in another order, and products of halves: to their sums Inductor adds
    the bias, or what a tied layer gives, before it rounds them. Other halves are rounded as written. A C++ compiler runs."""
    from torch._inductor import config  # which takes seconds

    for seed in BY_INDUCTOR:
        torch.compiler.reset()
        with mock.patch.object(linear, "multiplies_into_sums", return_value=False):
            with config.patch(emulate_precision_casts=True):
                compiled, said = group(seed, keeps=True, backend="inductor")
            eager, _ = group(seed, keeps=True)
        wide = {"forward": "y ", "input_grad": "x ", "weight_grad": "one.weight"}
        of_sums = ["one.bias", "other.bias", *(start for role, start in wide.items() if role in said)]
        if eager.get("one.bias") is not None and eager["y 0 0"].dtype == torch.bfloat16:
            of_sums.append("y ")
        for key in [key for key in eager if key.startswith(tuple(of_sums)) and eager[key] is not None]:
            one, other = (each.pop(key).nan_to_num(7.0, 7.0, 7.0) for each in (compiled, eager))
            unit = torch.finfo(other.dtype).eps * float(other.abs().max()) if other.numel() else 0.0
            torch.testing.assert_close(one, other, rtol=0, atol=2 * unit, msg=said)
        assert same(compiled, eager), said
    torch.compiler.reset()


# ---- what is kept for backward ----


def kept(layer, x):
    """Bytes that autograd keeps for the backward pass of `layer`, without its parameters."""
    own, found = {p.untyped_storage().data_ptr() for p in layer.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    assert y.requires_grad
    return sum(found.values())


# Bytes for each number of the input, and for each token and feature: of scales. Wide are weight gradients in bfloat16, and the
# four bits that torch has no dtype for.
KEPT = {
    "fp8": lambda tokens, inputs: tokens * inputs + 4,
    "fp8 rowwise": lambda tokens, inputs: tokens * inputs + 4 * inputs,
    "fp8 rowwise_with_gw_hp": lambda tokens, inputs: 2 * tokens * inputs,
    "fp8 blocks": lambda tokens, inputs: tokens * inputs + 4 * inputs * (tokens // 128),
    "mxfp8": lambda tokens, inputs: tokens * inputs + 4 * inputs * (tokens // 32),
    "nvfp4": lambda tokens, inputs: 2 * tokens * inputs,
    "nvfp4 nearest": lambda tokens, inputs: 2 * tokens * inputs,
    "int8": lambda tokens, inputs: tokens * inputs + 4 * inputs,
}


@EVERY_RECIPE
def test_a_layer_keeps_a_byte_for_each_number_of_its_input(name):
    tokens, inputs = 128, 96
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, requires_grad=True)
    layer = layer_of(RECIPES[name], inputs, 64)
    assert kept(layer, x * 1) == KEPT[name](tokens, inputs)
    layer.weight.requires_grad_(False)
    assert kept(layer, x * 1) == 0, "the gradient that the input is kept for is not wanted"


@EVERY_RECIPE
def test_each_operand_is_rounded_once_where_its_scales_are_the_same_both_ways(name, monkeypatch):
    quantized, seen = linear.quantized, []
    for module in (linear, linear.transposed.__globals__):
        target = module if isinstance(module, dict) else vars(module)
        monkeypatch.setitem(target, "quantized", lambda x, *how: seen.append(x.shape) or quantized(x, *how))
    layer, x = layer_of(RECIPES[name], 96, 64), torch.randn(32, 96, requires_grad=True)
    layer(x).sum().backward()
    # Input, gradient of the output and weight; the last anew in backward, where nothing keeps it.
    assert len(seen) == {"fp8": 4, "fp8 rowwise_with_gw_hp": 4}.get(name, 6)


def test_a_write_to_the_weight_before_its_backward_pass_raises_and_one_to_the_input_does_not():
    layer, x = layer_of(RECIPES["fp8"], 32, 32), torch.randn(16, 32, requires_grad=True)
    expected = results(layer, x.detach(), torch.ones(16, 32))["weight"]
    layer.zero_grad()
    inner = x * 1
    y = layer(inner)
    inner.detach().zero_()
    y.sum().backward()
    assert torch.equal(layer.weight.grad, expected)
    y = layer(x * 1)
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
