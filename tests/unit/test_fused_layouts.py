"""Fused kernels walk raw memory: boosted optimizers step as torch's default does, however tensors lie."""

import copy
import logging
import re

import pytest
import torch
from prescribed import DEVICE, HOST, boost, loss_with
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision

OPTIMIZERS = {
    "Adam": lambda params: Adam(params, lr=0.01, amsgrad=True),
    "AdamW": lambda params: AdamW(params, lr=0.01),
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: Adagrad(params, lr=0.05),
}
PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: "fp16",
    "bf16": lambda: "bf16",
    "O1": lambda: FP16ApexMixedPrecision("O1", loss_scale=128.0, verbosity=0),
}
LAST = torch.channels_last
both = pytest.mark.parametrize("decides", [HOST, DEVICE])
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


class Run:
    """Convolutions under one precision, stepped by the fused kernel or by torch's default."""

    def __init__(self, name, precision, fused, memory_format=torch.contiguous_format):
        torch.manual_seed(0)
        self.booster = Booster("cpu", PRECISIONS[precision](), fused_optimizer=fused)
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)).to(memory_format=memory_format)
        self.model, self.optimizer, *_ = self.booster.boost(model, OPTIMIZERS[name](model.parameters()))
        self.data = torch.Generator().manual_seed(1)

    def train(self, steps=2, change=None):
        for _ in range(steps):
            self.optimizer.zero_grad()
            x = torch.randn(2, 3, 8, 8, generator=self.data)
            self.booster.backward(self.model(x).float().square().mean(), self.optimizer)
            if change is not None:
                for param in self.model.parameters():
                    param.grad = change(param.grad)
            assert self.optimizer.step()
        return self

    @property
    def weights(self):
        return [param.detach().clone() for param in self.model.parameters()]


def compare(name, precision, train, **options):
    """`train` gives the same weights with the fused kernel, which stays in use, as with torch's default."""
    fused, default = (train(Run(name, precision, fused, **options)) for fused in (True, False))
    assert all(group["fused"] for group in fused.optimizer.param_groups)
    for ours, expected in zip(fused.weights, default.weights, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
@every_optimizer
def test_a_model_whose_memory_format_changes_while_it_trains(name, precision):
    def train(run):
        run.train()
        run.model.to(memory_format=LAST)
        run.train()
        run.model.to(memory_format=torch.contiguous_format)
        return run.train()

    compare(name, precision, train)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("there", "here"), [(torch.contiguous_format, LAST), (LAST, torch.contiguous_format)])
@every_optimizer
def test_state_of_a_run_in_another_memory_format(name, precision, there, here):
    saved = Run(name, precision, fused=False, memory_format=there).train()

    def train(run):
        run.model.load_state_dict(saved.model.state_dict())
        run.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
        return run.train()

    compare(name, precision, train, memory_format=here)


@every_optimizer
def test_state_loaded_into_the_user_s_own_optimizer(name):
    saved = Run(name, "fp32", fused=False).train()

    def train(run):
        run.train()
        choices = [{"fused": group["fused"], "foreach": group["foreach"]} for group in run.optimizer.param_groups]
        state = copy.deepcopy(saved.optimizer.state_dict())
        state.pop("booster")
        for group, choice in zip(state["param_groups"], choices, strict=True):
            group.update(choice)
        run.optimizer.unwrap().load_state_dict(state)
        return run.train()

    compare(name, "fp32", train, memory_format=LAST)


@every_optimizer
def test_state_made_before_boosting_in_another_memory_format(name):
    torch.manual_seed(0)
    net = nn.Conv2d(3, 6, 3).to(memory_format=LAST)
    warm = OPTIMIZERS[name](net.parameters())
    net(torch.ones(1, 3, 4, 4)).square().sum().backward()
    warm.step()
    net.to(memory_format=torch.contiguous_format)
    twin, other = copy.deepcopy((net, warm))
    booster = Booster("cpu")
    model, optimizer, *_ = booster.boost(net, warm)
    optimizer.zero_grad()
    other.zero_grad()
    x = torch.randn(1, 3, 4, 4)
    booster.backward(model(x).square().sum(), optimizer)
    twin(x).square().sum().backward()
    optimizer.step()
    other.step()
    torch.testing.assert_close(net.weight, twin.weight, rtol=1e-4, atol=1e-5)


