"""A model computes in its own precision, whatever precision surrounds its forward and its backward."""

import ast
import itertools
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from everywhere import everywhere
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import booster
from booster import Booster
from booster.mixed_precision import (
    BF16MixedPrecision,
    FP16ApexMixedPrecision,
    MixedPrecision,
    NaiveAMPModel,
    TF32MixedPrecision,
    apex_amp,
)
from booster.mixed_precision.hardware import CUDA, ONEDNN, switched


class AsInTheDocs(MixedPrecision):
    """bfloat16 autocast, written as a user's loop has it."""

    def forward_context(self):
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class AsItIs(MixedPrecision):
    """Casts nothing by itself."""


PRECISIONS = {
    **{name: lambda name=name: name for name in everywhere() if name != "fp16_apex"},
    **{
        f"fp16_apex {level}": lambda level=level: FP16ApexMixedPrecision(level, verbosity=0)
        for level in ("O0", "O1", "O2", "O3")
    },
    "bf16 sdpa": lambda: BF16MixedPrecision(sdpa_fp32=False),
    "tf32": lambda: TF32MixedPrecision(emulate=True),
    "own": AsInTheDocs,
    "own float32": AsItIs,
}
EVERY_PAIR = pytest.mark.parametrize(("outer", "inner"), list(itertools.product(PRECISIONS, PRECISIONS)))


class Inner(nn.Module):
    """One of every kind of operation that a precision may cast, with the dtypes that it saw."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.dtypes = []

    def forward(self, x):
        h = self.linear(x)
        weights = F.softmax(h, -1)
        mixed, _ = self.attention(h, h, h, need_weights=False)
        q = h.unflatten(-1, (2, 4)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, q, q)
        out = F.gelu(mixed) + attended.transpose(1, 2).flatten(2)
        self.dtypes += [h.dtype, weights.dtype, mixed.dtype, attended.dtype, out.dtype]
        return out.square().mean(-1) + weights.float().std(-1)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        torch.manual_seed(2)
        self.linear, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.inner = [inner]  # not a submodule: it was boosted on its own
        self.dtypes = []

    def forward(self, x):
        before = self.linear(x)
        within = self.inner[0](INPUT)
        h = self.linear(x)
        self.dtypes += [before.dtype, h.dtype, F.softmax(h, -1).dtype, self.attention(h, h, h)[0].dtype]
        return h.float().square().mean() + within.float().mean()


INPUT = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(3))


def boosted_inner(precision):
    net = Inner()
    model, *_ = Booster("cpu", PRECISIONS[precision]()).boost(net)
    return net, model


def results(net, loss):
    loss.backward()
    return [net.dtypes, [None if p.grad is None else p.grad.clone() for p in net.parameters()]]


def alone(precision, scale=1.0):
    net, model = boosted_inner(precision)
    output = model(INPUT)
    return [output.detach(), *results(net, output.float().mean() * scale)]


def assert_same(one, other):
    assert one[1] == other[1]
    assert one[0].dtype == other[0].dtype
    assert torch.equal(one[0], other[0])
    for a, b in zip(one[2], other[2], strict=True):
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.crossed
@EVERY_PAIR
def test_a_model_inside_a_model_of_another_precision_computes_as_it_does_alone(outer, inner):
    net, model = boosted_inner(inner)
    outputs = []
    model.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    around = Outer(model)
    b = Booster("cpu", PRECISIONS[outer]())
    whole, *_ = b.boost(around)
    loss = whole(INPUT)
    assert_same([outputs[0], *results(net, loss)], alone(inner))
    # and what is around it does not notice
    assert around.dtypes[0] == around.dtypes[1]
    plain = Outer(lambda x: torch.zeros(()))
    Booster("cpu", PRECISIONS[outer]()).boost(plain)[0](INPUT)
    assert around.dtypes == plain.dtypes


@pytest.mark.crossed
@EVERY_PAIR
def test_a_model_inside_the_autocast_of_another_booster_computes_as_it_does_alone(outer, inner):
    net, model = boosted_inner(inner)
    with Booster("cpu", PRECISIONS[outer]()).autocast():
        output = model(INPUT)
    loss = output.float().mean()
    assert_same([output.detach(), *results(net, loss)], alone(inner))


@pytest.mark.crossed
@EVERY_PAIR
def test_a_model_inside_a_criterion_of_another_precision_computes_as_it_does_alone(outer, inner):
    net, model = boosted_inner(inner)
    outputs = []

    def criterion(x):
        outputs.append(model(x))
        return outputs[0].float().mean()

    _, _, criterion, *_ = Booster("cpu", PRECISIONS[outer]()).boost(nn.Linear(1, 1), criterion=criterion)
    loss = criterion(INPUT)
    assert_same([outputs[0].detach(), *results(net, loss)], alone(inner))


@contextmanager
def session():
    apex_amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    try:
        yield
    finally:
        apex_amp.shutdown()


@pytest.mark.crossed
@pytest.mark.parametrize("inner", PRECISIONS)
@pytest.mark.parametrize("surroundings", ["session", "torch.autocast"])
def test_a_model_in_an_o1_session_or_an_autocast_of_torch_computes_as_it_does_alone(surroundings, inner):
    net, model = boosted_inner(inner)
    with session() if surroundings == "session" else torch.autocast("cpu", torch.bfloat16):
        output = model(INPUT)
        loss = output.float().mean()
    assert_same([output.detach(), *results(net, loss)], alone(inner))


class Switching(MixedPrecision):
    """Turns a switch of torch's for products around its passes, as tf32 does on CUDA and products="bfloat16" on a CPU."""

    def __init__(self, switches, precision):
        self.switches, self.precision = switches, precision

    def forward_context(self):
        return switched(self.switches, self.precision)

    def backward_context(self):
        return self.forward_context()


