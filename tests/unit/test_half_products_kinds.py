"""Every kind of product in float32: against float64 and torch's own halves, on drawn shapes, and at the edges."""

import itertools
import re
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from test_half_products import (
    HALVES,
    OPERATIONS,
    Seen,
    check_products,
    check_rounded,
    exact,
    fp16_precision,
    numbers,
    widened,
)
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.mixed_precision import (
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    hardware,
)
from booster.mixed_precision.half_products import float32_products
from booster.mixed_precision.half_products.product_choice import HalfProducts


def drawn(generator, *bounds):
    return [int(torch.randint(1, bound, (), generator=generator)) for bound in bounds]


# ---------------------------------------------------------------------- kinds that are a sum of products


def _addbmm(g):
    b, m, k, n = drawn(g, 5, 20, 50, 20)
    return torch.addbmm, ((m, n), (b, m, k), (b, k, n)), {}, b * k + 1


def _addmv(g):
    m, k = drawn(g, 40, 70)
    return torch.addmv, ((m,), (m, k), (k,)), {}, k + 1


def _tensordot(g):
    a, b, c, d = drawn(g, 8, 8, 8, 8)
    return torch.tensordot, ((a, b, c), (b, c, d)), {"dims": 2}, b * c


def _inner(g):
    m, n, k = drawn(g, 20, 20, 60)
    return torch.inner, ((m, k), (n, k)), {}, k


def _matmul_of_batches(g):
    a, b, m, k, n = drawn(g, 4, 4, 12, 40, 12)
    return torch.matmul, ((a, 1, m, k), (b, k, n)), {}, k


def _depthwise(g):
    n, c, side, dilation = *drawn(g, 3, 8), int(torch.randint(7, 12, (), generator=g)), drawn(g, 4)[0]
    options = {"groups": c, "dilation": dilation, "padding": dilation}
    return F.conv2d, ((n, c, side, side), (2 * c, 1, 3, 3), (2 * c,)), options, 10


def _conv_transpose1d(g):
    n, c, o, side = drawn(g, 4, 6, 6, 12)
    options = {"stride": 3, "padding": 1, "output_padding": 1, "dilation": 2, "groups": 2}
    return F.conv_transpose1d, ((n, 2 * c, side), (2 * c, o, 3), (2 * o,)), options, 3 * c + 1


def _conv_transpose3d(g):
    n, c, o, side = drawn(g, 3, 4, 4, 5)
    return F.conv_transpose3d, ((n, c, side, side, side), (c, o, 2, 2, 2)), {"stride": 2}, 8 * c


def _unbatched_conv1d(g):
    c, o, side = drawn(g, 6, 6, 20)
    return F.conv1d, ((c, side + 4), (o, c, 5), (o,)), {}, 5 * c + 1


def _grouped(g):
    groups, k, n = drawn(g, 5, 8, 4)  # of rows in steps of 16 bytes, which torch wants
    ends = torch.randint(12, (groups,), generator=g).cumsum(0).int()

    def grouped(x, weights):
        if x.dtype != torch.float64:
            return F.grouped_mm(x, weights, offs=ends)
        return torch.cat([x[start:end] @ each for start, end, each in zip([0, *ends], ends, weights, strict=False)])

    return grouped, ((int(ends[-1]), 8 * k), (groups, 8 * k, 8 * n)), {}, 8 * k


def _bilinear(g):
    m, i, j, k = drawn(g, 12, 12, 12, 12)
    return F.bilinear, ((m, i), (m, j), (k, i, j), (k,)), {}, i * j + 1


def _addr(g):
    m, n = drawn(g, 20, 20)
    return torch.addr, ((m, n), (m,), (n,)), {}, 2


MORE = {
    make.__name__.strip("_"): make
    for make in (
        _addbmm, _addmv, _tensordot, _inner, _matmul_of_batches, _depthwise, _conv_transpose1d, _conv_transpose3d,
        _unbatched_conv1d, _grouped, _bilinear, _addr,
    )
}  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("operation", MORE)
def test_further_products_and_their_gradients_are_the_exact_ones_rounded_once_up_to_the_sums_bound(operation, dtype):
    check_products(MORE[operation], operation, dtype)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("operation", [*OPERATIONS, *MORE])
