"""The facade: devices, what boost() accepts and refuses, backward, and everything that is handed back."""

import collections
import copy
import sys

import pytest
import torch
from everywhere import everywhere
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster import Booster
from booster.facade import foreign_names as checks
from booster.memory.estimate import PLUGINS
from booster.mixed_precision import (
    BF16MixedPrecision,
    DtypePolicy,
    FP16TorchMixedPrecision,
    MixedPrecision,
    NaiveAMPModel,
    apex_amp,
)
from booster.plugin import Plugin, SingleDevice, TorchDDPPlugin

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def fp16(**options):
    return Booster("cpu", FP16TorchMixedPrecision(init_scale=256.0), **options)


def loader():
    return DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,))), batch_size=4)


# ---- arguments in each other's place ----


@pytest.mark.parametrize(
    ("given", "error", "fix"),
    [
        (("bf16",), ValueError, "device='bf16' is not legal; write Booster(mixed_precision='bf16')"),
        ((torch.bfloat16,), TypeError, "device=torch.bfloat16 is not legal; write Booster(mixed_precision='bf16')"),
        (("fsdp",), ValueError, "device='fsdp' is not legal; write Booster(plugin=TorchFSDPPlugin())"),
        ((SingleDevice(),), TypeError, "write Booster(plugin=SingleDevice(...))"),
        ((BF16MixedPrecision(),), TypeError, "write Booster(mixed_precision=BF16MixedPrecision(...))"),
        (("cpu", "cuda:1"), ValueError, "mixed_precision='cuda:1' is not legal; write Booster(device='cuda:1')"),
        (("cpu", torch.device("cpu")), TypeError, "write Booster(device='cpu')"),
        (
            ("cpu", torch.float16),
            TypeError,
            "mixed_precision=torch.float16 is not legal; write Booster(mixed_precision='fp16')",
        ),
        (("cpu", "bfloat16"), ValueError, "write Booster(mixed_precision='bf16')"),
        (("cpu", "ddp"), ValueError, "write Booster(plugin=TorchDDPPlugin())"),
        (("cpu", SingleDevice), TypeError, "write Booster(plugin=SingleDevice(...))"),
        (("cpu", None, "cpu"), TypeError, "plugin='cpu' is not legal; write Booster(device='cpu')"),
        (("cpu", None, "bf16"), TypeError, "write Booster(mixed_precision='bf16')"),
        (("cpu", "bf16", "zero2"), TypeError, "write Booster(plugin=LowLevelZeroPlugin(stage=2))"),
        (("cpu", None, BF16MixedPrecision), TypeError, "write Booster(mixed_precision=BF16MixedPrecision(...))"),
    ],
)
def test_what_belongs_to_another_argument_raises_and_names_that(given, error, fix):
    with pytest.raises(error) as raised:
        Booster(*given)
    assert str(raised.value).endswith(fix)


class Name(str):
    """A string that shows itself in another way, as a member of an enum does."""

    def __repr__(self):
        return f"<Name {str(self)}>"


def test_strings_of_a_class_of_their_own_are_strings():
    booster = Booster(Name("cpu"), Name("bf16"))
    assert (booster.device.type, booster.precision.dtype) == ("cpu", torch.bfloat16)


def test_the_names_of_parallelisms_are_those_that_an_estimate_takes():
    assert set(checks._PLUGINS) == set(PLUGINS)


# ---- device ----


@no_cuda
def test_the_device_is_the_cpu_where_there_is_nothing_else():
    assert Booster().device == torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_device_is_a_string_or_a_torch_device(device):
    assert Booster(device).device == torch.device("cpu")


@no_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_cuda_without_cuda_raises(device):
    with pytest.raises(ValueError, match="sees no CUDA device"):
        Booster(device)


