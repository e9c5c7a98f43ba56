"""The boosted model: the user's own in every respect, except that it runs under a precision."""

import collections
import copy
import dataclasses
import functools
import inspect
import io
import shutil
import threading
import types
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from booster import Booster
from booster.mixed_precision import (
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
)

PRECISIONS = ["fp32", "fp16", "bf16"]
HALF = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Net(nn.Module):
    """Small, with a child, a buffer, an attribute, a property and methods besides forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)
        self.register_buffer("shift", torch.zeros(2))
        self.temperature = 2.0

    def forward(self, x):
        return self.head(self.body(x)) / self.temperature + self.shift

    def embed(self, x):
        return self.body(x)

    def describe(self):
        return "a net"

    def itself(self):
        return self

    @property
    def width(self):
        return self.head.in_features

    @width.setter
    def width(self, value):
        self.chosen_width = value


def boosted(model=None, precision="bf16", **kwargs):
    return Booster(device="cpu", mixed_precision=precision, **kwargs).boost(Net() if model is None else model)[0]


class Rooted(nn.Module):
    """Its own parameter and buffer, besides those of a child."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(x * self.scale + self.shift)


# ---- attributes ----


@pytest.mark.parametrize("precision", [*PRECISIONS, "bf16_naive"])
def test_functional_call_replaces_parameters_of_the_models_root_for_one_call(precision):
    user = Rooted()
    model = boosted(user, precision)
    own = dict(model.named_parameters())
    given = {name: torch.full_like(value, 0.5, requires_grad=True) for name, value in model.state_dict().items()}
    x = torch.ones(3, 4)
    found = torch.func.functional_call(model, given, (x,))
    assert torch.equal(found.float(), torch.full((3, 2), 4 * (0.5 + 0.5) * 0.5 + 0.5))
    found.float().sum().backward()
    assert all(value.grad is not None for value in given.values())
    assert all(param is own[name] and param.grad is None for name, param in user.named_parameters())
    assert not torch.equal(model(x), found)
    with pytest.raises(RuntimeError):
        torch.func.functional_call(model, given, (torch.ones(3, 5),))
    assert all(param is own[name] for name, param in user.named_parameters())


def test_a_parameter_of_the_models_root_is_no_more_replaced_by_a_tensor_than_the_models_own():
    model = boosted(Rooted())
    with pytest.raises(TypeError, match="cannot assign .* as parameter 'scale'"):
        model.scale = torch.ones(4)


def test_attributes_are_read_from_the_model():
    net = Net()
    model = boosted(net)
    assert model.temperature == 2.0
    assert model.body is net.body
    assert model.shift is net.shift
    assert model.width == 8
    assert model.describe() == "a net"
    assert model.itself() is net
    assert not hasattr(model, "nothing")
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing


def test_attributes_that_the_model_has_are_set_on_the_model():
    net = Net()
    model = boosted(net)
    model.temperature = 4.0
    model.head = nn.Linear(8, 3)
    model.shift = torch.ones(3)
    model.width = 5
    assert net.temperature == 4.0
    assert net.head.out_features == 3
    assert net.chosen_width == 5
    assert model(torch.zeros(1, 4)).shape == (1, 3)
    assert set(model.state_dict()) == set(net.state_dict())


def test_new_attributes_and_modules_are_set_on_the_model_too():
    net = Net()
    model = boosted(net)
    model.note = "seen"
    model.extra = nn.Linear(2, 2)
    model.gain = nn.Parameter(torch.ones(1))
    model.register_buffer("count", torch.zeros(1))
    model.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    model.add_module("more", nn.Linear(1, 1))
    assert net.note == "seen"
    names = {"extra.weight", "gain", "count", "bias", "more.weight"}
    assert names <= set(net.state_dict())
    assert names <= set(model.state_dict())
    assert {"extra.weight", "gain", "bias"} <= set(dict(model.named_parameters()))


