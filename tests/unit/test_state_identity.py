"""`optimizer.load_state_dict(optimizer.state_dict())` changes nothing, to the bit, for every precision and optimizer."""

import copy

import pytest
import torch
from torch import nn, optim

from booster import Booster
from booster.mixed_precision import (
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
)

SCALE = {"initial_scale": 2.0**5}
PRECISIONS = {
    "fp32": MixedPrecision,
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2.0**5),
    "bf16": BF16MixedPrecision,
    "fp16_naive": lambda: FP16NaiveMixedPrecision(**SCALE),
    "fp16_naive split": lambda: FP16NaiveMixedPrecision(**SCALE, master_weights="split"),
    "fp16_naive none": lambda: FP16NaiveMixedPrecision(**SCALE, master_weights="none"),
    "fp16_naive stochastic": lambda: FP16NaiveMixedPrecision(**SCALE, master_weights="none", rounding="stochastic"),
    "fp16_naive kahan": lambda: FP16NaiveMixedPrecision(**SCALE, master_weights="none", rounding="kahan"),
    "bf16_naive": BF16NaiveMixedPrecision,
    "bf16_naive fp32": lambda: BF16NaiveMixedPrecision(master_weights="fp32"),
    "bf16_naive none": lambda: BF16NaiveMixedPrecision(master_weights="none"),
    "bf16_naive stochastic": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
    "bf16_naive kahan": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"),
    **{
        f"O{level}": lambda level=level: FP16ApexMixedPrecision(f"O{level}", loss_scale="dynamic", verbosity=0)
        for level in range(4)
    },
}
OPTIMIZERS = {
    "Adam": lambda p: optim.Adam(p, lr=1e-3, amsgrad=True, eps=1e-4),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-3, eps=1e-4),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-3, eps=1e-4, foreach=True),
    "SGD": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-3),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True, eps=1e-4),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1e-2, eps=1e-4),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-3, eps=1e-4),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-3, eps=1e-4),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-3, eps=1e-4),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-3, lambd=1e-2),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-3),
}
ELEMENTWISE_ONLY = ("split", "none", "stochastic", "kahan")


class Net(nn.Module):
    """Weights of ordinary size, below float16's normal numbers and without dimensions, enough of each for rare roundings."""

    def __init__(self):
        super().__init__()
        self.ordinary = nn.Parameter(torch.randn(90, 500))
        self.tiny = nn.Parameter(torch.randn(100, 300) * 2.0**-16)
        self.scalar = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x @ self.ordinary + x[:, :1] @ self.tiny.flatten()[:500][None] + self.scalar


class Run:
    def __init__(self, precision, optimizer):
        torch.manual_seed(0)
        net = Net()
        self.booster = Booster("cpu", PRECISIONS[precision]())
        self.model, self.optimizer, *_ = self.booster.boost(net, OPTIMIZERS[optimizer](net.parameters()))
        self.generator = torch.Generator().manual_seed(1)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            x = torch.randn(2, 90, generator=self.generator) / 10
            loss = self.model(x).square().mean() + sum(p.float().sum() * 1e-3 for p in self.model.parameters())
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()

    def snapshot(self):
        weights = {name: param.detach() for name, param in self.model.named_parameters()}
        return copy.deepcopy({"weights": weights, "optimizer": self.optimizer.state_dict()})


def different(a, b, path=""):
    """Where two states differ: in type, dtype, shape or any bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        raw = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)] if same else []
        return [] if same and torch.equal(*raw) else [f"{path}: {a.dtype} {b.dtype}"]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [found for key in a for found in different(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, type(a)) and len(a) == len(b):
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in different(x, y, f"{path}.{i}")]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} {b!r}"]


def cases():
    for precision in PRECISIONS:
        for name in OPTIMIZERS:
            if name == "Adafactor" and precision.endswith(ELEMENTWISE_ONLY):
                continue
            yield precision, name


@pytest.mark.crossed
@pytest.mark.parametrize(("precision", "optimizer"), list(cases()))
def test_loading_the_own_state_is_the_identity(precision, optimizer):
    run = Run(precision, optimizer)
    run.train(3)
    before = run.snapshot()
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert different(before, run.snapshot()) == []


@pytest.mark.slow_cases("fp16_naive kahan", "bf16_naive stochastic", "fp16_naive none", "fp16_naive")
@pytest.mark.crossed
@pytest.mark.parametrize(
    "order", [("model", "optimizer"), ("optimizer", "model")], ids=["model first", "optimizer first"]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_has_the_same_state_and_goes_on_alike(precision, order):
    wrong = {}
    for name in ("Adam", "NAdam", "ASGD"):
        run = Run(precision, name)
        run.train(3)
        saved = copy.deepcopy({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})
        other = Run(precision, name)
        other.train(1)
        for part in order:
            getattr(other, part).load_state_dict(copy.deepcopy(saved[part]))
        other.generator.set_state(run.generator.get_state())
        found = different(run.snapshot(), other.snapshot())
        run.train(2)
        other.train(2)
        found += different(run.snapshot(), other.snapshot())
        if found:
            wrong[name] = found
    assert wrong == {}


@pytest.mark.slow_cases("fp16_naive kahan", "bf16_naive stochastic", "fp16_naive none", "fp16_naive")
@pytest.mark.crossed
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "ASGD"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_after_its_state_was_cleared_an_optimizer_begins_anew_with_the_masters_it_has(precision, optimizer):
    run, other = Run(precision, optimizer), Run(precision, optimizer)
    run.train(3)
    other.train(3)
    run.optimizer.state.clear()
    assert not run.optimizer.state
    other.optimizer.load_state_dict({**other.optimizer.state_dict(), "state": {}})
    run.train(2)
    other.train(2)
    assert different(run.snapshot(), other.snapshot()) == []
