"""When boosting switches an optimizer to torch's fused kernel, and when it leaves it alone."""

import copy
import logging
from typing import Any

import pytest
import torch
from prescribed import loss_with
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from booster import Booster
from booster.common.torch_internals.tensor_internals import FakeTensorMode
from booster.mixed_precision import FP16TorchMixedPrecision
from booster.update import choice as fused

LOGGER = "booster.update"


def boosted(optimizer: Optimizer, model: nn.Module, precision: str = "fp16", **options: Any) -> Any:
    return Booster("cpu", precision, **options).boost(model, optimizer)[1]


def is_fused(optimizer: Any) -> bool:
    return all(group.get("fused") is True for group in optimizer.param_groups)


def train(optimizer: Any, model: nn.Module, grads: list[float]) -> None:
    params = list(model.parameters())
    for grad in grads:
        optimizer.zero_grad()
        optimizer.backward(loss_with(params, [grad] * len(params)))
        assert optimizer.step()


@pytest.mark.parametrize("make", [Adam, AdamW, SGD, Adagrad])
def test_boosting_switches_once_and_says_so_in_one_line(make, caplog):
    model = nn.Linear(2, 2)
    with caplog.at_level(logging.INFO, LOGGER):
        optimizer = boosted(make(model.parameters(), lr=0.1), model)
    assert is_fused(optimizer)
    assert [record.getMessage() for record in caplog.records] == [
        f"{make.__name__} uses its fused implementation; Booster(fused_optimizer=False) keeps the default"
    ]
    before = model.weight.detach().clone()
    train(optimizer, model, [1.0, 0.5])
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (AdamW, {"foreach": True}),
        (AdamW, {"foreach": False}),
        (AdamW, {"fused": False}),
        (Adam, {"differentiable": True}),
        (Adam, {"capturable": True}),
        (SGD, {"foreach": True}),
        (Adagrad, {"foreach": False}),
    ],
)
def test_an_explicit_implementation_is_respected(make, options, caplog):
    model = nn.Linear(2, 2)
    with caplog.at_level(logging.INFO, LOGGER):
        optimizer = boosted(make(model.parameters(), lr=0.1, **options), model)
    assert not is_fused(optimizer)
    assert all(optimizer.param_groups[0][name] == value for name, value in options.items())
    assert caplog.records == []


def test_an_explicit_implementation_of_one_group_is_respected():
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "foreach": True}]
    optimizer = boosted(AdamW(groups, lr=0.1), model)
    assert not is_fused(optimizer)


@pytest.mark.parametrize("make", [Adam, AdamW, SGD, Adagrad])
@pytest.mark.parametrize("value", [True, False])
def test_foreach_that_is_set_after_boost_steps_by_true_gradients(make, value):
    model = nn.Linear(4, 2)
    plain = copy.deepcopy(model)
    reference = make(plain.parameters(), lr=0.1)
    b = Booster("cpu", FP16TorchMixedPrecision(init_scale=2.0**7))
    model, optimizer, *_ = b.boost(model, make(model.parameters(), lr=0.1))
    for step in range(3):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        plain(rows).square().mean().backward()
        b.backward(model(rows).square().mean(), optimizer)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
            each.param_groups[0]["foreach"] = value
    torch.testing.assert_close(model.weight, plain.weight, rtol=5e-3, atol=5e-3)


@pytest.fixture
def nothing_known():
    fused._lets_step.cache_clear()
    yield
    fused._lets_step.cache_clear()


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("make", [Adam, AdamW, SGD, Adagrad])
def test_an_optimizer_that_torch_refuses_to_step_fused_on_its_device_keeps_the_default(make, monkeypatch, caplog):
    """As Adagrad on CUDA before torch 2.12: its kernel is there."""
    init, hooked = make._init_group, []

    def refuse(self, group, *args):
        if group["fused"]:
            raise RuntimeError("`fused=True` requires all the params to be floating point Tensors of supported devices")
        return init(self, group, *args)

    monkeypatch.setattr(make, "_init_group", refuse)
    model = nn.Linear(3, 2)
    handle = register_optimizer_step_pre_hook(lambda *args: hooked.append(args))
    try:
        with caplog.at_level(logging.INFO, LOGGER):
            optimizer = boosted(make(model.parameters(), lr=0.1), model, "fp32")
    finally:
        handle.remove()
    assert not is_fused(optimizer)
    assert not hooked, "a look is no step of the user's"
    assert (
        f"torch does not let {make.__name__} use its fused implementation on cpu: `fused=True` requires" in caplog.text
    )
    before = model.weight.detach().clone()
    train(optimizer, model, [1.0])
    assert not torch.equal(model.weight, before)


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.skipif(torch.__version__ >= "2.12", reason="of torch 2.11")
def test_adagrad_of_torch_2_11_is_not_fused_on_cuda():
    with FakeTensorMode():  # where a tensor on CUDA needs no GPU
        assert fused._lets_step(Adam, "cuda")
        assert not fused._lets_step(Adagrad, "cuda")


def test_fused_optimizer_false_keeps_the_default():
    model = nn.Linear(2, 2)
    assert not is_fused(boosted(AdamW(model.parameters()), model, fused_optimizer=False))


def test_a_subclass_and_an_optimizer_without_a_kernel_are_left_alone():
    class Mine(AdamW):
        pass

    for make in (Mine, torch.optim.RMSprop):
        model = nn.Linear(2, 2)
        optimizer = boosted(make(model.parameters(), lr=0.1), model)
        assert not is_fused(optimizer)
        train(optimizer, model, [1.0])