def test_attributes_are_deleted_from_the_model():
    net = Net()
    model = boosted(net)
    del model.temperature
    del model.head
    assert not hasattr(net, "temperature")
    assert not hasattr(net, "head")
    with pytest.raises(AttributeError):
        del model.nothing


def test_dir_shows_the_attributes_of_the_model():
    assert {"describe", "temperature", "head", "shift", "forward"} <= set(dir(boosted()))


def test_a_container_keeps_its_length_index_and_iteration():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model = boosted(net)
    assert len(model) == 3
    assert model[2] is net[2]
    assert list(model) == list(net)
    named = nn.ModuleDict({"a": nn.Linear(1, 1)})
    assert list(boosted(named)) == ["a"]
    assert "a" in boosted(nn.ModuleDict({"a": nn.Linear(1, 1)}))


def test_a_model_is_true_even_when_it_is_an_empty_container():
    assert boosted(nn.Sequential())
    assert boosted()


# ---- names ----


def test_names_are_those_of_the_model():
    net = Net()
    model = boosted(net)
    for method in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert dict(getattr(model, method)()) == dict(getattr(net, method)()), method
    for method in ("parameters", "buffers", "modules", "children"):
        assert list(getattr(model, method)()) == list(getattr(net, method)()), method
    assert model.get_submodule("body.0") is net.body[0]
    assert model.get_parameter("head.weight") is net.head.weight
    assert [name for name, _ in model.named_parameters(prefix="x")] == [n for n, _ in net.named_parameters(prefix="x")]


def test_state_dict_is_that_of_the_model():
    net = Net()
    model = boosted(net)
    assert list(model.state_dict()) == list(net.state_dict())
    other = boosted(Net())
    assert str(other.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), net.state_dict().values(), strict=True))
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "typo"'):
        other.load_state_dict({**model.state_dict(), "typo": torch.zeros(1)})


def test_state_dict_pickles_without_the_library():
    buffer = io.BytesIO()
    torch.save(boosted().state_dict(), buffer)
    buffer.seek(0)
    Net().load_state_dict(torch.load(buffer, weights_only=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_names_stay_clean_inside_another_module(compiled):
    def outer(model):
        return nn.ModuleDict({"net": model, "other": nn.Linear(1, 1)})

    net = Net()
    nested, plain = outer(boosted(torch.compile(net, backend="eager") if compiled else net)), outer(Net())
    assert list(nested.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in nested.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in nested.named_modules()] == [n for n, _ in plain.named_modules()]
    assert str(nested.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(net.head.weight, plain["net"].head.weight)
    wrong = {**plain.state_dict(), "net.typo": torch.zeros(1)}
    del wrong["net.head.weight"]
    with pytest.raises(RuntimeError, match=r"typo") as info:
        nested.load_state_dict(wrong)
    assert "head.weight" in str(info.value)
    nested.eval()
    assert not net.training
    assert not net.body[0].training
    nested.to(torch.float64)
    assert net.head.weight.dtype == torch.float64


# ---- methods of nn.Module ----


def test_train_eval_apply_and_requires_grad_reach_the_model():
    net = Net()
    model = boosted(net)
    assert model.eval() is model
    assert not net.training
    assert not net.body[0].training
    assert model.training is False
    assert model.train() is model
    assert net.body.training
    seen = []
    assert model.apply(seen.append) is model
    assert seen == list(net.children())[0:0] + [net.body[0], net.body[1], net.body, net.head, net]
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in net.parameters())


def test_training_mode_is_the_models_own_even_when_the_model_changes_it_itself():
    net = Net()
    model = boosted(net)
    net.eval()
    assert model.training is False
    net.train()
    assert model.training is True
    model.training = False
    assert net.training is False


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.double(),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to("cpu"),
    ],
)
def test_casts_and_moves_reach_the_model_and_return_the_boosted_one(move):
    net, expected = Net(), move(Net())
    model = boosted(net)
    assert move(model) is model
    assert [p.dtype for p in net.parameters()] == [p.dtype for p in expected.parameters()]
    assert net.shift.dtype == expected.shift.dtype


