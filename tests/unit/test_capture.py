"""A captured step: replays are the steps that eager ones would have been, to the bit, and what a graph cannot do is said.

There is no GPU here. A recorder of operations takes the place of the graph: tests/support/recorded_graph.py.
"""

import copy
import functools
import math
import sys
from collections.abc import Iterator

import pytest
import torch
from comparing import assert_same, same
from recorded_graph import RecordedGraphs
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    lr_scheduler,
)

from benchmarks.waits import HostReads, as_on_a_gpu
from booster import Booster, LossScaleError, StepResult
from booster.capture import trial
from booster.capture.graph_inputs import AHEAD
from booster.capture.trial import check
from booster.common.devices import HostCopy
from booster.loss_scaler import DynamicScale
from booster.mixed_precision import (
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    PrecisionSchedule,
)
from booster.nn.lr_scheduler import CosineAnnealingWarmupLR
from booster.update.device import _Applied

STEPS = 16
OVERFLOWS = (4, 5, 11)  # steps with a loss that is not finite
SCALE = {"init_scale": 2.0**12, "growth_interval": 4, "hysteresis": 2}
NAIVE_SCALE = {"initial_scale": 2.0**12, "growth_interval": 4, "hysteresis": 2}


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    with as_on_a_gpu():
        yield


PRECISIONS = {
    "fp32": lambda: "fp32",
    "bf16": lambda: "bf16",
    "fp16": lambda: FP16TorchMixedPrecision(**SCALE),
    "bf16_naive": lambda: "bf16_naive",
    "bf16_naive split": lambda: BF16NaiveMixedPrecision(master_weights="split"),
    "bf16_naive none": lambda: BF16NaiveMixedPrecision(master_weights="none"),
    "bf16_naive split24": lambda: BF16NaiveMixedPrecision(master_weights="split24"),
    "bf16_naive 8bit": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
    "bf16_naive bf16 states": lambda: BF16NaiveMixedPrecision(states="bf16"),
    "bf16_naive stochastic": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
    "bf16_naive kahan": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(**NAIVE_SCALE),
    "fp16_naive split": lambda: FP16NaiveMixedPrecision(master_weights="split", **NAIVE_SCALE),
}
OPTIMIZERS = {
    "AdamW": lambda params: AdamW(params, lr=1e-2),
    "AdamW amsgrad": lambda params: AdamW(params, lr=1e-2, amsgrad=True),
    "AdamW maximize": lambda params: AdamW(params, lr=1e-3, maximize=True),
    "Adam": lambda params: Adam(params, lr=1e-2),
    "Adam decayed": lambda params: Adam(params, lr=1e-2, weight_decay=0.1),
    "Adam betas": lambda params: Adam(params, lr=1e-2, betas=(0.8, 0.95), eps=1e-6),
    "SGD": lambda params: SGD(params, lr=1e-2),
    "SGD momentum": lambda params: SGD(params, lr=1e-2, momentum=0.9),
    "SGD nesterov": lambda params: SGD(params, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": lambda params: Adagrad(params, lr=1e-2),
    "Adagrad decayed": lambda params: Adagrad(params, lr=1e-2, lr_decay=0.1, weight_decay=0.01),
    "two groups": lambda params: (
        lambda held: AdamW([{"params": held[:2], "lr": 1e-2}, {"params": held[2:], "lr": 1e-3}])
    )(list(params)),
}
SCHEDULES = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 11], 0.3),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=9),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step % 5)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.02, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    ),
    "cosine after warm-up": lambda optimizer: CosineAnnealingWarmupLR(optimizer, total_steps=STEPS, warmup_steps=5),
}


class Run:
    """A model with dropout and batch statistics, trained by eager steps, or by captured ones where `captured`.

    function: the name of a method that is a step, or what makes the step of a run. example: what that is recorded with.
    """

    def __init__(
        self,
        captured,
        precision="fp16",
        optimizer="AdamW",
        schedule="cosine",
        *,
        clip=1.0,
        max_graphs=8,
        function=None,
        example=None,
        **options,
    ):
        torch.manual_seed(0)
        self.booster = Booster("cpu", PRECISIONS[precision](), max_consecutive_skips=None, **options)
        net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3))
        inner = OPTIMIZERS[optimizer](net.parameters())
        self.model, self.optimizer, self.criterion, _, self.schedule = self.booster.boost(
            net, inner, nn.CrossEntropyLoss(), None, SCHEDULES[schedule](inner)
        )
        self.clip = clip
        self.graphs = RecordedGraphs()
        self.step = function(self) if callable(function) else getattr(self, function or "whole_step")
        if captured:
            self.step = self.booster._captured(self.step, example or batch(0), self.graphs, max_graphs)

    def loss(self, x, y, factor):
        return self.criterion(self.model(x), y) * factor

    def whole_step(self, x, y, factor):
        loss = self.loss(x, y, factor)
        self.booster.backward(loss, self.optimizer)
        if self.clip:
            self.optimizer.clip_grad_by_norm(self.clip)
        result = self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "result": result}

    def micro_step(self, x, y, factor):
        loss = self.loss(x, y, factor)
        self.booster.backward(loss, self.optimizer)
        return loss

    def everything(self):
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "rates": [group["lr"] for group in self.optimizer.param_groups],
                "counts": (self.optimizer.num_applied, self.optimizer.num_skipped, self.optimizer.progress),
                "scale": self.optimizer.loss_scale,
                "random": torch.get_rng_state(),
            }
        )


