"""Products of halves computed in float32 on a CPU: what they are, which are, and what does not change."""

import contextvars
import functools
import logging
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.common.torch_internals.autograd_internals import num_function_modes
from booster.mixed_precision import (
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    hardware,
)
from booster.mixed_precision.configure import choose_half_products
from booster.mixed_precision.half_products import float32_products
from booster.mixed_precision.half_products.float32_products import Float32Products, Recomputation
from booster.mixed_precision.half_products.product_choice import HalfProducts

pytestmark = pytest.mark.usefixtures("nothing_compiled")

HALVES = [torch.bfloat16, torch.float16]
PRECISIONS = ["bf16", "fp16", "bf16_naive", "fp16_naive"]


def widened(kinds=hardware.KINDS, *, training=True):
    return Float32Products("cpu", kinds, Recomputation(), training=training)


def numbers(shape, dtype, generator, scale=1.0):
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


# ---------------------------------------------------------------------- against float64


def _pair(g, *dims):
    return [int(torch.randint(1, bound, (), generator=g)) for bound in dims]


def _mm(g):
    m, k, n = _pair(g, 40, 70, 40)
    return torch.mm, ((m, k), (k, n)), {}, k


def _addmm(g):
    m, k, n = _pair(g, 40, 70, 40)
    return torch.addmm, ((n,), (m, k), (k, n)), {"beta": 0.5, "alpha": 2.0}, 2 * k + 2


def _bmm(g):
    b, m, k, n = _pair(g, 5, 20, 50, 20)
    return torch.bmm, ((b, m, k), (b, k, n)), {}, k


def _baddbmm(g):
    b, m, k, n = _pair(g, 5, 20, 50, 20)
    return torch.baddbmm, ((b, m, n), (b, m, k), (b, k, n)), {}, k + 1


def _linear(g):
    b, t, k, n = _pair(g, 5, 20, 70, 40)
    return F.linear, ((b, t, k), (n, k), (n,)), {}, k + 1


def _matmul(g):
    b, m, k = _pair(g, 5, 20, 60)
    return torch.Tensor.matmul, ((b, m, k), (k,)), {}, k


def _einsum(g):
    b, i, j, k = _pair(g, 5, 20, 20, 60)
    return (lambda x, y: torch.einsum("bik,bjk->bij", x, y)), ((b, i, k), (b, j, k)), {}, k


def _dot(g):
    (k,) = _pair(g, 90)
    return torch.dot, ((k,), (k,)), {}, k


def _mv(g):
    m, k = _pair(g, 40, 70)
    return torch.mv, ((m, k), (k,)), {}, k


def _conv2d(g):
    n, c, o, side, groups = *_pair(g, 4, 6, 6), int(torch.randint(7, 14, (), generator=g)), 2
    stride, padding, dilation = _pair(g, 3, 3, 3)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return F.conv2d, ((n, 2 * c, side, side), (2 * o, c, 3, 3), (2 * o,)), options, 9 * c + 1


def _conv1d_same(g):
    n, c, o, side = _pair(g, 4, 8, 8, 30)
    return F.conv1d, ((n, c, side + 3), (o, c, 3)), {"padding": "same"}, 3 * c


def _conv3d(g):
    n, c, o = _pair(g, 3, 4, 4)
    return F.conv3d, ((n, c, 5, 6, 7), (o, c, 2, 3, 2)), {}, 12 * c


def _conv_transpose2d(g):
    n, c, o, side, stride = _pair(g, 4, 8, 8, 9, 3)
    return F.conv_transpose2d, ((n, c, side, side), (c, o, 3, 3), (o,)), {"stride": stride}, 9 * c + 1


OPERATIONS = {
    make.__name__.strip("_"): make
    for make in (
        _mm, _addmm, _bmm, _baddbmm, _linear, _matmul, _einsum, _dot, _mv, _conv2d, _conv1d_same, _conv3d, _conv_transpose2d
    )
}  # fmt: skip


def exact(function, operands, options, grad=None):
    """In float64: the result, its gradients, and the same of magnitudes, which bound the error of a sum."""
    found = []
    for part in (operands, [each.abs() for each in operands]):
        wide = [each.double().requires_grad_() for each in part]
        out = function(*wide, **options)
        g = torch.ones_like(out) if grad is None else grad.double()
        found.append((out.detach(), *torch.autograd.grad(out, wide, g.abs() if part is not operands else g)))
    return found


