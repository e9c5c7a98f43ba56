"""Buffers of a half model are averaged among ranks before each forward in training, and never otherwise."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision, NaiveAMPModel
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin


class Counter(nn.Module):
    """A float buffer, an integer buffer and a pinned BatchNorm; forward leaves all but BatchNorm's alone."""

    def __init__(self, rank):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("level", torch.full((3,), float(10 * rank)))
        self.register_buffer("large", torch.tensor(60000.0))
        self.register_buffer("steps", torch.tensor(rank))
        self.seen = []
        with torch.no_grad():
            self.norm.running_mean.fill_(float(rank))

    def forward(self, x):
        self.seen.append((self.level.tolist(), float(self.norm.running_mean[0]), int(self.steps), float(self.large)))
        return self.norm(x) + self.level.sum()


def forward_once(rank, world_size, training, options):
    model = NaiveAMPModel(Counter(rank), **options)
    model.train(training)
    with torch.no_grad():
        model(torch.zeros(4, 2))
    return model.seen[0], model.level.dtype, model.norm.running_mean.dtype


def test_in_training_floating_buffers_are_the_mean_and_integers_stay(ranks2):
    results = ranks2(forward_once, True, {})
    assert [seen for seen, *_ in results] == [
        ([5.0, 5.0, 5.0], 0.5, 0, 60000.0),  # the sum of two would overflow a half
        ([5.0, 5.0, 5.0], 0.5, 1, 60000.0),
    ]
    assert [dtypes for _, *dtypes in results] == [[torch.float32, torch.float32]] * 2


def test_in_evaluation_no_buffer_is_touched(ranks2):
    results = ranks2(forward_once, False, {})
    assert [seen[:3] for seen, *_ in results] == [([0.0] * 3, 0.0, 0), ([10.0] * 3, 1.0, 1)]


def test_without_sync_buffer_no_buffer_is_touched(ranks2):
    results = ranks2(forward_once, True, {"sync_buffer": False})
    assert [seen[:3] for seen, *_ in results] == [([0.0] * 3, 0.0, 0), ([10.0] * 3, 1.0, 1)]


def evaluate_alone(rank, world_size):
    model = NaiveAMPModel(Counter(rank)).eval()
    if rank == 0:  # a collective would wait for rank 1, which never comes
        model(torch.zeros(4, 2))
        model(torch.zeros(4, 2))
    model.train()
    model(torch.zeros(4, 2))
    return len(model.seen), model.seen[-1][0]


def test_evaluation_on_one_rank_alone_does_not_hang(ranks2):
    assert ranks2(evaluate_alone) == [(3, [5.0] * 3), (1, [5.0] * 3)]