CHANGES = {
    "channels last": lambda grad: grad.contiguous(memory_format=LAST) if grad.dim() == 4 else grad,
    "transposed": lambda grad: (
        grad.t().contiguous().t() if grad.dim() == 2 else grad.transpose(0, -1).contiguous().transpose(0, -1)
    ),
    "strided": lambda grad: torch.stack([grad, torch.full_like(grad, 7)], dim=-1)[..., 0],
    "expanded": lambda grad: grad.flatten()[:1].reshape([1] * grad.dim()).expand(grad.shape),
}


@pytest.mark.crossed
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@every_optimizer
def test_gradients_that_the_user_laid_out_otherwise(name, precision, change, clip):
    def train(run):
        if clip:
            run.optimizer.register_step_pre_hook(lambda *_: None)  # so that clips are written to gradients
            step = run.optimizer.step
            run.optimizer.step = lambda: (run.optimizer.clip_grad_by_norm(0.01), step())[1]
        return run.train(3, CHANGES[change])

    compare(name, precision, train)


@both
@every_optimizer
def test_gradients_of_autograd_grad_of_a_channels_last_convolution(name, decides):
    def train(fused):
        torch.manual_seed(0)
        net = nn.Conv2d(8, 8, 3)
        x = torch.randn(2, 8, 6, 6).to(memory_format=LAST)
        inner = OPTIMIZERS[name](net.parameters())
        for group in inner.param_groups:
            group["fused"] = fused
        optimizer = boost(inner, None, decides) if fused else inner
        for _ in range(3):
            for param, grad in zip(
                net.parameters(), torch.autograd.grad(net(x).square().mean(), net.parameters()), strict=True
            ):
                param.grad = grad
            optimizer.step()
        return net.weight

    torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-5)


