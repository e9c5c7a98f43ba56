"""Sums that torch's CPU kernels make in half are made in float32 and rounded once, where products of halves are widened."""

import contextlib
import contextvars
import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision
from booster.mixed_precision.half_products import half_sums
from booster.mixed_precision.half_products.product_choice import HalfProducts

EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def zeros(n):
    return torch.zeros(n, dtype=torch.long)


# Of a parameter of (4, 8), functions by which its first row, or first element, is taken n times.
TAKEN = {
    "embedding": lambda x, n: F.embedding(zeros(n), x),
    "embedding of a padding": lambda x, n: F.embedding(zeros(n), x, padding_idx=1),
    "embedding_bag": lambda x, n: F.embedding_bag(zeros(n)[:, None], x, mode="sum"),
    "embedding of a largest norm": lambda x, n: F.embedding(zeros(n), x, max_norm=2**0.5),
    "embedding of torch": lambda x, n: torch.embedding(x, zeros(n)),
    "embedding_bag of torch": lambda x, n: torch.embedding_bag(x, zeros(n), torch.arange(n))[0],
    "x[i]": lambda x, n: x[zeros(n)],
    "x[list]": lambda x, n: x[[0] * n],
    "x[i, j]": lambda x, n: x[zeros(n), zeros(n)],
    "x[:, i]": lambda x, n: x[:, zeros(n)],
    "x[..., i]": lambda x, n: x[..., zeros(n)],
    "x[i, None]": lambda x, n: x[zeros(n), None],
    "take": lambda x, n: x.take(zeros(n)),
    "index_select": lambda x, n: x.index_select(0, zeros(n)),
    "index_select of numbers": lambda x, n: x[0].index_select(0, zeros(n)),
    "index_select by names": lambda x, n: torch.index_select(input=x, dim=0, index=zeros(n)),
    "padding by the edge": lambda x, n: F.pad(x[None], (n, 0), mode="replicate"),
    "adaptive average": lambda x, n: F.adaptive_avg_pool1d(x[:1, :1], n),
    "interpolated by areas": lambda x, n: F.interpolate(x[None, :1, :1], size=n, mode="area"),
    "repeated by a tensor": lambda x, n: x.flatten().repeat_interleave(torch.tensor([n] + [1] * 31)),
    "repeated by names": lambda x, n: torch.repeat_interleave(x, dim=1, repeats=torch.tensor([n] + [1] * 7)),
    "sliding windows": lambda x, n: x.repeat(8, 1).flatten().unfold(0, 128, 1),
    "sliding views": lambda x, n: x.repeat(8, 1).flatten()[1:].as_strided((128, 128), (1, 1), 1),
    "sliding patches": lambda x, n: F.unfold(x.repeat(8, 1).view(1, 1, 2, 128), (1, 64)),
    "sliding averages": lambda x, n: F.avg_pool1d(x.repeat(8, 1).view(1, 1, 256), 128, 1),
    "sliding averages of planes": lambda x, n: nn.AvgPool2d((1, 64), stride=1)(x.repeat(8, 1).view(1, 1, 2, 128)),
    "adaptive maximum": lambda x, n: F.adaptive_max_pool1d(x[:1, :1], n),
    "adaptive maximum of planes": lambda x, n: nn.AdaptiveMaxPool2d((n // 8, 8))(x[None, :1, :1]),
    "adaptive maximum of volumes": lambda x, n: F.adaptive_max_pool3d(x[None, None, :1, :1], (1, n // 8, 8), True)[0],
    # Of zeros around a single one.
    "sliding maximum": lambda x, n: F.max_pool1d(F.pad(x[:1, :1], (1024, 1024)), 1025, 1),
    "sliding maximum of planes": lambda x, n: nn.MaxPool2d((1, 1025), 1)(F.pad(x[None, :1, :1], (1024, 1024))),
    "sliding maximum of volumes": lambda x, n: F.max_pool3d(
        F.pad(x[None, None, :1, :1], (1024, 1024)), kernel_size=(1, 1, 1025), stride=1, return_indices=True
    )[0],
    "fractional maximum": lambda x, n: F.fractional_max_pool2d(
        F.pad(x[None, :1, :1], (511, 511)), (1, 512), (1, 512), _random_samples=x.new_full((1, 1, 2), 0.5)
    ),
    "index_put": lambda x, n: torch.zeros(n, 8, dtype=x.dtype).index_put((torch.arange(n),), x[0]),
}
# Of n numbers, functions that add them up.
ADDED = {
    "index_add": lambda x, n: x.new_zeros(4).index_add(0, zeros(n), x)[0],
    "index_add_": lambda x, n: x.new_zeros(4).index_add_(0, zeros(n), x)[0],
    "index_put": lambda x, n: x.new_zeros(4).index_put((zeros(n),), x, accumulate=True)[0],
    "index_put_": lambda x, n: x.new_zeros(4).index_put_((zeros(n),), x, accumulate=True)[0],
    "index_put_ of rows": lambda x, n: torch.index_put_(x.new_zeros(4, 2), (zeros(n),), x[:, None], True)[0, 1],
    "put": lambda x, n: x.new_zeros(4).put(zeros(n), x, accumulate=True)[0],
    "put_": lambda x, n: x.new_zeros(4).put_(zeros(n), x, accumulate=True)[0],
    "index_reduce_": lambda x, n: x.new_zeros(1, 1).index_reduce_(0, zeros(n), x[:, None], "mean", include_self=False),
    "segment_reduce": lambda x, n: torch.segment_reduce(x, "sum", lengths=torch.tensor([n])),
    "coalesce": lambda x, n: torch.sparse_coo_tensor(zeros(n)[None], x, (4,)).coalesce().to_dense()[0],
    "to_dense": lambda x, n: torch.sparse_coo_tensor(zeros(n)[None], x, (4,)).to_dense()[0],
    "sparse product": lambda x, n: (torch.ones(1, n, dtype=x.dtype).to_sparse() @ x[:, None])[0, 0],
    "sparse.mm": lambda x, n: torch.sparse.mm(torch.ones(1, n, dtype=x.dtype).to_sparse(), x[:, None])[0, 0],
    "adaptive_avg_pool3d": lambda x, n: F.adaptive_avg_pool3d(x.view(1, 1, n // 64, 8, 8), 1),
    "fold": lambda x, n: F.fold(x.view(1, int(n**0.5), -1), (1, 2 * int(n**0.5) - 1), (1, int(n**0.5))).max(),
    "histc": lambda x, n: torch.histc(x.detach(), 2, 0, 1)[0] + 0 * x[0],
    "histogram": lambda x, n: torch.histogram(x.new_zeros(n), 1, range=(-1, 1), weight=x.detach())[0][0] + 0 * x[0],
    "sparse.sum": lambda x, n: torch.sparse.sum(
        torch.sparse_coo_tensor(torch.stack([torch.arange(n), zeros(n)]), x, (n, 2)), dim=0
    ).to_dense()[0],
    "avg_pool2d": lambda x, n: F.avg_pool2d(x.view(1, 1, n // 64, 64), (n // 64, 64)),
    "lp_pool1d": lambda x, n: F.lp_pool1d(x.view(1, 1, n), 2, n),
    "nanmean": lambda x, n: x.nanmean(),
    "scatter_reduce": lambda x, n: x.new_zeros(1).scatter_reduce(0, zeros(n), x, "mean", include_self=False),
}
# With weights of (4, 8), functions of n rows of ones, with a gradient that is a sum over the rows.
SUMMED = {
    "layer_norm": lambda w, x: F.layer_norm(x, (8,), None, w[0]),
    "layer_norm with both": lambda w, x: F.layer_norm(x, (8,), w[1], w[0]),
    "layer_norm by names": lambda w, x: F.layer_norm(x, normalized_shape=[8], bias=w[0], weight=w[1]),
}


def context(dtype):
    products = HalfProducts(dtype)
    products.choose("float32")
    return products.forward_context("cpu")


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(("count", "small"), [(4096, -1), (60000, -1), (60000, half_sums.SMALL)])
@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_many_times_gets_the_whole_sum_of_its_gradients(name, count, small, dtype, monkeypatch):
    monkeypatch.setattr(half_sums, "SMALL", small)
    param = nn.Parameter(torch.ones(4, 8, dtype=dtype))
    with context(dtype):
        out = TAKEN[name](param, count)
    assert out.dtype == dtype
    weights = torch.rand(out.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
    expected = TAKEN[name](wide, count)
    expected.backward(weights.double())
    torch.testing.assert_close(out.double(), expected)
    out.backward(weights)
    # Sums in float32 of up to 2**16 positive terms, off by at most 2**16 * 2**-24 of it, and one rounding.
    torch.testing.assert_close(param.grad.double(), wide.grad, rtol=EPS[dtype] + 2.0**-8, atol=0.0)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("count", [4096, 2**16])
@pytest.mark.parametrize("name", ADDED)
@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:Sparse invariant")
def test_what_adds_into_few_numbers_gives_the_whole_sum_and_its_gradient(name, count, dtype):
    # Of whole multiples of 2**-7, of which 2**16 are in the range of float16.
    terms = torch.rand(count, generator=torch.Generator().manual_seed(0)).add(0.5).mul(16 * 8).round().div(2**8)
    found, wide = terms.to(dtype).requires_grad_(), terms.to(dtype).double().requires_grad_()
    with context(dtype):
        out = ADDED[name](found, count)
    expected = ADDED[name](wide, count)
    assert out.dtype == dtype
    # Positive terms, as above, or multiples of a power of two that float32 holds, and one rounding each way.
    torch.testing.assert_close(out.double(), expected, rtol=EPS[dtype] + 2.0**-8, atol=0.0)
    out.backward(torch.ones_like(out))
    expected.backward(torch.ones_like(expected))
    # Gradients of a mean of 2**16 are subnormal in float16, to 2**-24.
    torch.testing.assert_close(found.grad.double(), wide.grad, rtol=EPS[dtype] + 2.0**-8, atol=2.0**-24)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.filterwarnings("ignore")
def test_no_function_of_the_list_sums_in_half_but_those_that_it_leaves(dtype):
    from benchmarks.half_sums import LEFT, wrong

    assert wrong(dtype, widened=True).keys() <= LEFT
    some = ["embedding", "index_put_", "replicate padding, 2d", "coalesce", "adaptive_avg_pool3d", "layer_norm rows"]
    assert list(wrong(dtype, widened=False, names=some)) == some  # it finds them


def test_tables_of_sparse_gradients_and_of_a_largest_norm_are_as_torch_has_them():
    found = []
    for mode in (contextlib.nullcontext(), context(torch.bfloat16)):
        table = nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
        with mode:
            F.embedding(zeros(2), table, max_norm=1.0)
            F.embedding_bag(zeros(2)[None] + 1, table, max_norm=2.0)
            out = F.embedding_bag(zeros(3)[:, None], table, mode="sum", sparse=True)
        out.sum().backward()
        assert table.grad.is_sparse
        found.append((table.detach(), table.grad.to_dense()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][0][:2, 0].tolist() != [1.0, 1.0]  # their rows were rescaled


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_log_softmax_are_those_of_float32(dim, dtype):
    gen = torch.Generator().manual_seed(0)
    scores = torch.randn((4096, 2) if dim == 0 else (2, 4096), generator=gen).to(dtype)
    grad = torch.rand(scores.shape, generator=gen).to(dtype)
    for call in (lambda x: F.log_softmax(x, dim), lambda x: x.log_softmax(dim), nn.LogSoftmax(dim)):
        found, wide = scores.clone().requires_grad_(), scores.double().requires_grad_()
        with context(dtype):
            out = call(found)
        out.backward(grad)
        call(wide).backward(grad.double())
        assert out.dtype == dtype
        assert (found.grad - wide.grad).norm() <= EPS[dtype] * wide.grad.norm()
        half = scores.clone().requires_grad_()
        torch.log_softmax(half, dim).backward(grad)
        assert (half.grad - wide.grad).norm() > EPS[dtype] * wide.grad.norm()  # torch's own


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    "call", [lambda x, w: F.layer_norm(x, (8,), w[0], w[1]), lambda x, w: F.embedding(zeros(3), w) * x]
)
def test_forward_mode_passes_through_what_is_summed_in_float32(call):
    gen = torch.Generator().manual_seed(0)
    x, w, along = (torch.randn(3, 8, generator=gen) for _ in range(3))

    def tangent(dtype, mode):
        weight, source = w[:2].to(dtype).requires_grad_(), x.to(dtype)
        with torch.autograd.forward_ad.dual_level(), mode:
            dual = torch.autograd.forward_ad.make_dual(weight, along[:2].to(dtype))
            return torch.autograd.forward_ad.unpack_dual(call(source, dual)).tangent

    found, wide = tangent(torch.bfloat16, context(torch.bfloat16)), tangent(torch.float64, contextlib.nullcontext())
    assert (found - wide).norm() <= 8 * 2.0**-8 * wide.norm()  # some eight roundings on the way


@pytest.mark.parametrize("training", [True, False])
def test_sums_are_float32_where_no_product_is_widened_and_torchs_own_where_native_is_asked_for(training):
    ones = torch.ones(4096, dtype=torch.bfloat16)
    found = {}
    for choice in ("auto", "native"):
        products = HalfProducts(torch.bfloat16, sdpa_fp32=False)
        products.choose(choice)
        products.kinds = frozenset()  # as on a CPU with units for halves
        products._plan()
        assert products.report() == ""
        with torch.set_grad_enabled(training), products.forward_context("cpu") or contextlib.nullcontext():
            found[choice] = ADDED["index_add"](ones, 4096).item()
    assert found == {"auto": 4096.0, "native": 256.0}
    products = HalfProducts(torch.bfloat16, sdpa_fp32=True)
    products.choose("native")
    with products.forward_context("cpu"):  # for attention
        assert ADDED["index_add"](ones, 4096).item() == 256.0


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("weights", ["half", "float32"])
@pytest.mark.parametrize("small", [-1, 2**18])
@pytest.mark.parametrize("name", SUMMED)
def test_a_layer_norm_sums_over_rows_in_float32(name, small, weights, dtype, monkeypatch):
    monkeypatch.setattr(half_sums, "SMALL", small)
    gen = torch.Generator().manual_seed(0)
    inputs = torch.randn(20000, 8, generator=gen).to(dtype).requires_grad_()
    param = nn.Parameter(torch.rand(4, 8, generator=gen).to(dtype if weights == "half" else torch.float32))
    grad = torch.rand(20000, 8, generator=gen).to(dtype)
    with context(dtype):
        out = SUMMED[name](param, inputs)
    assert out.dtype == dtype
    out.backward(grad)
    wide, wide_inputs = param.detach().double().requires_grad_(), inputs.detach().double().requires_grad_()
    expected = SUMMED[name](wide, wide_inputs)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected, rtol=EPS[dtype], atol=4 * EPS[dtype])
    assert (param.grad - wide.grad).abs().max() <= 2 * EPS[dtype] * wide.grad.abs().max()
    assert (inputs.grad - wide_inputs.grad).norm() <= EPS[dtype] * wide_inputs.grad.norm()


NORMS = {
    "layer": lambda x, w, b: F.layer_norm(x.movedim(1, -1), (8,), w, b).movedim(-1, 1),
    "group": lambda x, w, b: F.group_norm(x, 4, w, bias=b),
    "instance": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "group of torch": lambda x, w, b: torch.group_norm(x, 4, w, b),
    "instance of torch": lambda x, w, b: torch.instance_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
    "batch of torch": lambda x, w, b: torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
    "batch with statistics": lambda x, w, b: F.batch_norm(x, *x.new_zeros(2, 8, dtype=torch.float32), w, b, True),
}


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("weights", ["trained", "frozen", "none"])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_a_norm_are_not_off_by_the_rounding_of_its_mean(name, weights, layout, dtype):
    gen = torch.Generator().manual_seed(0)
    source = (torch.randn(4, 8, 16, 16, generator=gen) + 4).to(dtype).contiguous(memory_format=layout)
    grad = (torch.rand(4, 8, 16, 16, generator=gen) + 0.5).to(dtype)
    found = []
    for wide in (False, True):
        as_wanted = torch.float64 if wide else dtype
        affine = [torch.ones(8, dtype=as_wanted), torch.zeros(8, dtype=as_wanted)]
        affine = [None, None] if weights == "none" else [each.requires_grad_(weights == "trained") for each in affine]
        inputs = source.detach().to(as_wanted).requires_grad_()
        if wide and name == "batch with statistics":
            out = NORMS["batch"](inputs, *affine)
        else:
            with contextlib.nullcontext() if wide else context(dtype):
                out = NORMS[name](inputs, *affine)
        assert out.dtype == as_wanted
        out.backward(grad.to(as_wanted))
        found.append([each.grad.double() for each in (inputs, *affine) if each is not None and each.grad is not None])
    # One rounding of each gradient; sums in float32 of 1,024 terms of about 1, which nearly cancel in those of the weight.
    assert (found[0][0] - found[1][0]).norm() <= EPS[dtype] * found[1][0].norm()
    for one, other in zip(*(each[1:] for each in found), strict=True):
        assert (one - other).norm() <= EPS[dtype] * other.norm() + 1024 * 2.0**-21


def test_a_half_batch_norm_in_a_model_has_gradients_and_statistics_of_float32():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    x, weights = torch.randn(4, 8, 16, 16).add(4).bfloat16().float(), torch.rand(4, 8, 16, 16).bfloat16()
    plain = copy.deepcopy(norm)
    (plain(x) * weights.float()).sum().backward()
    half = BF16NaiveMixedPrecision(keep_fp32=(), output_to_fp32=False)
    model, *_ = Booster("cpu", half, half_products="float32").boost(norm)
    out = model(x)
    assert out.dtype == model.weight.dtype == torch.bfloat16
    out.backward(weights)
    torch.testing.assert_close(model.running_var, plain.running_var)
    off = (model.weight.grad.float() - plain.weight.grad).norm()
    assert off <= EPS[torch.bfloat16] * plain.weight.grad.norm()


@pytest.mark.parametrize("small", [-1, half_sums.SMALL])
def test_gradients_of_gradients_pass_through_what_is_summed_in_float32(small, monkeypatch):
    monkeypatch.setattr(half_sums, "SMALL", small)
    gen = torch.Generator().manual_seed(0)
    table = torch.randn(4, 8, generator=gen).to(torch.bfloat16).requires_grad_()
    bias = torch.randn(8, generator=gen).to(torch.bfloat16).requires_grad_()

    def penalty(table, bias):
        out = F.layer_norm(F.embedding(torch.tensor([0, 1, 1, 3]), table), (8,), None, bias)
        (grad,) = torch.autograd.grad(out.pow(2).sum(), table, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), table)[0]

    wide = penalty(table.detach().double().requires_grad_(), bias.detach().double().requires_grad_())
    with context(torch.bfloat16):
        found = penalty(table, bias)
    assert (found - wide).norm() <= 16 * 2.0**-8 * wide.norm()  # some eight roundings to bfloat16 on the way


# Of a half (32, 8), functions that take where the result goes, or its dtype.
INTO = {
    "prod": lambda x, **into: torch.prod(x, 0, **into),
    "logsumexp": lambda x, **into: torch.logsumexp(x, 0, **into),
    "nanmean": lambda x, **into: torch.nanmean(x, 0, **into),
    "index_add": lambda x, **into: torch.index_add(x, 0, zeros(32), x, **into),
    "index_reduce": lambda x, **into: torch.index_reduce(x, 0, zeros(32), x, "mean", **into),
    "scatter_reduce": lambda x, **into: torch.scatter_reduce(x, 0, zeros((32, 8)), x, "mean", **into),
    "index_select": lambda x, **into: torch.index_select(x, 0, zeros(3), **into),
    "take": lambda x, **into: torch.take(x, zeros(3), **into),
    "mm": lambda x, **into: torch.mm(x.T, x, **into),
}
WITH_DTYPE = {
    **{name: INTO[name] for name in ("prod", "nanmean")},
    "x.prod": lambda x, dtype: x.prod(dtype=dtype),
    "log_softmax": lambda x, dtype: torch.log_softmax(x, 0, dtype=dtype),
    "F.log_softmax": lambda x, dtype: F.log_softmax(x, 0, dtype=dtype),
    "x.log_softmax": lambda x, dtype: x.log_softmax(0, dtype),
    "sparse.sum": lambda x, dtype: torch.sparse.sum(x.to_sparse(), dtype=dtype),
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", INTO)
def test_a_result_goes_where_out_says(name, dtype):
    x = (torch.rand(32, 8, dtype=torch.float64) / 2 + 0.75).to(dtype)
    wide = INTO[name](x.double())
    for out in (
        torch.empty(wide.shape, dtype=dtype),
        torch.empty(0, dtype=dtype),
        torch.empty(2, *wide.shape, dtype=dtype)[1],
    ):
        with context(dtype):
            found = INTO[name](x, out=out)
        assert found is out
        assert out.dtype == dtype
        assert out.shape == wide.shape
        assert (out - wide).norm() <= 1.01 * EPS[dtype] * wide.norm()


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", WITH_DTYPE)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_result_has_the_dtype_that_is_asked_for_and_no_rounding_to_half(name, dtype, recorded):
    x = (torch.rand(32, 8, dtype=torch.float64) / 2 + 0.75).to(dtype)
    wide = WITH_DTYPE[name](x.double(), dtype=torch.float64)
    with context(dtype):
        found = WITH_DTYPE[name](x.requires_grad_(recorded), dtype=torch.float32)
    assert found.dtype == torch.float32
    assert (found.detach() - wide).norm() <= 64 * 2.0**-24 * wide.norm()


@pytest.mark.parametrize("precision", ["bf16_naive", "fp16_naive"])
def test_the_loss_of_classes_is_summed_in_float32_within_a_model(precision):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 16)

        def forward(self, x, y):
            return F.cross_entropy(self.layer(x), y, weight=torch.arange(1.0, 17.0).to(x.dtype), ignore_index=-1)

    torch.manual_seed(0)
    net = Masked()
    x, y = torch.randn(20000, 8), torch.randint(0, 16, (20000,))
    y[::2] = -1
    expected = net(x, y)
    expected.backward()
    wide = net.layer.weight.grad.clone()
    net.zero_grad()
    booster = Booster("cpu", precision)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    loss = model(x, y)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) <= 0.01 * expected.item()
    booster.backward(loss, optimizer)
    optimizer.unscale_grads()
    assert (model.layer.weight.grad - wide).norm() <= 0.03 * wide.norm()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_naive"])
@pytest.mark.parametrize("layout", ["coo"])
def test_products_with_sparse_matrices_train(precision, layout):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.register_buffer("adjacency", torch.eye(6).to_sparse(), persistent=False)

        def forward(self, x):
            return self.adjacency @ self.layer(x)

    torch.manual_seed(0)
    net, x = Graph(), torch.randn(6, 8)
    expected = net(x)
    booster = Booster("cpu", precision, half_products="float32")
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    out = model(x)
    assert (out.to_dense() - expected).norm() <= 4 * 2.0**-8 * expected.norm()
    booster.backward(out.mean(), optimizer)
    assert optimizer.step() or precision == "fp16"


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "bf16_naive"])
def test_a_checkpointed_layer_norm_is_summed_in_float32_again_in_backward(precision, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.norm, self.first(x), use_reentrant=reentrant)

    def bias_gradient():
        net = Checkpointed()
        booster = Booster("cpu", precision)
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=1e-3))
        booster.backward(model(torch.randn(4096, 8)).sum(), optimizer)
        return model.norm.bias.grad.tolist()

    assert contextvars.Context().run(bias_gradient) == [4096.0] * 8  # as if no product had run in this thread