def check_rounded(found, exactly, magnitude, dtype, count, what):
    """One rounding to `dtype`, and the error of a sum of `count` products in float32."""
    unit, tiny = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = unit * exactly.abs() + (count + 4) * torch.finfo(torch.float32).eps * magnitude * (1 + unit) + tiny
    assert found.dtype == dtype
    assert (found.double() - exactly).abs().le(bound).all(), what


def check_products(draw, operation, dtype):
    """60 drawn products of a kind: each result and gradient is the exact one, rounded once."""
    generator = torch.Generator().manual_seed(5)
    for trial in range(60):
        function, shapes, options, count = draw(generator)
        operands = [numbers(shape, dtype, generator, 0.5).requires_grad_() for shape in shapes]
        with widened():
            out = function(*operands, **options)
        grad = numbers(out.shape, dtype, generator)
        found = (out.detach(), *torch.autograd.grad(out, operands, grad))
        exactly, magnitude = exact(function, [each.detach() for each in operands], options, grad)
        for index, (one, other, size) in enumerate(zip(found, exactly, magnitude, strict=True)):
            terms = count if index == 0 else out.numel() * 4 + count
            check_rounded(one, other, size, dtype, terms, f"{operation} trial {trial} result {index}")


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_widened_product_and_its_gradients_are_the_exact_ones_rounded_once_up_to_the_sums_bound(operation, dtype):
    check_products(OPERATIONS[operation], operation, dtype)


# ---------------------------------------------------------------------- the ends of the range


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_infinities_nan_and_subnormals_are_those_of_torch(dtype):
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    rows = torch.tensor([[info.max, info.max], [float("inf"), 1], [float("nan"), 1], [tiny, tiny], [tiny, 0]]).to(dtype)
    # Of one sign, as float32 sums overflow too: whether inf or NaN is left of terms that cancel is for the order of the sum.
    columns = torch.tensor([[1.0, -2.0], [1.0, -2.0]]).to(dtype)
    expected = rows @ columns
    with widened():
        found = rows @ columns
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert found[0, 0] == float("inf")
    assert found[2].isnan().all()
    assert found[4, 0] == tiny


def test_a_gradient_overflows_float16_as_natively():
    weight = torch.full((2, 2), 200.0, dtype=torch.float16, requires_grad=True)
    x = torch.full((1, 2), 200.0, dtype=torch.float16, requires_grad=True)
    for context in (torch.enable_grad(), widened()):
        with context:
            out = x @ weight.t()
        assert out.isinf().all()
        grads = torch.autograd.grad(out, (x, weight), torch.full_like(out, 500.0))
        assert all(each.isinf().all() for each in grads)


def test_strides_and_channels_last_stay():
    x = torch.randn(2, 4, 6, 6).half().contiguous(memory_format=torch.channels_last)
    weight = torch.randn(3, 4, 3, 3).half().contiguous(memory_format=torch.channels_last)
    wide = torch.randn(8, 12).half()
    with widened():
        out, product = F.conv2d(x, weight), wide[::2, ::3] @ wide[::3, ::3].t()
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        product, wide[::2, ::3].float() @ wide[::3, ::3].t().float(), check_dtype=False, rtol=1e-3, atol=1e-2
    )


def test_out_and_in_place_forms_write_where_they_are_told():
    a, b, into = torch.randn(3, 4).half(), torch.randn(4, 3).half(), torch.empty(3, 3, dtype=torch.float16)
    with widened():
        assert torch.mm(a, b, out=into) is into
        expected = torch.addmm(into, a, b)
        kept = into.clone()
        assert kept.addmm_(a, b) is kept
    assert torch.equal(kept, expected)
    leaf = a.clone().requires_grad_()
    with widened(), pytest.raises(RuntimeError, match="out="):
        torch.mm(leaf, b, out=into)


def test_dtypes_that_do_not_multiply_in_torch_do_not_here():
    with widened():
        with pytest.raises(RuntimeError):
            torch.randn(2, 2).half() @ torch.randn(2, 2)
        with pytest.raises(RuntimeError):
            torch.randn(2, 2).half() @ torch.randn(2, 2).bfloat16()
        assert (torch.randn(2, 2).double() @ torch.randn(2, 2).double()).dtype == torch.float64
        assert (torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64)).dtype == torch.int64


# ---------------------------------------------------------------------- what autograd keeps


class Casts(torch.utils._python_dispatch.TorchDispatchMode):
    """The memory of what was widened, and how often."""

    def __init__(self):
        super().__init__()
        self.memory = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype in HALVES and out.dtype == torch.float32:
            self.memory.append(StorageWeakRef(out.untyped_storage()))
        return out