def test_zero_grad_and_hooks_work_on_the_boosted_model():
    net = Net()
    model = boosted(net)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.ones(1, 4)).sum().backward()
    assert seen == ["pre", torch.float32]
    model.zero_grad()
    assert net.head.weight.grad is None


def test_repr_shows_the_model():
    assert "(head): Linear(in_features=8, out_features=2, bias=True)" in repr(boosted())


# ---- copies ----


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_deep_copy_is_an_independent_boosted_model(precision):
    torch.manual_seed(0)
    net = Net()
    model = boosted(net, precision)
    ema = copy.deepcopy(model)
    x = torch.randn(3, 4)
    assert torch.equal(ema(x), model(x))
    with torch.no_grad():
        for p in ema.parameters():
            p.zero_()
    assert net.head.weight.abs().sum() > 0
    assert torch.equal(ema(x), torch.zeros(3, 2))
    assert list(ema.state_dict()) == list(net.state_dict())
    seen = []
    ema.head.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    ema(x)
    assert seen == [HALF[precision]]


def test_a_deep_copy_keeps_the_pinned_modules_pinned():
    model = boosted(precision=BF16MixedPrecision(keep_fp32="head"))
    ema = copy.deepcopy(model)
    seen = []
    for name in ("head", "body"):
        ema.get_submodule(name).register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    ema(torch.ones(1, 4))
    assert seen == [torch.bfloat16, torch.float32]


def test_a_deep_copy_shares_the_precision():
    # A user's strategy may hold what cannot be copied.
    class Mine(BF16MixedPrecision):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    model = boosted(precision=Mine())
    assert copy.deepcopy(model)(torch.ones(1, 4)).dtype == torch.float32


@pytest.mark.parametrize("precision", ["bf16_naive", "fp16_naive"])
def test_an_average_of_the_model_before_boost_moves_and_one_of_half_weights_does_not(precision):
    def lerp(average, weight, _):
        return average.lerp(weight.to(average.dtype), 1 - 0.9999)

    net, average = nn.Linear(4, 4), functools.partial(AveragedModel, avg_fn=lerp)
    nn.init.ones_(net.weight)
    of_floats = average(copy.deepcopy(net))
    model, *_ = Booster("cpu", precision).boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    of_halves = average(model)
    for step in range(101):
        of_floats.update_parameters(model)
        of_halves.update_parameters(model)
        if step == 0:  # which is copied
            model.weight.data.fill_(1.5)
    expected = torch.full((4, 4), 1.5 - 0.5 * 0.9999**100)
    torch.testing.assert_close(of_floats.module.weight.data, expected, rtol=3 * 100 * 2.0**-24, atol=0)
    assert torch.equal(of_halves.module.weight.float(), torch.ones(4, 4))


# ---- forward and other methods under the precision ----


@pytest.mark.parametrize("precision", PRECISIONS)
def test_methods_beside_forward_run_under_the_precision(precision):
    net = Net()
    model = boosted(net, precision)
    seen = []
    net.body[0].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    assert model.embed(torch.ones(1, 4)).dtype == torch.float32
    assert model.forward(torch.ones(1, 4)).dtype == torch.float32
    assert seen == [HALF[precision]] * 2


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x):
        return self.cell(x)

    @torch.no_grad()
    def generate(self, x, steps):
        for _ in range(steps):
            x = self(x)
        return x


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_method_that_calls_the_model_itself_runs_under_the_precision(precision):
    net = Generator()
    model = boosted(net, precision)
    seen = []
    net.cell.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    assert model.generate(torch.ones(1, 4), steps=3).dtype == torch.float32
    assert seen == [HALF[precision]] * 3
    assert not torch.is_autocast_enabled("cpu")