def batch(step, size=4):
    generator = torch.Generator().manual_seed(100 + step)
    factor = torch.tensor(math.inf if step in OVERFLOWS else 1.0)
    x, y = torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)
    return x, y, factor


def fields(result):
    return result.applied, result.loss_scale, result.grad_norm, result.skipped_reason, result.culprit


def trained(captured, *arguments, train=lambda run, step: run.step(*batch(step)), steps=STEPS, **options):
    """Everything after some steps, each loss, and each result, read only in the end."""
    run = Run(captured, *arguments, **options)
    returned = [train(run, step) for step in range(steps)]
    results = [fields(each["result"]) for each in returned if isinstance(each, dict)]
    losses = [each["loss"].detach() if isinstance(each, dict) else each for each in returned]
    return run, {"losses": losses, "results": results, **run.everything()}


def same_as_eager(*arguments, **options):
    """The run of captured steps, which left to the bit what eager ones leave."""
    run, found = trained(True, *arguments, **options)
    assert_same(found, trained(False, *arguments, **options)[1])
    return run


# ---------------------------------------------------------------------- the same steps


@pytest.mark.slow_cases(
    "bf16_naive none-Adam betas-linear",
    "bf16_naive-Adam-milestones",
    "bf16-AdamW amsgrad-restarts",
    "bf16_naive stochastic-Adagrad-cosine after warm-up",
)
@pytest.mark.crossed
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_replayed_steps_are_eager_ones_to_the_bit(precision, optimizer, schedule):
    eager, expected = trained(False, precision, optimizer, schedule)
    run, found = trained(True, precision, optimizer, schedule)
    assert_same(found, expected)
    assert (run.graphs.num_recordings, run.graphs.num_replays) == (1, STEPS - 1)
    assert [not result[0] for result in found["results"]] == [step in OVERFLOWS for step in range(STEPS)]
    if "fp16" in precision:
        scales = [result[1] for result in found["results"]]
        assert any(b > a for a, b in zip(scales, scales[1:], strict=False))
        assert any(b < a for a, b in zip(scales, scales[1:], strict=False))


CAPTURABLE = {
    "RMSprop": lambda params, **options: RMSprop(params, lr=1e-3, momentum=0.9, **options),
    "NAdam": lambda params, **options: NAdam(params, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1, **options),
    "RAdam": lambda params, **options: RAdam(params, lr=1e-2, **options),
    "Adamax": lambda params, **options: Adamax(params, lr=1e-2, **options),
    "ASGD": lambda params, **options: ASGD(params, lr=1e-2, t0=3, **options),
    "Rprop": lambda params, **options: Rprop(params, lr=1e-2, **options),
    "Adadelta": lambda params, **options: Adadelta(params, lr=0.5, **options),
    "Adam": lambda params, **options: Adam(params, lr=1e-2, amsgrad=True, **options),
}

QUICK = ("Adam", "NAdam", "ASGD")


@pytest.fixture
def capturable_here(monkeypatch):
    """Optimizers that are built with capturable=True step tensors of a CPU, as they do those of a GPU."""
    for name in CAPTURABLE:
        module = sys.modules[f"torch.optim.{name.lower()}"]
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda supports_xla=True: ["cpu"])
        own = {"capturable": True, "foreach": True}
        monkeypatch.setitem(OPTIMIZERS, name, functools.partial(CAPTURABLE[name], **own))


@pytest.mark.slow_cases(
    "bf16_naive kahan", "fp16_naive", "bf16_naive bf16 states", "bf16_naive stochastic", "bf16_naive", "bf16_naive none"
)
@pytest.mark.usefixtures("capturable_here")
@pytest.mark.crossed
@pytest.mark.parametrize(
    "optimizer", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CAPTURABLE]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_optimizers_without_a_kernel_are_captured_where_they_are_capturable(precision, optimizer):
    # A rate in a tensor is multiplied where a number is a factor of a kernel: an ulp. So eager steps read a tensor, too.
    expected = trained(True, precision, optimizer, max_graphs=0)[1]
    run, found = trained(True, precision, optimizer)
    assert_same(found, expected)
    assert run.graphs.num_replays == STEPS - 1
    assert [not result[0] for result in found["results"]] == [step in OVERFLOWS for step in range(STEPS)]


@pytest.mark.usefixtures("capturable_here")
@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp16", "fp16_naive split"])
@pytest.mark.parametrize("optimizer", CAPTURABLE)
def test_a_skip_leaves_what_a_capturable_optimizer_has_and_the_host_reads_nothing(optimizer, precision, monkeypatch):
    def held():
        return copy.deepcopy((list(run.model.parameters()), list(run.optimizer.unwrap().state.values())))

    run = Run(False, precision, optimizer)
    for step in range(3):
        run.whole_step(*batch(step))
    run.optimizer.sync()
    before, behind = held(), Behind(monkeypatch)
    loss = run.loss(*batch(OVERFLOWS[0]))
    with HostReads() as reads:
        run.booster.backward(loss, run.optimizer)
        result = run.optimizer.step()
    assert (behind.waits, dict(reads.found)) == (0, {})
    assert same(held(), before)
    assert not result.applied


def test_steps_that_look_at_nothing_are_the_same():
    same_as_eager("bf16", clip=0.0)


def test_capture_itself_changes_nothing():
    assert_same(Run(True).everything(), Run(False).everything())
    begun = Run(False)
    begun.step(*batch(0))
    before = begun.everything()
    begun.booster._captured(begun.step, batch(1), begun.graphs, 8)
    assert_same(begun.everything(), before)