def _lstm(g):
    sizes = (6, 2, 8), (1, 2, 8), (1, 2, 8), (32, 8), (32, 8), (32,), (32,)
    return (lambda x, h, c, *weights: torch.lstm(x, (h, c), weights, True, 1, 0.0, True, False, False)[0]), sizes, {}, 8


def _scaled_dot_product_attention(g):
    return F.scaled_dot_product_attention, ((2, 2, 8, 4),) * 3, {}, 8


@pytest.fixture
def none_is_small(monkeypatch):
    """Operands of a few elements are kept as large ones are."""
    monkeypatch.setattr(float32_products, "SMALL", -1)


@pytest.mark.usefixtures("none_is_small")
@pytest.mark.parametrize("naive", [True, False], ids=["half weights", "autocast"])
@pytest.mark.parametrize("make", [*OPERATIONS.values(), _lstm, _scaled_dot_product_attention])
def test_autograd_keeps_operands_in_half(make, naive):
    g = torch.Generator().manual_seed(0)
    function, shapes, options, _ = make(g)
    operands = [numbers(shape, torch.bfloat16 if naive else torch.float32, g).requires_grad_() for shape in shapes]
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16, enabled=not naive):
        with widened():
            out = function(*operands, **options)
        is_cast = naive or function is not torch.dot  # of the widest dtype, as on CUDA
        assert len(casts.memory) == (len(operands) if is_cast else 0)
        held = [memory for memory in casts.memory if not memory.expired()]
        out.float().sum().backward()
    assert not held
    assert all(operand.grad is not None for operand in operands)


@pytest.mark.parametrize("naive", [True, False], ids=["half weights", "autocast"])
@pytest.mark.parametrize("make", [*OPERATIONS.values(), _lstm, _scaled_dot_product_attention])
def test_what_autograd_keeps_of_small_operands_changes_no_bit_and_is_widened_once(make, naive, monkeypatch):
    function, shapes, options, _ = make(torch.Generator().manual_seed(0))
    found = []
    for small in (-1, float32_products.SMALL):
        monkeypatch.setattr(float32_products, "SMALL", small)
        g = torch.Generator().manual_seed(1)
        operands = [numbers(shape, torch.bfloat16 if naive else torch.float32, g).requires_grad_() for shape in shapes]
        with torch.autocast("cpu", torch.bfloat16, enabled=not naive), widened():
            out = function(*operands, **options)
        grad = numbers(out.shape, out.dtype, g)
        with Casts() as casts:
            gradients = torch.autograd.grad(out, operands, grad)
        found.append((out, *gradients))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert len(casts.memory) <= 1 + (0 if naive else len(operands))  # the gradient that comes, and those that go


@pytest.mark.parametrize("size", [float32_products.SMALL, float32_products.SMALL + 1])
def test_one_large_operand_has_all_of_a_product_kept_in_half(size):
    vectors = [torch.ones(size).bfloat16().requires_grad_() for _ in range(2)]
    with Casts() as casts, widened():
        out = torch.dot(*vectors)
    assert [memory.expired() for memory in casts.memory] == [size > float32_products.SMALL] * 2
    out.float().backward()


def test_a_weight_of_a_small_product_and_of_a_large_one_is_widened_once_and_freed():
    weight = torch.randn(4, 4).bfloat16().requires_grad_()
    x = torch.randn(2, 4).bfloat16()
    with Casts() as casts, widened():
        loss = F.linear(x, weight).float().sum() + F.linear(x.repeat(float32_products.SMALL, 1), weight).float().sum()
        assert len(casts.memory) == 3 + 2  # the sums, too
    loss.backward()
    exactly = (float32_products.SMALL + 1) * x.double().sum(0)
    torch.testing.assert_close(weight.grad.double(), exactly.expand(4, 4), rtol=2**-8, atol=0)
    del loss
    assert all(memory.expired() for memory in casts.memory)


@pytest.mark.usefixtures("none_is_small")
def test_a_weight_that_products_share_is_widened_once_in_the_backward_pass():
    x, weight = torch.randn(2, 4).bfloat16(), torch.randn(4, 4).bfloat16().requires_grad_()
    with widened():
        for _ in range(3):
            x = F.linear(x, weight)
    loss = x.float().sum()
    with Casts() as casts:
        loss.backward()
    gradients, inputs = 3, 3
    assert len(casts.memory) == gradients + inputs + 1
    assert all(memory.expired() for memory in casts.memory)