class Streaming(Generator):
    def stream(self, x, steps):
        for _ in range(steps):
            x = self(x)
            yield x


def test_a_generator_runs_under_the_precision_and_leaves_the_loop_body_alone():
    net = Streaming()
    model = boosted(net, "bf16")
    seen = []
    net.cell.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    for item in model.stream(torch.ones(1, 4), steps=2):
        assert item.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
    assert seen == [torch.bfloat16] * 2
    next(model.stream(torch.ones(1, 4), steps=2))  # left in the middle
    assert not torch.is_autocast_enabled("cpu")


def test_a_method_keeps_its_name_and_signature():
    import inspect

    model = boosted(Generator())
    assert model.generate.__name__ == "generate"
    assert list(inspect.signature(model.generate).parameters) == ["x", "steps"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_forward_runs_the_same_in_eval_under_no_grad_and_under_inference_mode(precision):
    model = boosted(Net(), precision).eval()
    x = torch.randn(2, 4)
    expected = model(x).detach()
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    assert model(x).requires_grad


def test_an_exception_in_forward_leaves_autocast_off():
    model = boosted(Net(), "bf16")
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    with pytest.raises(RuntimeError):
        model.embed(torch.ones(1, 5))
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._len_torch_function_stack() == 0


# ---- what goes in and out ----


class Out(NamedTuple):
    logits: torch.Tensor
    ids: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "batch"


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    double: torch.Tensor


class Echo(nn.Module):
    """Returns what `make` builds from a half tensor, a float64 one and an integer one."""

    def __init__(self, make):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, x):
        return self.make(self.linear(x), torch.ones(1, dtype=torch.float64), torch.arange(3))


def leaves(value):
    if dataclasses.is_dataclass(value) and not isinstance(value, collections.abc.Mapping):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    elif isinstance(value, collections.abc.Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


OUTPUTS = {
    "tuple": lambda h, d, i: (h, d, i),
    "list": lambda h, d, i: [h, [d, i]],
    "namedtuple": lambda h, d, i: Out(h, i),
    "dict": lambda h, d, i: {"h": h, "nested": {"d": d, "i": i}},
    "ordered dict": lambda h, d, i: collections.OrderedDict(h=h, d=d),
    "default dict": lambda h, d, i: collections.defaultdict(list, h=h, d=d),
    "read-only mapping": lambda h, d, i: types.MappingProxyType({"h": h, "d": d}),
    "dataclass": lambda h, d, i: Result(h, d),
    "frozen dataclass": lambda h, d, i: Batch(h, i),
    "named tuple of torch": lambda h, d, i: torch.return_types.max((h, i)),
    "packed sequence": lambda h, d, i: nn.utils.rnn.pack_sequence([h]),
    "none and text": lambda h, d, i: (None, "text", h, 3),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_keep_their_containers_and_only_half_tensors_become_float32(kind):
    make = OUTPUTS[kind]
    output = boosted(Echo(make))(torch.ones(2, 4))
    half = torch.zeros(2, 4, dtype=torch.bfloat16)
    expected = make(half, torch.ones(1, dtype=torch.float64), torch.arange(3))
    assert type(output) is type(expected)
    found = [leaf.dtype if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(output)]
    wanted = [leaf.dtype if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(expected)]
    assert found == [torch.float32 if dtype is torch.bfloat16 else dtype for dtype in wanted]
    assert torch.float32 in found


def test_a_cast_output_leaves_the_containers_of_the_model_alone():
    kept = {}

    def make(h, d, i):
        kept["out"] = {"h": h}
        return kept["out"]

    boosted(Echo(make))(torch.ones(2, 4))
    assert kept["out"]["h"].dtype == torch.bfloat16


class Taking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = []

    def forward(self, batch, *, mask=None):
        self.seen.append((type(batch), [leaf.dtype for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]))
        return self.linear(leaves(batch)[0])


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(2, 4), "ids": torch.arange(2), "d": torch.ones(1, dtype=torch.float64)},
        Out(torch.ones(2, 4), torch.arange(2)),
        Batch(torch.ones(2, 4), torch.arange(2)),
        [torch.ones(2, 4), torch.ones(2, dtype=torch.bool)],
    ],
)
def test_inputs_reach_the_model_as_they_are(batch):
    net = Taking()
    boosted(net)(batch, mask=torch.ones(1))
    assert net.seen == [(type(batch), [leaf.dtype for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)])]