def average_in_pairs(rank, world_size):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = NaiveAMPModel(Counter(rank), parallel_group=pairs[rank // 2])
    clone = copy.deepcopy(model)
    model(torch.zeros(4, 2))
    clone(torch.zeros(4, 2))
    return model.seen[0][0][0], clone.seen[0][0][0]


def test_the_mean_is_over_the_parallel_group_and_a_copy_keeps_it(ranks4):
    assert ranks4(average_in_pairs) == [(5.0, 5.0), (5.0, 5.0), (25.0, 25.0), (25.0, 25.0)]


def average_over_a_group_of_others(rank, world_size):
    group = dist.new_group([0])
    model = NaiveAMPModel(Counter(rank), parallel_group=group)
    try:
        model(torch.zeros(4, 2))
    except RuntimeError as error:
        return str(error)
    return model.seen[0][0][0]


def test_a_rank_outside_the_group_says_so(ranks2):
    alone, outside = ranks2(average_over_a_group_of_others)
    assert alone == 0.0
    assert "not in the group" in outside


def boosted_buffers(rank, world_size, sync_buffer):
    booster = Booster(
        device="cpu", mixed_precision=FP16NaiveMixedPrecision(sync_buffer=sync_buffer), plugin=TorchDDPPlugin()
    )
    net = Counter(rank)
    model, *_ = booster.boost(net)
    with torch.no_grad():  # boost has made the ranks equal; let them drift
        net.level.fill_(10.0 * rank)
    model(torch.zeros(4, 2))
    with torch.no_grad():
        net.level.fill_(10.0 * rank)
    model.eval()(torch.zeros(4, 2))
    return net.seen[0][0][0], net.seen[1][0][0]


def test_the_strategy_averages_before_ddp_broadcasts(ranks2):
    assert [training for training, _ in ranks2(boosted_buffers, True)] == [5.0, 5.0]


def test_the_strategy_leaves_buffers_to_ddp_by_default(ranks2):
    assert [training for training, _ in ranks2(boosted_buffers, False)] == [0.0, 0.0]  # those of rank 0


# ---- float buffers that are read, and those of kept modules ----


class Angles(nn.Module):
    """No parameters: cosines of positions, in float32 whatever weights are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("omega", 10000 ** (-torch.arange(8) / 8.0), persistent=False)

    def forward(self, x):
        return torch.outer(torch.arange(4090, 4090 + x.shape[1], device=x.device), self.omega).cos()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("table", torch.linspace(-1, 1, 8))
        self.register_buffer("calls", torch.zeros(()))
        self.seen = None

    def forward(self, x, angles):
        self.calls += 2**-9
        y = self.down(self.up(self.norm(x) + angles + self.table).relu())
        self.seen = y.dtype
        return x + y


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.angles = Angles()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        x, angles = self.embed(x), self.angles(x)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(x)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
PLACES = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2),
    "fsdp": TorchFSDPPlugin,
    "fsdp, by block": lambda: TorchFSDPPlugin(wrap_policy=Block),
    "tp": lambda: HybridParallelPlugin(2, 1, tp_plan=PLAN),
    "pp": lambda: HybridParallelPlugin(1, 2),
}


def positions(rank, world_size, place, keep):
    torch.manual_seed(0)
    plugin = PLACES[place]() if world_size > 1 else None
    booster = Booster("cpu", FP16NaiveMixedPrecision(keep_fp32=keep, initial_scale=1.0), plugin)
    model = Positions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.MSELoss())
    losses = []
    x, y = torch.linspace(-1, 1, 2 * 4 * 8).view(2, 4, 8), torch.zeros(2, 4, 8)
    for _ in range(3):
        if place == "pp" and world_size > 1:
            loss = booster.execute_pipeline(iter([(x, y)]), wrapped, criterion, optimizer)["loss"]
        else:
            loss = criterion(wrapped(x), y)
            booster.backward(loss, optimizer)
        losses.append(float(booster.reduce(loss.detach())))
        assert optimizer.step().applied
        optimizer.zero_grad()
    own = booster.unwrap(wrapped)
    names = ("angles.omega", "blocks.0.table", "blocks.0.calls", "blocks.1.table")
    found = dict(own.named_buffers())
    seen = {block.seen for block in own.blocks if isinstance(block, Block)}
    return losses, {name: found[name].dtype for name in names if name in found}, seen


@pytest.mark.crossed
@pytest.mark.parametrize("keep", [(), ("angles", "embed", "blocks.*.norm", "head")], ids=["none kept", "kept"])
@pytest.mark.parametrize("place", PLACES)
def test_float_buffers_are_float32_and_activations_half_wherever_weights_lie(ranks2, place, keep):
    expected, _, seen = positions(0, 1, place, keep)
    assert seen == {torch.float16}
    for losses, dtypes, inside in ranks2(positions, place, keep):
        # A few roundings to half of numbers below 4, in another order of sums.
        assert losses == pytest.approx(expected, abs=4 * torch.finfo(torch.float16).eps)
        assert set(dtypes.values()) == {torch.float32}
        assert inside - {None} == {torch.float16}
