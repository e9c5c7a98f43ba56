"""Steps by kernels in a graph are those outside of one, to the bit: skips, loss scales, random rounding, schedules."""

import copy

import pytest
import torch
from interpreted import interpreted
from recorded_graph import RecordedGraphs
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop, lr_scheduler

from benchmarks.waits import as_on_a_gpu
from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision

pytestmark = interpreted
STEPS = 12
OVERFLOWS = (3, 4, 8)

PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2.0**12, growth_interval=2, hysteresis=2),
    "split": lambda: BF16NaiveMixedPrecision(master_weights="split"),
    "split24 8bit": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
    "bf16 states": lambda: BF16NaiveMixedPrecision(states="bf16"),
    "stochastic": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
    "kahan": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**12, growth_interval=2, hysteresis=1),
}
OPTIMIZERS = {
    "AdamW": lambda groups: AdamW(groups, lr=1e-2),
    "SGD": lambda groups: SGD(groups, lr=1e-2, momentum=0.9),
    "RMSprop": lambda groups: RMSprop(groups, lr=1e-3, momentum=0.9),
    "Adagrad": lambda groups: Adagrad(groups, lr=1e-2, lr_decay=0.1),
}


class Run:
    def __init__(self, captured, precision, optimizer, **options):
        torch.manual_seed(0)
        options = {"fused_optimizer": "triton", "max_consecutive_skips": None, "skip_nonfinite": True, **options}
        self.booster = Booster("cpu", PRECISIONS[precision](), **options)
        net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
        inner = OPTIMIZERS[optimizer]([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 1e-3}])
        schedule = lr_scheduler.ExponentialLR(inner, 0.8)
        self.model, self.optimizer, self.criterion, _, self.schedule = self.booster.boost(
            net, inner, nn.CrossEntropyLoss(), None, schedule
        )
        self.graphs = RecordedGraphs()
        self.run = self.booster._captured(self.step, batch(0), self.graphs, 8) if captured else self.step

    def step(self, x, y, factor):
        loss = self.criterion(self.model(x), y) * factor
        self.booster.backward(loss, self.optimizer)
        self.optimizer.clip_grad_by_norm(1.0)
        result = self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss, result


def batch(step):
    generator = torch.Generator().manual_seed(step)
    factor = torch.tensor(float("inf") if step in OVERFLOWS else 1.0)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator), factor


def trained(captured, precision, optimizer="AdamW", train=lambda run, step: run.run(*batch(step))):
    run = Run(captured, precision, optimizer)
    returned = [train(run, step) for step in range(STEPS)]
    assert run.optimizer._update.decision.steps.reason is None  # kernels made them all
    results = [
        (each.applied, each.loss_scale, each.grad_norm, each.skipped_reason, each.culprit) for _, each in returned
    ]
    assert [applied for applied, *_ in results] == [step not in OVERFLOWS for step in range(STEPS)]
    return run, {
        "losses": [loss.item() for loss, _ in returned],
        "results": results,
        **state_of(run),
        "rates": run.schedule.get_last_lr(),
        "counts": (run.optimizer.num_applied, run.optimizer.num_skipped, run.optimizer.loss_scale),
    }


def state_of(run):
    return {
        "model": list(map(bits, run.model.parameters())),
        "states": [
            (name, bits(value))
            for own in run.optimizer.optimizer.state.values()
            for name, value in own.items()
            if isinstance(value, torch.Tensor)
        ],
        "packed": [
            (name, *map(bits, value.tensors))
            for own in run.optimizer.optimizer.state.values()
            for name, value in own.items()
            if not isinstance(value, torch.Tensor)
        ],
        "masters": [bits(tensor) for tensor in run.optimizer._update.optimizer_state.master_tensors()],
    }


def bits(tensor):
    return tensor.detach().cpu().contiguous().view(torch.uint8).tolist() if tensor.dim() else float(tensor)


def assert_same(one, other):
    assert {key for key in one if repr(one[key]) != repr(other[key])} == set()  # NaN is NaN


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [(precision, "AdamW") for precision in PRECISIONS] + [("fp16", name) for name in OPTIMIZERS if name != "AdamW"],
)
def test_replayed_steps_are_eager_ones_to_the_bit(precision, optimizer):
    with as_on_a_gpu():
        expected = trained(False, precision, optimizer)[1]
        run, found = trained(True, precision, optimizer)
    assert_same(found, expected)
    assert (run.graphs.num_recordings, run.graphs.num_replays) == (1, STEPS - 1)


def test_what_is_loaded_on_the_way_and_steps_outside_of_the_graph_are_followed():
    def train(run, step):
        if step == 4:
            run.optimizer.load_state_dict(run.optimizer.state_dict())
        if step == 7:
            run.optimizer.param_groups[0]["weight_decay"] = 0.3
        return (run.step if step in (5, 9) else run.run)(*batch(step))

    with as_on_a_gpu():
        expected = trained(False, "split24 8bit", train=train)[1]
        run, found = trained(True, "split24 8bit", train=train)
    assert_same(found, expected)
    assert run.graphs.num_recordings >= 2


def test_a_graph_holds_what_its_kernels_read_whatever_is_stepped_outside_of_it():
    def outside(run, step):
        """Step by another clip and on one of the parameters, of which more sets are made by and by than are known at once."""
        x, y, _ = batch(step)
        loss = run.criterion(run.model(x), y)
        run.booster.backward(loss, run.optimizer)
        stepped = list(run.model.parameters())[step % 4]
        for param in run.model.parameters():
            param.grad = param.grad if param is stepped else None
        run.optimizer.clip_grad_by_norm(0.1 * step)
        result = run.optimizer.step()
        run.schedule.step()
        run.optimizer.zero_grad()
        return loss, result

    def train(run, step):
        return outside(run, step) if step in (5, 6, 7, 10) else run.run(*batch(step))

    with as_on_a_gpu():
        expected = trained(False, "fp16", train=train)[1]
        run, found = trained(True, "fp16", train=train)
    assert_same(found, expected)
    assert (run.graphs.num_recordings, run.graphs.num_replays) == (1, STEPS - 5)


def test_a_rate_in_a_tensor_is_read_where_it_is():
    with as_on_a_gpu():
        numbers, tensors = Run(False, "fp16", "AdamW"), Run(False, "fp16", "AdamW")
        for group in tensors.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        for step in range(5):
            for run in (numbers, tensors):
                run.step(*batch(step))
    assert all(map(torch.equal, numbers.model.parameters(), tensors.model.parameters()))
    assert all(isinstance(group["lr"], torch.Tensor) for group in tensors.optimizer.param_groups)


@pytest.mark.parametrize(
    ("precision", "optimizer"), [("fp16", "RMSprop"), ("split24 8bit", "AdamW"), ("bf16 states", "SGD")]
)
def test_a_trial_finds_nothing_that_waits_and_changes_nothing(precision, optimizer):
    with as_on_a_gpu():
        run = Run(False, precision, optimizer)
        run.step(*batch(0))
        run.optimizer.load_state_dict(run.optimizer.state_dict())  # states that no step has met yet
        before, scale = copy.deepcopy(state_of(run)), run.optimizer.loss_scale
        assert run.booster.capturable(run.step, *batch(1)) == []
        assert_same(state_of(run), before)
        assert run.optimizer.loss_scale == scale