def test_a_recorder_freezes_numbers_of_python():
    """What keeps the equality above honest: a graph that ran Python again would follow the count."""
    run, count = Run(False, "fp32"), []

    def step(x, y, factor):
        count.append(1)
        return x.sum() * 0 + len(count)

    captured = run.booster._captured(step, batch(0), run.graphs, 8)
    count.clear()
    assert [float(captured(*batch(step))) for step in range(5)] == [1, 2, 2, 2, 2]


def test_a_host_that_reads_in_a_recording_is_noticed():
    with pytest.raises(RuntimeError, match="a host reads in a recording"):
        RecordedGraphs().record(lambda: float(torch.zeros(3).sum()), ())


def test_what_a_recording_launches_has_not_run_before_the_first_replay():
    value = torch.zeros(3)
    replay = RecordedGraphs().record(lambda: value.add_(1), ())
    assert value.tolist() == [0, 0, 0]
    replay()
    replay()
    assert value.tolist() == [2, 2, 2]


def test_memory_that_nobody_holds_any_more_is_noticed():
    """What keeps later tests honest: a graph that reads what was freed would find other numbers there."""
    values, out = [torch.ones(3)], torch.zeros(3)
    replay = RecordedGraphs().record(lambda: out.copy_(values[0] * 2 + torch.tensor(1.0)), ())
    replay()
    assert out.tolist() == [3, 3, 3]
    values[0] = values[0][:1]
    replay()
    values.clear()
    with pytest.raises(RuntimeError, match=r"memory that nothing holds any more: torch.float32 torch.Size\(\[3\]\)"):
        replay()


# ---------------------------------------------------------------------- results


def test_results_are_of_their_own_step_whenever_they_are_read():
    def results(captured):
        run = Run(captured)
        return [run.step(*batch(step))["result"] for step in range(10)]

    found = results(True)
    assert all(isinstance(result, StepResult) for result in found)
    assert same([fields(result) for result in reversed(found)][::-1], [fields(result) for result in results(False)])


def test_results_of_eager_steps_between_replays_stay_what_they_were():
    def train(run, step):
        return (run.whole_step if step % 3 == 2 else run.step)(*batch(step))

    run = same_as_eager(train=train)
    assert run.graphs.num_replays == STEPS - STEPS // 3 - 1


def test_tensors_that_come_back_are_copies_without_a_graph():
    run = Run(True)
    losses = [run.step(*batch(step))["loss"] for step in range(6)]
    assert len({loss.data_ptr() for loss in losses}) == 6
    assert not any(loss.requires_grad for loss in losses)


def test_what_the_optimizer_tells_between_steps_is_of_now():
    names = ("loss_scale", "step_was_skipped", "num_applied", "num_consecutive_skips", "progress")

    def heard(captured):
        run, found = Run(captured), []
        for step in range(8):
            run.step(*batch(step))
            assert isinstance(run.optimizer.param_groups[0]["lr"], float)
            found.append([getattr(run.optimizer, name) for name in names])
            found[-1] += [run.schedule.get_last_lr(), fields(run.optimizer.last_step)]
        return found

    assert same(heard(True), heard(False))


def test_too_many_skips_in_a_row_raise_as_they_do_in_eager_steps():
    def raised(captured):
        run = Run(False, "fp16")
        run.optimizer._history._max_consecutive_skips = 3
        step = run.booster._captured(run.step, batch(0), run.graphs, 8) if captured else run.step
        x, y, _ = batch(0)
        for number in range(20):
            try:
                step(x, y, torch.tensor(math.inf if number > 5 else 1.0))
            except LossScaleError as error:
                return number, str(error)
        return None

    assert raised(True) == raised(False) is not None


# ---------------------------------------------------------------------- a device that is behind


class Behind:
    """A device with flags that come `steps` steps late; None: never before the host waits."""

    def __init__(self, monkeypatch, steps=None):
        self.made, self.waits = 0, 0
        behind, begin = self, HostCopy.__init__

        def init(copy, tensor):
            begin(copy, tensor)
            behind.made += 1
            copy.number = behind.made

        def ready(copy):
            return steps is not None and copy.number + steps <= behind.made

        def applied(flag):
            behind.waits += not flag.ready()
            return not bool(flag.tensor())

        monkeypatch.setattr(HostCopy, "__init__", init)
        monkeypatch.setattr(HostCopy, "ready", ready)
        monkeypatch.setattr(_Applied, "__call__", applied)


@pytest.mark.slow_cases("fp16-milestones", "fp16-exponential", "fp16-linear")
@pytest.mark.crossed
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("precision", ["fp16", "bf16_naive split"])
def test_a_replay_reads_nothing_on_the_host_whatever_becomes_of_steps_before(precision, schedule, monkeypatch):
    expected = trained(False, precision, schedule=schedule)[1]
    behind, reads = Behind(monkeypatch), HostReads()

    def train(run, step):
        if step < 2:  # the first is eager, the second recorded
            return run.step(*batch(step))
        if step == 2:
            behind.waits = 0
        with reads:
            return run.step(*batch(step))

    run = Run(True, precision, schedule=schedule)
    returned = [train(run, step) for step in range(STEPS)]
    assert (behind.waits, dict(reads.found)) == (0, {})
    assert run.graphs.num_replays == STEPS - 1
    results = [fields(each["result"]) for each in returned]
    losses = [each["loss"] for each in returned]
    assert_same({"losses": losses, "results": results, **run.everything()}, expected)