@pytest.mark.parametrize("device", ["mps", "xpu", "npu", "meta", "foo", "", "cpu:x"])
def test_other_devices_raise_and_the_legal_ones_are_named(device):
    with pytest.raises(ValueError, match=r"device='.*'cpu'.*'cuda'"):
        Booster(device)


def test_windows_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError, match="does not support Windows.*WSL2"):
        Booster("cpu")


class Unready(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("precision", everywhere())
def test_a_model_on_the_meta_device_gets_values_or_an_error_that_says_how(precision):
    with torch.device("meta"):
        model, unready = net(), nn.Sequential(nn.Linear(2, 2), Unready())
    booster = Booster("cpu", precision)
    for one in (model, unready):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        if one is unready:
            with pytest.raises(ValueError, match="on the meta device"):
                booster.boost(one, optimizer)
            assert all(param.is_meta for param in one.parameters())
            continue
        boosted, boosted_optimizer, *_ = booster.boost(one, optimizer)
        assert all(bool(param.isfinite().all()) for param in boosted.parameters())
        booster.backward(boosted(torch.ones(1, 4)).float().square().sum(), boosted_optimizer)
        boosted_optimizer.step()


class MetaDevice(SingleDevice):
    """In place of a device other than where models are made."""

    def place(self, module, policy, device):
        return super().place(module, policy, torch.device("meta"))


def test_model_and_optimizer_state_follow_the_placed_parameters():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = list(model.parameters())
    boosted, boosted_optimizer, *_ = Booster("cpu", plugin=MetaDevice()).boost(model, optimizer)
    held = [p for group in boosted_optimizer.param_groups for p in group["params"]]
    assert {p.device.type for p in held} == {"meta"}
    assert [id(p) for p in held] == [id(p) for p in boosted.parameters()]
    for param in held:
        assert optimizer.state[param]["exp_avg"].device.type == "meta"
    assert len(optimizer.state) == len(before)


# ---- options ----


@pytest.mark.parametrize("name", ["precision", "mixed_precision", "fp16", "bf16", "amp"])
@pytest.mark.parametrize("cls", [SingleDevice, TorchDDPPlugin])
def test_a_plugin_given_a_precision_names_booster(cls, name):
    with pytest.raises(TypeError, match=rf"{cls.__name__} got \['{name}'\].*Booster\(mixed_precision=..., plugin="):
        cls(**{name: "fp16"})


# ---- what boost() returns ----


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_boost_returns_the_five_and_none_for_none(precision):
    booster = Booster("cpu", precision)
    model = net()
    assert [x is None for x in booster.boost(model)] == [False, True, True, True, True]
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    five = booster.boost(model, optimizer, nn.CrossEntropyLoss(), loader(), scheduler)
    assert [x is None for x in five] == [False] * 5
    assert isinstance(five[1], torch.optim.Optimizer)


def test_unwrap_gives_back_the_users_objects():
    booster = Booster("cpu", "bf16")
    model, data = net(), loader()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    criterion = nn.CrossEntropyLoss()
    five = booster.boost(model, optimizer, criterion, data, scheduler)
    for boosted, mine in zip(five, (model, optimizer, criterion, data, scheduler), strict=True):
        assert booster.unwrap(boosted) is mine
    function = torch.nn.functional.mse_loss
    assert booster.unwrap(booster.boost(net(), criterion=function)[2]) is function
    compiled = torch.compile(five[0], backend="eager")
    assert booster.unwrap(compiled) is model
    for foreign in (net(), optimizer, 3, None):
        with pytest.raises(TypeError, match="unwrap needs"):
            booster.unwrap(foreign)


def test_batches_arrive_on_the_device_in_their_containers():
    Pair = collections.namedtuple("Pair", "x y")
    batches = [{"x": torch.ones(2, 4), "name": "a"}, Pair(torch.ones(1), [torch.ones(1)])]
    booster = Booster("cpu")
    got = list(booster.boost(net(), dataloader=batches)[3])
    assert type(got[0]) is dict
    assert got[0]["name"] == "a"
    assert type(got[1]) is Pair


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_plain_python_with_the_ddp_plugin_is_one_process(precision):
    def run(plugin):
        torch.manual_seed(0)
        booster = Booster("cpu", precision, plugin)
        model = net()
        model, optimizer, *_ = booster.boost(model, sgd(model))
        for _ in range(3):
            with booster.no_sync(model, optimizer):
                booster.backward(model(torch.ones(2, 4)).square().mean() * 0.01, optimizer)
            optimizer.step()
        data = booster.prepare_dataloader(TensorDataset(torch.arange(10)), 4, shuffle=True)
        return torch.cat([p.flatten() for p in model.parameters()]), [batch[0].tolist() for batch in data]

    params, batches = run(TorchDDPPlugin())
    assert torch.equal(params, run(None)[0])
    assert batches == run(None)[1]
    assert TorchDDPPlugin().data_parallel_size == 1
    assert TorchDDPPlugin().group is None


def test_gather_and_reduce_work_in_a_world_of_one():
    booster = Booster("cpu")
    rows = torch.randn(3, 2)
    assert torch.equal(booster.gather(rows), rows)
    assert torch.equal(booster.reduce(rows), rows)
    assert booster.reduce(3.0, "sum") == 3.0


def test_a_users_plugin_is_one_method():
    class Doubling(Plugin):
        def place(self, module, policy, device):
            assert isinstance(policy, DtypePolicy)
            self.device = device
            return module

    plugin = Doubling()
    Booster("cpu", "bf16", plugin).boost(net())
    assert plugin.device == torch.device("cpu")
    with pytest.raises(TypeError, match="abstract"):
        Plugin()


# ---- what boost() refuses, before it changes anything ----


def snapshot(model, optimizer):
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return (
        [(n, p.dtype, p.device, p.detach().clone(), id(p)) for n, p in model.named_parameters()],
        copy.deepcopy(groups),
        [id(p) for g in optimizer.param_groups for p in g["params"]],
        [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in model.modules()],
    )


def same(a, b):
    return str(a[1:]) == str(b[1:]) and all(
        x[:3] == y[:3] and torch.equal(x[3], y[3]) and x[4] == y[4] for x, y in zip(a[0], b[0], strict=True)
    )


class Refusing(BF16MixedPrecision):
    def check(self, model):
        raise ValueError("refused by the strategy")


WRONG = {
    "a model that is none": (TypeError, "model must be a torch.nn.Module", {"model": "net"}),
    "a class": (TypeError, "model must be a torch.nn.Module", {"model": nn.Linear}),
    "an optimizer that is none": (TypeError, "optimizer must be a torch.optim.Optimizer", {"optimizer": "adam"}),
    "an optimizer class": (TypeError, "optimizer must be a torch.optim.Optimizer", {"optimizer": torch.optim.SGD}),
    "an optimizer of another model": (ValueError, "none of the optimizer's 4 parameters", {"optimizer": sgd(net())}),
    "a criterion that is none": (TypeError, "criterion must be callable", {"criterion": 3}),
    "a scheduler that is none": (TypeError, "lr_scheduler must have a step method", {"lr_scheduler": 3}),
    "a foreign scheduler": (
        ValueError,
        "neither the one given to this boost.*boost them together",
        {"lr_scheduler": torch.optim.lr_scheduler.StepLR(sgd(net()), 1)},
    ),
    "a loader that is none": (TypeError, "dataloader must be an iterable", {"dataloader": 3}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_objects_raise_and_change_nothing(case):
    error, message, wrong = WRONG[case]
    model = net()
    optimizer = sgd(model)
    before = snapshot(model, optimizer)
    booster = Booster("cpu", BF16MixedPrecision(keep_fp32="0"))
    with pytest.raises(error, match=message):
        booster.boost(**{"model": model, "optimizer": optimizer, **wrong})
    assert same(before, snapshot(model, optimizer))
    booster.boost(model, optimizer)  # the failed call is forgotten
    assert not same(before, snapshot(model, optimizer)), "the comparison sees nothing"


@pytest.mark.parametrize("precision", [Refusing(), BF16MixedPrecision(keep_fp32="typo")])
def test_a_refusal_of_the_strategy_changes_nothing(precision):
    model = net()
    optimizer = sgd(model)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="refused by|selects no module"):
        Booster("cpu", precision).boost(model, optimizer, nn.CrossEntropyLoss(), loader())
    assert same(before, snapshot(model, optimizer))


def test_boosting_anything_twice_raises():
    booster = Booster("cpu", "bf16")
    model, data = net(), loader()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    b_model, b_optimizer, b_criterion, b_data, b_scheduler = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), data, scheduler
    )
    twice = "boosted already"
    for again in (model, b_model):
        with pytest.raises(RuntimeError, match=twice):
            booster.boost(again)
        if again is b_model:
            with pytest.raises(RuntimeError, match=twice):
                Booster("cpu").boost(again)
    other = net()
    for wrong in (
        {"optimizer": optimizer},
        {"optimizer": b_optimizer},
        {"criterion": b_criterion},
        {"dataloader": b_data},
        {"lr_scheduler": b_scheduler},
    ):
        with pytest.raises(RuntimeError, match=twice):
            booster.boost(other, **wrong)
    booster.boost(other)