@dataclasses.dataclass
class Kept:
    x: torch.Tensor


class Writing(nn.Module):
    """Writes into all that it is given: into tensors in place, and into containers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, state):
        x.sub_(1.0)
        out = self.linear(x)
        state["h"], state["new"] = out, [out]
        del state["old"]
        state["count"] += 1
        state["rows"].append(out)
        state["rows"][0].add_(1.0)
        state["queue"].append(out)
        state["members"].add(out)
        state["batch"].x = out
        return out


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Writing()

    def forward(self, x, state):
        h = self.first(x)
        return h + self.inner(h, state)

    def alone(self, x):
        x.mul_(2.0)
        return self.first(x)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "make",
    [
        lambda: "fp32",
        lambda: BF16NaiveMixedPrecision(),
        lambda: FP16NaiveMixedPrecision(),
        lambda: FP16ApexMixedPrecision(opt_level="O2"),
        lambda: BF16MixedPrecision(keep_fp32="inner"),
        lambda: BF16NaiveMixedPrecision(keep_fp32="inner"),
    ],
    ids=["fp32", "bf16_naive", "fp16_naive", "O2", "bf16, kept", "bf16_naive, kept"],
)
def test_what_a_model_writes_into_its_inputs_reaches_them(make, mode):
    torch.manual_seed(0)
    found = []
    net = Holding()
    plain, model = copy.deepcopy(net), boosted(net, make())
    x, old = torch.randn(2, 4), torch.ones(1)
    with mode():
        for called in (plain, model):
            state = {"h": x.clone(), "old": old, "count": 0, "rows": [x.clone()], "batch": Kept(x.clone())}
            state.update(queue=collections.deque([x.clone()], maxlen=2), members={x.clone()})
            queue, members = state["queue"], state["members"]
            rows, batch, given, single = state["rows"], state["batch"], x.clone(), x.clone()
            out = called(given, state)
            assert state["rows"] is rows
            assert state["batch"] is batch
            assert (len(queue), len(members), queue.maxlen) == (2, 2, 2)
            assert (len(rows), state["count"], "old" in state) == (2, 1, False)
            read = called.alone(single)
            torch.testing.assert_close(single, 2 * x, rtol=1e-2, atol=1e-2)
            found.append((given, single, out, read, state["h"], *state["new"], *rows, batch.x))
            assert {each.dtype for each in (rows[0], single, given)} == {torch.float32}
    torch.testing.assert_close(*found, rtol=2e-2, atol=3e-2, check_dtype=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive", "fp16_naive"])
def test_what_a_model_writes_into_its_only_input_reaches_it(precision):
    class Normalising(nn.Linear):
        def forward(self, x):
            return super().forward(x.sub_(1.0))

    net = Normalising(4, 4)
    x = torch.randn(2, 4)
    boosted(net, precision)(given := x.clone())
    torch.testing.assert_close(given, x - 1, rtol=2e-2, atol=2e-2)


# ---- torch.compile ----

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    def __init__(self, dim=8, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(batch, length, dim))


def train(model, optimizer, booster, steps):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 5, 8)).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow_cases("bf16-before-eager")
@pytest.mark.crossed
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_compiled_model_trains_like_the_eager_one_and_compiles_once(precision, when, backend):
    def run(compile_it):
        torch.manual_seed(0)
        net = Attention()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        booster = Booster(device="cpu", mixed_precision=precision)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = torch.compile(net, backend=counter) if compile_it and when == "before" else net
        model, optimizer, *_ = booster.boost(model, optimizer)
        keys = list(model.state_dict())
        if compile_it and when == "after":
            model = torch.compile(model, backend=counter)
        losses = train(model, optimizer, booster, 12)
        return losses, counter.frame_count, keys, booster.unwrap(model)

    import torch._dynamo.testing

    eager, _, keys, _ = run(False)
    compiled, frames, compiled_keys, inner = run(True)
    assert compiled == pytest.approx(eager, rel=2e-2 if precision == "bf16" else 2e-3)
    assert compiled[-1] < compiled[0]
    assert 1 <= frames <= 4, f"{frames} graphs: recompiled at every step"
    assert compiled_keys == keys
    assert isinstance(inner, nn.Module)


@pytest.mark.parametrize("when", ["before", "before, and has run", "after"])
def test_pinned_modules_stay_in_float32_in_a_compiled_model(when):
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    if when.startswith("before"):
        model = torch.compile(model, backend=counter)
        if "run" in when:
            model(x)
    booster = Booster(device="cpu", mixed_precision=BF16MixedPrecision(keep_fp32="1", output_dtype=None))
    model = booster.boost(model)[0]
    model = torch.compile(model, backend=counter) if when == "after" else model
    for _ in range(5):
        out = model(x)
        assert out.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
    assert counter.frame_count == (2 if "run" in when else 1)


def test_module_compile_of_the_boosted_model_works():
    model = boosted(Net())
    x = torch.randn(2, 4)
    expected = model(x)
    model.compile(backend="eager")
    assert torch.allclose(model(x), expected, atol=1e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_a_model_compiled_with_inductor_trains():
    torch.manual_seed(0)
    booster = Booster(device="cpu", mixed_precision="bf16")
    net = Attention()
    model, optimizer, *_ = booster.boost(torch.compile(net), torch.optim.SGD(net.parameters(), lr=0.1))
    losses = train(model, optimizer, booster, 3)
    assert losses[-1] < losses[0]


class OwnWords(nn.Module):
    """Overrides what nn.Module has, with its own arguments, as people do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.fitted = self.loaded = None

    def forward(self, x):
        return self.layer(x)

    def train(self, batches=(), *, epochs=1):
        self.fitted = (batches, epochs)
        super().train(True)
        return "fitted"

    def eval(self, batches=None):
        super().train(False)
        return self if batches is None else len(batches)

    def load_state_dict(self, state):
        self.loaded = sorted(state)
        return super().load_state_dict(state)

    def zero_grad(self):
        for param in self.parameters():
            param.grad = None

    def _apply(self, fn):
        return super()._apply(fn)