def test_a_result_is_torchs_own_up_to_the_bounds_of_both(operation, dtype):
    """Torch rounds once, too, or after the sum and once more with what is added to it."""
    generator = torch.Generator().manual_seed(9)
    for trial in range(20):
        function, shapes, options, count = ({**OPERATIONS, **MORE})[operation](generator)
        operands = [numbers(shape, dtype, generator, 0.5) for shape in shapes]
        native = function(*operands, **options)
        with widened():
            found = function(*operands, **options)
        _, magnitude = exact(function, operands, options)
        info = torch.finfo(dtype)
        bound = (2 * info.eps + 2 * count * torch.finfo(torch.float32).eps) * magnitude[0] + info.tiny * info.eps
        assert found.shape == native.shape
        assert found.stride() == native.stride()
        assert (found.double() - native.double()).abs().le(bound).all(), (operation, trial)


# ---------------------------------------------------------------------- kinds with functions between their products


def attention(generator, dtype):
    """Shapes, masks and heads of a drawn attention, as a function of query, key and value."""
    b, h, t, s, e = drawn(generator, 3, 4, 12, 12, 12)
    kind = trial_of(generator, 4)
    mask = torch.randn(t, s, generator=generator).to(dtype) if kind == 1 else None
    mask = torch.randn(t, s, generator=generator) > -1 if kind == 2 else mask
    if kind == 2:
        mask[:, 0] = True  # a row of nothing is NaN everywhere

    def function(q, k, v):
        added = mask.to(q.dtype) if kind == 1 else mask
        return F.scaled_dot_product_attention(q, k, v, added, is_causal=kind == 3)

    return function, [(b, h, t, e), (b, h, s, e), (b, h, s, e)]


def trial_of(generator, kinds):
    return int(torch.randint(kinds, (), generator=generator))


def recurrent(name):
    def make(generator, dtype):
        steps, batch, width, inside = drawn(generator, 6, 4, 8, 8)
        layers, both = 1 + trial_of(generator, 2), bool(trial_of(generator, 2))
        layer = getattr(nn, name)(width, inside, layers, bidirectional=both)
        flat = [param.shape for param in layer.parameters()]
        function = getattr(torch, {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}[name])

        def call(x, *weights):
            state = torch.zeros(layers * (1 + both), batch, inside, dtype=x.dtype)
            hidden = (state, state) if name == "LSTM" else state
            return function(x, hidden, list(weights), True, layers, 0.0, True, both, False)[0]

        return call, [(steps, batch, width), *flat]

    return make


BETWEEN = {"attention": attention, **{name: recurrent(name) for name in ("LSTM", "GRU", "RNN")}}


@pytest.mark.slow_cases("GRU")
@pytest.mark.crossed
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", BETWEEN)
def test_attention_and_recurrent_layers_are_within_a_rounding_of_float64_on_drawn_shapes(kind, dtype):
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    for trial in range(60):
        function, shapes = BETWEEN[kind](generator, dtype)
        operands = [numbers(shape, dtype, generator, 0.5).requires_grad_() for shape in shapes]
        with widened(), Seen() as seen:
            out = function(*operands)
        assert not set().union(*seen.dtypes.values()) & set(HALVES)
        grad = numbers(out.shape, dtype, generator)
        wide = [each.detach().double().requires_grad_() for each in operands]
        exactly = function(*wide)
        found = (out, *torch.autograd.grad(out, operands, grad))
        expected = (exactly, *torch.autograd.grad(exactly, wide, grad.double()))
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == dtype
            # One rounding, and what float32 loses on the way through some hundred sums and functions.
            loose = 1e-5 * max(1.0, other.abs().max().item())
            torch.testing.assert_close(
                one.double(), other, rtol=torch.finfo(dtype).eps / 2, atol=loose, msg=f"{kind} {trial}"
            )


# ---------------------------------------------------------------------- edges


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_padding_modes_are_those_of_float64(dtype, mode):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3, stride=2, padding=(2, 1), dilation=2, groups=2, padding_mode=mode).to(dtype)
    x = torch.randn(2, 4, 9, 8).to(dtype)
    with widened(), Seen() as seen:
        found = layer(x)
    exactly = layer.double()(x.double())
    assert seen.dtypes["convolution"] == {torch.float32}
    torch.testing.assert_close(found.double(), exactly, rtol=torch.finfo(dtype).eps / 2, atol=1e-6)