def test_an_optimizer_may_hold_the_criterions_parameters_and_those_of_an_earlier_model():
    class Metric(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out):
            return (out * self.scale).square().mean()

    booster = fp16()
    first, second, metric = net(), net(), Metric()
    first_boosted = booster.boost(first)[0]
    both = torch.optim.SGD([*first.parameters(), *second.parameters(), *metric.parameters()], lr=0.1)
    model, optimizer, criterion, *_ = booster.boost(second, both, metric)
    booster.backward(criterion(model(torch.ones(2, 4)) + first_boosted(torch.ones(2, 4))), optimizer)
    before = metric.scale.item()
    assert optimizer.step().applied
    assert metric.scale.item() != before
    assert first[0].weight.grad is not None


# ---- backward ----


@pytest.fixture
def ready():
    booster = fp16()
    model = net()
    model, optimizer, *_ = booster.boost(model, sgd(model))
    return booster, model, optimizer


def test_a_loss_must_be_one_element_that_requires_gradients(ready):
    booster, model, optimizer = ready
    x = torch.ones(3, 4)
    for wrong in (model(x), model(x).sum(1), 3.0, None):
        with pytest.raises(ValueError, match="the loss must be a tensor of one element"):
            booster.backward(wrong, optimizer)
    with pytest.raises(RuntimeError, match="does not require gradients"):
        booster.backward(model(x).sum().detach(), optimizer)
    with torch.no_grad():
        loss = model(x).sum()
    with pytest.raises(RuntimeError, match="does not require gradients"):
        booster.backward(loss, optimizer)
    booster.backward(model(x).sum().reshape(1, 1), optimizer)