def test_methods_of_torch_that_a_class_overrides_keep_its_own_arguments():
    net = OwnWords()
    model, *_ = Booster("cpu", "bf16").boost(net)
    assert model.train([1, 2], epochs=3) == "fitted"
    assert net.fitted == ([1, 2], 3)
    assert model.training
    assert model.eval() is model
    assert not net.layer.training
    assert model.eval([1, 2, 3]) == 3
    model.load_state_dict(net.state_dict())
    assert net.loaded == ["layer.bias", "layer.weight"]
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    assert net.layer.weight.grad is None
    assert model.to(torch.float64) is model


@pytest.mark.parametrize("precision", ["bf16", "bf16_naive"])
def test_zero_grad_of_a_class_has_its_own_arguments(precision):
    class Logs(nn.Linear):
        def zero_grad(self, set_to_none, *, why=""):
            super().zero_grad(set_to_none)
            return setattr(self, "why", why)

    model, *_ = Booster("cpu", precision).boost(Logs(4, 2))
    for to_none in (False, True):
        model(torch.ones(1, 4)).sum().backward()
        model.zero_grad(to_none, why="new epoch")
        assert model.why == "new epoch"
        assert (model.weight.grad is None) == to_none
    with pytest.raises(TypeError, match="missing a required argument: 'set_to_none'"):
        model.zero_grad()