EMPTY = {
    "linear of no rows": lambda t: F.linear(t(0, 4), t(3, 4), t(3)),
    "linear of no columns": lambda t: F.linear(t(2, 0), t(3, 0), t(3)),
    "bmm of no matrices": lambda t: torch.bmm(t(0, 2, 3), t(0, 3, 4)),
    "einsum of nothing": lambda t: torch.einsum("bi,bj->ij", t(0, 2), t(0, 3)),
    "convolution of no images": lambda t: F.conv2d(t(0, 3, 8, 8), t(4, 3, 3, 3)),
    "attention of no samples": lambda t: F.scaled_dot_product_attention(t(0, 2, 4, 8), t(0, 2, 4, 8), t(0, 2, 4, 8)),
    "dot of nothing": lambda t: torch.dot(t(0), t(0)),
    "dot": lambda t: torch.dot(t(5), t(5)),
    "matmul of vectors": lambda t: t(5) @ t(5),
    "einsum to no dimensions": lambda t: torch.einsum("i,i->", t(5), t(5)),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", EMPTY)
def test_empty_shapes_and_results_without_dimensions_are_torchs_with_gradients(name, dtype):
    def run():
        torch.manual_seed(0)
        leaves = []

        def tensor(*shape):
            leaves.append(torch.randn(shape).to(dtype).requires_grad_())
            return leaves[-1]

        out = EMPTY[name](tensor)
        return out, *torch.autograd.grad(out.float().sum(), leaves, allow_unused=True)

    native = run()
    with widened():
        found = run()
    for one, other in zip(found, native, strict=True):
        if other is None:
            assert one is None or not one.any()
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        torch.testing.assert_close(one, other, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)


def test_a_scalar_does_not_multiply_a_matrix_here_either():
    with widened(), pytest.raises(RuntimeError):
        torch.ones((), dtype=torch.float16) @ torch.ones(2, 2, dtype=torch.float16)


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda a, b, out: torch.mm(a, b, out=out), (3, 3)),
        (lambda a, b, out: torch.matmul(a, b, out=out), (3, 3)),
        (lambda a, b, out: torch.addmm(torch.ones(3).to(a), a, b, out=out), (3, 3)),
        (lambda a, b, out: torch.bmm(a[None], b[None], out=out), (1, 3, 3)),
        (lambda a, b, out: torch.linalg.multi_dot([a, b], out=out), (3, 3)),
        (lambda a, b, out: torch.mv(a, b[:, 0], out=out), (3,)),
    ],
    ids=["mm", "matmul", "addmm", "bmm", "multi_dot", "mv"],
)
def test_out_is_written_where_it_lies_in_float16_and_stays_float32_where_torch_has_it_so(call, shape):
    torch.manual_seed(0)
    a, b = torch.randn(3, 4).half(), torch.randn(4, 3).half()
    expected = call(a, b, torch.empty(shape, dtype=torch.float16))
    into = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=torch.float16)
    strided = into[..., ::2]
    with widened():
        assert call(a, b, strided) is strided
        with pytest.raises(RuntimeError):
            call(a, b, torch.empty(shape, dtype=torch.int32))
    torch.testing.assert_close(strided, expected, rtol=2e-3, atol=1e-3)
    assert not into[..., 1::2].any()


def products(x, image, q, w, kernel):
    """One of each kind that is differentiated twice."""
    return {
        "linear": F.linear(x, w),
        "conv2d": F.conv2d(image, kernel, padding=1).flatten(1)[:, :8],
        "conv_transpose2d": F.conv_transpose2d(image, kernel, stride=2).flatten(1)[:, :8],
        "einsum": torch.einsum("bi,ji,bk->bj", x, w, x),
    }


