"""Weights that arrive after `step`: LowLevelZeroPlugin(overlap_allgather=True) never shows them as they were before."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugin import LowLevelZeroPlugin
from booster.shards.zero_buckets import FlatParameters

DIM, CLASSES, BATCH = 16, 5, 8
PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2.0**10, growth_interval=3),
    "bf16": lambda: "bf16",
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10, hysteresis=1),
    "bf16_naive": lambda: "bf16_naive",
}
WAYS = {
    "stage 1": {},
    "stage 1, reduce_scatter": {"reduce_scatter": True},
    "stage 2": {"stage": 2},
}
OVERFLOW = 3  # of the steps, of one rank alone


class Net(nn.Module):
    """Weights that a module's forward reads, that another's does, in a list, and by a view of them made elsewhere."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.parts = nn.ParameterList(torch.randn(DIM, DIM // 2) * 0.2 for _ in range(2))
        self.lstm = nn.LSTM(DIM, DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = torch.tanh(F.linear(x, self.second.weight.t()) + self.first(x))
        x = x @ torch.cat(list(self.parts), dim=1)
        x = self.lstm(x)[0] + self.second(x)
        return self.head(x)


@contextmanager
def late():
    """All-gathers begin when somebody waits for them, so that who does not wait reads what was before."""
    gather = FlatParameters.gather

    class Late:
        def __init__(self, *args):
            self._args = args

        def wait(self):
            for work in gather(*self._args):
                work.wait()

    FlatParameters.gather = lambda bucket, group: [Late(bucket, group)]
    try:
        yield
    finally:
        FlatParameters.gather = gather


class Job:
    def __init__(self, precision, seed=0, **options):
        torch.manual_seed(seed)
        self.net = Net()
        self.booster = Booster("cpu", PRECISIONS[precision](), LowLevelZeroPlugin(bucket_cap_mb=1e-3, **options))
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.model, self.optimizer, *_ = self.booster.boost(self.net, optimizer)
        self.kept = dict(self.net.named_parameters())
        self.losses = []

    def step(self, number, rank):
        generator = torch.Generator().manual_seed(10 * number + rank)
        x = torch.randn(BATCH, DIM, generator=generator)
        loss = F.cross_entropy(self.model(x), x[:, :CLASSES].argmax(1))
        self.losses.append(loss.detach())
        if number == OVERFLOW and rank == 1:
            loss = loss * float("nan")
        self.booster.backward(loss, self.optimizer)
        self.optimizer.clip_grad_by_norm(0.5)
        applied = bool(self.optimizer.step())
        self.optimizer.zero_grad()
        return applied

    def layout(self):
        return self.model.module.layout

    def weights(self):
        """As a kept reference shows them."""
        return {name: param.detach().clone() for name, param in self.kept.items()}


def evaluated(job):
    with torch.no_grad():
        return job.model.eval()(torch.zeros(BATCH, DIM))


READERS = {
    "the next forward": lambda job: evaluated(job),
    "parameters": lambda job: list(job.model.parameters()),
    "state_dict": lambda job: job.model.state_dict(),
    "a submodule": lambda job: job.model.head,
    "unwrap": lambda job: job.booster.unwrap(job.model),
    "a copy of the model": lambda job: copy.deepcopy(job.model),
    "the own module's forward": lambda job: job.net(torch.zeros(1, DIM, dtype=job.net.head.weight.dtype)),
    "the own module's state_dict": lambda job: job.net.state_dict(),
    "the optimizer's state_dict": lambda job: job.optimizer.state_dict(),
    "a copy of the optimizer": lambda job: copy.deepcopy(job.optimizer.state_dict()),
    "unscale_grads": lambda job: job.optimizer.unscale_grads(),
    "wait_for_weights": lambda job: job.optimizer.wait_for_weights(),
}


def exact(rank, world_size, precision, way):
    plain = Job(precision, **WAYS[way])
    with late():
        job = Job(precision, overlap_allgather=True, **WAYS[way])
        for number in range(6):
            applied = plain.step(number, rank)
            assert job.step(number, rank) == applied == (number != OVERFLOW)
            assert bool(job.layout().pending_all_gathers) == applied, "weights are still on their way after a step"
        assert all(map(torch.equal, job.losses, plain.losses))
        job.optimizer.wait_for_weights()
        mine, expected = job.weights(), plain.weights()
        assert [name for name in expected if not torch.equal(mine[name], expected[name])] == []
        states = [each.optimizer.state_dict()["state"] for each in (job, plain)]
        for index, state in states[1].items():
            assert all(torch.equal(value, states[0][index][key]) for key, value in state.items()), index


def cases(quick):
    return list(_cases(quick))


def _cases(quick):
    for precision in PRECISIONS:
        for way in WAYS:
            marks = [] if (precision, way) in quick else [pytest.mark.slow]
            yield pytest.param(precision, way, marks=marks, id=f"{precision}-{way}")


@pytest.mark.parametrize(
    ("precision", "way"), cases({("fp32", "stage 2"), ("bf16_naive", "stage 1"), ("fp16", "stage 1, reduce_scatter")})
)
def test_training_is_to_the_bit_what_it_is_without_overlap(ranks2, precision, way):
    ranks2(exact, precision, way)


@pytest.mark.parametrize(("precision", "way"), cases({("fp16_naive", "stage 2")}))
def test_it_is_on_four_ranks_too(ranks4, precision, way):
    ranks4(exact, precision, way)


def readers(rank, world_size, way):
    plain = Job("bf16_naive", **WAYS[way])
    with late():
        job = Job("bf16_naive", overlap_allgather=True, **WAYS[way])
        for number, (name, read) in enumerate(READERS.items()):
            for each in (plain, job):
                each.step(10 + number, rank)
            expected = plain.weights()
            assert any(not torch.equal(w, expected[n]) for n, w in job.weights().items()), (
                "this test sees who does not wait"
            )
            read(job)
            assert [n for n, w in job.weights().items() if not torch.equal(w, expected[n])] == [], name
            for each in (plain, job):
                each.model.train()


@pytest.mark.parametrize("way", ["stage 1, reduce_scatter", "stage 2"])
def test_whoever_reads_weights_by_way_of_booster_waits_for_them(ranks2, way):
    ranks2(readers, way)


def first_use(rank, world_size):
    job = Job("fp32", overlap_allgather=True, stage=2)
    seen = []
    with late():
        job.step(0, rank)
        pending_all_gathers = job.layout().pending_all_gathers
        hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: seen.append((name, len(pending_all_gathers._works))))
            for name, module in (("first", job.net.first), ("lstm", job.net.lstm))
        ]
        job.model(torch.zeros(BATCH, DIM))
    for hook in hooks:
        hook.remove()
    left = dict(seen)
    assert left["first"] > left["lstm"] > 0, left
    assert not pending_all_gathers


def test_forward_waits_for_a_weight_when_it_is_first_used(ranks2):
    ranks2(first_use)


def gathered(rank, world_size):
    """Starts and waits of all-gathers in a step without overlap, in order; and the number of buckets."""
    job, seen, gather = Job("fp32", stage=2), [], FlatParameters.gather

    class Noted:
        def __init__(self, work):
            self._work = work

        def wait(self):
            seen.append("wait")
            self._work.wait()

    def noted(bucket, group):
        seen.append("start")
        return [Noted(work) for work in gather(bucket, group)]

    FlatParameters.gather = noted
    try:
        job.step(0, rank)
    finally:
        FlatParameters.gather = gather
    return seen, len(job.layout().buckets)


def test_a_step_without_overlap_starts_every_all_gather_before_it_waits(ranks2):
    for seen, number in ranks2(gathered):
        assert number > 2
        assert seen == ["start"] * number + ["wait"] * number