@pytest.mark.usefixtures("none_is_small")
@pytest.mark.parametrize("context", [nullcontext, widened])
def test_an_operand_that_is_written_to_before_backward_raises_as_in_torch(context):
    x, weight = torch.randn(2, 4).bfloat16(), torch.randn(4, 4).bfloat16().requires_grad_()
    with context():
        out = F.linear(x, weight)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*version 1; expected version 0"):
        out.float().sum().backward()


# ---------------------------------------------------------------------- of a boosted model


class Net(nn.Module):
    """Convolution, attention by a module and by the function, a recurrent layer, an einsum, and a linear layer used twice."""

    def __init__(self, recurrent=True):
        super().__init__()
        self.conv, self.attention = nn.Conv2d(3, 16, 4, 4), nn.MultiheadAttention(16, 2, batch_first=True)
        self.rnn = nn.LSTM(16, 16, batch_first=True) if recurrent else nn.Identity()
        self.twice, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.mix = nn.Parameter(torch.randn(16, 16) / 4)

    def body(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + F.scaled_dot_product_attention(*(x[:, None],) * 3)[:, 0]
        x = torch.einsum("btd,de->bte", x, self.mix)
        return self.twice(self.twice(x).relu())

    def forward(self, x):
        x = self.body(self.conv(x).flatten(2).transpose(1, 2))
        x = self.rnn(x)
        return self.head((x[0] if isinstance(x, tuple) else x).mean(1))


class Recomputed(Net):
    def __init__(self, reentrant):
        super().__init__(recurrent=False)
        self.reentrant = reentrant

    def body(self, x):
        return checkpoint(super().body, x, use_reentrant=self.reentrant)


def train(precision, choice, make=Net, steps=4):
    torch.manual_seed(0)
    b = Booster("cpu", precision, half_products=choice)
    net = make()
    model, optimizer, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=0.05))
    x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 4, (8,))
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x).float(), y)
        b.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().float() for name, value in net.named_parameters()}