def test_sparse_embeddings_are_left_alone():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = boosted(SGD(model.parameters(), lr=0.1), model)
    assert not is_fused(optimizer)
    optimizer.backward(model(torch.tensor([1])).sum())
    assert optimizer.step()


@pytest.mark.parametrize(
    "options", [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}]
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_parameter_used_for_the_first_time_later_trains_as_without_boosting(options, precision):
    def run(optimizer: Any, weights: list[torch.Tensor], backward: Any) -> list[torch.Tensor]:
        for grads in ([1.0, None], [0.5, 2.0], [None, 1.0], [1.0, 1.0]):
            optimizer.zero_grad()
            backward(loss_with(weights, grads))
            optimizer.step()
        return [weight.detach() for weight in weights]

    model = nn.Linear(2, 2)
    twin = copy.deepcopy(model)
    plain = SGD(twin.parameters(), lr=0.1, **options)
    optimizer = boosted(SGD(model.parameters(), lr=0.1, **options), model, precision)
    expected = run(plain, list(twin.parameters()), lambda loss: loss.backward())
    got = run(optimizer, list(model.parameters()), optimizer.backward)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("make", [Adam, AdamW, SGD, Adagrad])
def test_state_made_before_boosting_moves_into_the_fused_kernel(make):
    model = nn.Linear(2, 2)
    twin = copy.deepcopy(model)
    options = {"lr": 0.1, **({"momentum": 0.9} if make is SGD else {})}
    plain, other = make(model.parameters(), **options), make(twin.parameters(), **options)
    for optimizer, module in ((plain, model), (other, twin)):
        loss_with(list(module.parameters()), [1.0, 1.0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = boosted(plain, model)
    train(ours, model, [0.5, -1.0])
    for grad in (0.5, -1.0):
        other.zero_grad()
        loss_with(list(twin.parameters()), [grad, grad]).backward()
        other.step()
    assert torch.allclose(model.weight, twin.weight, atol=1e-6)


@pytest.mark.parametrize("make", [Adam, AdamW, SGD, Adagrad])
def test_a_state_dict_of_an_unfused_optimizer_loads_and_stays_fused(make, caplog):
    model = nn.Linear(2, 2)
    twin = copy.deepcopy(model)
    options = {"lr": 0.1, **({"momentum": 0.9} if make is SGD else {})}
    plain = make(twin.parameters(), **options)
    for grad in (1.0, -0.5):
        plain.zero_grad()
        loss_with(list(twin.parameters()), [grad, grad]).backward()
        plain.step()
    optimizer = boosted(make(model.parameters(), **options), model)
    caplog.clear()
    with caplog.at_level(logging.INFO, LOGGER):
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert caplog.records == []  # said at boost()
    assert is_fused(optimizer)
    model.load_state_dict(twin.state_dict())
    train(optimizer, model, [0.25, 2.0])
    for grad in (0.25, 2.0):
        plain.zero_grad()
        loss_with(list(twin.parameters()), [grad, grad]).backward()
        plain.step()
    assert torch.allclose(model.weight, twin.weight, atol=1e-6)


def test_a_foreach_state_dict_into_a_switched_optimizer_stays_fused():
    model = nn.Linear(2, 2)
    plain = AdamW(copy.deepcopy(model).parameters(), foreach=True)
    optimizer = boosted(AdamW(model.parameters()), model)
    optimizer.load_state_dict(plain.state_dict())
    assert is_fused(optimizer)
    train(optimizer, model, [1.0])


def test_a_fused_state_dict_into_an_optimizer_with_an_explicit_implementation_keeps_it():
    source = nn.Linear(2, 2)
    writer = boosted(AdamW(source.parameters()), source)
    train(writer, source, [1.0])
    model = nn.Linear(2, 2)
    optimizer = boosted(AdamW(model.parameters(), foreach=True), model)
    optimizer.load_state_dict(writer.state_dict())
    assert optimizer.param_groups[0]["foreach"] is True
    assert not is_fused(optimizer)
    train(optimizer, model, [1.0])


def test_a_state_dict_of_a_boosted_optimizer_loads_into_a_plain_one():
    model = nn.Linear(2, 2)
    optimizer = boosted(AdamW(model.parameters()), model)
    train(optimizer, model, [1.0])
    plain = AdamW(nn.Linear(2, 2).parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert float(plain.state_dict()["state"][0]["step"]) == 1.0


def test_a_group_added_after_boosting_is_fused_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = boosted(AdamW(model[0].parameters()), model)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    assert is_fused(optimizer)
    train(optimizer, model, [1.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_came_in_half_is_stepped_as_torch_steps_it_by_default(dtype):
    # torch's fused SGD leaves most of a half parameter alone on CPU.
    torch.manual_seed(0)
    model, twin = nn.Linear(16, 16).to(dtype), nn.Linear(16, 16).to(dtype)
    twin.load_state_dict(model.state_dict())
    optimizer, plain = (torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9) for net in (model, twin))
    booster = Booster("cpu", "fp32")
    model, optimizer, *_ = booster.boost(model, optimizer)
    for _ in range(2):
        x = torch.randn(4, 16, dtype=dtype)
        for net in (model, twin):
            net.zero_grad()
        booster.backward(model(x).sum(), optimizer)
        twin(x).sum().backward()
        optimizer.step()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
