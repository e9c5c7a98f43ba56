"""Under half weights, float buffers and what kept modules return keep their bits, and do not widen the halves they meet."""

import copy
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision
from booster.mixed_precision.policy import half_policy
from booster.tensors.cast_regions import cast_inputs
from booster.tensors.trees import tensors as tensors_of
from booster.tensors.weak import WeakBufferTensor, WeakTensor, as_weak, strip_weak

HALVES = [torch.float16, torch.bfloat16]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAIVE = {F16: FP16NaiveMixedPrecision, BF16: BF16NaiveMixedPrecision}


class Two(nn.Module):
    """Two layers, and what a subclass does between them; `between` holds what reached the second."""

    def __init__(self, **buffers):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.between = None

    def forward(self, x):
        x = self.middle(self.first(x))
        self.between = x.dtype
        return self.second(x)


class Table(Two):
    def __init__(self):
        super().__init__(table=torch.randn(16, 8))

    def middle(self, x):
        return x + self.table[: x.shape[1]]


class Rotary(Two):
    """Frequencies under its own name; their cosines are never cast."""

    def __init__(self):
        super().__init__(omega=10000 ** (-torch.arange(0, 4) / 4.0))
        self.cosines = None

    def middle(self, x):
        angles = torch.outer(torch.arange(4092, 4092 + x.shape[1]), self.omega).repeat(1, 2)
        self.cosines = strip_weak(angles.cos())
        query = x * angles.cos() + x.roll(4, -1) * angles.sin()
        return F.scaled_dot_product_attention(query, query, x)


class Attention(Two):
    """A bias by distance, and a mask of the lowest finite number, which has a row that sees nothing."""

    def __init__(self):
        mask = torch.full((4, 4), torch.finfo(F32).min).triu(1)
        mask[3] = torch.finfo(F32).min
        super().__init__(bias=torch.randn(4, 4), mask=mask)

    def middle(self, x):
        return (x @ x.transpose(-1, -2) + self.bias + self.mask).softmax(-1) @ x


class Normalised(Two):
    def __init__(self):
        super().__init__(mean=torch.randn(8), std=torch.rand(8) + 0.5)

    def middle(self, x):
        return (x - self.mean) / self.std


class Averages(Two):
    """Means and counts, set anew and in place; of ones, so that what they should be is known."""

    def __init__(self):
        super().__init__(anew=torch.zeros(8), in_place=torch.zeros(8), seen=torch.zeros(()), calls=torch.zeros(()))

    def middle(self, x):
        if self.training:
            ones = x.detach().mean((0, 1)) * 0 + 1
            self.anew = 0.999 * self.anew + 0.001 * ones
            self.in_place.mul_(0.999).add_(ones, alpha=0.001)
            self.seen += 1
            self.calls = self.calls + 1
        return x - self.anew + self.in_place


class Codebook(Two):
    def __init__(self):
        super().__init__(code=torch.randn(5, 8), size=torch.zeros(5))

    def middle(self, x):
        distances = (x.unsqueeze(-2) - self.code).pow(2).sum(-1)
        chosen = distances.argmin(-1).flatten()
        self.size.add_(F.one_hot(chosen, 5).to(x.dtype).sum(0))
        self.code.index_add_(0, chosen, (x.detach().flatten(0, 1) - self.code[chosen]) * 1e-3)
        return x + (F.embedding(chosen, self.code).view_as(x) - x).detach()


class Experts(Two):
    """A balancing bias, moved by 0.001 in every call, which a half would lose at 0.5."""

    def __init__(self):
        super().__init__(balance=torch.zeros(8))

    def middle(self, x):
        scores = x.sigmoid()
        chosen = (scores + self.balance).topk(2, -1).indices
        self.balance += 0.001
        return scores * torch.zeros_like(scores).scatter(-1, chosen, 1)


class Kernel(Two):
    """A filter that is no parameter, by a product and by a convolution."""

    def __init__(self):
        super().__init__(kernel=torch.ones(4, 1, 3) / 3, fixed=torch.randn(8, 8))

    def middle(self, x):
        return F.conv1d(x @ self.fixed, self.kernel, padding=1, groups=4)