def fp16_precision(name):
    """Of a low scale, so that no first step is skipped."""
    return FP16TorchMixedPrecision(init_scale=256.0) if name == "fp16" else name


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_naive", "fp16_naive", "O1", "O2", "O3"])
def test_every_precision_trains_the_same_widened_and_near_float32(precision):
    def chosen():
        if precision.startswith("O"):
            return FP16ApexMixedPrecision(precision, loss_scale=64.0, verbosity=0, backend="native")
        return fp16_precision(precision)

    here, _ = train(chosen(), "float32", steps=6)
    wide, _ = train("fp32", "auto", steps=6)
    assert here[-1] < here[0]
    # Eight bits of mantissa, or eleven, over a dozen layers and a few steps.
    torch.testing.assert_close(torch.tensor(here), torch.tensor(wide), rtol=0, atol=0.03)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_native_is_what_torch_computes_to_the_bit(precision):
    """A hand-written loop, in the layers that a recurrent or attention layer is not part of."""

    def make():
        return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(128, 4))

    half = torch.float16 if "fp16" in precision else torch.bfloat16
    torch.manual_seed(0)
    net, x, y = make(), torch.randn(8, 3, 16, 16), torch.randint(0, 4, (8,))
    b = Booster("cpu", precision, half_products="native")
    model, *_ = b.boost(net)
    boosted = model(x)
    if "naive" in precision:
        expected = net(x.to(half)).float()
    else:
        with torch.autocast("cpu", half):
            expected = net(x).float()
    assert torch.equal(boosted, expected)
    optimizer_grads = torch.autograd.grad(F.cross_entropy(boosted, y), net.parameters())
    for one, other in zip(
        optimizer_grads, torch.autograd.grad(F.cross_entropy(expected, y), net.parameters()), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_what_checkpointing_recomputes_is_widened_too_and_gradients_are_the_same_to_the_bit(precision, reentrant):
    plain = train(fp16_precision(precision), "float32", lambda: Net(recurrent=False), steps=2)
    again = train(fp16_precision(precision), "float32", lambda: Recomputed(reentrant), steps=2)
    assert plain[0] == again[0]
    # A weight used twice gets its gradients added in float32, but one after the other where a second pass recomputes.
    for name, value in plain[1].items():
        torch.testing.assert_close(again[1][name], value, rtol=2**-7, atol=2**-10, msg=name)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Which dtypes products that the engine runs have."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if any(part in name for part in ("mm", "convolution", "attention", "rnn_layer", "lstm")):
            for each in args:
                if isinstance(each, torch.Tensor) and each.is_floating_point():
                    self.dtypes.setdefault(name, set()).add(each.dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "make", [Net, lambda: Recomputed(False), lambda: Recomputed(True)], ids=["plain", "checkpoint", "reentrant"]
)
def test_no_product_of_a_step_is_made_in_half(precision, make):
    with Seen() as seen:
        train(fp16_precision(precision), "float32", make, steps=1)
    assert {"mm", "convolution", "convolution_backward"} <= set(seen.dtypes)
    assert set().union(*seen.dtypes.values()) == {torch.float32}, seen.dtypes


@pytest.mark.parametrize("precision", PRECISIONS)
def test_evaluation_is_widened_too_and_follows_weights_that_are_written_through_data(precision):
    net = Net()
    model, *_ = Booster("cpu", precision, half_products="float32").boost(net)
    model.eval()
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad(), Seen() as seen:
        before = model(x)
        net.head.weight.data.zero_()
        net.head.bias.data.fill_(3.0)
        after = model(x)
    assert set().union(*seen.dtypes.values()) == {torch.float32}
    assert not torch.equal(before, after)
    assert (after == 3).all()


def test_the_users_own_half_tensors_and_torch_are_as_before():
    net = nn.Linear(4, 4)
    model, *_ = Booster("cpu", "bf16_naive", half_products="float32").boost(net)
    model(torch.randn(2, 4))
    with Seen() as seen:
        torch.randn(2, 2).bfloat16() @ torch.randn(2, 2).bfloat16()
    assert seen.dtypes["mm"] == {torch.bfloat16}
    assert num_function_modes() == 0


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "make", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("naive", [True, False], ids=["half weights", "autocast"])
def test_recurrent_layers_train_and_return_the_dtypes_of_torch(make, dtype, naive):
    torch.manual_seed(0)
    layer, x = make(6, 6), torch.randn(3, 4, 6) if "Cell" not in make.__name__ else torch.randn(4, 6)
    exactly = make(6, 6).double()
    if naive:
        layer, x = layer.to(dtype), x.to(dtype)
    exactly.load_state_dict(layer.state_dict())

    def flat(out):
        return [out] if isinstance(out, torch.Tensor) else [leaf for each in out for leaf in flat(each)]

    with torch.autocast("cpu", dtype, enabled=not naive), widened():
        found = flat(layer(x))
    half_under_autocast = make in (
        nn.LSTM,
        nn.RNN,
        nn.RNNCell,
    )  # as torch returns them in bfloat16; float16 LSTMs raise there
    assert {each.dtype for each in found} == {dtype if naive or half_under_autocast else torch.float32}
    for one, other in zip(found, flat(exactly(x.double())), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=6 * torch.finfo(dtype).eps)
    sum(each.float().sum() for each in found).backward()
    assert all(param.grad is not None and param.grad.isfinite().all() for param in layer.parameters())


def test_a_weight_is_widened_once_in_a_forward_that_records_and_anew_after_it_is_written_to():
    weight, x = torch.randn(4, 4).bfloat16().requires_grad_(), torch.randn(2, 4).bfloat16()
    casts = []

    class Casts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and args[0].shape == (4, 4):
                casts.append(args[0])
            return func(*args, **(kwargs or {}))

    with widened(), Casts():
        for _ in range(3):
            F.linear(x, weight)
        assert len(casts) == 1
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(F.linear(x, weight), F.linear(x.float(), weight.float()).bfloat16())


@pytest.mark.parametrize("size", [4, 128], ids=["small", "large"])
def test_a_weight_is_rounded_anew_in_an_autocast_to_another_dtype(size):
    weight, x = torch.randn(size, size).requires_grad_(), torch.randn(2, size)
    with torch.autocast("cpu", torch.bfloat16), widened():
        F.linear(x, weight)
        with torch.autocast("cpu", torch.float16):
            found = F.linear(x, weight)
    assert torch.equal(found, F.linear(x.half().float(), weight.half().float()).half())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("choice", ["auto", "native", "float32"])
@pytest.mark.parametrize("sdpa_fp32", ["auto", True, False])
@pytest.mark.parametrize("training", [True, False])
def test_attention_is_a_row_of_the_table_that_sdpa_fp32_overrides(monkeypatch, dtype, choice, sdpa_fp32, training):
    """Torch's backward pass of attention in half is slow on every CPU, so "auto" widens it while training."""
    monkeypatch.setattr(hardware, "slow_products", lambda dtype: NONE)  # a CPU that has all units
    products = HalfProducts(dtype, sdpa_fp32)
    products.choose(choice)
    q = torch.randn(1, 2, 4, 8).to(dtype)
    with torch.set_grad_enabled(training), Seen() as seen, products.forward_context("cpu") or nullcontext():
        out = F.scaled_dot_product_attention(q, q, q)
    while_training = training and (choice == "auto" or sdpa_fp32 is True)
    wide = sdpa_fp32 is not False and (while_training or choice == "float32")
    assert set().union(*seen.dtypes.values()) == {torch.float32 if wide else dtype}
    assert out.dtype == dtype


def test_operands_of_attention_are_rounded_as_those_of_all_products():
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16), widened({"attention"}):
        found = F.scaled_dot_product_attention(q, k, v)
    rounded = [each.bfloat16().float() for each in (q, k, v)]
    assert torch.equal(found, F.scaled_dot_product_attention(*rounded).bfloat16())


