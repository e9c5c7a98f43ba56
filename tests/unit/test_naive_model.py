"""NaiveAMPModel, modules kept in float32 inside a half model, and what a policy does to a model."""

import copy
import dataclasses
import io
from collections import namedtuple
from typing import NamedTuple

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import (
    DtypePolicy,
    FP16NaiveMixedPrecision,
    NaiveAMPModel,
    is_batch_norm,
    set_fp32_attr_to_module,
)
from booster.mixed_precision.keep_fp32 import Float32Forward
from booster.mixed_precision.policy import cast_parameters, half_policy
from booster.tensors.weak import strip_weak

HALVES = [torch.float16, torch.bfloat16]
F16, F32 = torch.float16, torch.float32


class Pair(NamedTuple):
    x: torch.Tensor
    index: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    label: str


class Probe(nn.Module):
    """Remembers the arguments it got, and returns them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen = None

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return kwargs or (args[0] if len(args) == 1 else args)


class Net(nn.Module):
    """body -> norm -> head, with a buffer of each kind, an attribute and a method besides forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)
        self.temperature = 2.0
        self.register_buffer("shift", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64) * 1j)

    def forward(self, x):
        return self.head(self.norm(self.body(x))) / self.temperature + self.shift

    def embed(self, x):
        return self.body(x)


def dtypes(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


# ---- casting ----


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_parameters_are_half_and_buffers_stay_as_they_were_registered(dtype):
    model = NaiveAMPModel(Net(), dtype=dtype)
    found = dtypes(model)
    assert found.pop("count") == torch.int64
    assert found.pop("phase") == torch.complex64
    assert found.pop("shift") == F32
    assert torch.equal(model.phase, torch.ones(2, dtype=torch.complex64) * 1j)
    assert set(found.values()) == {dtype}


def test_the_result_is_that_of_the_half_model_in_float32_and_gradients_are_half():
    net, x = Net(), torch.randn(3, 4)
    half = copy.deepcopy(net).half()
    model = NaiveAMPModel(net)
    out = model(x)
    assert out.dtype == F32
    assert torch.equal(out, half(x.half()).float())
    out.sum().backward()
    assert {p.grad.dtype for p in net.parameters()} == {F16}


def test_output_stays_half_when_asked():
    assert NaiveAMPModel(Net(), output_to_fp32=False)(torch.randn(3, 4)).dtype == F16


def test_the_parameter_objects_of_the_model_stay_so_an_optimizer_made_before_holds_them():
    net = Net()
    before = list(net.parameters())
    assert all(a is b for a, b in zip(before, NaiveAMPModel(net).parameters(), strict=True))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        ("torch.float16", torch.float16),
        ("torch.half", torch.float16),
        ("torch.bfloat16", torch.bfloat16),
        ("torch.float32", torch.float32),
    ],
)
def test_dtype_is_a_torch_dtype_or_its_documented_string(given, meant):
    assert NaiveAMPModel(Net(), dtype=given).body.weight.dtype == meant


def test_tf32_is_float32_whose_forward_multiplies_in_it_where_the_device_does(monkeypatch):
    with pytest.raises(ValueError, match=r"tf32 needs .* the model is on cpu. Move it first; or give it to Booster"):
        NaiveAMPModel(Net(), dtype="torch.tf32")
    for file in ("naive", "fp32"):
        monkeypatch.setattr(f"booster.mixed_precision.{file}.missing", lambda *args, **kwargs: "")
    seen, net = [], Net()
    net.register_forward_pre_hook(lambda *args: seen.append(torch.backends.cuda.matmul.fp32_precision))
    model, before = NaiveAMPModel(net, dtype="torch.tf32"), torch.backends.cuda.matmul.fp32_precision
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    model(torch.ones(2, 4))
    assert seen == ["tf32"]
    assert torch.backends.cuda.matmul.fp32_precision == before != "tf32"


@pytest.mark.parametrize("dtype", ["fp16", "float16", torch.int8, torch.float64, None, 16])
def test_any_other_dtype_raises_with_the_legal_ones_and_leaves_the_model_alone(dtype):
    net = Net()
    with pytest.raises(ValueError, match=r"'torch.float16', 'torch.half', 'torch.bfloat16', 'torch.float32'"):
        NaiveAMPModel(net, dtype=dtype)
    assert net.body.weight.dtype == F32