class Reads(nn.Linear):
    """Notes the state of each switch of torch, in forward and in backward."""

    def __init__(self, seen):
        super().__init__(2, 2)
        self.seen = seen

    def note(self):
        self.seen.append([switch.fp32_precision for switch in (*CUDA(), *ONEDNN())])

    def forward(self, x):
        self.note()
        out = super().forward(x)
        out.register_hook(lambda grad: self.note())
        return out


@pytest.mark.parametrize("inner", ["fp32", "bf16", "fp16_naive", "the other switch"])
@pytest.mark.parametrize(("switches", "precision"), [(CUDA, "tf32"), (ONEDNN, "bf16")])
def test_switches_of_torch_stand_within_as_they_do_alone(switches, precision, inner):
    other = Switching(*((ONEDNN, "bf16") if switches is CUDA else (CUDA, "tf32")))
    before = [switch.fp32_precision for switch in (*CUDA(), *ONEDNN())]

    def passes(around):
        seen = []
        b = Booster("cpu", other if inner == "the other switch" else inner)
        net = Reads(seen)
        model, optimizer, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with around:
            b.backward(model(torch.ones(1, 2)).float().sum(), optimizer)
        return seen

    outer = Booster("cpu", Switching(switches, precision))
    assert passes(outer.autocast()) == passes(nullcontext())
    seen = []
    with outer.autocast():
        Reads(seen)(torch.ones(1, 2))
    assert seen[0] != before
    assert [switch.fp32_precision for switch in (*CUDA(), *ONEDNN())] == before


def _put_zeros(model, optimizer, how):
    params = [*model.parameters()]
    if how == "copy_":
        with torch.no_grad():
            for param in params:
                param.copy_(torch.zeros_like(param))
    elif how == "data":
        for param in params:
            param.data = torch.zeros_like(param)
    elif how == "foreach":
        with torch.no_grad():
            torch._foreach_mul_(params, 0.0)
    else:
        model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})


@pytest.mark.crossed
@pytest.mark.parametrize("how", ["copy_", "data", "foreach", "load_state_dict"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("around", ["own", "torch", "off"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16_apex"])
def test_weights_that_are_written_to_inside_a_surrounding_autocast_are_read_as_they_are(precision, around, grad, how):
    made = FP16ApexMixedPrecision("O1", verbosity=0) if precision == "fp16_apex" else precision
    b = Booster("cpu", made, half_products="native")
    net = nn.Linear(8, 4)
    model, optimizer, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    regions = {
        "own": b.autocast,
        "torch": lambda: torch.autocast("cpu", torch.bfloat16),
        "off": lambda: torch.autocast("cpu", enabled=False),
    }
    with torch.set_grad_enabled(grad), regions[around]():
        assert model(INPUT).any()
        _put_zeros(model, optimizer, how)
        assert not model(INPUT).any()


def test_lbfgs_trains_inside_a_surrounding_autocast_as_without():
    def losses(surrounded):
        torch.manual_seed(0)
        b, net = Booster("cpu", "bf16", half_products="native"), nn.Linear(8, 4)
        model, optimizer, *_ = b.boost(net, torch.optim.LBFGS(net.parameters(), max_iter=4))
        x, found = torch.randn(16, 8), []

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            b.backward(loss, optimizer)
            found.append(loss.item())
            return loss

        with b.autocast() if surrounded else nullcontext():
            for _ in range(2):
                optimizer.step(closure)
        return found

    assert losses(True) == losses(False)
    assert losses(True)[-1] < losses(True)[0] / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_naive_model_computes_the_same_inside_autocast(dtype):
    model = NaiveAMPModel(Inner(), dtype=dtype)
    expected = model(INPUT)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(INPUT), expected)


@pytest.mark.crossed
@EVERY_PAIR
def test_activations_are_recomputed_as_they_were_whatever_surrounds_the_backward(outer, inner):
    class Checkpointed(Inner):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def train(surroundings):
        net = Checkpointed()
        b = Booster("cpu", PRECISIONS[inner]())
        model, optimizer, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loss = model(INPUT).float().mean()
        with surroundings:
            b.backward(loss, optimizer)
        optimizer.step()
        return net.dtypes, [param.detach().clone() for param in net.parameters()]

    dtypes, weights = train(Booster("cpu", PRECISIONS[outer]()).autocast())
    expected_dtypes, expected = train(nullcontext())
    assert dtypes == expected_dtypes
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_an_inner_region_that_raises_leaves_the_outer_one_as_it_was():
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError

    model, *_ = Booster("cpu", "fp32").boost(Broken())
    square = torch.ones(2, 2)
    with Booster("cpu", FP16ApexMixedPrecision(verbosity=0)).autocast():
        before = (square @ square).dtype, torch.exp(square.half()).dtype
        with pytest.raises(KeyError):
            model(square)
        assert ((square @ square).dtype, torch.exp(square.half()).dtype) == before == (torch.float16, torch.float32)
    assert (square @ square).dtype == torch.float32


def test_only_the_registry_and_apex_s_own_interface_import_apex():
    root = Path(booster.__file__).parent
    importers = set()
    for path in root.rglob("*.py"):
        own = path.is_relative_to(root / "mixed_precision" / "apex")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            if not own and any(name.startswith("booster.mixed_precision.apex") for name in names):
                importers.add(str(path.relative_to(root)))
    assert importers == {"mixed_precision/__init__.py", "mixed_precision/apex_amp.py"}