@pytest.mark.parametrize("kind", ["linear", "conv2d", "conv_transpose2d", "einsum"])
def test_gradients_of_gradients_of_each_kind_are_those_of_float64(kind):
    torch.manual_seed(0)
    leaves = [torch.randn(shape).bfloat16() for shape in ((4, 8), (4, 3, 6, 6), (1, 1, 5, 4), (8, 8), (3, 3, 3, 3))]

    def penalty(tensors):
        inputs = [each.clone().requires_grad_() for each in tensors]
        out = products(*inputs)[kind]
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True, allow_unused=True)
        found = torch.autograd.grad(
            sum(each.square().sum() for each in first if each is not None), inputs, allow_unused=True
        )
        return [each for each in found if each is not None]

    with widened():
        found = penalty(leaves)
    expected = penalty([each.double() for each in leaves])
    assert len(found) == len(expected) >= 2
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        # Half a dozen roundings of bfloat16 one after the other, of numbers as large as the largest.
        loose = 8 * 2**-8 * other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=8 * 2**-8, atol=loose)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch uses it itself, for forward mode
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("transform", ["forward mode", "vmap", "grad", "vmap of grad"])
@pytest.mark.parametrize("name", ["linear", "conv2d", "conv_transpose2d", "attention", "einsum", "bmm"])
def test_a_transform_gives_the_numbers_of_torch_for_each_kind(name, transform):
    if (name, transform) == ("attention", "forward mode"):
        pytest.skip("torch does not differentiate its flash kernel forward")
    torch.manual_seed(0)
    x, w = {
        "linear": (torch.randn(4, 6), torch.randn(5, 6)),
        "conv_transpose2d": (torch.randn(2, 3, 4, 4), torch.randn(3, 4, 3, 3)),
        "conv2d": (torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)),
        "attention": (torch.randn(2, 5, 8), torch.randn(2, 5, 8)),
        "einsum": (torch.randn(4, 6), torch.randn(6, 6)),
        "bmm": (torch.randn(2, 4, 4), torch.randn(2, 4, 4)),
    }[name]
    x, w = x.bfloat16(), w.bfloat16()
    call = {
        "linear": F.linear,
        "conv_transpose2d": lambda v, u: F.conv_transpose2d(v, u, stride=2),
        "conv2d": lambda v, u: F.conv2d(v, u),
        "attention": lambda v, u: F.scaled_dot_product_attention(v, u, u),
        "einsum": lambda v, u: torch.einsum("ij,jk->ik", v, u),
        "bmm": torch.bmm,
    }[name]
    batch = torch.stack([x, 2 * x, -x])

    def total(v):
        return call(v, w).float().sum()

    def run():
        if transform == "forward mode":
            return torch.func.jvp(lambda v: call(v, w), (x,), (x,))[1]
        if transform == "vmap":
            return torch.func.vmap(lambda v: call(v, w))(batch)
        return torch.func.grad(total)(x) if transform == "grad" else torch.func.vmap(torch.func.grad(total))(batch)

    native = run()
    w.requires_grad_()  # a weight that is kept must not outlive a transform
    with widened():
        here = run(), run()
    for found in here:
        assert found.dtype == native.dtype
        loose = 2**-6 * max(1.0, native.abs().max().item())
        torch.testing.assert_close(found, native, rtol=2**-6, atol=loose)


# ---------------------------------------------------------------------- torch's own shortcuts


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_naive", "fp16_naive"])
def test_the_fused_encoder_layer_of_evaluation_makes_no_product_in_half(precision):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 16)
    model, *_ = Booster("cpu", fp16_precision(precision), half_products="float32").boost(net)
    model.eval()
    with torch.no_grad(), Seen() as seen:
        model(x)
    assert seen.dtypes
    assert set().union(*seen.dtypes.values()) == {torch.float32}, seen.dtypes


# ---------------------------------------------------------------------- products that autocast has no rule for


class Grouped(nn.Module):
    def __init__(self, checkpointed=None):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 16, 8))
        self.checkpointed = checkpointed

    def multiply(self, x, ends):
        return F.grouped_mm(x, self.weights, offs=ends)

    def forward(self, x, ends):
        if self.checkpointed is None:
            return self.multiply(x, ends)
        return checkpoint(self.multiply, x, ends, use_reentrant=self.checkpointed)


