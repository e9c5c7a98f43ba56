"""On a CUDA device: a whole step in one CUDA graph is the eager step, and the host is out of it."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu.models import tiny
from benchmarks.gpu.ways import HALF, torch_graph
from booster import Booster

pytestmark = pytest.mark.gpu

PRECISIONS = ["fp32", "bf16", "fp16", "bf16_naive", "fp16_naive"]
STEPS = 500
OVERFLOW_AT = (40, 41, 333)


def batches(count: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 64, generator=generator).cuda(),
            torch.randint(0, 64, (8,), generator=generator).cuda(),
            torch.tensor(float("inf") if index in OVERFLOW_AT else 1.0).cuda(),
        )
        for index in range(count)
    ]


class Run:
    """The tiny model with a rate in a tensor of float32, as captured steps read it."""

    def __init__(self, precision: str, *, dropout: float = 0.0) -> None:
        self.booster = Booster("cuda", precision, max_consecutive_skips=None)
        net = nn.Sequential(tiny("cuda"), nn.Dropout(dropout))
        rate = torch.tensor(2.0**-10, device="cuda")  # the same in float32 and as a number of Python
        inner = torch.optim.AdamW(net.parameters(), lr=float(rate))
        schedule = torch.optim.lr_scheduler.StepLR(inner, 100, 0.5)
        self.model, self.optimizer, self.criterion, _, self.schedule = self.booster.boost(
            net, inner, nn.CrossEntropyLoss(), None, schedule
        )

    def step(self, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> Any:
        loss = self.criterion(self.model(x), y) * factor
        self.booster.backward(loss, self.optimizer)
        self.optimizer.clip_grad_by_norm(1.0)
        result = self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss, result


@pytest.mark.parametrize("precision", PRECISIONS)
def test_five_hundred_steps_are_eager_ones(precision: str) -> None:
    data = batches(STEPS)
    eager, captured = Run(precision), Run(precision)
    step = captured.booster.capture(captured.step, *data[0])
    expected = [eager.step(*batch) for batch in data]
    found = [step(*batch) for batch in data]

    for (loss, result), (other, wanted) in zip(found, expected, strict=True):
        assert torch.equal(loss.nan_to_num(), other.detach().nan_to_num())
        assert (result.applied, result.loss_scale) == (wanted.applied, wanted.loss_scale)
    assert all(map(torch.equal, captured.model.parameters(), eager.model.parameters()))
    assert captured.optimizer.num_skipped == eager.optimizer.num_skipped == len(OVERFLOW_AT)
    assert captured.schedule.get_last_lr() == eager.schedule.get_last_lr()
    assert step.num_graphs == 1  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropout_draws_other_numbers_in_every_replay(compiled: bool) -> None:
    run = Run("fp32", dropout=0.5)
    x, y, one = batches(1)[0]
    model = torch.compile(run.model) if compiled else run.model
    step = run.booster.capture(lambda x: model(x), x)
    outputs = [step(x) for _ in range(5)]
    assert len({output.eq(0).sum(1).cpu().numpy().tobytes() for output in outputs[2:]}) > 1


def test_a_step_reads_nothing_on_the_host_and_copies_from_pinned_memory() -> None:
    run = Run("fp32")
    x, y, one = (tensor.cpu().pin_memory() for tensor in batches(1)[0])
    step = run.booster.capture(run.step, x, y, one)
    losses = [step(x, y, one)[0] for _ in range(10)]
    assert losses[-1] < losses[0]


def microseconds(step: Callable[[], Any], calls: int = 200) -> float:
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times) * 1e6


@pytest.mark.slow
@pytest.mark.parametrize("precision", HALF)
def test_the_time_of_a_tiny_step_is_near_that_of_a_graph_by_hand(precision: str) -> None:
    run, batch = Run(precision), batches(1)[0]
    step = run.booster.capture(run.step, *batch)
    ours, eager = microseconds(lambda: step(*batch)), microseconds(lambda: run.step(*batch))
    raw = microseconds(torch_graph(tiny("cuda"), F.cross_entropy, *batch[:2], precision))
    assert ours <= 1.1 * raw, f"{ours:.0f} us; by hand {raw:.0f} us, eager {eager:.0f} us"


def test_memory_stays_near_that_of_eager_steps() -> None:
    def peak(captured: bool) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run, batch = Run("bf16"), batches(1)[0]
        step = run.booster.capture(run.step, *batch) if captured else run.step
        for _ in range(5):
            step(*batch)
        return torch.cuda.max_memory_allocated() - before

    # A trial keeps a copy of weights and states, and inputs and results lie twice.
    assert peak(True) <= 3 * peak(False) + 2**22