def test_backward_needs_boosted_optimizers(ready):
    booster, model, optimizer = ready
    loss = model(torch.ones(1, 4)).sum()
    for wrong in (optimizer.unwrap(), None, "sgd", [optimizer, optimizer.unwrap()], [None]):
        with pytest.raises(TypeError, match="the optimizer that boost.. returned"):
            booster.backward(loss, wrong)
    with pytest.raises(ValueError, match="empty list"):
        booster.backward(loss, [])


@pytest.mark.parametrize("loss_id", [1, -1, 7])
def test_an_unknown_loss_id_raises(ready, loss_id):
    booster, model, optimizer = ready
    with pytest.raises(ValueError, match=rf"loss_id={loss_id} is not legal; FP16TorchMixedPrecision keeps one"):
        booster.backward(model(torch.ones(1, 4)).sum(), optimizer, loss_id=loss_id)
    booster.backward(model(torch.ones(1, 4)).sum(), optimizer, loss_id=0)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_inputs_limits_the_gradients_to_what_is_named(precision, single):
    booster = Booster("cpu", precision)
    raw = net()
    model, optimizer, *_ = booster.boost(raw, sgd(raw))
    inputs = raw[2].weight if single else [raw[2].weight, raw[2].bias]
    booster.backward(model(torch.ones(1, 4)).sum() * 0.01, optimizer, inputs=inputs)
    assert raw[2].weight.grad is not None
    assert raw[0].weight.grad is None
    with pytest.raises((ValueError, RuntimeError), match="inputs"):
        booster.backward(model(torch.ones(1, 4)).sum(), optimizer, inputs=[])


