"""Whatever a replay of a step can reach is afterwards what it was, to the bit, under every precision."""

import pytest
import torch
from everywhere import everywhere
from reached import differences, reached
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision import (
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    Int8MixedPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
    TF32MixedPrecision,
)


class Net(nn.Module):
    """Keeps counts in every way that a module can."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.up, self.middle, self.down = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32)
        self.calls, self.history, self.counts = 0, [], {"calls": 0, "seen": [set()]}

    def forward(self, x):
        self.calls += 1
        self.counts["calls"] += 1
        self.counts["seen"][0].add(self.calls)
        self.history.append(self.calls)
        return self.down(F.relu(self.middle(F.dropout(F.relu(self.up(self.norm(x))), 0.1))))


PRECISIONS = {
    **{name: lambda name=name: name for name in everywhere()},
    **{f"fp16_apex {level}": lambda level=level: FP16ApexMixedPrecision(level, verbosity=0) for level in ("O1", "O2")},
    "fp16_naive 8bit": lambda: FP16NaiveMixedPrecision(states="8bit"),
    "tf32": lambda: TF32MixedPrecision(emulate=True),
    "fp8": lambda: FP8MixedPrecision(emulate=True),
    "mxfp8": lambda: MXFP8MixedPrecision(emulate=True),
    "nvfp4": lambda: NVFP4MixedPrecision(emulate=True),
    "int8": Int8MixedPrecision,
}


class Run:
    def __init__(self, precision, **options):
        torch.manual_seed(0)
        self.raw = Net()
        self.booster = Booster("cpu", PRECISIONS[precision](), skip_nonfinite=True, **options)
        optimizer = torch.optim.AdamW(self.raw.parameters(), lr=1e-3)
        self.model, self.optimizer, *_ = self.booster.boost(self.raw, optimizer)
        self.x, self.y = torch.randn(32, 32), torch.randint(0, 32, (32,))

    def loss(self, factor=1.0):
        return F.cross_entropy(self.model(self.x).float(), self.y) * factor

    def one_pass(self, factor=1.0):
        loss = self.loss(factor)
        self.booster.backward(loss, self.optimizer)
        return loss

    def step(self, factor=1.0):
        self.one_pass(factor)
        applied = self.optimizer.step().applied
        self.optimizer.zero_grad()
        return applied

    def everything(self):
        found = reached(model=self.model, optimizer=self.optimizer, precision=self.booster.precision)
        # Counts the first calls of a model, of which a replay makes some, for a warning.
        return {path: value for path, value in found.items() if not path.startswith("model._raw_calls._left")}


@pytest.mark.slow_cases("mxfp8-True", "int8-True", "fp16_apex-True")
@pytest.mark.crossed
@pytest.mark.parametrize("bad", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_a_replay_reaches_is_what_it_was(precision, bad):
    run = Run(precision)
    run.step()
    run.one_pass()  # its gradients wait
    before = run.everything()
    for forward in (run.loss, run.one_pass):
        if bad:
            run.booster.diagnose(lambda forward=forward: forward(torch.inf), run.optimizer)
        else:
            run.booster.diagnose(forward, run.optimizer)
        assert differences(before, run.everything()) == []


def test_what_a_replay_would_have_changed_is_noticed():
    run = Run("fp16_apex O2")
    run.step()
    before = run.everything()
    run.booster.precision.scales[0].unskipped += 1
    run.raw.counts["seen"][0].add(7)
    changed = differences(before, run.everything())
    assert any(path.endswith("unskipped") for path in changed)
    assert any("[seen]" in path for path in changed)


@pytest.mark.slow_cases("mxfp8", "int8", "fp16_apex")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_whose_skipped_steps_are_diagnosed_is_the_run_without(precision):
    traces = []
    for diagnose in (None, "every"):
        run = Run(precision, diagnose=diagnose)
        torch.manual_seed(1)
        applied = [run.step(factor) for factor in (1.0, torch.inf, 1.0, torch.inf, torch.inf, 1.0)]
        optimizer = run.optimizer
        state = reached(state=optimizer.state_dict(), model=run.model.state_dict(), scale=optimizer.loss_scale)
        traces.append((applied, state, run.raw.calls, run.raw.history, run.raw.counts, torch.rand(())))
        assert applied[1] is False
        assert len(run.booster.diagnoses) == (0 if diagnose is None else applied.count(False))
    (applied, state, *rest), (applied_too, state_too, *rest_too) = traces
    assert applied == applied_too
    assert differences(state, state_too) == []
    assert rest == rest_too