def test_parallel_mode_raises_and_names_parallel_group():
    with pytest.raises(TypeError, match="parallel_group"):
        NaiveAMPModel(Net(), parallel_mode="data")


def test_wrapping_twice_raises():
    with pytest.raises(RuntimeError, match="already"):
        NaiveAMPModel(NaiveAMPModel(Net()))


# ---- containers ----


def test_inputs_are_cast_in_every_container_and_integers_and_float64_stay():
    probe = Probe()
    x, index, wide = torch.randn(2), torch.arange(2), torch.randn(2, dtype=torch.float64)
    NaiveAMPModel(probe)([x, {"a": (x, index)}], wide, pair=Pair(x, index), record=Record(x, "a"), flag=True)
    args, kwargs = probe.seen
    assert [args[0][0].dtype, args[0][1]["a"][0].dtype, args[0][1]["a"][1].dtype] == [F16, F16, torch.int64]
    assert args[1].dtype == torch.float64
    assert type(kwargs["pair"]) is Pair
    assert [kwargs["pair"].x.dtype, kwargs["pair"].index.dtype] == [F16, torch.int64]
    assert type(kwargs["record"]) is Record
    assert kwargs["record"].x.dtype == F16
    assert kwargs["flag"] is True


def containers(x, index):
    point = namedtuple("Point", "x index")
    return {
        "tensor": x,
        "tuple": (x, index),
        "list": [x, index],
        "dict": {"x": x, "index": index},
        "namedtuple": point(x, index),
        "dataclass": Record(x, "a"),
    }


def floats(tree):
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.is_floating_point() else []
    if isinstance(tree, dict):
        return [t for item in tree.values() for t in floats(item)]
    if dataclasses.is_dataclass(tree):
        return floats(tree.x)
    return [t for item in tree for t in floats(item)] if isinstance(tree, (tuple, list)) else []


@pytest.mark.parametrize("kind", list(containers(None, None)))
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_pinned_module_sees_and_returns_float32_in_the_same_container(kind, by_keyword):
    net = nn.Sequential(Probe())
    set_fp32_attr_to_module(net[0])
    model = NaiveAMPModel(net, output_to_fp32=False)
    index = torch.arange(2)
    given = containers(torch.randn(2).half(), index)[kind]
    out = model[0](value=given)["value"] if by_keyword else model[0](given)
    args, kwargs = net[0].seen
    seen = kwargs["value"] if by_keyword else args[0]
    assert type(seen) is type(given)
    assert type(strip_weak(out)) is type(given)
    assert [t.dtype for t in floats(seen)] == [F32]
    assert [t.dtype for t in floats(out)] == [F32]
    if kind == "tuple":
        assert seen[1] is index  # integers are not touched, let alone cast
        assert out[1] is index


def test_transformers_model_output_keeps_its_type_inside_and_outside(transformers):
    modeling_outputs = transformers.modeling_outputs

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.saw = None

        def forward(self, x):
            self.saw = x.dtype
            return modeling_outputs.BaseModelOutput(last_hidden_state=self.layer(x), hidden_states=(x, x))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = Encoder()
            self.head = nn.Linear(4, 2)
            self.inner = None

        def forward(self, x):
            self.inner = self.encoder(x)
            return modeling_outputs.BaseModelOutput(last_hidden_state=self.head(self.inner.last_hidden_state))

    net = Outer()
    set_fp32_attr_to_module(net.encoder)
    out = NaiveAMPModel(net)(torch.randn(2, 4))
    assert net.encoder.saw == F32
    assert type(net.inner) is modeling_outputs.BaseModelOutput
    assert net.inner.last_hidden_state.dtype == F32
    assert [h.dtype for h in net.inner.hidden_states] == [F32, F32]
    assert type(out.last_hidden_state) is torch.Tensor
    assert type(out) is modeling_outputs.BaseModelOutput
    assert out["last_hidden_state"].dtype == out.last_hidden_state.dtype == F32


