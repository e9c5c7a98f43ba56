"""Muon on sharded matrices steps as torch's Muon does on whole ones, to the bit, and sends each matrix twice in bfloat16."""

import logging
import math

import pytest
import torch
import torch.distributed as dist
from comparing import assert_same, difference, weights, whole
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from booster import Booster
from booster.common.torch_internals.tensor_internals import gather_full
from booster.masters.masters import _packed
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, SingleDevice, TorchFSDPPlugin
from booster.update import distributed_muon
from booster.update.distributed_muon import DistributedMuon, _owners

SHAPES = [(12, 8), (8, 12), (8, 8), (5, 20), (24, 8), (8, 24), (12, 8), (3, 4)]
PLACEMENTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "fused projection": [StridedShard(0, split_factor=3)],
    "both": [Shard(0), Shard(1)],
    "rows twice": [StridedShard(0, split_factor=2), Shard(0)],
    "copies": [Replicate(), Shard(0)],
    "copies of columns": [Shard(1), Replicate()],
}
OPTIONS = [
    {},
    {"nesterov": False, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "momentum": 0.5},
    {"lr": torch.tensor(0.02, dtype=torch.float32)},
]
ONE = [name for name, placements in PLACEMENTS.items() if len(placements) == 1]


def drawn(seed):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float32) for shape in SHAPES]


def optimizer_of(params, options):
    halves = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.005}]
    return torch.optim.Muon(halves, **{"lr": 0.02, **options})


def sharded_by(whole, mesh, placements):
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def compare_steps(placements, options, most=None):
    """Step sharded matrices and whole ones; the first group has one without a gradient, and one that is not sharded."""
    mesh = init_device_mesh("cpu", (2,) * len(placements))
    if most is not None:
        distributed_muon.MOST = most
    sharded = [nn.Parameter(sharded_by(w, mesh, placements)) for w in drawn(0)] + [nn.Parameter(torch.ones(4, 4))]
    alone = [nn.Parameter(w) for w in drawn(0)] + [nn.Parameter(torch.ones(4, 4))]
    ours, theirs = optimizer_of(sharded, options), optimizer_of(alone, options)
    step, sent = DistributedMuon(), []
    real = dist.all_to_all_single
    try:
        dist.all_to_all_single = lambda out, given, *sizes, **group: (
            sent.append(given.nbytes),
            real(out, given, *sizes, **group),
        )[1]
        for seed in range(1, 4):
            for param, one, grad in zip(sharded, alone, [*drawn(seed), torch.ones(4, 4)], strict=True):
                skipped = seed == 2 and param is sharded[2]
                one.grad = None if skipped else grad.clone()
                param.grad = (
                    None if skipped else grad.clone() if one is alone[-1] else sharded_by(grad, mesh, placements)
                )
            step(ours)
            theirs.step()
    finally:
        dist.all_to_all_single, distributed_muon.MOST = real, 2**24
    for param, one in zip(sharded[:-1], alone[:-1], strict=True):
        assert_same(gather_full(param.detach()), one.detach(), str(tuple(one.shape)))
        momentum = ours.state[param]["momentum_buffer"]
        assert momentum.placements == param.placements
        assert_same(gather_full(momentum), theirs.state[one]["momentum_buffer"])
    assert_same(whole(sharded[-1]), whole(alone[-1]))
    return sent


def stepped(rank, world_size, name, options):
    return compare_steps(PLACEMENTS[name], OPTIONS[options])


@pytest.mark.parametrize("options", range(len(OPTIONS)))
@pytest.mark.parametrize("name", ONE)
def test_steps_are_those_of_whole_matrices_to_the_bit(ranks2, name, options):
    ranks2(stepped, name, options)


@pytest.mark.parametrize("name", [name for name in PLACEMENTS if name not in ONE])
def test_steps_are_the_same_on_two_dimensions_of_a_mesh(ranks4, name):
    ranks4(stepped, name, 0)


def stepped_without_a_group(rank, world_size):
    """As where the ranks of one stage of a pipeline shard matrices; torch names a new group by how many a rank is in."""
    own = dist.new_group([0])
    real = distributed_muon._ranks
    distributed_muon._ranks = lambda param: (real(param)[0], None)
    try:
        return compare_steps(PLACEMENTS["both"], {}), compare_steps(PLACEMENTS["copies"], {}, most=100)
    finally:
        distributed_muon._ranks = real
        if rank == 0:
            dist.destroy_process_group(own)