@pytest.mark.crossed
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["cosine", "exponential", "sequence", "lambda"])
def test_flags_that_come_late_change_nothing(schedule, steps, monkeypatch):
    def train(run, step):
        if step == 8:
            run.optimizer.param_groups[0]["lr"] = 0.5
        if step % 7 == 6:
            assert run.schedule.get_last_lr()[0] > 0
        if step == 12 and schedule != "sequence":
            run.schedule.base_lrs[0] *= 2
        if step == 14:
            run.schedule.load_state_dict(run.schedule.state_dict())
        return run.step(*batch(step))

    expected = trained(False, "fp16", schedule=schedule, train=train)[1]
    Behind(monkeypatch, steps)
    assert_same(trained(True, "fp16", schedule=schedule, train=train)[1], expected)


def test_the_host_waits_once_in_so_many_steps_as_rates_are_foreseen(monkeypatch):
    behind = Behind(monkeypatch)
    run = trained(True, "fp16", steps=AHEAD + 2)[0]
    behind.waits = 0
    for step in range(AHEAD - 1):
        run.step(*batch(step % STEPS))
    assert behind.waits == 0
    for step in range(3):
        run.step(*batch(step))
    assert behind.waits == AHEAD - 1


@pytest.mark.parametrize("where", ["outside", "epoch given", "replaced", "tensor"])
def test_the_outcome_is_waited_for_where_a_schedule_cannot_be_foreseen(where, monkeypatch):
    def train(run, step):
        if step == 0 and where == "tensor":
            run.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
        result = run.own(*batch(step))
        if where == "outside":
            run.schedule.step()
        return result

    def step_of(run):
        def step(x, y, factor):
            loss = run.loss(x, y, factor)
            run.booster.backward(loss, run.optimizer)
            result = run.optimizer.step()
            if where != "outside":
                run.schedule.step(*([None, 3] if where == "epoch given" else []))
            run.optimizer.zero_grad()
            return {"loss": loss, "result": result}

        return step

    def run_of(captured):
        run = Run(False, "fp16", schedule="cosine")
        if where in ("epoch given", "replaced"):
            run.schedule.scheduler.step = lambda *given, step=run.schedule.scheduler.step: step()
        run.own = run.booster._captured(step_of(run), batch(0), run.graphs, 8) if captured else step_of(run)
        for step in range(12):
            train(run, step)
        everything = run.everything()
        everything["schedule"].pop("step", None)
        return everything

    expected = run_of(False)
    behind = Behind(monkeypatch)
    found = run_of(True)
    assert_same(found, expected)
    assert behind.waits >= 11


def test_a_schedule_that_computes_from_what_has_changed_is_told_of_and_waited_for(monkeypatch, caplog):
    level = [1.0]
    monkeypatch.setitem(SCHEDULES, "own", lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: level[0]))
    behind = Behind(monkeypatch, 3)
    run = Run(True, "fp16", schedule="own")
    for step in range(12):
        if step == 9:
            level[0] = 0.5
        run.step(*batch(step + 5))
    assert behind.waits > 0
    (said,) = [record.message for record in caplog.records if "was foreseen" in record.message]
    assert "AdamW went to (0.005,), and (0.01,) was foreseen" in said
    behind.waits = 0
    run.step(*batch(5))
    assert behind.waits > 0
    assert run.schedule.get_last_lr() == [0.005]


# ---------------------------------------------------------------------- kinds of calls


def test_new_shapes_are_captured_again_and_the_short_last_batch_has_the_same_bits():
    def train(run, step):
        return run.step(*batch(step, size=4 if step % 5 < 4 else 2))

    run = same_as_eager(train=train)
    assert (run.step.num_graphs, run.graphs.num_recordings) == (2, 2)


def test_batches_that_lie_otherwise_in_memory_have_a_graph_of_their_own():
    def seen(captured):
        run = Run(False)
        step = (
            run.booster._captured(lambda x: x * 2, (torch.ones(2, 3),), run.graphs, 8) if captured else lambda x: x * 2
        )
        given = [torch.randn(2, 3) if number % 3 else torch.randn(3, 2).t() for number in range(12)]
        return [(step(x).stride(), run.graphs.num_recordings) for x in given]

    assert [strides for strides, _ in seen(True)] == [strides for strides, _ in seen(False)]
    assert seen(True)[-1][1] == 2


def test_more_kinds_than_max_graphs_run_without_a_graph_and_one_warning(caplog):
    def train(run, step):
        return run.step(*batch(step, size=2 + step % 4))

    run = same_as_eager(train=train, max_graphs=2)
    assert run.step.num_graphs == 2
    assert sum("max_graphs=" in record.message for record in caplog.records) == 1


def test_numbers_in_the_batch_are_of_the_kind():
    def step_of(run):
        return lambda x, y, factor, weight: run.whole_step(x, y, factor * weight)

    def train(run, step):
        return run.step(*batch(step), (1.0, 0.5)[step % 2])

    same_as_eager(train=train, function=step_of, example=(*batch(0), 1.0))


def test_evaluation_and_training_have_graphs_of_their_own():
    def train(run, step):
        run.model.train(step % 4 != 3)
        return run.step(*batch(step))

    run = same_as_eager(train=train)
    assert run.step.num_graphs == 2


def test_a_layer_that_is_frozen_on_the_way_stays():
    def train(run, step):
        if step in (10, 20):
            for param in run.booster._boosted.wrappers()[0].module[0].parameters():
                param.requires_grad_(step == 20)
        return run.step(*batch(step))

    same_as_eager(train=train)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive split"])
