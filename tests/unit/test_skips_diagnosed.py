"""`Booster(diagnose=...)`: a skipped step is replayed by itself, from what it was given, and explained in one paragraph."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.down(F.dropout(F.relu(self.up(x)), 0.2))


class Run:
    def __init__(self, diagnose="first", precision="fp16", criterion=F.cross_entropy, **options):
        torch.manual_seed(0)
        self.raw = Net()
        self.booster = Booster("cpu", precision, diagnose=diagnose, **options)
        optimizer = torch.optim.AdamW(self.raw.parameters(), lr=1e-2)
        self.model, self.optimizer, self.criterion, *_ = self.booster.boost(self.raw, optimizer, criterion)
        self.x, self.y = torch.randn(6, 4), torch.arange(6) % 3

    def step(self, loss=None):
        loss = loss or (lambda: self.criterion(self.model(self.x), self.y))
        value = loss()
        self.booster.backward(value, self.optimizer)
        result = self.optimizer.step()
        self.optimizer.zero_grad()
        return float(value.detach()), result.applied

    def break_up(self):
        with torch.no_grad():
            self.raw.up.weight.fill_(6e4)
            self.x.abs_().add_(1)


def diagnoses_of(run):
    return [(found.kind, found.module, found.direction, found.certain) for found in run.booster.diagnoses]


@pytest.mark.parametrize(
    ("precision", "options", "warns"),
    [
        ("bf16", {}, True),
        ("bf16", {"skip_nonfinite": True}, False),
        ("bf16", {"clip_grad_norm": 1.0}, False),
        (BF16NaiveMixedPrecision(clip_grad_norm=1.0), {}, False),
        ("fp16", {}, False),
    ],
)
def test_a_diagnosis_for_which_nothing_looks_at_gradients_is_warned_of(precision, options, warns, caplog):
    with caplog.at_level(logging.WARNING, "booster.numerics"):
        Run(precision=precision, **options)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warns
    assert all("skip_nonfinite=True" in record.message for record in caplog.records)


def test_a_skipped_step_is_diagnosed_and_told_in_one_warning(caplog):
    run = Run()
    assert run.step()[1]
    assert diagnoses_of(run) == []
    run.break_up()
    with caplog.at_level(logging.WARNING, "booster.numerics"):
        assert not run.step()[1]
    assert diagnoses_of(run) == [("overflow", "up", "forward", True)]
    (record,) = caplog.records
    assert "Overflow of float16" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(("diagnose", "expected"), [("first", 1), (2, 2), ("every", 3)])
def test_as_many_skips_are_diagnosed_as_were_asked_for(diagnose, expected):
    run = Run(diagnose)
    run.break_up()
    for _ in range(3):
        run.step()
    assert len(run.booster.diagnoses) == expected


def test_the_replay_has_the_random_numbers_of_the_step_and_changes_nothing():
    class Chancy(Net):
        def forward(self, x):
            return self.down(self.up(x)) * (torch.rand(()) * 1e3).floor()

    run = Run()
    run.raw.__class__ = Chancy
    plain = Run(None)
    plain.raw.__class__ = Chancy
    torch.manual_seed(7)
    expected = [plain.step() for _ in range(4)]
    torch.manual_seed(7)
    assert [run.step() for _ in range(4)] == expected
    assert not expected[0][1]
    assert run.booster.diagnoses[0].kind == "loss_scale"
    assert abs(run.booster.diagnoses[0].loss - expected[0][0]) < 1e-6 * expected[0][0]
    for one, other in zip(plain.raw.parameters(), run.raw.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_bad_loss_of_a_boosted_criterion_is_named():
    run = Run(criterion=lambda out, y: -(out.softmax(-1) * torch.tensor([0.0, 1, 1])).log().mean())
    run.step()
    (found,) = run.booster.diagnoses
    assert (found.kind, found.operation, found.direction, found.certain) == ("loss", "aten.log", "loss", True)


def test_views_between_model_and_criterion_are_followed():
    run = Run()
    run.break_up()
    run.step(lambda: run.criterion(run.model(run.x.view(2, 3, 4)).flatten(0, 1), run.y))
    (found,) = run.booster.diagnoses
    assert (found.kind, found.module, found.notes) == ("overflow", "up", ())


def test_a_loss_made_outside_is_said_to_be_out_of_sight_but_the_model_is_seen():
    run = Run("every")
    weight = torch.tensor(float("inf"))
    run.step(lambda: F.cross_entropy(run.model(run.x), run.y) * weight)
    (found,) = run.booster.diagnoses
    assert (found.kind, found.direction, found.certain) == ("loss", "loss", False)
    assert "What computes the loss is not in the replay" in str(found)
    run.break_up()
    run.step(lambda: F.cross_entropy(run.model(run.x), run.y) * 1.0)
    assert diagnoses_of(run)[1] == ("overflow", "up", "forward", True)


def test_a_finite_loss_with_a_bad_gradient_is_said_to_be_that_of_what_computes_the_loss():
    run = Run()
    assert run.step(lambda: (run.model(run.x).float().sum() * 0.0).sqrt()) == (0.0, False)
    (found,) = run.booster.diagnoses
    assert (found.kind, found.direction, found.micro_batch) == ("loss", "backward", 0)
    assert "The loss is finite, and the gradient that came back from it" in str(found)


def test_what_stands_between_model_and_criterion_is_said_to_be_out_of_sight_but_the_model_is_seen():
    run = Run()
    run.break_up()
    run.step(lambda: run.criterion(run.model(run.x) * 1.0, run.y))
    assert diagnoses_of(run) == [("overflow", "up", "forward", True)]
    assert "What computes the loss is not in the replay" in str(run.booster.diagnoses[0])


def test_a_backward_overflow_is_found_without_the_loss():
    run = Run()
    run.step(lambda: F.cross_entropy(run.model(run.x), run.y) * 1e4)
    (found,) = run.booster.diagnoses
    assert (found.kind, found.direction) == ("loss_scale", "backward")
    assert found.remedies[0].startswith("finite at scale 2**")


def test_the_micro_batch_is_named():
    run = Run()
    good, bad = run.x, run.x.clone()
    bad[4] = torch.nan
    with run.booster.accumulate(run.model, run.optimizer, 3):
        for x in (good, bad, good):
            run.booster.backward(run.criterion(run.model(x), run.y), run.optimizer)
    run.optimizer.step()
    (found,) = run.booster.diagnoses
    assert (found.kind, found.micro_batch, found.rows) == ("data", 1, (4,))


def test_an_overflow_in_the_sum_over_micro_batches_is_in_the_last_of_them():
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    booster = Booster("cpu", FP16NaiveMixedPrecision(initial_scale=1.0), diagnose="first")
    model, optimizer, criterion, *_ = booster.boost(
        raw, torch.optim.SGD(raw.parameters(), lr=0.1), lambda out, y: (out.float() * y).sum()
    )
    for _ in range(2):
        booster.backward(criterion(model(torch.ones(1, 4)), torch.full((1, 2), 4e4)), optimizer)
    assert not optimizer.step()
    (found,) = booster.diagnoses
    assert (found.kind, found.module, found.operation, found.micro_batch) == ("overflow", "1", "aten.add_", 1)
    assert (found.direction, found.certain) == ("backward", True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # as inductor is imported
@pytest.mark.parametrize(
    ("backend", "fused"),
    [("eager", True), ("aot_eager", True), (None, "compile"), pytest.param("inductor", True, marks=pytest.mark.slow)],
)
def test_a_compiled_model_or_update_is_diagnosed_by_the_names_of_the_model(backend, fused):
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    nn.init.constant_(raw[2].weight, 6e4)
    booster = Booster("cpu", "fp16", diagnose="first", fused_optimizer=fused)
    model = torch.compile(raw, backend=backend) if backend else raw
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    x, y = torch.rand(8, 8) + 5, torch.arange(8) % 4
    booster.backward(criterion(model(x), y), optimizer)
    assert not optimizer.step()
    (by_itself,) = booster.diagnoses
    for found in (by_itself, booster.diagnose(lambda: criterion(model(x), y), optimizer)):
        assert (found.kind, found.module, found.operation) == ("overflow", "2", "aten.addmm")
        assert "finite with keep_fp32='2'" in found.remedies
        assert found.certain


@pytest.mark.parametrize("by_keyword", [False, True])
def test_inputs_written_to_since_are_said_and_nothing_is_certain(by_keyword):
    run = Run()
    run.x[2] = torch.nan
    loss = run.criterion(run.model(x=run.x) if by_keyword else run.model(run.x), run.y)
    run.booster.backward(loss, run.optimizer)
    run.x[3] = torch.nan
    run.optimizer.step()
    (found,) = run.booster.diagnoses
    assert not found.certain
    assert "written to in place" in str(found)


def test_nothing_of_a_step_is_kept_after_it():
    run = Run()
    x = torch.randn(6, 4)
    kept = weakref.ref(x)
    run.x = x
    run.step()
    run.x = None
    del x
    gc.collect()
    assert kept() is None


def test_nothing_is_kept_once_as_many_skips_as_asked_for_were_diagnosed():
    run = Run("first")
    assert run.step()[1]
    run.break_up()
    assert not run.step()[1]
    kept = weakref.ref(run.x)
    loss = run.criterion(run.model(run.x), run.y)
    run.x = None
    run.booster.backward(loss, run.optimizer)
    gc.collect()
    assert kept() is None
    run.optimizer.step()
    assert len(run.booster.diagnoses) == 1


def test_calls_that_no_backward_pass_follows_are_not_kept_for_ever():
    run = Run()
    first = torch.randn(6, 4)
    kept = weakref.ref(first)
    run.model(first)
    del first
    for _ in range(64):
        run.model(run.x)
    gc.collect()
    assert kept() is None


def test_a_copy_of_a_model_is_not_recorded():
    run = Run()
    average = copy.deepcopy(run.model)
    run.step()
    average(run.x)
    assert run.step()[1]


def test_a_failing_replay_is_told_and_does_not_end_the_training(caplog):
    run = Run()
    run.x[0] = torch.nan
    calls = iter(range(10))

    class Once(Net):
        def forward(self, x):
            if next(calls):
                raise RuntimeError("only once")
            return super().forward(x)

    run.raw.__class__ = Once
    with caplog.at_level(logging.WARNING, "booster.numerics"):
        assert not run.step()[1]
    assert "could not be replayed: RuntimeError: only once" in caplog.text