class Spectral(Two):
    def __init__(self):
        super().__init__()
        self.third = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.fourth = nn.utils.spectral_norm(nn.Linear(8, 8))

    def middle(self, x):
        return self.fourth(self.third(x))


class Instances(Two):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def middle(self, x):
        return self.norm(x)


class OfAChild(Two):
    """A buffer that another module reads."""

    def __init__(self):
        super().__init__()
        self.child = Table()

    def middle(self, x):
        return x + self.child.table[0]


KINDS = [Table, Rotary, Attention, Normalised, Averages, Codebook, Experts, Kernel, Spectral, Instances, OfAChild]


def boosted(model, dtype, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    booster = Booster("cpu", NAIVE[dtype](**options))
    return booster, *booster.boost(model, optimizer)[:2]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_buffers_stay_as_registered_and_activations_half(dtype, kind):
    torch.manual_seed(0)
    model = kind()
    registered = {name: buffer.dtype for name, buffer in model.named_buffers()}
    booster, wrapped, optimizer = boosted(model, dtype)
    for _ in range(3):
        output = wrapped(torch.randn(2, 4, 8))
        booster.backward(1e-3 * output.pow(2).mean(), optimizer)
        assert optimizer.step().applied
        optimizer.zero_grad()
    assert model.between == dtype
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == registered
    assert {type(tensor) for tensor in (output, *model.buffers(), *model.state_dict().values())} == {torch.Tensor}
    assert output.isfinite().all()
    wrapped.eval()
    with torch.no_grad():
        assert wrapped(torch.randn(2, 4, 8)).dtype == F32
    assert model.between == dtype


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def read(container):
    if isinstance(container, (Pair, Named)):
        return container.first
    return container["first"] if isinstance(container, dict) else container[0]


RETURNED = {
    "tuple": lambda y: (y, None),
    "list": lambda y: [y, y],
    "named tuple": lambda y: Named(y, y),
    "dict": lambda y: {"first": y},
    "dataclass": lambda y: Pair(y, y),
}


@pytest.mark.slow_cases("list", "dict", "named tuple")
@pytest.mark.parametrize("name", RETURNED)
def test_a_compiled_kept_module_returns_containers_that_widen_no_half(name):
    class Kept(nn.Linear):
        def forward(self, x):
            return RETURNED[name](super().forward(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept, self.tail = Kept(8, 8), nn.Linear(8, 8)
            self.register_buffer("table", torch.randn(2, 8))

        def forward(self, x):
            one, other = self.table.unbind()
            return self.tail(read(self.kept(x)) + one) + other

    model, *_ = Booster("cpu", BF16NaiveMixedPrecision(keep_fp32="kept", output_to_fp32=False)).boost(Model())
    x = torch.randn(4, 8)
    torch._dynamo.reset()
    found = torch.compile(model, backend="eager")(x)
    assert found.dtype == BF16
    assert torch.equal(found, model(x))


def test_a_compiled_forward_sets_a_buffer_anew_in_float32():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            y = self.layer(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y - self.mean

    torch.manual_seed(0)
    model = Model()
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    eager, *_ = Booster("cpu", "bf16_naive").boost(model)
    compiled = torch.compile(Booster("cpu", "bf16_naive").boost(twin)[0], backend="eager")
    for _ in range(3):
        assert torch.equal(eager(x), compiled(x))
    assert twin.mean.dtype == F32
    assert torch.equal(model.mean, twin.mean)


@pytest.mark.slow_cases("Table", "Attention")
@pytest.mark.parametrize("kind", [Table, Rotary, Attention, Kernel, Spectral], ids=lambda kind: kind.__name__)
def test_a_compiled_model_computes_the_same(kind):
    torch.manual_seed(0)
    model = kind().eval()
    other, x = copy.deepcopy(model), torch.randn(2, 4, 8)
    eager, *_ = Booster("cpu", "bf16_naive").boost(model)
    compiled, *_ = Booster("cpu", "bf16_naive").boost(
        torch.compile(other, backend="eager", fullgraph=kind is not Rotary)
    )
    assert torch.equal(eager(x), compiled(x))
    assert other.between in (BF16, None)


def test_angles_at_far_positions_are_those_of_float32():
    model = Rotary()
    exact = torch.outer(torch.arange(4092, 4096).double(), model.omega.double()).repeat(1, 2).cos()
    boosted(model, BF16)[1](torch.randn(1, 4, 8))
    # An angle below 2**12 is rounded once in float32, and so is the product that it is.
    torch.testing.assert_close(model.cosines.double(), exact, rtol=0, atol=2**12 * 2**-23)


# Counts of float16 end at 2,048 and averages at 0.80; those of bfloat16 at 256 and 0.34.
@pytest.mark.slow_cases("torch.float16-2100")
@pytest.mark.parametrize(("dtype", "steps"), [(torch.float16, 2100), (torch.bfloat16, 600)], ids=str)
def test_averages_and_counts_go_on_where_halves_stand_still(dtype, steps):
    model = Averages()
    _, wrapped, _ = boosted(model, dtype)
    for _ in range(steps):
        wrapped(torch.zeros(1, 4, 8))
    expected = 1 - 0.999**steps
    assert (model.seen.item(), model.calls.item()) == (steps, steps)
    torch.testing.assert_close(model.in_place, torch.full((8,), expected), rtol=steps * 2**-24, atol=0)
    # What is added is half already, as the model has it.
    rounded = torch.finfo(dtype).eps + steps * 2**-23
    torch.testing.assert_close(model.anew, torch.full((8,), expected), rtol=rounded, atol=0)


def test_a_balancing_bias_passes_the_point_where_halves_stop():
    model = Experts()
    _, wrapped, _ = boosted(model, BF16)
    for _ in range(2000):
        wrapped(torch.zeros(1, 1, 8))
    torch.testing.assert_close(model.balance, torch.full((8,), 2.0), rtol=2000 * 2**-24, atol=0)


def test_what_a_module_does_not_let_cast_stays():
    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(3)

        def _apply(self, fn, recurse=True):
            self.total = fn(self.total)  # as a metric moves its states
            return self

    model = nn.Sequential(nn.Linear(4, 4))
    model.metric = Guarded()
    del model._modules["metric"]
    model.add_module("1", nn.Identity())
    model[1].metric = Guarded()
    boosted(model, BF16)
    assert model[1].metric.total.dtype == F32


class Checkpointed(Two):
    """A function, not a module, that is run again in backward, and reads a buffer there."""

    def __init__(self, *, use_reentrant):
        super().__init__(table=torch.randn(4, 8))
        self.use_reentrant = use_reentrant

    def part(self, x):
        return F.linear(x * self.table.cos() + self.table, self.table.T @ self.table).relu()

    def middle(self, x):
        return x if self.use_reentrant is None else checkpoint(self.part, x, use_reentrant=self.use_reentrant)


@pytest.mark.crossed
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_checkpointed_function_reads_buffers_in_backward_as_in_forward(dtype, use_reentrant):
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant=use_reentrant)
    other = copy.deepcopy(model)
    other.middle = other.part
    grads = []
    for each in (model, other):
        booster, wrapped, optimizer = boosted(each, dtype)
        torch.manual_seed(1)
        booster.backward(1e-3 * wrapped(torch.randn(2, 4, 8)).pow(2).mean(), optimizer)
        grads.append([param.grad for param in each.parameters()])
    assert all(map(torch.equal, *grads))
    assert type(model.table) is torch.Tensor


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_copies_made_in_forward_and_of_what_it_kept_work_alone(dtype):
    class Copies(Two):
        def middle(self, x):
            self.cosines = self.table.cos()  # such as caches of rotary embeddings
            self.copied.append(copy.deepcopy(self))
            return x + self.cosines

    model = Copies(table=torch.randn(4, 8))
    object.__setattr__(model, "copied", [])
    _, wrapped, _ = boosted(model, dtype)
    with torch.no_grad():
        expected = wrapped(torch.ones(2, 4, 8))
        inside, outside = model.copied[0], copy.deepcopy(wrapped)
        assert {type(each.table) for each in (model, inside, outside.module)} == {torch.Tensor}
        inside.copied, outside.module.copied = [], []
        assert torch.equal(inside(torch.ones(2, 4, 8, dtype=dtype)).float(), expected)
        assert torch.equal(outside(torch.ones(2, 4, 8)), expected)
    assert inside.table.data_ptr() != model.table.data_ptr()


def test_a_sparse_buffer_meets_halves():
    class Graph(Two):
        def middle(self, x):
            return torch.sparse.mm(self.adjacency, x)

    torch.manual_seed(0)
    model = Graph(adjacency=torch.rand(4, 4).round().to_sparse())
    exact = copy.deepcopy(model)
    x = torch.randn(4, 8)
    found = boosted(model, BF16)[1](x)
    # Two layers and a sum of four, all of them rounded, of numbers up to 4.
    torch.testing.assert_close(found, exact(x), rtol=0, atol=4 * 4 * 2**-8)
    assert model.adjacency.dtype == F32
    assert model.between == BF16


# ---- a word for both ways ----


def test_half_buffers_are_stored_in_half_and_fp32_buffers_widen():
    model = Table()
    boosted(model, BF16, half_buffers="table")
    assert model.table.dtype == BF16
    model = nn.Sequential(Table(), Table())
    boosted(model, BF16, half_buffers=lambda name, module: name == "0")
    assert [each.table.dtype for each in model] == [BF16, F32]

    class Probe(Table):
        def middle(self, x):
            self.sum = x + self.table[: x.shape[1]]
            return self.sum.to(x.dtype)

    model = Probe()
    boosted(model, BF16, fp32_buffers=Probe)[1](torch.randn(2, 4, 8))
    assert model.sum.dtype == F32


@pytest.mark.parametrize("option", ["half_buffers", "fp32_buffers"])
def test_a_buffer_that_is_not_there_is_refused_with_those_that_are(option):
    with pytest.raises(ValueError, match=f"{option}='tabel' selects no float buffer of Table, which has table"):
        boosted(Table(), BF16, **{option: "tabel"})
    with pytest.raises(TypeError, match=f"{option} holds 3"):
        BF16NaiveMixedPrecision(**{option: 3})


def test_a_buffer_named_twice_is_refused():
    with pytest.raises(ValueError, match="half_buffers and fp32_buffers both select table"):
        boosted(Table(), BF16, half_buffers="table", fp32_buffers="table")


def test_lists_of_a_model_of_its_own_float32_modules_are_kept():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.wi, self.wo, self.gate = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.wo(self.wi(x)) * self.gate(x)

    class Model(nn.Module):
        _keep_in_fp32_modules = ("wo",)
        _keep_in_fp32_modules_strict = ("gate.weight",)

        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(x)

    assert half_policy(Model(), F16).keep_fp32 == {"block.wo", "block.gate"}
    assert half_policy(Model(), BF16).keep_fp32 == {"block.gate"}
    model = Model()
    boosted(model, F16)[1](torch.randn(2, 8))
    assert [each.weight.dtype for each in (model.block.wi, model.block.wo, model.block.gate)] == [F16, F32, F32]


# ---- what kept modules return ----


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_kept_head_returns_float32_and_a_kept_module_inside_does_not_widen(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 512))
    _, wrapped, _ = boosted(model, dtype, keep_fp32=("1", "4"))
    seen = []
    model[3].register_forward_hook(lambda module, args, output: seen.append(output))
    logits = wrapped(torch.randn(16, 64))
    assert seen[0].dtype == dtype
    assert type(logits) is torch.Tensor
    exact = seen[0].double() @ model[4].weight.double().T + model[4].bias.double()
    # 64 products of up to 2**-3 * 1, summed in float32.
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=64 * 2**-24 * 4)
    assert not torch.equal(logits, logits.to(dtype).float())


def test_a_loss_within_the_model_reads_the_kept_head_in_float32():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, y):
            return F.cross_entropy(self.head(self.body(x)), y)

    model = Model()
    booster, wrapped, optimizer = boosted(model, F16, keep_fp32="head")
    loss = wrapped(torch.randn(4, 8), torch.arange(4))
    assert not torch.equal(loss, loss.half().float())
    booster.backward(loss, optimizer)
    assert {name: param.grad.dtype for name, param in model.named_parameters()} == {
        "body.weight": F16,
        "body.bias": F16,
        "head.weight": F32,
        "head.bias": F32,
    }