# ---------------------------------------------------------------------- which products

# What oneDNN says of CPUs by these flags, and what is then computed in float32: (flags, limit, bfloat16, float16).
ALL, NONE, NOT_MM = hardware.KINDS, frozenset(), hardware.KINDS - {"matrix product"}
AMD, INTEL = ("avx512_bf16",), ("avx512_bf16", "avx512_fp16")
AMX = (*INTEL, "amx_bf16")
CPUS = {
    "AVX2": ((), None, ALL, ALL),
    "AVX512-BF16": (AMD, None, NONE, ALL),
    "AVX512-BF16 and FP16": (INTEL, None, ALL, NOT_MM),
    "AMX": (AMX, None, NONE, NOT_MM),
    "AMX-FP16": ((*AMX, "amx_fp16"), None, NONE, NOT_MM),
    "AMX, at AVX512_CORE_FP16": (AMX, "AVX512_CORE_FP16", ALL, NOT_MM),
    "AMX, at AVX512_CORE_BF16": (AMX, "avx512_core_bf16", ALL, ALL),
    "AMX, at AVX2": (AMX, "AVX2", ALL, ALL),
    "AVX512-BF16, at AVX512_CORE": (AMD, "AVX512_CORE", ALL, ALL),
    "AVX512-BF16, at a name that oneDNN ignores": (AMD, "AVX9000", NONE, ALL),
}


@pytest.fixture
def cpu(monkeypatch):
    def be(flags, limit=None, variable="ONEDNN_MAX_CPU_ISA"):
        for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
            monkeypatch.delenv(name, raising=False)
        if limit is not None:
            monkeypatch.setenv(variable, limit)
        has = {**dict.fromkeys(("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16"), False), "cpu_name": "Some CPU"}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**has, **dict.fromkeys(flags, True)})

    return be


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize("name", CPUS)
def test_auto_widens_what_the_units_that_onednn_uses_are_slow_at(cpu, name, variable):
    flags, limit, bfloat16, float16 = CPUS[name]
    cpu(flags, limit, variable)
    assert hardware.slow_products(torch.bfloat16) == bfloat16
    assert hardware.slow_products(torch.float16) == float16


def test_what_is_widened_is_said_once(cpu, caplog):
    caplog.set_level(logging.INFO, "booster.mixed_precision.half_products")
    cpu(())
    Booster("cpu", "fp32", half_products="auto").boost(nn.Linear(2, 2))
    Booster("cpu", BF16MixedPrecision(sdpa_fp32=False), half_products="native").boost(nn.Linear(2, 2))
    assert not caplog.messages
    b = Booster("cpu", "bf16")
    b.boost(nn.Linear(2, 2))
    b.boost(nn.Linear(2, 2))
    assert caplog.messages == [
        "bfloat16 is multiplied in float32, with operands and results rounded to bfloat16, where this CPU (Some CPU) is slower "
        "in it: attention, convolutions, matrix products, recurrent layers; half_products='native' and sdpa_fp32=False leave "
        "them to torch"
    ]


@pytest.mark.parametrize(
    ("sdpa_fp32", "choice", "reason"),
    [
        (False, "auto", None),
        (False, "native", None),
        ("auto", "native", None),
        ("auto", "auto", "this CPU (Some CPU) is slower in it"),
        (True, "native", "sdpa_fp32=True asks"),
    ],
)
def test_a_cpu_with_units_widens_attention_alone(cpu, caplog, sdpa_fp32, choice, reason):
    caplog.set_level(logging.INFO, "booster.mixed_precision.half_products")
    cpu(AMX)
    Booster("cpu", BF16MixedPrecision(sdpa_fp32=sdpa_fp32), half_products=choice).boost(nn.Linear(2, 2))
    assert caplog.messages == [
        "bfloat16 is multiplied in float32, with operands and results rounded to bfloat16, where "
        f"{reason}: attention while training; sdpa_fp32=False leaves it to torch"
    ] * (reason is not None)