def test_ranks_without_a_group_of_their_own_make_none_and_step_alike(ranks4):
    assert ranks4(stepped_without_a_group) == [([], [])] * 4


def stepped_in_rounds(rank, world_size):
    sent = compare_steps([Shard(0)], {}), compare_steps([Shard(0)], {}, most=100)
    return [(len(each), sum(each)) for each in sent]


def test_what_is_sent_is_two_bfloat16_numbers_an_element_in_rounds_of_bounded_size(ranks2):
    found = ranks2(stepped_in_rounds)
    elements = 3 * sum(map(math.prod, SHAPES)) - math.prod(SHAPES[2])  # one has no gradient in one step
    at_once, in_rounds = zip(*found, strict=True)
    for calls_and_bytes in (at_once, in_rounds):
        assert sum(each for _, each in calls_and_bytes) == 2 * 2 * elements
    assert {calls for calls, _ in at_once} == {2 * 3 * 2}  # two exchanges, three steps, two groups
    assert min(calls for calls, _ in in_rounds) > 2 * 3 * 2


def test_owners_have_like_amounts_of_work():
    assert _owners([(9, 1), (4, 1), (4, 1), (1, 1)], 2) == [0, 1, 1, 1]
    shapes = [(768, 768)] * 24 + [(3072, 768)] * 24 + [(768, 2304)] * 12
    loads = [0] * 8
    for (rows, columns), owner in zip(shapes, _owners(shapes, 8), strict=True):
        loads[owner] += rows * columns * min(rows, columns)
    assert max(loads) <= 1.05 * sum(loads) / 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 6)

    def forward(self, x):
        return self.second(self.first(x).relu())


