"""The levels of apex on a CUDA device: they train as float32 does, cast as listed, and skip overflows."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision

pytestmark = pytest.mark.gpu

HALF, FLOAT = torch.float16, torch.float32
LEVELS = ["O0", "O1", "O2", "O3"]
PARAMETERS = {"O0": FLOAT, "O1": FLOAT, "O2": HALF, "O3": HALF}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 32, generator=generator).cuda(), torch.randint(0, 8, (16,), generator=generator).cuda())
        for _ in range(count)
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_ten_steps_lose_what_float32_loses(level: str) -> None:
    batches = make_batches(10)

    reference = make_model().cuda()
    raw = torch.optim.SGD(reference.parameters(), lr=0.05)
    expected = []
    for x, y in batches:
        loss = F.cross_entropy(reference(x), y)
        expected.append(loss.item())
        loss.backward()
        raw.step()
        raw.zero_grad()

    net = make_model()
    options = {"max_loss_scale": 2.0**8} if level in ("O1", "O2") else {}
    booster = Booster("cuda", FP16ApexMixedPrecision(level, verbosity=0, backend="native", **options))
    model, optimizer, criterion, *_ = booster.boost(
        net, torch.optim.SGD(net.parameters(), lr=0.05), nn.CrossEntropyLoss()
    )
    assert net[0].weight.dtype == PARAMETERS[level]
    assert net[1].weight.dtype == (HALF if level == "O3" else FLOAT)
    losses = []
    for x, y in batches:
        loss = criterion(model(x), y)
        losses.append(loss.item())
        booster.backward(loss, optimizer)
        assert optimizer.step()
        optimizer.zero_grad()
    tolerance = 1e-5 if level == "O0" else 2e-2
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)


FUNCTIONS = {
    "linear": (lambda x: F.linear(x, torch.ones(4, 4, device="cuda")), HALF, HALF),
    "matmul": (lambda x: x @ torch.ones(4, 4, device="cuda"), HALF, HALF),
    "mv": (lambda x: torch.mv(x, torch.ones(4, device="cuda")), HALF, HALF),
    "softmax": (lambda x: F.softmax(x, dim=-1), FLOAT, FLOAT),
    "gelu": (F.gelu, FLOAT, FLOAT),
    "std": (torch.std, FLOAT, FLOAT),
    "pow": (lambda x: x**2, FLOAT, FLOAT),
    "relu": (F.relu, HALF, FLOAT),
    "tanh": (torch.tanh, HALF, FLOAT),
    "atan2 with float32": (lambda x: torch.atan2(x, torch.ones(4, 4, device="cuda")), FLOAT, FLOAT),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_o1_runs_listed_functions_in_their_dtype(name: str) -> None:
    function, from_half, from_float = FUNCTIONS[name]
    booster = Booster("cuda", FP16ApexMixedPrecision(verbosity=0, backend="native"))
    with booster.autocast():
        dtypes = [function(torch.ones(4, 4, dtype=dtype, device="cuda")).dtype for dtype in (HALF, FLOAT)]
    assert dtypes == [from_half, from_float]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_with_an_overflow_is_skipped_and_halves_the_scale(level: str) -> None:
    net = make_model()
    booster = Booster("cuda", FP16ApexMixedPrecision(level, verbosity=0, max_loss_scale=2.0**8, backend="native"))
    model, optimizer, criterion, *_ = booster.boost(
        net, torch.optim.SGD(net.parameters(), lr=0.05), nn.CrossEntropyLoss()
    )
    (x, y), *_ = make_batches(1)
    before = net[0].weight.detach().clone()
    booster.backward(criterion(model(x), y) * torch.inf, optimizer)
    assert not optimizer.step()
    assert torch.equal(net[0].weight, before)
    assert optimizer.loss_scale == 2.0**7
    optimizer.zero_grad()
    booster.backward(criterion(model(x), y), optimizer)
    assert optimizer.step()
    assert not torch.equal(net[0].weight, before)