# register_backward_hook is its modern name; extra_repr is for print; zero_grad clears what plugins keep, and takes no more.
NOT_OWN = {"forward", "register_backward_hook", "extra_repr", "zero_grad", "get_extra_state", "set_extra_state"}
METHODS = {name for name, _ in inspect.getmembers(nn.Module, inspect.isfunction) if name[0] != "_"} - NOT_OWN


def test_every_method_of_torch_that_a_class_overrides_is_its_own():
    for name in sorted(METHODS):

        def own(self, *args, wanted=None, name=name, **kwargs):
            return getattr(nn.Linear, name)(self, *args, **kwargs) if wanted is None else wanted

        net = type("Own", (nn.Linear,), {name: own})(2, 2)
        model, *_ = Booster("cpu", "bf16").boost(net)
        assert getattr(model, name)(wanted={"theirs": 1}) == {"theirs": 1}, name
        if name != "state_dict":
            assert getattr(model, name)(wanted=net) in (model, net), name
        net = nn.Linear(2, 2)
        model, *_ = Booster("cpu", "bf16").boost(net)
        setattr(net, name, lambda *args: {"of": "the instance"})
        assert getattr(model, name)() == {"of": "the instance"}, name


class MakesTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) + self.layer(torch.zeros(len(x), 4))

    def act(self, x):
        return self.layer(torch.zeros(len(x), 4))


@pytest.mark.parametrize("precision", ["bf16_naive", "fp16_naive"])
def test_a_tensor_that_forward_makes_in_float32_is_named_by_its_line(precision):
    model, *_ = Booster("cpu", precision).boost(MakesTensors())
    for call in (model, model.act):
        with pytest.raises(
            RuntimeError, match=r"weights are b?float16, and .*test_model_wrapper.py:\d+ in (forward|act)"
        ):
            call(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(torch.ones(1, 5))
    assert "default_dtype" not in str(caught.value)
    norm, *_ = Booster("cpu", precision).boost(nn.Sequential(Widens(), nn.LayerNorm(4)))
    with pytest.raises(RuntimeError, match="expect parameter to have scalar type of Float: weights are"):
        norm(torch.ones(1, 4))


class Widens(nn.Module):
    def forward(self, x):
        return x * torch.ones(4)


@pytest.mark.parametrize("of_states", [torch.float32, torch.bfloat16])
def test_first_states_of_another_dtype_are_told_from_a_layer_that_torch_does_not_train(of_states):
    class Refused(nn.Module):
        def forward(self, input):
            hx = torch.zeros(2, 4, dtype=of_states)
            raise RuntimeError(f"could not create a primitive descriptor for the LSTM, {hx.shape}")

    model, *_ = Booster("cpu", "bf16_naive").boost(Refused())
    with pytest.raises(RuntimeError, match="could not create a primitive descriptor") as caught:
        model(torch.ones(2, 4))
    assert ("forward gave one of them a tensor of another dtype" in str(caught.value)) == (of_states == torch.float32)


# ---- transformers ----


@pytest.fixture
def gpt2(transformers):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_transformers_model_generates_under_the_precision(gpt2, precision):
    model = boosted(gpt2, precision).eval()
    seen = []
    gpt2.lm_head.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    ids = model.generate(torch.zeros(1, 2, dtype=torch.long), max_new_tokens=4, do_sample=False, pad_token_id=1)
    assert ids.dtype == torch.int64
    assert ids.shape[1] > 2
    assert set(seen) == {HALF[precision]}


def test_a_transformers_model_saves_itself_through_the_boosted_one(gpt2, transformers, tmp_path):
    model = boosted(gpt2)
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), gpt2.parameters(), strict=True))