@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["plain", "reentrant checkpoint", "checkpoint"])
@pytest.mark.parametrize("half_products", ["native", "float32"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_product_of_groups_runs_in_the_half_of_autocast_with_gradients_of_float64(dtype, half_products, checkpointed):
    g = torch.Generator().manual_seed(0)
    precision = BF16MixedPrecision if dtype == torch.bfloat16 else partial(FP16TorchMixedPrecision, init_scale=1.0)
    model = Grouped(checkpointed)
    b = Booster("cpu", precision(output_dtype=None), half_products=half_products)
    boosted, optimizer, *_ = b.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    ends, x, grad = torch.tensor([2, 2, 9], dtype=torch.int32), torch.randn(9, 16, generator=g).requires_grad_(), None
    with torch.no_grad():
        assert boosted(x, ends).dtype == dtype
    out = boosted(x, ends)
    grad = numbers(out.shape, dtype, g)
    b.backward((out * grad).float().sum(), optimizer)

    def exactly(x, weights):
        return torch.cat([x[:2] @ weights[0], x[2:] @ weights[2]])

    found = out.detach(), x.grad, model.weights.grad
    operands = [each.detach().to(dtype) for each in (x, model.weights)]
    for one, other, size, count in zip(found, *exact(exactly, operands, {}, grad), (16, 8, 9), strict=True):
        assert torch.equal(one.to(dtype).to(one.dtype), one)  # of float32 weights, but of halves
        check_rounded(one.to(dtype), other, size, dtype, count, half_products)


def test_only_models_that_hold_several_matrices_in_one_parameter_pay_for_a_mode_where_nothing_is_widened():
    for model, pays in [
        (nn.Linear(2, 2), False),
        (nn.Conv1d(2, 2, 3), False),
        (nn.utils.parametrizations.weight_norm(nn.ConvTranspose1d(2, 2, 3)), False),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), False),
        (nn.Bilinear(2, 2, 2), True),
        (nn.Sequential(Grouped()), True),
    ]:
        for precision in (BF16MixedPrecision(), BF16NaiveMixedPrecision()):
            products = precision.half_products
            products.choose("native")
            precision.convert(model)
            has_rules = pays and precision.policy.compute is not None
            assert products.widens == has_rules
            assert (products.forward_context("cuda") is not None) == has_rules


@contextmanager
def on_cuda(dtype):
    """Inside, tensors are such of a GPU, which have dtypes and no numbers, under autocast: so torch's rules are CUDA's."""
    with FakeTensorMode(), torch.device("cuda"):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", torch.float16)


def test_a_product_of_groups_runs_in_half_on_a_gpu():
    products = HalfProducts(torch.bfloat16)
    products.inspect(Grouped())
    with on_cuda(torch.bfloat16):
        operands = torch.ones(9, 16), torch.ones(3, 16, 8), torch.tensor([2, 2, 9], dtype=torch.int32)
        with products.forward_context("cuda"):
            out = F.grouped_mm(*operands[:2], offs=operands[2])
        assert (out.dtype, out.device.type) == (torch.bfloat16, "cuda")


RULES = {  # that autocast has on CUDA alone; of each the shapes of operands
    torch.mv: ((3, 4), (4,)),
    torch.addmv: ((3,), (3, 4), (4,)),
    torch.addr: ((3, 4), (3,), (4,)),
    torch.dot: ((4,), (4,)),
    torch.vdot: ((4,), (4,)),
    torch.cross: ((2, 3), (2, 3)),
    F.bilinear: ((3, 4), (3, 5), (2, 4, 5)),
}


@pytest.mark.parametrize("function", RULES, ids=lambda function: function.__name__)
def test_where_a_cpu_has_no_rule_of_autocast_that_of_cuda_holds(function):
    options = {"dim": 1} if function is torch.cross else {}
    for halves in itertools.product((torch.float32, torch.bfloat16), repeat=len(RULES[function])):
        with on_cuda(torch.bfloat16):
            on_gpu = [torch.ones(shape, dtype=dtype) for shape, dtype in zip(RULES[function], halves, strict=True)]
            expected = function(*on_gpu, **options).dtype
        for kinds in (hardware.KINDS, frozenset()):
            mode = widened(kinds)
            mode.casts = True
            operands = [torch.ones(shape, dtype=dtype) for shape, dtype in zip(RULES[function], halves, strict=True)]
            with torch.autocast("cpu", torch.bfloat16), mode:
                found = function(*operands, **options)
            assert found.dtype == expected, (halves, kinds)
            bound = torch.finfo(found.dtype).eps * function(*(each.float() for each in operands), **options).abs()
            exactly = function(*(each.double() for each in operands), **options)
            assert (found.double() - exactly).abs().le(bound).all()