def test_every_micro_batch_of_a_group_replays_a_graph_of_its_own(precision):
    def train(run, step):
        count = 2 if step % 5 == 4 else 3
        with run.booster.accumulate(run.model, run.optimizer, count):
            losses = [run.step(*batch(10 * step + micro)) for micro in range(count)]
        run.optimizer.clip_grad_by_norm(0.5)
        run.optimizer.step()
        run.schedule.step()
        run.optimizer.zero_grad()
        return torch.stack([loss.detach() for loss in losses])

    run = same_as_eager(precision, train=train, steps=12, function="micro_step")
    assert run.step.num_graphs == 5  # three of a whole group, two of a short one
    with pytest.raises(RuntimeError, match="left after 1 of num_micro_batches=2"):
        with run.booster.accumulate(run.model, run.optimizer, 2):
            run.step(*batch(0))


def test_a_whole_group_can_be_one_graph():
    def step_of(run):
        def step(batches):
            with run.booster.accumulate(run.model, run.optimizer, len(batches)):
                losses = [run.micro_step(*each) for each in batches]
            result = run.optimizer.step()
            run.schedule.step()
            run.optimizer.zero_grad()
            return {"loss": torch.stack(losses).mean(), "result": result}

        return step

    def train(run, number):
        return run.step([batch(2 * number), batch(2 * number + 1)])

    same_as_eager(train=train, steps=12, function=step_of, example=([batch(0), batch(1)],))


def test_an_average_of_weights_is_followed_in_the_graph():
    averages = []

    def step_of(run):
        average = [param.detach().clone() for param in run.model.parameters()]
        averages.append(average)

        def step(x, y, factor):
            found = run.whole_step(x, y, factor)
            torch._foreach_lerp_(average, [param.detach() for param in run.model.parameters()], 0.1)
            return found

        return step

    assert same_as_eager(steps=12, function=step_of).graphs.num_replays == 11
    assert_same(*averages)


def test_micro_batches_inside_no_sync_are_replayed():
    def train(run, step):
        with run.booster.no_sync(run.model):
            first = run.step(*batch(10 * step))
        second = run.step(*batch(10 * step + 1))
        run.optimizer.step()
        run.schedule.step()
        run.optimizer.zero_grad()
        return torch.stack([first.detach(), second.detach()])

    run = same_as_eager(train=train, steps=8, function="micro_step")
    assert (run.step.num_graphs, run.graphs.num_replays) == (
        2,
        12,
    )  # the first step makes states, and a graph is of later ones


@pytest.mark.parametrize("where", ["before", "never", "outside"])
def test_gradients_may_be_cleared_elsewhere(where):
    left = []

    def step_of(run):
        left.append(list(run.model.parameters()))

        def step(x, y, factor):
            if where == "before":
                run.optimizer.zero_grad()
            loss = run.loss(x, y, factor)
            run.booster.backward(loss, run.optimizer)
            return {"loss": loss, "result": run.optimizer.step()}

        return step

    def train(run, number):
        returned = run.step(*batch(number))
        if where == "outside":
            run.optimizer.zero_grad(set_to_none=number % 2 == 0)
        return returned

    assert same_as_eager(train=train, steps=14, function=step_of).graphs.num_replays > 6
    assert_same(*([param.grad for param in params] for params in left))


def test_two_models_and_their_optimizers_step_in_one_graph():
    def train(captured):
        torch.manual_seed(0)
        booster, graphs = Booster("cpu", FP16TorchMixedPrecision(**SCALE)), RecordedGraphs()
        generator, discriminator = nn.Linear(4, 6), nn.Linear(6, 1)
        make = booster.boost(generator, Adam(generator.parameters(), lr=1e-2))[:2]
        judge = booster.boost(discriminator, SGD(discriminator.parameters(), lr=1e-2, momentum=0.9))[:2]

        def step(noise, real):
            fake = make[0](noise)
            loss_d = judge[0](fake.detach()).mean() - judge[0](real).mean()
            booster.backward(loss_d, judge[1])
            judge[1].clip_grad_by_norm(0.1)
            first = judge[1].step()
            judge[1].zero_grad()
            loss_g = -judge[0](make[0](noise)).mean()
            booster.backward(loss_g, make[1])
            second = make[1].step()
            make[1].zero_grad()
            judge[1].zero_grad()
            return loss_d, loss_g, first, second

        run = booster._captured(step, (torch.randn(5, 4), torch.randn(5, 6)), graphs, 8) if captured else step
        data, returned = torch.Generator().manual_seed(1), []
        for number in range(STEPS):
            noise = torch.randn(5, 4, generator=data) * (math.inf if number in OVERFLOWS else 1.0)
            returned.append(run(noise, torch.randn(5, 6, generator=data)))
        return {
            "losses": [[loss.detach() for loss in each[:2]] for each in returned],
            "results": [[fields(result) for result in each[2:]] for each in returned],
            "weights": [*make[0].parameters(), *judge[0].parameters()],
            "states": [make[1].state_dict(), judge[1].state_dict()],
        }

    found, expected = train(True), train(False)
    assert_same(found, expected)