def trained(plugin, precision, hooks=()):
    torch.manual_seed(0)
    net = Net()
    matrices, rest = [p for p in net.parameters() if p.dim() == 2], [p for p in net.parameters() if p.dim() == 1]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
    for hook in hooks:
        optimizers[0].register_step_post_hook(hook)
    booster = Booster("cpu", precision, plugin)
    model, optimizers, criterion, *_ = booster.boost(net, optimizers, nn.MSELoss())
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(64, 16, generator=draw), torch.randn(64, 6, generator=draw)
        booster.backward(criterion(model(x), y), optimizers)
        for optimizer in optimizers:
            optimizer.clip_grad_by_norm(1e-2)
            assert optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def boosted(rank, world_size, precision):
    """Also returns how often a step hook was called, and what was logged."""
    said, calls = [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("booster").addHandler(handler)
    found = trained(TorchFSDPPlugin(), precision, [lambda *_: calls.append(1)])
    return found, len(calls), [each for each in said if "was changed between" in each]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_fsdp_trains_muon_as_one_device_does_and_says_nothing_of_the_other_optimizer(ranks2, precision):
    alone = trained(SingleDevice(), precision)
    for found, calls, said in ranks2(boosted, precision):
        assert calls == 3
        assert not said
        for name, weight in alone.items():
            assert torch.allclose(found[name], weight, rtol=0, atol=1e-6), name


SHARDED = {
    "FSDP": TorchFSDPPlugin,
    "ZeRO": lambda: LowLevelZeroPlugin(stage=2),
    "TP": lambda: HybridParallelPlugin(2, 1, tp_plan={"layers.0": "colwise", "layers.1": "rowwise"}),
}
MOMENTUM = 0.95


class Uneven(nn.Module):
    """Matrices that two ranks cannot halve, and one of a single row, of which a rank has nothing under FSDP."""

    def __init__(self, widths=(16, 24, 7, 5, 9, 1)):
        super().__init__()
        ends = zip(widths, widths[1:], strict=False)
        self.layers = nn.ModuleList([nn.Linear(into, out, bias=False) for into, out in ends])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def kept_run(plugin, states, precision="fp32", **options):
    torch.manual_seed(0)
    net = Uneven(**options)
    booster = Booster("cpu", precision, plugin, states=states)
    return booster, *booster.boost(net, torch.optim.Muon(net.parameters(), lr=0.02, momentum=MOMENTUM), nn.MSELoss())[
        :3
    ]


def losses_of(parts, seeds):
    booster, model, optimizer, criterion = parts
    found = []
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        loss = criterion(model(torch.randn(64, 16, generator=draw)), torch.randn(64, 1, generator=draw))
        booster.backward(loss, optimizer)
        assert optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def resumed(rank, world_size, name, precision, folder):
    parts = kept_run(SHARDED[name](), "8bit", precision)
    first = losses_of(parts, range(4))
    parts[0].save(folder, *parts[1:3])
    rest = losses_of(parts, range(4, 7)), weights(parts[1])
    again = kept_run(SHARDED[name](), "8bit", precision)
    losses_of(again, [9])
    again[0].load(folder, *again[1:3])
    assert losses_of(again, range(4, 7)) == rest[0]
    assert difference(weights(again[1]), rest[1]) is None
    return first + rest[0], parts[0].memory(*parts[1:3]).states


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16_naive", marks=pytest.mark.slow)])
def test_momentum_of_8_bits_is_dealt_out_resumes_to_the_bit_and_moves(ranks2, tmp_path, name, precision):
    found = ranks2(resumed, name, precision, str(tmp_path))
    alone = losses_of(kept_run(SingleDevice(), "fp32", precision), range(7))
    for losses, _ in found:
        assert losses == pytest.approx(alone, rel=0.02)
    elements = sum(map(torch.Tensor.numel, Uneven().parameters()))
    # A group of 32 has a scale; each matrix begins at a multiple of 64, on each rank that has any of it.
    assert sum(states for _, states in found) <= (elements + 2 * 5 * 64) * (1 + 2 / 32)
    moved = kept_run(SingleDevice(), "8bit", precision)
    moved[0].load(str(tmp_path), *moved[1:3])
    assert losses_of(moved, range(4, 7)) == pytest.approx(alone[4:], rel=0.02)


class Matrices(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.held = nn.ParameterList([torch.ones(size) for size in sizes])

    def forward(self):
        return sum(param.sum() for param in self.held)


@pytest.mark.parametrize("sizes", [[(64, 96)], [(96, 64), (40, 24), (8, 200)]], ids=str)
def test_momentum_of_8_bits_is_as_near_to_that_of_float32_as_its_codes_are(sizes):
    found = {}
    for states in ("fp32", "8bit"):
        net = Matrices(sizes)
        booster = Booster("cpu", "fp32", SingleDevice(), states=states)
        model, optimizer, *_ = booster.boost(net, torch.optim.Muon(net.parameters(), lr=0.02, momentum=MOMENTUM))
        draw = torch.Generator().manual_seed(0)
        for _ in range(40):
            booster.backward(model(), optimizer)
            for param in model.parameters():
                param.grad.copy_(torch.randn(param.shape, generator=draw, dtype=torch.float32))
            optimizer.step()
            optimizer.zero_grad()
        found[states] = [optimizer.state[param]["momentum_buffer"].clone() for param in model.parameters()]
        held = booster.memory(model, optimizer).states
        assert held == sum(map(math.prod, sizes)) * (4 if states == "fp32" else 1 + 2 / 32)
    # A step between codes is 2 * sqrt(x * s) / 127 for a scale s, that is the largest of 32 normal numbers, 2.1 of their
    # deviations; rounding errs by the root of a sixth of its square, and mean |x| is 0.8 deviations. Of errors of earlier steps
    # the momentum keeps its share.
    of_one = math.sqrt(4 * 2.1 * 0.8 / 127**2 / 6)
    expected = of_one / math.sqrt(1 - MOMENTUM**2)
    for exact, kept in zip(found["fp32"], found["8bit"], strict=True):
        assert 0.5 * expected < float((kept - exact).norm() / exact.norm()) < 1.5 * expected


def packed(rank, world_size):
    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(sharded_by(torch.zeros(5, 20), mesh, [Shard(0)])) for _ in range(6)]
    return [len(pieces) for pieces in _packed(params, 120)]


def test_ranks_with_unequal_shards_put_the_same_matrices_into_a_bucket(ranks2):
    assert ranks2(packed) == [[2, 2, 2]] * 2


def one_row(rank, world_size):
    return losses_of(kept_run(TorchFSDPPlugin(), "8bit", widths=(16, 1)), range(4))


def test_a_rank_that_has_nothing_of_the_only_matrix_takes_part(ranks2):
    alone = losses_of(kept_run(SingleDevice(), "fp32", widths=(16, 1)), range(4))
    assert ranks2(one_row) == [pytest.approx(alone, rel=0.02)] * 2