def test_the_graph_is_kept_where_asked(ready):
    booster, model, optimizer = ready
    loss = model(torch.ones(1, 4)).sum() * 0.01
    booster.backward(loss, optimizer, retain_graph=True)
    booster.backward(loss, optimizer)
    with pytest.raises(RuntimeError, match="second time"):
        booster.backward(loss, optimizer)
    assert optimizer.step().applied


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_create_graph_makes_gradients_differentiable():
    booster = Booster("cpu", "fp32")
    raw = nn.Linear(1, 1, bias=False)
    model, optimizer, *_ = booster.boost(raw, sgd(raw))
    booster.backward(model(torch.ones(1, 1)).pow(3).sum(), optimizer, create_graph=True)
    (second,) = torch.autograd.grad(raw.weight.grad.sum(), raw.weight)
    assert torch.allclose(second, 6 * raw.weight)
    raw.weight.grad = None


def test_a_gradient_penalty_outside_the_model_uses_autocast():
    booster = Booster("cpu", "bf16")
    raw = net()
    model, optimizer, *_ = booster.boost(raw, sgd(raw))
    x = torch.ones(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with booster.autocast():
        product = grad @ grad.T
    assert product.dtype == torch.bfloat16
    booster.backward(product.float().mean(), optimizer)
    assert optimizer.step().applied
    with booster.autocast(), booster.autocast():
        pass
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_of_float32_is_nothing():
    with Booster("cpu").autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


# ---- no_sync and accumulate ----


@pytest.mark.parametrize("method", ["no_sync", "accumulate"])
def test_contexts_need_a_model_and_an_optimizer_of_this_booster(ready, method):
    booster, model, optimizer = ready
    other = fp16().boost(net())[0]

    def enter(model, optimizer):
        options = {"num_micro_batches": 1} if method == "accumulate" else {}
        return getattr(booster, method)(model, optimizer, **options)

    for foreign in (net(), None, optimizer):
        with pytest.raises(TypeError, match=f"{method} needs the model that boost.. returned"):
            enter(foreign, optimizer)
    with pytest.raises(ValueError, match="that this Booster did not boost"):
        enter(other, optimizer)
    with pytest.raises(TypeError, match=f"{method} needs the optimizer that boost.. returned"):
        enter(model, optimizer.unwrap())
    enter(torch.compile(model, backend="eager"), optimizer)


# ---- several models ----


def test_a_strategy_object_may_serve_several_models():
    precision = BF16MixedPrecision()
    booster = Booster("cpu", precision)
    assert booster.precision is precision
    assert isinstance(precision, MixedPrecision)
    assert all(booster.boost(net())[0](torch.ones(1, 4)).dtype == torch.float32 for _ in range(2))


def test_a_prepared_loader_passes_through_boost_once():
    booster = Booster("cpu")
    prepared = booster.prepare_dataloader(torch.arange(8.0).view(4, 2), batch_size=2)
    assert booster.boost(net(), dataloader=prepared)[3] is prepared
    with pytest.raises(RuntimeError, match="boosted already"):
        booster.boost(net(), dataloader=prepared)


# ---- one model, several optimizers ----


def halves(model, second=torch.optim.AdamW):
    """Muon for the matrices of `model`, another optimizer for the rest."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    return [torch.optim.Muon(matrices, lr=0.1), second([p for p in model.parameters() if p.dim() != 2], lr=0.1)]


class Named:
    """A scheduler of the user's own, which does not name its optimizer."""

    def step(self):
        pass


def test_schedulers_of_two_optimizers_come_back_each_with_its_own():
    model = net()
    optimizers = halves(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers[::-1]]
    booster = Booster("cpu")
    model, boosted, _, _, wrapped = booster.boost(model, optimizers, lr_scheduler=schedulers)
    assert isinstance(wrapped, list)
    assert [each._optimizer for each in wrapped] == boosted[::-1]
    model = net()
    optimizers = halves(model)
    schedulers = [Named(), torch.optim.lr_scheduler.StepLR(optimizers[1], 1)]
    model, boosted, _, _, wrapped = booster.boost(model, optimizers, lr_scheduler=schedulers)
    assert [each._optimizer for each in wrapped] == boosted
    model = net()
    optimizers = halves(model)
    one = torch.optim.lr_scheduler.StepLR(optimizers[1], 1)
    model, boosted, _, _, wrapped = booster.boost(model, optimizers, lr_scheduler=one)
    assert wrapped._optimizer is boosted[1]
    model = net()
    both = [torch.optim.lr_scheduler.StepLR(own := sgd(model), 1), torch.optim.lr_scheduler.ExponentialLR(own, 0.9)]
    model, boosted, _, _, wrapped = booster.boost(model, own, lr_scheduler=both)
    assert [each._optimizer for each in wrapped] == [boosted, boosted]


def wrong_lists(model):
    muon, adamw = halves(model)
    whole = sgd(model)
    alien = sgd(net())
    return {
        "shared": ([muon, whole], ValueError, r"0.weight, 2.weight are in several of the 2 optimizers"),
        "one shared": (
            [muon, torch.optim.SGD([model[0].weight, model[0].bias], lr=0.1)],
            ValueError,
            "0.weight is in several",
        ),
        "empty": ([], ValueError, "empty list of optimizers"),
        "twice": ([muon, muon], ValueError, "same optimizer twice"),
        "alien": ([muon, alien], ValueError, "parameters belong to the model"),
        "no optimizer": ([muon, 3], TypeError, "must be a torch.optim.Optimizer, got int"),
        "none": ([muon, None], TypeError, "must be a torch.optim.Optimizer, got NoneType"),
        "iterator": (iter([muon, adamw]), TypeError, "must be a torch.optim.Optimizer"),
    }


@pytest.mark.parametrize("name", list(wrong_lists(net())))
def test_what_is_wrong_with_a_list_of_optimizers_is_said(name):
    model = net()
    optimizers, error, message = wrong_lists(model)[name]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        Booster("cpu", "fp16_naive").boost(model, optimizers)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_scheduler_without_owner_is_refused_where_two_could_be_it():
    model = net()
    with pytest.raises(ValueError, match="neither"):
        Booster("cpu").boost(model, halves(model), lr_scheduler=Named())


def test_parameters_of_neither_optimizer_are_named_in_a_warning(caplog):
    model = net()
    muon, adamw = halves(model)
    adamw.param_groups[0]["params"].pop()
    Booster("cpu").boost(model, [muon, adamw])
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "2.bias of Sequential is in none of the 2 optimizers" in record.getMessage()
    caplog.clear()
    model = net()
    muon, adamw = halves(model)
    adamw.param_groups[0]["params"].pop().requires_grad_(False)
    Booster("cpu").boost(model, [muon, adamw])
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


# ---- TorchScript ----


def scripted(module):
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        return torch.jit.script(module)


def traced(module):
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        return torch.jit.trace(module, torch.ones(1, 4))


@pytest.mark.parametrize("compile_", [scripted, traced])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16_naive", "fp16_apex"])
def test_torchscript_is_refused_by_name(precision, compile_):
    model = compile_(net())
    with pytest.raises(TypeError, match="the model is a TorchScript module.*as it was before"):
        Booster("cpu", precision).boost(model, sgd(model))
    with pytest.raises(TypeError, match="the criterion is a TorchScript module"):
        Booster("cpu", precision).boost(net(), None, compile_(net()))


@pytest.mark.parametrize("wrap", [NaiveAMPModel, apex_amp.initialize])
def test_torchscript_is_refused_by_name_elsewhere_too(wrap):
    with pytest.raises(TypeError, match="the model is a TorchScript module"):
        wrap(scripted(net()))


class LARC:
    """What apex's class of that name is to `isinstance`: an object around an optimizer."""

    def __init__(self, optimizer):
        self.optim = optimizer
        self.param_groups = optimizer.param_groups


@pytest.mark.parametrize("boost", ["boost", "initialize"])
def test_a_wrapper_around_an_optimizer_is_refused_by_name_with_what_to_do(boost):
    net = nn.Linear(2, 2)
    wrapped = LARC(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(
        TypeError, match=r"got LARC, a wrapper around SGD .*pass the SGD inside it, or .*timm\.optim\.Lars\("
    ):
        if boost == "boost":
            Booster("cpu").boost(net, wrapped)
        else:
            apex_amp.initialize(net, wrapped, verbosity=0)
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer"):
        Booster("cpu").boost(net, 3)


def test_the_class_of_the_users_optimizer_is_found_by_unwrapping():
    net = nn.Linear(2, 2)
    booster = Booster("cpu")
    optimizer = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))[1]
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert not isinstance(optimizer, torch.optim.SGD)
    assert isinstance(booster.unwrap(optimizer), torch.optim.SGD)


