"""torchdata's StatefulDataLoader within a checkpoint: it goes on within an epoch, to the bit, on as many ranks."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from booster import Booster
from booster.checkpoint import CheckpointError
from booster.plugin import SingleDevice, TorchDDPPlugin

pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

SIZE, BATCH = 26, 3


class Noisy(Dataset):
    """Samples with random augmentation, in the training process; what a worker drew before is not replayed."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        noise = torch.rand(()).item() if get_worker_info() is None else 0.0
        return torch.tensor([float(index), noise])


class Stream(IterableDataset):
    """A stream of one rank's own, with its own position."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.position = rank, world_size, 0

    def __iter__(self):
        while self.position < SIZE:
            self.position += 1
            yield torch.tensor([float(self.position * 10 + self.rank), 0.0])
        self.position = 0

    def state_dict(self):
        return {"rank": self.rank, "position": self.position}

    def load_state_dict(self, state):
        assert state["rank"] == self.rank, "another rank's state"
        self.position = state["position"]


def made(dataset, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
        return StatefulDataLoader(dataset, BATCH, **options)


def boosted(rank, world_size, *, num_workers=0, streamed=False):
    torch.manual_seed(rank)
    booster = Booster("cpu", "fp32", TorchDDPPlugin() if world_size > 1 else SingleDevice())
    if streamed:
        loader = made(Stream(rank, world_size), num_workers=num_workers)
    elif world_size > 1:
        loader = made(Noisy(), num_workers=num_workers, sampler=DistributedSampler(Noisy(), world_size, rank))
    else:
        loader = made(Noisy(), num_workers=num_workers, shuffle=True)
    model = nn.Linear(2, 1)
    model, optimizer, _, loader, _ = booster.boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dataloader=loader
    )
    return booster, model, optimizer, loader


def interrupted(rank, world_size, cases, root):
    """For each case: what the unbroken run sees after the save, and what the resumed one sees; rest and next epoch."""
    seen = []
    for index, (options, before) in enumerate(cases):
        booster, model, optimizer, loader = boosted(rank, world_size, **options)
        list(loader)
        batches = iter(loader)
        for _ in range(before):
            next(batches)
        booster.save(f"{root}/{index}", model, optimizer, None, loader)
        rest = [batch.tolist() for batch in batches]
        whole = [batch.tolist() for batch in loader]
        booster, model, optimizer, loader = boosted(rank, world_size, **options)
        booster.load(f"{root}/{index}", model, optimizer, None, loader)
        seen.append(((rest, whole), tuple([batch.tolist() for batch in loader] for _ in range(2))))
    return seen


CASES = {
    "mid-epoch": ({}, 3),
    "mid-epoch, two workers": ({"num_workers": 2}, 3),
    "between epochs": ({}, 0),
    "a stream": ({"streamed": True}, 2),
}


@pytest.mark.parametrize(("world_size", "names"), [(1, list(CASES)), (2, ["mid-epoch", "a stream"])])
def test_the_resumed_loader_gives_what_the_unbroken_one_does(run_on_ranks, tmp_path, world_size, names):
    cases = [CASES[name] for name in names]
    if world_size == 1:
        ranks = [interrupted(0, 1, cases, str(tmp_path))]
    else:
        ranks = run_on_ranks(interrupted, 2, cases, str(tmp_path))
    for rank, results in enumerate(ranks):
        for name, (unbroken, resumed) in zip(names, results, strict=True):
            assert unbroken[0], "nothing was left to see"
            assert resumed == unbroken, f"{name}, rank {rank}"


@pytest.mark.crossed
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffled", ["by the sampler", "by the global one"])
def test_after_the_last_batch_an_epoch_is_over_once_its_iterator_is(tmp_path, shuffled, num_workers):
    def job():
        torch.manual_seed(3)
        data = torch.arange(6.0).unsqueeze(1)
        options = {
            "by the sampler": {"sampler": DistributedSampler(data, 1, 0, seed=5)},
            "by the global one": {"shuffle": True},
        }[shuffled]
        booster, model = Booster("cpu", "fp32"), nn.Linear(1, 1)
        loader = made(data, num_workers=num_workers, **options)
        return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), dataloader=loader)[:4]

    booster, model, optimizer, _, loader = job()
    for count, _ in enumerate(loader, start=1):
        if count == len(loader):
            booster.save(tmp_path, model, optimizer, None, loader)
    unbroken = [[batch.tolist() for batch in loader] for _ in range(2)]
    booster, model, optimizer, _, loader = job()
    booster.load(tmp_path, model, optimizer, None, loader)
    assert loader.epoch == 0
    assert [[batch.tolist() for batch in loader] for _ in range(3)] == [[], *unbroken]
    assert loader.epoch == 3


def save_on_two(rank, world_size, root):
    booster, model, optimizer, loader = boosted(rank, world_size)
    next(iter(loader))
    booster.save(root, model, optimizer, None, loader)


def test_another_number_of_ranks_is_refused_with_the_ways_out(ranks2, tmp_path):
    ranks2(save_on_two, str(tmp_path))
    booster, model, optimizer, loader = boosted(0, 1)
    with pytest.raises(
        CheckpointError, match="is that of 2 ranks, each its own, and this job has 1.*prepare_dataloader"
    ):
        booster.load(tmp_path, model, optimizer, None, loader)
    booster.load(tmp_path, model, optimizer)