def test_optimizers_that_share_a_backward_decide_together():
    def train(captured):
        torch.manual_seed(0)
        booster, graphs = Booster("cpu", FP16TorchMixedPrecision(**SCALE), max_consecutive_skips=None), RecordedGraphs()
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        model, both, criterion, *_ = booster.boost(
            net, [AdamW(net[0].parameters(), lr=1e-2), SGD(net[1].parameters(), lr=1e-2)], nn.CrossEntropyLoss()
        )

        def step(x, y, factor):
            loss = criterion(model(x), y) * factor
            booster.backward(loss, both)
            results = [optimizer.step() for optimizer in both]
            for optimizer in both:
                optimizer.zero_grad()
            return loss, results

        run = booster._captured(step, batch(0), graphs, 8) if captured else step
        returned = [run(*batch(number)) for number in range(STEPS)]
        return {
            "losses": [loss.detach() for loss, _ in returned],
            "results": [[fields(result) for result in results] for _, results in returned],
            "weights": list(model.parameters()),
            "states": [optimizer.state_dict() for optimizer in both],
        }

    assert_same(train(True), train(False))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of parts of itself, which its compiler imports
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_is_called_in_a_graph(backend):
    """Dropout that Inductor compiles draws a seed in each call, where it runs: in a replay too."""

    def train(captured):
        torch.manual_seed(0)
        booster, graphs = Booster("cpu", "bf16", clip_grad_norm=1.0), RecordedGraphs()
        net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 3))
        model, optimizer, criterion, *_ = booster.boost(net, AdamW(net.parameters(), lr=1e-2), nn.CrossEntropyLoss())
        compiled = torch.compile(model, backend=backend)

        def step(x, y, factor):
            loss = criterion(compiled(x), y)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = booster._captured(step, batch(0), graphs, 8) if captured else step
        losses = [run(*batch(number)).detach() for number in range(8)]
        assert graphs.num_replays == 7 * captured
        compiled_calls = counters["stats"]["unique_graphs"]
        return {"losses": losses, "weights": list(model.parameters()), "random": torch.get_rng_state()}, compiled_calls

    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    (expected, graphs), (found, others) = train(False), train(True)
    assert_same(found, expected)
    assert graphs == others > 0


# ---------------------------------------------------------------------- what changes between two calls


@pytest.mark.parametrize("optimizer", ["SGD momentum", "AdamW"])
def test_states_begin_as_they_do_in_eager_steps_where_the_first_are_skipped(optimizer):
    def train(run, step):
        x, y, _ = batch(step)
        return run.step(x, y, torch.tensor(math.inf if step < 3 else 1.0))

    run = same_as_eager("fp16", optimizer, train=train)
    assert run.graphs.num_recordings == 1


def test_a_parameter_that_joins_while_a_step_is_recorded_begins_with_no_state():
    def step_of(run):
        calls = []

        def step(x, y, factor):
            calls.append(1)
            loss = run.loss(x, y, factor) + (run.late.sum() if len(calls) > run.joins else 0)
            run.booster.backward(loss, run.optimizer)
            result = run.optimizer.step()
            run.optimizer.zero_grad()
            return {"loss": loss, "result": result}

        return step

    def train(captured):
        run = Run(False)
        run.late = nn.Parameter(torch.ones(3))
        run.optimizer.add_param_group({"params": [run.late]})
        run.joins = 1 + 2 * captured  # so many calls come before, those of the trial included
        step = step_of(run)
        step = run.booster._captured(step, batch(0), run.graphs, 8) if captured else step
        for number in range(9):
            step(*batch(number))
        return {"late": run.late, **run.everything()}

    assert_same(train(True), train(False))


@pytest.mark.parametrize("precision", ["fp16", "bf16_naive split", "fp16_naive"])
def test_a_checkpoint_that_is_saved_and_loaded_on_the_way_is_followed(precision, tmp_path):
    def train(run, step):
        given = (run.model, run.optimizer, None, None, run.schedule)
        if step == 8:
            run.booster.save(tmp_path / str(id(run)), *given)
        if step == 16:
            run.booster.load(tmp_path / str(id(run)), *given)
        return run.step(*batch(step))

    same_as_eager(precision, train=train)


def test_states_and_weights_that_are_loaded_or_dropped_are_followed():
    def train(run, step):
        if step == 6:
            run.kept = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        if step == 8:
            run.model.load_state_dict(run.kept[0])
            run.optimizer.load_state_dict(run.kept[1])
        if step == 18:
            run.optimizer.unwrap().state.clear()
        return run.step(*batch(step))

    same_as_eager(train=train)


@pytest.mark.parametrize("precision", ["bf16_naive 8bit", "bf16_naive bf16 states"])
def test_packed_states_that_are_loaded_are_followed(precision):
    """Of SGD, which has no other states, and without masters: nothing else is put elsewhere."""

    def train(run, step):
        if step == 6:
            run.kept = copy.deepcopy(run.optimizer.state_dict())
            del run.kept["booster"]
        if step == 8:
            run.optimizer.load_state_dict(run.kept)
        return run.step(*batch(step))

    run = same_as_eager(precision, "SGD momentum", train=train)
    assert run.graphs.num_recordings == 2


@pytest.mark.parametrize("precision", ["bf16_naive", "bf16_naive split", "bf16_naive 8bit", "fp16_naive"])
def test_wide_weights_that_are_loaded_into_half_ones_become_masters_before_the_next_replay(precision):
    def train(run, step):
        if step in (9, 12):
            noise = torch.Generator().manual_seed(step)
            given = {
                name: value.float() + 0.1 * torch.randn(value.shape, generator=noise)
                for name, value in run.model.state_dict().items()
                if value.is_floating_point()
            }
            run.model.load_state_dict(given, strict=False)
        return (run.whole_step if step == 15 else run.step)(*batch(step))

    run = same_as_eager(precision, train=train)
    assert run.graphs.num_recordings == 1


