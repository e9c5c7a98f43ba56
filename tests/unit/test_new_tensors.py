"""Tensors that a half model makes in its own forward."""

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, NaiveMixedPrecision
from booster.tensors.cast_regions import NewTensors

NAIVE = {"fp16_naive": FP16NaiveMixedPrecision, "bf16_naive": BF16NaiveMixedPrecision}
EVERY_NAIVE = pytest.mark.parametrize("strategy", NAIVE.values(), ids=NAIVE)

MAKERS = {
    "zeros": lambda: torch.zeros(3),
    "ones": lambda: torch.ones(2, 3, requires_grad=True),
    "empty": lambda: torch.empty(3),
    "full": lambda: torch.full((3,), 2.0),
    "full of integers": lambda: torch.full((3,), 2),
    "arange": lambda: torch.arange(3),
    "arange of floats": lambda: torch.arange(0.0, 3.0),
    "arange by keyword": lambda: torch.arange(start=0, end=3, step=0.5),
    "linspace": lambda: torch.linspace(0, 1, 5),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "tensor of integers": lambda: torch.tensor([1, 2]),
    "tensor of an array": lambda: torch.tensor(np.ones(2, dtype=np.float32)),
    "scalar_tensor": lambda: torch.scalar_tensor(1.0),
    "as_tensor of an array": lambda: torch.as_tensor(np.ones(2, dtype=np.float32)),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "from_numpy": lambda: torch.from_numpy(np.ones(2, dtype=np.float32)),
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3),
    "randint": lambda: torch.randint(3, (3,)),
    "eye": lambda: torch.eye(2),
    "hann_window": lambda: torch.hann_window(4),
    "fftfreq": lambda: torch.fft.fftfreq(4),
    "given": lambda: torch.zeros(3, dtype=torch.float32),
    "out": lambda: torch.zeros(3, out=torch.empty(3, dtype=torch.float32)),
    "zeros_like": lambda: torch.zeros_like(torch.arange(3)),
    "new_zeros": lambda: torch.arange(3).new_zeros(3),
}


@pytest.mark.crossed
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_new_tensors_have_the_dtype_that_torchs_default_would_give_them(maker, dtype):
    torch.set_default_dtype(dtype)
    try:
        expected = MAKERS[maker]()
    finally:
        torch.set_default_dtype(torch.float32)
    with NewTensors(dtype):
        made = MAKERS[maker]()
    assert (made.dtype, made.shape, made.requires_grad) == (expected.dtype, expected.shape, expected.requires_grad)


def test_a_default_dtype_of_the_user_s_wins():
    torch.set_default_dtype(torch.float64)
    try:
        with NewTensors(torch.bfloat16):
            assert torch.zeros(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class MakesItsOwn(nn.Module):
    """Positions and a mask made in forward, as many models do."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def part(self, x):
        positions = torch.arange(0.0, 4.0) / 4
        return self.linear(torch.ones(4) * 0.5 + positions.expand_as(x)) * torch.linspace(0, 1, 4)

    def forward(self, x):
        x = self.linear(x)
        x = x + (checkpoint(self.part, x, use_reentrant=False) if self.checkpointed else self.part(x))
        return self.norm(x)


@EVERY_NAIVE
def test_a_model_that_makes_tensors_fails_without_the_option_and_trains_with_it(strategy):
    def build(**options):
        torch.manual_seed(0)
        net = MakesItsOwn()
        booster = Booster("cpu", strategy(**options))
        return booster, *booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))[:2]

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="dtype"):
        build()[1](x)
    booster, model, optimizer = build(default_dtype=True)
    losses = []
    for _ in range(5):
        loss = model(x).square().mean() + model(x).sum().square()
        booster.backward((model(x) - 1).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] != losses[0]
    assert torch.zeros(1).dtype == torch.float32


@EVERY_NAIVE
def test_recomputed_activations_make_the_same_tensors(strategy):
    def train(checkpointed):
        torch.manual_seed(0)
        net = MakesItsOwn(checkpointed)
        booster = Booster("cpu", strategy(default_dtype=True, sdpa_fp32=False))
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        booster.backward((model(torch.ones(8, 4).cumsum(0)) - 1).square().mean(), optimizer)
        optimizer.step()
        return [param.detach() for param in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


@EVERY_NAIVE
def test_pinned_modules_models_of_other_precisions_and_other_threads_make_float32(strategy):
    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            self.dtype = torch.zeros(1).dtype
            return x * self.weight

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.pinned, self.plain, self.float32 = Probe(), Probe(), [Booster("cpu").boost(Probe())[0]]

        def forward(self, x):
            thread = threading.Thread(target=lambda: setattr(self, "elsewhere", torch.zeros(1).dtype))
            thread.start()
            thread.join()
            return self.float32[0](self.plain(self.pinned(x)))

    net = Whole()
    Booster("cpu", strategy(default_dtype=True, keep_fp32="pinned")).boost(net)[0](torch.ones(1))
    assert net.plain.dtype == strategy.dtype
    assert {net.pinned.dtype, net.float32[0].dtype, net.elsewhere} == {torch.float32}
    assert issubclass(strategy, NaiveMixedPrecision)


def test_complex_numbers_stay_as_wide_as_torch_makes_them():
    with NewTensors(torch.bfloat16):
        assert torch.tensor([1j]).dtype == torch.complex64