# ---- inputs ----


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_finite_inputs_stay_finite_and_infinite_ones_infinite(dtype):
    lowest, inf = torch.finfo(F32).min, float("inf")
    given = torch.tensor([lowest, -lowest, -inf, inf, 1.0, float("nan")])
    most = torch.finfo(dtype).max
    for tree in ((given,), (given, 3), {"mask": given}):
        found = cast_inputs(tree, dtype)
        half = found["mask"] if isinstance(found, dict) else found[0]
        assert half.dtype == dtype
        assert half[:5].tolist() == [-most, most, -inf, inf, 1.0]
        assert half[5].isnan()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_row_that_a_float32_mask_hides_whole_makes_no_nan(dtype):
    class Masked(Two):
        def forward(self, x, mask):
            return self.second((self.first(x) @ x.transpose(-1, -2) + mask).softmax(-1) @ x)

    mask = torch.zeros(4, 4).fill_(torch.finfo(F32).min)
    assert boosted(Masked(), dtype)[1](torch.randn(2, 4, 8), mask=mask).isfinite().all()


# ---- the rule itself ----


def test_what_meets_halves_is_rounded_and_what_does_not_is_float32():
    half, wide = torch.ones(2, dtype=BF16), torch.ones(2)
    weak = torch.full((2,), 1 + 2**-20).as_subclass(WeakBufferTensor)
    assert (weak + half).dtype == (half * weak).dtype == torch.cat([weak, half]).dtype == BF16
    assert type(weak.cos()) is type(weak * 2) is type(torch.stack([weak, weak])) is WeakBufferTensor
    assert type(weak * torch.arange(2)) is WeakBufferTensor
    assert type(weak + wide) is type(weak.float()) is type(weak.to(F32)) is torch.Tensor
    assert (weak > half).all()  # compared in float32
    assert (half * torch.tensor(3.0).as_subclass(WeakBufferTensor)).dtype == BF16
    assert (weak * torch.tensor(3.0, dtype=BF16)).dtype == F32  # a half without dimensions decides nothing
    parts = weak.split(1)
    assert {type(part) for part in parts} == {WeakBufferTensor}
    assert type(strip_weak(weak)) is torch.Tensor
    assert type(as_weak({"x": wide}, BF16)["x"]) is WeakTensor