# ---- keep_fp32 ----


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_marked_module_computes_in_float32_from_weights_that_were_never_half(dtype):
    net, x = Net(), torch.randn(3, 4)
    nn.init.normal_(net.norm.weight)
    weight = net.norm.weight.detach().clone()
    set_fp32_attr_to_module(net.norm)
    body, norm = copy.deepcopy(net.body).to(dtype), copy.deepcopy(net.norm)
    model = NaiveAMPModel(net, dtype=dtype)
    hidden = []
    net.norm.register_forward_hook(lambda module, args, output: hidden.append(output))
    model(x)
    assert torch.equal(model.norm.weight, weight)
    assert model.norm.weight.dtype == F32
    assert torch.equal(hidden[0], norm(body(x.to(dtype)).float()))
    assert model.head(hidden[0]).dtype == dtype  # and so it is rounded where it meets half weights


@pytest.mark.parametrize("keep", ["norm", nn.LayerNorm, lambda name, module: name.startswith("norm"), "n*m"])
def test_keep_fp32_by_name_type_predicate_or_pattern_is_the_same_as_marking(keep):
    torch.manual_seed(0)
    by_option = NaiveAMPModel(Net(), keep_fp32=keep)
    torch.manual_seed(0)
    net = Net()
    set_fp32_attr_to_module(net.norm)
    by_mark = NaiveAMPModel(net)
    x = torch.randn(3, 4)
    assert dtypes(by_option) == dtypes(by_mark)
    assert by_option.norm.weight.dtype == F32
    assert torch.equal(by_option(x), by_mark(x))


def test_a_pinned_module_pins_what_is_inside_it_also_where_that_is_marked_itself():
    inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    net = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 2))
    set_fp32_attr_to_module(inner)
    set_fp32_attr_to_module(inner[1])
    seen = []
    inner[0].register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    inner[1].register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    inner.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    NaiveAMPModel(net)(torch.randn(2, 4))
    assert seen == [(F32, F32), (F32, F32), (F16, F32)]


def test_gradients_of_pinned_parameters_are_float32_and_flow_on_in_half():
    net = Net()
    set_fp32_attr_to_module(net.norm)
    NaiveAMPModel(net)(torch.randn(3, 4)).sum().backward()
    assert (net.norm.weight.grad.dtype, net.body.weight.grad.dtype) == (F32, F16)
    assert net.body.weight.grad.abs().sum() > 0


class ReadByNorm(torch.utils._python_dispatch.TorchDispatchMode):
    """The dtypes of what batches are normalised of, and how many tensors were cast."""

    def __init__(self):
        super().__init__()
        self.read, self.casts = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit"):
            self.read.add(args[0].dtype)
        self.casts += name == "_to_copy"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("kept", [True, False], ids=["running", "of the batch"])
@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 7), (8, 6, 5, 4), (4, 6, 3, 2, 2)], ids=len)
def test_a_batch_norm_amid_halves_reads_them_and_computes_in_float32(shape, kept, affine, dtype):
    """Without parameters torch would keep statistics of halves in half, so that one gets its inputs in float32."""
    torch.manual_seed(0)
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    net = nn.Sequential(kind(6, affine=affine, track_running_stats=kept))
    exact = copy.deepcopy(net).double()
    cast_parameters(net, half_policy(net, dtype))
    x = (3 * torch.randn(shape) + 1).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    weights = torch.randn(shape).to(dtype)
    for training in (True, False):
        net.train(training), exact.train(training)
        with ReadByNorm() as norm:
            out = net(x)
        expected = exact(wide)
        assert norm.read == {dtype if affine else F32}
        assert norm.casts == (0 if affine else 1)
        inputs, wides = [x, *net.parameters()], [wide, *exact.parameters()]
        found = (out, *torch.autograd.grad((out * weights).float().sum(), inputs))
        for one, other in zip(found, (expected, *torch.autograd.grad((expected * weights).sum(), wides)), strict=True):
            # Gradients of parameters are sums of what was rounded once.
            loose = 4 * torch.finfo(dtype).eps * (1 + other.abs().max().item())
            torch.testing.assert_close(one.double(), other, rtol=torch.finfo(dtype).eps, atol=loose)
        assert out.dtype == (dtype if affine else F32)  # of which the model returns what there is
    for one, other in zip(net.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


def test_a_batch_norm_with_a_forward_of_its_own_gets_float32():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            assert x.dtype == F32
            return super().forward(x)

    net = nn.Sequential(Own(6), nn.Linear(6, 2))
    cast_parameters(net, half_policy(net, F16))
    assert net(torch.randn(4, 6).half()).dtype == F16


def test_batch_norm_is_half_when_asked_and_its_statistics_as_they_were_registered():
    norm = NaiveAMPModel(nn.Sequential(nn.BatchNorm1d(2)), keep_fp32=())[0]
    assert (norm.weight.dtype, norm.running_var.dtype) == (F16, F32)


def test_a_pin_that_selects_nothing_raises_before_anything_is_cast():
    net = Net()
    with pytest.raises(ValueError, match="selects no module"):
        NaiveAMPModel(net, keep_fp32="nrom")
    assert net.body.weight.dtype == F32


def test_marking_the_whole_model_raises():
    net = Net()
    set_fp32_attr_to_module(net)
    with pytest.raises(ValueError, match="whole Net is marked"):
        NaiveAMPModel(net)


def test_marks_survive_a_deepcopy_of_the_model():
    net = Net()
    set_fp32_attr_to_module(net.norm)
    assert NaiveAMPModel(copy.deepcopy(net)).norm.weight.dtype == F32


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index):
        return self.head(self.embed(index))