def test_models_of_one_class_have_their_names_in_the_order_in_which_they_were_boosted():
    """A set's order follows addresses, which differ from process to process."""
    for _ in range(5):
        booster = Booster("cpu", "fp32")
        models, criteria = [nn.Linear(1, 1) for _ in range(8)], [nn.MSELoss() for _ in range(8)]
        boosted = []
        for place in torch.randperm(8).tolist():  # as addresses are
            model, criterion = models[place], criteria[place]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            boosted.append(booster.boost(model, optimizer, criterion)[::2][:2])
        labelled = booster._boosted.labelled()
        assert list(labelled) == ["Linear", *(f"Linear-{number}" for number in range(1, 8))]
        assert [id(model) for model in labelled.values()] == [id(model) for model, _ in boosted]
        assert [id(each) for each in booster._boosted.criteria] == [id(criterion) for _, criterion in boosted]


class Overridden(Booster):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = []

    def backward(self, *args, **options):
        self.calls.append("backward")
        return super().backward(*args, **options)

    def accumulate(self, *args, **options):
        self.calls.append("accumulate")
        return super().accumulate(*args, **options)

    def load(self, *args, **options):
        self.calls.append("load")
        return super().load(*args, **options)


def test_methods_that_call_others_call_those_of_a_subclass(tmp_path):
    booster = Overridden("cpu")
    model = nn.Linear(2, 1)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(4, 2), torch.randn(4, 1)
    booster.execute_pipeline(iter([batch]), model, nn.functional.mse_loss, optimizer)
    assert booster.calls == ["accumulate", "backward"]
    optimizer.step()
    optimizer.zero_grad()
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    booster.load_optimizer(optimizer, tmp_path / "optimizer")
    booster.save(tmp_path / "run", model, optimizer)
    booster.resume_or_start(tmp_path / "run", model, optimizer)
    assert booster.calls[2:] == ["load", "load"]