def test_casts_of_weights_in_an_autocast_around_the_loop_are_of_the_weights_of_now():
    def train(run, step):
        weight = next(run.model.parameters())
        seen = nn.functional.linear(batch(step)[0], weight)  # which has the cast kept
        return {**run.step(*batch(step)), "loss": seen.float().sum()}

    with torch.autocast("cpu", torch.bfloat16):
        expected = trained(False, "fp32", train=train)[1]
        run, found = trained(True, "fp32", train=train)
    assert_same(found, expected)
    assert len(set(map(float, found["losses"]))) == STEPS


def test_a_weight_that_is_put_elsewhere_is_followed():
    def train(run, step):
        if step == 7:
            weight = next(run.model.parameters())
            weight.data = weight.data.clone()
        return run.step(*batch(step))

    same_as_eager("fp32", train=train)


def test_a_new_group_of_parameters_is_followed():
    def train(run, step):
        if step == 9:
            extra = nn.Parameter(torch.ones(3))
            run.extra = extra
            run.optimizer.add_param_group({"params": [extra], "lr": 0.1})
            run.schedule.base_lrs.append(0.1)
        x, y, factor = batch(step)
        return run.step(x, y, factor)

    same_as_eager(train=train)


@pytest.mark.parametrize("option", ["weight_decay", "betas", "eps", "amsgrad"])
def test_options_that_graphs_hold_as_numbers_have_them_made_anew(option):
    values = {"weight_decay": 0.3, "betas": (0.5, 0.9), "eps": 1e-3, "amsgrad": False}

    def train(run, step):
        if step == 10:
            run.optimizer.param_groups[0][option] = values[option]
        return run.step(*batch(step))

    run = same_as_eager(train=train)
    assert run.graphs.num_recordings == (1 if option == "amsgrad" else 2)


def test_another_precision_that_is_switched_to_is_followed_or_refused():
    def train(run, step):
        if step == 6:
            run.booster.switch("bf16_naive")
        if step == 11:
            run.booster.switch(FP16TorchMixedPrecision(**SCALE))
        return run.step(*batch(step))

    run = same_as_eager("bf16", train=train)
    assert run.graphs.num_recordings == 3
    run.booster.switch(BF16NaiveMixedPrecision(log_num_zeros_in_grad=True))
    with pytest.raises(RuntimeError, match="the host decides on its steps"):
        run.step(*batch(0))


def test_a_schedule_of_precisions_goes_over_between_replays(monkeypatch):
    phases = {0: FP16TorchMixedPrecision(**SCALE), 6: "bf16_naive", 11: "bf16"}
    monkeypatch.setitem(PRECISIONS, "scheduled", lambda: PrecisionSchedule(phases))
    scheduled = functools.partial(trained, precision="scheduled")
    run, found = scheduled(True)
    assert_same(found, scheduled(False)[1])
    assert run.graphs.num_recordings == 3
    assert repr(run.booster.precision) == repr(Booster("cpu", "bf16").precision)


def test_a_schedule_of_momentum_runs_without_a_graph_to_the_same_bits_and_says_so(caplog, monkeypatch):
    monkeypatch.setitem(
        SCHEDULES, "momentum", lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1)
    )
    same_as_eager(schedule="momentum")
    (said,) = [record.message for record in caplog.records if "run without a graph" in record.message]
    assert "betas" in said


def test_a_rate_that_is_written_between_steps_is_read():
    def train(run, step):
        if step == 8:
            run.optimizer.param_groups[0]["lr"] = 0.5
            run.schedule.base_lrs[0] = 0.5
        return run.step(*batch(step))

    run = same_as_eager(train=train)
    assert run.graphs.num_recordings == 1


def test_a_record_goes_on_and_graphs_come_back_when_it_is_closed(tmp_path):
    def train(run, step):
        if step == 4:
            run.record = run.booster.record(tmp_path / str(id(run)), every=2)
        if step == 9:
            run.record.close()
            assert run.record.latest["step" if "step" in run.record.latest else "loss"] > 0
        return run.step(*batch(step))

    run = same_as_eager(train=train)
    assert run.graphs.num_replays == 3 + STEPS - 9


def test_a_step_can_be_diagnosed_between_replays():
    run = Run(True)
    for step in range(5):
        run.step(*batch(step))
    before = run.everything()
    x, y, factor = batch(4)
    found = run.booster.diagnose(lambda: run.loss(x, y, factor), run.optimizer)
    assert "inf" in str(found) or "nan" in str(found).lower()
    assert_same(run.everything(), before)


# ---------------------------------------------------------------------- refused


def test_where_there_is_no_gpu_steps_run_as_they_are_and_one_warning_says_so(caplog):
    expected = trained(False, steps=6)[1]

    def train(run, step):
        if step == 0:
            run.step = run.booster.capture(run.step, *batch(0))
        return run.step(*batch(step))

    assert_same(trained(False, train=train, steps=6)[1], expected)
    assert [record.levelname for record in caplog.records if "capture()" in record.message] == ["WARNING"]


def test_a_step_that_a_host_reads_in_is_refused_by_line():
    run = Run(False)

    def step(x, y, factor):
        loss = run.whole_step(x, y, factor)["loss"]
        return loss.item()

    line = step.__code__.co_firstlineno + 2
    with pytest.raises(RuntimeError, match=rf"capturable\(\) lists:\n  tests/unit/test_capture.py:{line}: \.item\(\)"):
        run.booster._captured(step, batch(0), run.graphs, 8)