@pytest.fixture
def entered(monkeypatch):
    """Each time that a mode is entered."""
    times, enter = [], Float32Products.__enter__
    monkeypatch.setattr(Float32Products, "__enter__", lambda self: (times.append(1), enter(self))[1])
    return times


@pytest.mark.parametrize("precision", PRECISIONS)
def test_native_enters_nothing(cpu, precision, entered):
    cpu(())
    train(fp16_precision(precision), "native", partial(nn.Sequential, nn.Flatten(), nn.Linear(768, 4)), 1)
    assert not entered
    assert HalfProducts(torch.bfloat16).forward_context("cuda") is None


@pytest.mark.parametrize("make", [BF16MixedPrecision, BF16NaiveMixedPrecision])
def test_a_cpu_with_units_makes_few_calls_more_than_native_for_sums_and_attention(cpu, make, entered):
    from test_calls import warm

    cpu(AMX)
    native = warm(make(sdpa_fp32=False), half_products="native")
    assert not entered
    # What is to see sums and attention makes a context, and is asked of each torch function: of the layer, here. A backward
    # pass asks whether anything ran that may run again.
    for sdpa_fp32 in (False, "auto"):
        found = warm(make(sdpa_fp32=sdpa_fp32), half_products="auto")
        assert found["forward"][0] - native["forward"][0] <= 5
        assert found["backward"][0] - native["backward"][0] <= 3
        assert found["step"] == native["step"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_widened_step_enters_one_mode_around_forward_and_none_around_backward(precision, entered):
    make = partial(nn.Sequential, nn.Conv2d(3, 16, 16), nn.Flatten(), nn.Linear(16, 4))
    contextvars.Context().run(train, fp16_precision(precision), "float32", make, 1)  # which has seen nothing recomputed
    assert len(entered) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_step_that_recomputes_enters_a_mode_for_each_pass_and_each_engine(precision, reentrant, entered):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 4)
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            x = self.conv(x).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x.mean(1))

    contextvars.Context().run(train, fp16_precision(precision), "float32", Checkpointed, 3)
    per_block = 4 if reentrant else 0  # each runs its own engine inside
    assert len(entered) == 3 * (3 + per_block)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(48, 16, 2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.rnn(x.flatten(1, 2).transpose(1, 2))[0][:, -1])