class Strided(nn.Module):
    """Weights that are a part of a larger tensor."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.whole = torch.arange(20.0).reshape(4, 5).to(dtype) / 20
        self.weight = nn.Parameter(self.whole[:, :3])
        self.bias = nn.Parameter(torch.zeros(4, dtype=dtype))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def train_strided(name, precision, fused):
    torch.manual_seed(0)
    booster = Booster("cpu", PRECISIONS[precision](), fused_optimizer=fused)
    model = Strided()
    boosted, optimizer, *_ = booster.boost(model, OPTIMIZERS[name](model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        booster.backward(boosted(torch.randn(5, 3)).float().square().mean(), optimizer)
        optimizer.clip_grad_by_norm(0.5)
        assert optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("precision", PRECISIONS)
@every_optimizer
def test_parameters_with_gaps_are_stepped_as_by_torch_and_what_lies_between_is_left_alone(name, precision):
    (model, _), (expected, _) = (train_strided(name, precision, fused) for fused in (True, False))
    torch.testing.assert_close(model.weight, expected.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.bias, expected.bias, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.whole[:, 3:], Strided().whole[:, 3:])


@every_optimizer
def test_a_parameter_with_gaps_that_comes_later_gives_the_kernel_up_with_one_line(name, caplog):
    if name == "Adagrad" and torch.__version__ < "2.12":
        pytest.skip("Adagrad of torch 2.11 steps no parameters that come later")

    def train(fused):
        torch.manual_seed(0)
        booster = Booster("cpu", "fp32", fused_optimizer=fused)
        model = nn.ModuleList([nn.Linear(3, 4), Strided()])
        boosted, optimizer, *_ = booster.boost(model, OPTIMIZERS[name](model[0].parameters()))
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": list(model[1].parameters())})
            optimizer.zero_grad()
            x = torch.randn(5, 3)
            with booster.autocast():
                loss = (model[0](x) + model[1](x)).square().mean()
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(0.1)
            assert optimizer.step()
        return model, optimizer

    with caplog.at_level(logging.INFO, "booster.update.application"):
        model, optimizer = train(True)
    assert not any(group["fused"] for group in optimizer.param_groups)
    message = "goes on with torch's default implementation; of its fused one: a parameter of shape (4, 3) has gaps"
    assert sum(message in record.getMessage() for record in caplog.records) == 1
    expected, _ = train(False)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(model[1].whole[:, 3:], Strided().whole[:, 3:])


@both
def test_a_kernel_that_the_user_chose_is_not_given_up(decides):
    model = Strided()
    before = model.whole.clone()
    optimizer = boost(AdamW(model.parameters(), fused=True), None, decides)
    optimizer.backward(model(torch.ones(2, 3)).sum())
    message = re.escape(
        "AdamW was built with fused=True, and torch's fused kernel cannot make this step: a parameter of shape (4, 3)"
    )
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert torch.equal(model.whole, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_that_come_later_are_stepped_by_sgd_on_cpu(dtype):
    booster = Booster("cpu", "fp32")
    model = nn.ParameterList([torch.ones(100), torch.ones(100)])
    model[1].data = model[1].data.to(dtype)
    _, optimizer, *_ = booster.boost(model, SGD(list(model)[:1], lr=0.5))
    optimizer.add_param_group({"params": [model[1]]})
    for _ in range(2):
        optimizer.zero_grad()
        booster.backward(loss_with(list(model), [torch.ones(100), torch.ones(100, dtype=dtype)]), optimizer)
        optimizer.step()
    assert torch.equal(model[0], torch.zeros(100))
    assert torch.equal(model[1], torch.zeros(100, dtype=dtype))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    "make",
    [lambda params: SGD(params, lr=0.1, momentum=0.9), lambda params: Adagrad(params, lr=0.1)],
    ids=["SGD", "Adagrad"],
)
def test_sparse_gradients_of_a_function_make_the_optimizer_go_back_to_the_default(make, precision, clip):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Parameter(torch.randn(6, 3))
            self.head = nn.Linear(3, 2)
            self.sparse = False

        def forward(self, index):
            return self.head(F.embedding(index, self.table, sparse=self.sparse))

    def train(fused):
        model = Looks()
        booster = Booster("cpu", precision, fused_optimizer=fused)
        boosted, optimizer, *_ = booster.boost(model, make(model.parameters()))
        for step in range(5):
            model.sparse = step in (2, 3)
            optimizer.zero_grad()
            booster.backward(boosted(torch.tensor([[0, 1], [1, 4]])).square().mean(), optimizer)
            if clip:
                optimizer.clip_grad_by_norm(0.1)
            assert optimizer.step()
        return model

    ours, expected = train(True), train(False)
    torch.testing.assert_close(ours.table, expected.table, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.head.weight, expected.head.weight, rtol=1e-4, atol=1e-5)


def test_adam_s_own_refusal_of_sparse_gradients_comes_through():
    table = nn.Parameter(torch.randn(6, 3))
    optimizer = boost(Adam([table], fused=True))
    optimizer.backward(F.embedding(torch.tensor([1]), table, sparse=True).sum())
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        optimizer.step()


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_kernel_given_up_where_the_device_decides(name, overflow):
    def train(fused):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.ones(3, 3))]
        if not fused:
            inner = OPTIMIZERS[name](params)
            optimizer = boost(inner, 2.0**8)
        else:
            inner = {"SGD": SGD, "AdamW": AdamW}[name](
                params, **({"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.01}), fused=True
            )
            optimizer = boost(inner, 2.0**8, DEVICE)
            optimizer._update.decision.application.kernel.switched = True
        for step in range(4):
            if step == 1:
                params[0].data = params[0].data.repeat(1, 2)[:, :3]
            grad = torch.full((3, 3), float("inf") if overflow and step == 2 else 0.5 * step)
            optimizer.zero_grad()
            optimizer.backward(loss_with(params, [grad]))
            optimizer.clip_grad_by_norm(1.0)
            assert bool(optimizer.step()) is not (overflow and step == 2)
        return params[0]

    torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-5)