class Scores(nn.Module):
    def __init__(self, function, *shapes):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.others = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x), *self.others)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_autocast_casts_on_no_cpu_works_or_says_which_function_it_is(precision):
    x = torch.randn(4, 4)
    bilinear = nn.Sequential(nn.Linear(4, 4), Scores(lambda y, w: F.bilinear(y, y, w), (2, 4, 4)))
    for choice in ("native", "float32"):
        boosted, *_ = Booster("cpu", precision, half_products=choice).boost(bilinear)
        assert boosted(x).isfinite().all()
        with torch.no_grad():
            assert boosted(x).isfinite().all()
    model = Scores(torch.mv, (4,))
    boosted, *_ = Booster("cpu", precision, half_products="float32").boost(model)
    assert boosted(x).isfinite().all()
    boosted, *_ = Booster("cpu", precision, half_products="native").boost(model)
    said = r"(addmv input tensors|expected scalar type) .*test_half_products_kinds\.py:\d+ in forward .* for mv,"
    with pytest.raises(RuntimeError, match=said):
        boosted(x)
    boosted, *_ = Booster("cpu", precision).boost(Scores(lambda y, w: w.clone().addmm_(y, y), (4, 4)))
    with pytest.raises(RuntimeError, match=r"no rule that casts them for it.* but for none in place"):
        boosted(x)


def test_groups_whose_rows_are_no_multiple_of_8_halves_say_so():
    model = Grouped()
    model.weights = nn.Parameter(torch.randn(3, 16, 12))  # its rows are one of 16 bytes in float32
    boosted, *_ = Booster("cpu", "bf16", half_products="native").boost(model)
    with pytest.raises(RuntimeError, match=r"halves in rows of a multiple of 8 numbers; .*set_experts_implementation"):
        boosted(torch.randn(9, 16), torch.tensor([2, 2, 9], dtype=torch.int32))


PRODUCT = re.compile(
    r"(?:^|_)(?:\w*(?:mm|mv|dot|matmul|linear|attention)|addr|ger|outer|inner|kron|cross|einsum|lstm|gru|rnn|cell|conv)(?:_|$|\d)"
)
OF_ONE_BACKEND = re.compile(  # or of numbers that are not floating, or that the caller scales
    r"_?(?:cudnn|use_cudnn|miopen|mkldnn|fbgemm|quantized|flash|triton|lstm_mps|cslt|sparse_semi)|"
    r"_(?:scaled|int_mm|weight_int|mixed_dtypes|dyn_quant|wrapped)"
)
WITHOUT_RULE = {
    "elementwise, in the dtype that `*` gives": "ger kron outer",
    "made of products that have one": "matmul rnn_relu rnn_tanh lstm gru rnn_relu_cell rnn_tanh_cell lstm_cell gru_cell "
    "_sparse_mm _sparse_addmm _foreach_mm",
    "called by functions of the table": "_trilinear _compute_linear_combination _addmm_activation "
    "_native_multi_head_attention",
    "written in place": "addmm_ addmv_ addbmm_ baddbmm_ addr_",
    "of sparse numbers, in float32 alone": "hspmm smm sspaddmm _sparse_sparse_matmul sparse_sampled_addmm",
}


def test_every_product_that_torch_has_is_cast_under_autocast_or_known_not_to_be():
    """By the dispatcher's own table; where this fails, torch has a new one, which goes into `_PRODUCTS` or above."""
    ours = {func.__name__ for func, (_, rule, _) in float32_products._PRODUCTS.items() if rule in ("half", "widest")}
    assert ours >= {"_grouped_mm", "mv", "addmv", "addr", "dot", "vdot", "inner", "bilinear", "cross"}
    treated = ours.union(*(names.split() for names in WITHOUT_RULE.values()))
    untreated = set()
    for overload in torch._C._dispatch_get_all_op_names():
        space, _, name = overload.partition("::")
        name, _, variant = name.partition(".")
        plain = name.removeprefix("linalg_")
        callable_ = any(hasattr(each, plain) for each in (torch, F, torch.linalg, torch.Tensor))
        # Of convolutions "padding" calls the other; "dtype" is that of the result, which the caller says.
        other = variant in ("padding", "dtype") or variant.endswith("out") or "backward" in name
        if OF_ONE_BACKEND.match(name) or {name, plain} & treated:
            continue
        if space == "aten" and PRODUCT.search(name) and callable_ and not other:
            devices = ("AutocastCPU", "AutocastCUDA")
            if not all(torch._C._dispatch_has_kernel_for_dispatch_key(overload, device) for device in devices):
                untreated.add(overload)
    assert untreated == set()