def test_what_is_written_to_gets_the_whole_number_by_whatever_function():
    half = torch.full((2,), 3.0, dtype=BF16)

    @torch.library.custom_op("booster_tests::move", mutates_args=("target",))
    def move(target: torch.Tensor, by: torch.Tensor) -> None:
        target.add_(by)

    ways = {
        "foreach": lambda weak: torch._foreach_add_([weak], [half]),
        "foreach with a half": lambda weak: torch._foreach_add_([weak, half.clone()], [half, weak]),
        "packet": lambda weak: torch.ops.aten.add_(weak, half),
        "overload": lambda weak: torch.ops.aten.add_.Tensor(weak, other=half),
        "custom": lambda weak: move(weak, half),
        "by name": lambda weak: move(target=weak, by=half),
        "out": lambda weak: torch.add(weak, half, out=weak),
        "data": lambda weak: setattr(weak, "data", weak.float() + half),
    }
    for name, way in ways.items():
        weak = torch.full((2,), 1 + 2**-12).as_subclass(WeakBufferTensor)
        way(weak)
        assert weak.tolist() == [4 + 2**-12] * 2, name
        assert type(weak) is WeakBufferTensor
    target = half.clone()
    torch._foreach_add_([target], [torch.ones(2).as_subclass(WeakBufferTensor)])
    assert target.tolist() == [4.0, 4.0]