def test_a_tied_weight_with_one_pinned_user_raises_and_names_both():
    model = Tied()
    with pytest.raises(ValueError, match=r"head\.weight is in a module.*embed\.weight"):
        NaiveAMPModel(model, keep_fp32="head")
    assert model.head.weight.dtype == F32
    assert not isinstance(model.head.forward, Float32Forward)


def test_a_tied_weight_with_both_or_no_users_pinned_is_fine():
    index = torch.arange(3)
    both = NaiveAMPModel(Tied(), keep_fp32=["head", "embed"])
    assert both.head.weight is both.embed.weight
    assert both(index).dtype == both.head.weight.dtype == F32
    neither = NaiveAMPModel(Tied())
    assert neither.head.weight is neither.embed.weight
    assert neither.head.weight.dtype == F16
    assert neither(index).dtype == F32


def test_a_module_used_in_two_places_is_pinned_in_both():
    shared = nn.LayerNorm(4)
    net = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared)
    seen = []
    shared.register_forward_hook(lambda module, args, out: seen.append((module.weight.dtype, out.dtype)))
    NaiveAMPModel(net, keep_fp32=nn.LayerNorm)(torch.randn(2, 4))
    assert seen == [(F32, F32)] * 2


def test_a_module_shared_by_a_pinned_and_another_parent_raises():
    shared = nn.Linear(4, 4)
    net = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    with pytest.raises(ValueError, match=r"a\.0\.weight is in a module.*b\.0\.weight"):
        NaiveAMPModel(net, keep_fp32="a")


# ---- being the model ----


def test_train_and_eval_propagate_and_return_the_model_itself():
    net = Net()
    model = NaiveAMPModel(net)
    assert model.eval() is model
    assert (model.training, net.training, net.norm.training) == (False, False, False)
    assert model.train() is model
    assert (model.training, net.training, net.norm.training) == (True, True, True)


def test_state_dict_keys_and_parameter_names_are_those_of_the_model_and_load_back():
    net = Net()
    keys, names = list(net.state_dict()), [name for name, _ in net.named_parameters()]
    model = NaiveAMPModel(net)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == names
    other = NaiveAMPModel(Net())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    x = torch.randn(3, 4)
    assert torch.equal(model(x), other(x))


def test_attributes_and_methods_pass_through_and_methods_cast_like_forward():
    net = Net()
    model = NaiveAMPModel(net)
    assert model.temperature == 2.0
    model.temperature = 4.0
    assert net.temperature == 4.0
    assert model.embed(torch.randn(3, 4)).dtype == F32
    with pytest.raises(AttributeError, match="nonsense"):
        _ = model.nonsense


