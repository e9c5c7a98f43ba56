"""What differs between ranks is each rank's own in a checkpoint: running statistics and `extra`. Drift is logged."""

import gc
import json
import logging
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from comparing import whole
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PLACEMENTS = {
    "one": lambda: None,
    "ddp": lambda: TorchDDPPlugin(),
    "ddp without broadcasts": lambda: TorchDDPPlugin(broadcast_buffers=False),
    "zero1": lambda: LowLevelZeroPlugin(stage=1),
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "fsdp": lambda: TorchFSDPPlugin(),
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1),
}


class Stream:
    """A stream of one rank's own."""

    def __init__(self, shard, position):
        self.shard, self.position = shard, position

    def state_dict(self):
        return {"shard": self.shard, "position": self.position}

    def load_state_dict(self, state):
        self.shard, self.position = state["shard"], state["position"]


def start(placement, precision="fp32"):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(8, 3))
    booster = Booster("cpu", precision, PLACEMENTS[placement]())
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


def train(parts, rank, world_size, steps):
    booster, model, optimizer = parts
    for step in steps:
        data = torch.randn(8, 8, generator=torch.Generator().manual_seed(world_size * step + rank))
        booster.backward((model(data).float() - 1).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def state(parts):
    module = parts[0].unwrap(parts[1])
    return {n: whole(t).detach().clone() for n, t in (*module.named_parameters(), *module.named_buffers())}


def resumed(rank, world_size, placement, precision, folder):
    """What differs between this rank before the save and after the load, and after three steps more."""
    first, second = start(placement, precision), start(placement, precision)
    train(first, rank, world_size, range(10))
    if world_size > 2:
        # After its first backward pass DistributedDataParallel lays its buckets out anew, and gloo sums the gradients of more
        # than two ranks in another order then: so the load comes after one, too.
        train(second, rank, world_size, range(1))
    extra = {"stream": Stream(rank, 10 * rank), "seen": torch.full((2 + rank,), float(rank)), "best": 0.5}
    torch.manual_seed(7 + rank)
    random.seed(rank)
    first[0].save(folder, *first[1:], step=1, extra=extra)
    before, draws = state(first), (torch.rand(3).tolist(), random.random())
    stream = Stream(None, None)
    run = second[0].load(folder, *second[1:], extra={"stream": stream})
    own_draws = (torch.rand(3).tolist(), random.random()) == draws
    wrong = [] if own_draws else ["random states"]
    wrong += [name for name, value in state(second).items() if not torch.equal(value, before[name])]
    if stream.state_dict() != {"shard": rank, "position": 10 * rank}:
        wrong.append(f"stream {stream.state_dict()}")
    if not torch.equal(run.extra["seen"], extra["seen"]) or run.extra["best"] != 0.5:
        wrong.append(f"extra {run.extra}")
    train(first, rank, world_size, range(10, 13))
    train(second, rank, world_size, range(10, 13))
    after = state(first)
    return wrong + [f"later {name}" for name, value in state(second).items() if not torch.equal(value, after[name])]


@pytest.mark.slow_cases("hybrid", "zero1")
@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("placement", list(PLACEMENTS)[1:])
def test_every_rank_gets_its_own_buffers_and_extra_back(run_on_ranks, tmp_path, placement, precision):
    assert run_on_ranks(resumed, 2, placement, precision, str(tmp_path)) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("placement", list(PLACEMENTS)[1:])
def test_each_of_four_ranks_gets_its_own_buffers_and_extra_back(run_on_ranks, tmp_path, placement):
    assert run_on_ranks(resumed, 4, placement, "fp32", str(tmp_path)) == [[]] * 4


def averaged(rank, world_size, placement, folder):
    """Whether an average of the weights, of which ranks may hold parts, comes back, placed as the one given to the load."""
    first, second = start(placement), start(placement)
    train(first, rank, world_size, range(2))
    average = {name: param.detach().clone() for name, param in first[1].named_parameters()}
    first[0].save(folder, *first[1:], extra={"ema": average})
    like = {name: torch.zeros_like(param) for name, param in second[1].named_parameters()}
    run = second[0].load(folder, *second[1:], extra={"ema": like})
    placed = all(type(run.extra["ema"][name]) is type(value.detach()) for name, value in like.items())
    second[0].load(folder, *second[1:])  # nothing is given: whole tensors
    alone = second[0].load(folder, *second[1:]).extra["ema"]
    return placed, all(
        torch.equal(whole(run.extra["ema"][name]), whole(value)) and torch.equal(alone[name], whole(value))
        for name, value in average.items()
    )


@pytest.mark.parametrize("placement", ["ddp", "fsdp"])
def test_an_average_in_extra_is_saved_as_weights_are(run_on_ranks, tmp_path, placement):
    assert run_on_ranks(averaged, 2, placement, str(tmp_path)) == [(True, True)] * 2


def rounded_by_chance(rank, world_size, folder):
    """The weights that differ after a resume where ranks hold parts of different sizes, one of them none, and draw as much."""
    wrong = []
    for placement in ("zero1", "fsdp"):
        runs = []
        for _ in range(2):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1))
            chance = BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic")
            booster = Booster("cpu", chance, PLACEMENTS[placement]())
            runs.append((booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]))
        first, second = runs
        train(first, rank, world_size, range(3))
        first[0].save(f"{folder}/{placement}", *first[1:])
        second[0].load(f"{folder}/{placement}", *second[1:])
        for run in runs:
            train(run, rank, world_size, range(3, 6))
        after = state(second)
        wrong += [f"{placement} {name}" for name, value in state(first).items() if not torch.equal(value, after[name])]
    return wrong