def test_a_schedule_that_writes_numbers_in_the_step_is_refused_by_line():
    run = Run(False)
    own = lr_scheduler.LambdaLR(run.optimizer.unwrap(), lambda step: 0.5**step)

    def step(x, y, factor):
        run.whole_step(x, y, factor)
        own.step()

    line = step.__code__.co_firstlineno + 2
    with pytest.raises(RuntimeError, match=rf"test_capture.py:{line}: 'lr' of group 0"):
        run.booster._captured(step, batch(0), run.graphs, 8)


def test_a_rate_that_is_written_in_later_steps_alone_is_refused_when_it_comes():
    run = Run(False)
    writes = []

    def step(x, y, factor):
        if writes:
            run.optimizer.param_groups[0]["lr"] = 0.5
        return run.whole_step(x, y, factor)

    captured = run.booster._captured(step, batch(0), run.graphs, 8)
    writes.append(1)
    with pytest.raises(RuntimeError, match="writes a learning rate itself"):
        captured(*batch(0))


@pytest.mark.parametrize("returned", [1.0, True, object()])
def test_what_a_graph_would_return_unchanged_is_refused(returned):
    run = Run(False)
    captured = run.booster._captured(lambda *given: returned, batch(0), run.graphs, 8)
    with pytest.raises(TypeError, match=r"tests/unit/test_capture.py:\d+\) returned"):
        captured(*batch(0))


def test_an_object_in_the_batch_is_refused():
    with pytest.raises(TypeError, match="a captured step was given .*; it takes tensors"):
        Run(True).step(object(), *batch(0)[1:])


@pytest.mark.crossed
@pytest.mark.parametrize("how", ["raises", "returns a number"])
@pytest.mark.parametrize("precision", ["fp16", "bf16_naive 8bit"])
def test_a_recording_that_raises_is_no_step(precision, how):
    def train(captured):
        run, calls = Run(False, precision), []

        def step(x, y, factor):
            calls.append(1)
            found = run.whole_step(x, y, factor)
            if len(calls) == 4 and captured:  # two of the trial, and one before
                if how == "raises":
                    raise ValueError("mine")
                return 1.0
            return found

        call = run.booster._captured(step, batch(0), run.graphs, 8) if captured else step
        losses = [call(*batch(0))["loss"].detach()]
        if captured:
            before = run.everything()
            with pytest.raises((ValueError, TypeError), match=r"mine|returned float 1\.0"):
                call(*batch(1))
            assert_same(run.everything(), before)
            assert run.optimizer._history.waiting == []
        losses += [call(*batch(number))["loss"].detach() for number in range(1, 12)]
        assert not captured or run.graphs.num_replays == 11
        return {"losses": losses, **run.everything()}

    assert_same(train(True), train(False))


def test_an_optimizer_that_steps_twice_is_refused():
    run = Run(False, "fp32", clip=0.0)

    def step(x, y, factor):
        for _ in range(2):
            run.booster.backward(run.loss(x, y, factor), run.optimizer)
            run.optimizer.step()
            run.optimizer.zero_grad()

    captured = run.booster._captured(step, batch(0), run.graphs, 8)
    captured(*batch(0))
    with pytest.raises(RuntimeError, match="steps AdamW 2 times"):
        captured(*batch(1))


class Following(BF16MixedPrecision):
    def after_step(self, applied):
        """As one that keeps an average of the weights."""


def test_a_step_in_a_file_that_is_no_python_alone_is_named_by_its_own_line(tmp_path):
    cell = tmp_path / "cell.py"
    cell.write_text("%magic of a notebook\n")
    assert trial._statements(str(cell)) == []


REFUSED = {
    "RMSprop": ({}, lambda params: RMSprop(params, lr=1e-2), "it has no fused kernel, so the host decides"),
    "foreach": ({}, lambda params: AdamW(params, lr=1e-2, foreach=True), "it has no fused kernel, so the host decides"),
    "release": ({"release_gradients": "exact"}, None, "release_gradients='exact' steps within backward"),
    "offload": (
        {"mixed_precision": "bf16_naive", "offload_states": True},
        None,
        "its states lie in the host's memory; leave offload_states False",
    ),
    "apex": ({"mixed_precision": "fp16_apex"}, None, "the host decides on its steps"),
    "after_step": ({"mixed_precision": Following()}, None, "its precision follows each step on the host"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_follows_is_refused_by_name(name):
    options, make, reason = REFUSED[name]
    torch.manual_seed(0)
    booster = Booster("cpu", **{"mixed_precision": "bf16", **options})
    net = nn.Linear(6, 3)
    boosted = booster.boost(net, (make or OPTIMIZERS["AdamW"])(net.parameters()))  # which a Booster does not hold
    assert boosted
    with pytest.raises(RuntimeError, match=rf"capture\(\) makes no graph of steps of this \w+: .*{reason}"):
        booster._captured(lambda x: x, (torch.zeros(1),), RecordedGraphs(), 8)


def test_a_loss_scale_with_a_rule_on_the_host_is_refused_by_name():
    class Own(DynamicScale):
        def update(self, found_inf):
            super().update(found_inf)

    booster = Booster("cpu", FP16TorchMixedPrecision(scale=Own()))
    net = nn.Linear(6, 3)
    kept = booster.boost(net, OPTIMIZERS["AdamW"](net.parameters()))
    with pytest.raises(RuntimeError, match="the rule of its loss scale, Own, runs on the host"):
        booster._captured(lambda x: x, (torch.zeros(1),), RecordedGraphs(), 8)
    del kept


def test_several_ranks_are_refused_by_name():
    with pytest.raises(RuntimeError, match="TorchDDPPlugin has several ranks: what sends their gradients keeps nodes"):
        check([], plugin="TorchDDPPlugin", several_ranks=True)