@functools.cache
def has_bfloat16_lstm():
    """Whether torch has one under autocast on the CPU that this is: asked of it, since imitated flags do not bind oneDNN, nor
    does its variable once that was read. In bfloat16 weights torch has one on every CPU."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(8, 8)(torch.ones(1, 1, 8))
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        return False
    return True


@pytest.mark.crossed
@pytest.mark.parametrize("name", CPUS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_lstm_trains_in_float16_on_every_cpu_and_in_bfloat16_where_there_are_no_units(precision, name, cpu):
    flags, limit, bfloat16, _ = CPUS[name]
    here = "naive" in precision or has_bfloat16_lstm()  # before it is another CPU by name
    cpu(flags, limit)
    widens = "fp16" in precision or "recurrent layer" in bfloat16
    chosen = BF16MixedPrecision() if "bf16" in precision else FP16TorchMixedPrecision()
    assert ("recurrent layer" in chosen.half_products.kinds) == widens
    if not widens and not here:
        return  # it would be torch's, which this CPU has not
    with Seen() as seen:
        losses, _ = train(fp16_precision(precision), "auto", Recurrent, steps=6)
    assert losses[-1] < losses[0]
    assert ({torch.float32} == set().union(*(seen.dtypes[key] for key in seen.dtypes if "rnn" in key))) == widens


def test_half_products_is_checked():
    with pytest.raises(ValueError, match=re.escape("half_products='fast'")):
        Booster("cpu", "bf16", half_products="fast")
    precision = BF16MixedPrecision()
    Booster("cpu", precision)
    with pytest.raises(
        ValueError, match="half_products='native', but this BF16MixedPrecision object runs with 'auto' already"
    ):
        Booster("cpu", precision, half_products="native")
    with pytest.raises(ValueError, match="half_products='float32' needs a CPU"):
        choose_half_products(BF16MixedPrecision(), "float32", torch.device("cuda"))


# ---------------------------------------------------------------------- compiled


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16_naive"])
def test_a_compiled_model_has_the_frames_and_graph_breaks_of_native(precision, cpu):
    from torch._dynamo.testing import CompileCounter

    cpu(())  # which "auto" widens everything on
    found = {}
    for choice in ("native", "float32", "auto"):
        torch._dynamo.reset()
        counter = CompileCounter()
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), nn.Linear(16, 16), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
        )
        b = Booster("cpu", precision, half_products=choice)
        model, optimizer, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        x = torch.randn(4, 3, 16, 16)
        eager = model(x)
        compiled = torch.compile(model, backend=counter)
        out = compiled(x)
        b.backward(out.square().mean(), optimizer)
        found[choice] = counter.frame_count
        torch.testing.assert_close(out, eager, rtol=2**-7, atol=2**-7)
        explained = torch._dynamo.explain(model)(x)
        found[choice, "breaks"] = explained.graph_break_count
        assert all(param.grad is not None for param in net.parameters())
    torch._dynamo.reset()
    assert found["native"] == found["float32"] == found["auto"] >= 1
    assert found["native", "breaks"] == found["float32", "breaks"] == found["auto", "breaks"] == 0


# ---------------------------------------------------------------------- what is said of overflows


def _overflowing_products():
    """By name: a module with a product that overflows float16, in forward or backward, and what reads its input."""

    def two(x):
        return x * 0 + 2

    class Matmul(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((8, 8), 3e4))

        def forward(self, x):
            return two(x) @ self.weight

    class Batched(Matmul):
        def forward(self, x):
            return torch.matmul(two(x)[:, None], self.weight.expand(len(x), 8, 8))[:, 0]

    class Convolution(nn.Conv1d):
        def __init__(self):
            super().__init__(2, 8, 4)
            nn.init.constant_(self.weight, 3e4)

        def forward(self, x):
            return super().forward(two(x).view(-1, 2, 4))[..., 0]

    class Heads(nn.MultiheadAttention):
        def __init__(self):
            super().__init__(8, 2, batch_first=True)
            nn.init.constant_(self.in_proj_weight, 3e4)

        def forward(self, x):
            x = two(x)[None]
            return super().forward(x, x, x, need_weights=False)[0][0]

    class Attention(nn.Module):
        """Keys so large that the gradient of queries overflows, of queries so small that scores are not."""

        def forward(self, x):
            x = x * torch.arange(1, 5)[:, None]
            return F.scaled_dot_product_attention(*(x[None, None] * scale for scale in (1e-4, 1e4, 1e2)))[0, 0]

    class Recurrent(nn.LSTM):
        """Weights so large that the gradient of what it reads overflows; its gates are not saturated."""

        def __init__(self):
            super().__init__(8, 8)
            nn.init.constant_(self.weight_ih_l0, 3e4)

        def forward(self, x):
            return super().forward((x * 0)[:, None])[0][:, 0]

    class Linear(nn.Linear):
        """Likewise."""

        def __init__(self):
            super().__init__(8, 8)
            nn.init.constant_(self.weight, 3e4)

        def forward(self, x):
            return super().forward(x * 0) * 2.0**-1

    forward = (Matmul, Batched, Convolution, Heads)
    return [(make, "forward") for make in forward] + [(make, "backward") for make in (Attention, Recurrent, Linear)]


@pytest.mark.crossed
@pytest.mark.parametrize("naive", [True, False], ids=["half weights", "autocast"])
@pytest.mark.parametrize(("make", "direction"), _overflowing_products())
def test_a_diagnosis_names_a_widened_product_as_it_names_the_one_in_half(make, direction, naive):
    def found(choice):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), make(), nn.Linear(8, 1))
        chosen = FP16NaiveMixedPrecision(initial_scale=8.0) if naive else FP16TorchMixedPrecision(init_scale=8.0)
        b = Booster("cpu", chosen, half_products=choice)
        model, optimizer, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        x = torch.ones(4, 8) + torch.arange(8) / 8
        one = b.diagnose(lambda: model(x).sum(), optimizer)
        inputs = [(each.shape, each.dtype) for each in one.inputs[:2]]
        return (
            (one.kind, one.module, one.operation, one.direction, one.dtype, one.certain),
            inputs,
            one.output.num_inf > 0,
        )

    here = found("float32")
    assert here[0][1] == "1"
    assert here[0][3:] == (direction, "float16", True)
    assert {dtype for _, dtype in here[1]} == {"float16"}
    if make.__name__ != "Recurrent":  # torch has no LSTM in float16
        assert here == found("native")