def test_ranks_of_unequal_parts_go_on_rounding_by_chance_to_the_bit(run_on_ranks, tmp_path):
    assert run_on_ranks(rounded_by_chance, 2, str(tmp_path)) == [[], []]


def drifted(rank, world_size, folder):
    """What the log says, and which replica's weights a checkpoint has after they were written apart."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("booster").addHandler(handler)
    parts = start("ddp")
    with torch.no_grad():
        for param in parts[1].parameters():
            param.add_(rank)
    parts[0].save(folder, *parts[1:])
    again = start("ddp")
    again[0].load(folder, *again[1:])
    first = [whole(param).clone() for param in parts[1].parameters()]
    for param in first:
        dist.broadcast(param, 0)
    same = all(map(torch.equal, again[1].parameters(), first))
    return same, [text for text in said if "differ between ranks" in text]


def test_replicas_that_drifted_are_told_and_the_first_ranks_are_saved(run_on_ranks, tmp_path):
    (first, logged), (second, not_logged) = run_on_ranks(drifted, 2, str(tmp_path))
    assert (first, second, len(logged), not_logged) == (True, True, 1, [])


def given(rank, world_size, placement, precision, folder):
    """Which tensors differ from those of plain files in several parts, which this rank holds parts of."""
    from safetensors.torch import load_file

    booster, model, _ = parts = start(placement, precision)
    booster.load_model(model, folder)
    files = sorted(Path(folder).glob("*.safetensors"))
    wanted = {name: value for file in files for name, value in load_file(file).items()}
    found = state(parts)
    return len(files) == 2 and [n for n, value in wanted.items() if not torch.equal(found[n], value.to(found[n].dtype))]


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("placement", ["ddp", "zero2", "fsdp"])
def test_plain_files_are_read_into_what_each_rank_holds(run_on_ranks, tmp_path, placement, precision):
    from safetensors.torch import save_file

    source = {
        name: torch.randn(value.shape) if value.is_floating_point() else value + 3
        for name, value in state(start("one")).items()
    }
    files = {name: f"{index % 2}.safetensors" for index, name in enumerate(source)}
    for file in set(files.values()):
        save_file({name: source[name] for name in source if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert run_on_ranks(given, 2, placement, precision, str(tmp_path)) == [[], []]


def counts_of_boosters(rank, world_size, folder):
    """Threads and descriptors of this process after each of some boosters that saved while training went on."""
    counts = []
    for number in range(10):
        parts = start("ddp")
        parts[0].save(f"{folder}/{number}", *parts[1:], async_save=True)
        parts[0].wait_for_save()
        del parts
        gc.collect()
        counts.append([len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd")])
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what Linux lists of a process")
def test_boosters_that_saved_while_training_went_on_leave_no_threads_and_no_descriptors(run_on_ranks, tmp_path):
    for counts in run_on_ranks(counts_of_boosters, 2, str(tmp_path)):
        assert counts[-1] == counts[1], counts