def test_what_overflows_in_a_kept_module_is_infinite_in_half_so_that_a_step_is_skipped():
    big = torch.full((2,), 1e6)
    assert (as_weak(big, F16) + torch.ones(2, dtype=F16)).isinf().all()
    assert (big.as_subclass(WeakBufferTensor) + torch.zeros(2, dtype=F16)).isfinite().all()


# ---- nothing weak leaves ----


class Cosines(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(8))

    def forward(self, x):
        return self.table.cos()


class Normal(nn.Module):
    """Of which the last layer is kept."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.layer(x))


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Normal(), Normal()])
        self.cosines, self.layer, self.head = Cosines(), nn.Linear(8, 8), nn.Linear(8, 4)

    def encode(self, x):
        for block in self.blocks:
            x = self.layer(block(x) + self.cosines(x) * self.cosines.table)
        return self.blocks[0](x) * self.cosines.table

    def stream(self, x):
        yield self.encode(x)
        yield self.cosines(x)

    def forward(self, x):
        return self.head(self.encode(x))


def parts():
    torch.manual_seed(0)
    model = Parts()
    before = model.blocks[0]  # a reference of the user's
    _, wrapped, _ = boosted(model, BF16, keep_fp32=("blocks.0.norm", "blocks.1.norm", "head"))
    return model, wrapped.eval(), before, torch.randn(2, 8), torch.randn(2, 8).bfloat16()


def saved(tensor, path):
    torch.save(tensor, path)
    return torch.load(path, weights_only=True)


def called(model, half):
    tables = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return torch.func.functional_call(model, tables, (half,))


def derived(model, half):
    weights = {name: param.detach() for name, param in model.named_parameters()}
    loss = lambda w: torch.func.functional_call(model, w, (half,)).sum()  # noqa: E731
    return list(torch.func.grad(loss)(weights).values())


# By what is called alone: of a boosted `model`, `wrapped`, a reference from `before` boost, inputs in float32 and half.
ESCAPES = {
    "the model": lambda m, w, b, x, h: w(x),
    "the user's model": lambda m, w, b, x, h: m(h),
    "a kept module": lambda m, w, b, x, h: m.blocks[1].norm(h),
    "a kept head": lambda m, w, b, x, h: m.head(h),
    "what has a kept module": lambda m, w, b, x, h: m.blocks[1](h),
    "a reference from before": lambda m, w, b, x, h: b(h),
    "what has a buffer": lambda m, w, b, x, h: m.cosines(h),
    "a buffer": lambda m, w, b, x, h: m.cosines.table,
    "a method": lambda m, w, b, x, h: w.encode(x),
    "a generator": lambda m, w, b, x, h: list(w.stream(x)),
    "a copy": lambda m, w, b, x, h: copy.deepcopy(m.blocks[1])(h),
    "a copy of the output": lambda m, w, b, x, h: copy.deepcopy(w(x).detach()),
    "functional_call": lambda m, w, b, x, h: called(m, h),
    "func.grad": lambda m, w, b, x, h: derived(m, h),
    "vmap": lambda m, w, b, x, h: torch.vmap(m)(h),
    "vmap of a part": lambda m, w, b, x, h: torch.vmap(m.blocks[1])(h),
    "jvp": lambda m, w, b, x, h: torch.func.jvp(m, (h,), (h,)),
    "jacrev": lambda m, w, b, x, h: torch.func.jacrev(m)(h),
    "jit.trace": lambda m, w, b, x, h: torch.jit.trace(m, (h,))(h),
    "jit.trace of a part": lambda m, w, b, x, h: torch.jit.trace(m.blocks[1], (h,))(h),
    "export": lambda m, w, b, x, h: torch.export.export(w, (x,), strict=True).module()(x),
    "export of a part": lambda m, w, b, x, h: torch.export.export(m.blocks[1], (h,), strict=True).module()(h),
    "compile": lambda m, w, b, x, h: torch.compile(w, backend="eager")(x),
    "compile of a part": lambda m, w, b, x, h: torch.compile(m.blocks[1], backend="eager", fullgraph=True)(h),
    "compile of a kept one": lambda m, w, b, x, h: torch.compile(m.head, backend="eager", fullgraph=True)(h),
    "compile of a buffer's": lambda m, w, b, x, h: torch.compile(m.cosines, backend="eager", fullgraph=True)(h),
}


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:While compiling")
def test_nothing_weak_leaves_the_model_and_its_parts(name):
    model, wrapped, before, x, half = parts()
    found = list(tensors_of(ESCAPES[name](model, wrapped, before, x, half)))
    assert found
    assert {type(tensor) for tensor in found} == {torch.Tensor}
    assert {type(buffer) for buffer in model.buffers()} == {torch.Tensor}
    own, kept = wrapped(x), model.blocks[1].norm(half)
    same = {"the user's model": model(half), "functional_call": model(half), "jit.trace": model(half)}
    same |= {name: model.blocks[1](half) for name in ("jit.trace of a part", "export of a part", "compile of a part")}
    same |= dict.fromkeys(["the model", "export", "compile", "a copy of the output"], own)
    if name in same:
        assert torch.equal(found[0], same[name])
    assert kept.dtype == F32
    assert not torch.equal(kept, kept.bfloat16().float())  # whole numbers, as keep_fp32 says


def test_models_that_share_kept_modules_and_buffers_run_both():
    trunk = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), Table())
    pair = [nn.Sequential(trunk, nn.Linear(8, 4)) for _ in range(2)]
    for each in pair:
        for module in (each, trunk):
            module(torch.randn(2, 4, 8))
    wrapped = [boosted(each, BF16, keep_fp32="0.1")[1] for each in pair]
    for each in wrapped:
        assert each(torch.randn(2, 4, 8)).isfinite().all()


def test_what_hooks_see_computes_and_is_saved_and_what_a_model_keeps_too(tmp_path):
    model, wrapped, _, x, _ = parts()
    seen = []
    for module in (model.blocks[1].norm, model.blocks[1], model.cosines, model.head, model):
        module.register_forward_hook(lambda module, args, output: seen.append(output))
    wrapped(x)
    for tensor in seen:
        assert torch.equal(torch.from_numpy(tensor.detach().numpy()), tensor.detach().float())
        assert type(saved(tensor.detach(), tmp_path / "seen.pt")) is type(tensor.detach().data.float()) is torch.Tensor
        assert torch.equal(copy.deepcopy(tensor.detach()), tensor.detach())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_function_over_kept_modules_runs_again_under_a_backward_of_torch(reentrant):
    class Around(Parts):
        def part(self, x):
            return self.layer(self.blocks[0].norm(self.blocks[0].layer(x)))

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=reentrant) if self.training else self.part(x)

    grads = []
    for training in (False, True):
        torch.manual_seed(0)
        model = Around()
        # Where products are widened, what a checkpoint runs again needs `Booster.backward`.
        booster = Booster("cpu", NAIVE[BF16](keep_fp32="blocks.0.norm"), half_products="native")
        wrapped, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        wrapped.train(training)
        x = torch.randn(2, 8, requires_grad=True)
        wrapped(x).pow(2).sum().backward()
        grads.append([x.grad, model.blocks[0].layer.weight.grad, model.blocks[0].norm.weight.grad])
    assert all(map(torch.equal, *grads))


@pytest.mark.filterwarnings("ignore:While compiling")
def test_export_that_would_round_buffers_says_what_does_not():
    model, wrapped, _, x, _ = parts()
    with pytest.raises(RuntimeError, match="pass strict=True"):
        torch.export.export(wrapped, (x,))
    assert {type(buffer) for buffer in model.buffers()} == {torch.Tensor}
    assert torch.equal(wrapped(x), torch.export.export(wrapped, (x,), strict=True).module()(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_is_scripted_before_boost_and_says_what_its_buffers_are():
    model, _, _, _, _ = parts()
    with pytest.raises(AttributeError, match="script the model before boost"):
        torch.jit.script(model)
    scripted = torch.jit.script(nn.Sequential(Cosines()))
    with pytest.raises(ValueError, match=r"TorchScript reads 0\.0\.table itself.*half_buffers"):
        boosted(nn.Sequential(scripted, nn.Linear(8, 8)), BF16)
    for words in ({"half_buffers": "0.0.table"}, {"fp32_buffers": "0.0.table"}):
        other = torch.jit.script(nn.Sequential(Cosines()))
        assert boosted(nn.Sequential(other, nn.Linear(8, 8)), BF16, **words)