def test_a_deepcopy_is_independent_and_keeps_its_pins():
    net = Net()
    set_fp32_attr_to_module(net.norm)
    model = NaiveAMPModel(net)
    x = torch.randn(3, 4)
    before = model(x)
    clone = copy.deepcopy(model)
    assert torch.equal(clone(x), before)
    with torch.no_grad():
        clone.norm.weight.zero_()
        clone.norm.bias.zero_()
    assert torch.equal(clone(x), (clone.head.bias.float() / 2).half().float().expand(3, 2))
    assert torch.equal(model(x), before)


def test_in_one_process_buffers_are_not_touched():
    net = nn.Sequential(nn.BatchNorm1d(4))
    NaiveAMPModel(net).train()(torch.randn(8, 4))
    version = net[0].running_mean._version
    NaiveAMPModel(copy.deepcopy(net)).eval()(torch.randn(8, 4))
    assert net[0].running_mean._version == version


def test_checkpointed_blocks_recompute_pinned_modules_the_same():
    net = Net()
    set_fp32_attr_to_module(net.norm)
    model, x = NaiveAMPModel(net), torch.randn(3, 4)
    model(x).sum().backward()
    strip_weak = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    forward = net.norm.forward
    net.norm.forward = lambda h: torch.utils.checkpoint.checkpoint(forward, h, use_reentrant=False)
    model(x).sum().backward()
    assert all(torch.equal(p.grad, strip_weak[name]) for name, p in net.named_parameters())


# ---- policies ----


def test_a_policy_without_dtypes_changes_nothing():
    net = Net()
    assert cast_parameters(net, DtypePolicy(output=F32)) is net
    assert set(dtypes(net).values()) == {F32, torch.int64, torch.complex64}


def test_gradients_are_cast_along_with_their_parameters():
    net = Net()
    net(torch.randn(3, 4)).sum().backward()
    cast_parameters(net, half_policy(net, F16, keep_fp32="norm"))
    assert (net.body.weight.grad.dtype, net.norm.weight.grad.dtype) == (F16, F32)


def test_the_half_policy_lists_pins_once_each():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4)), nn.LayerNorm(4))
    set_fp32_attr_to_module(net[2])
    policy = half_policy(net, torch.bfloat16, keep_fp32=[is_batch_norm, "1"])
    assert policy == DtypePolicy(param=torch.bfloat16, output=F32, keep_fp32=frozenset({"1", "2"}))


def test_placing_a_model_again_in_another_half_replaces_its_pins():
    net = Net()
    cast_parameters(net, half_policy(net, F16, keep_fp32="norm"))
    cast_parameters(net, half_policy(net, torch.bfloat16, keep_fp32="norm"))
    assert net(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16
    assert not isinstance(net.norm.forward.forward, Float32Forward)


def test_pins_inside_a_compiled_model_are_named_as_the_user_knows_them():
    net = Net()
    compiled = torch.compile(net, backend="eager")
    cast_parameters(compiled, half_policy(compiled, F16, keep_fp32="norm"))
    assert (net.norm.weight.dtype, net.body.weight.dtype) == (F32, F16)
    assert compiled(torch.randn(3, 4).half()).dtype == F16


def test_a_naive_model_can_be_boosted():
    model, *_ = Booster(device="cpu").boost(NaiveAMPModel(Net()))
    assert model(torch.randn(3, 4)).dtype == F32
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]


# ---- strategies ----


@pytest.mark.parametrize("name", ["fp16_naive", "bf16_naive"])
def test_a_strategy_casts_inputs_and_keeps_batch_norm_and_marked_modules_in_float32(name):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 2))
    set_fp32_attr_to_module(net[2])
    model, *_ = Booster(device="cpu", mixed_precision=name).boost(net)
    half = torch.float16 if name == "fp16_naive" else torch.bfloat16
    assert [layer.weight.dtype for layer in net] == [half, F32, F32, half]
    seen = []
    for layer in net:
        layer.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    assert model(torch.randn(3, 4)).dtype == F32
    assert seen == [(half, half), (half, half), (half, F32), (F32, half)]  # which does not widen what comes after it


def test_a_strategy_refuses_a_tied_weight_with_one_pinned_user_before_it_changes_the_model():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="same tensor"):
        Booster(device="cpu", mixed_precision=FP16NaiveMixedPrecision(keep_fp32="head")).boost(model, optimizer)
    assert model.head.weight.dtype == F32
