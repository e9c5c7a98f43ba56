"""Loaders in real ranks: what the workers of two ranks draw, and what a shuffled epoch holds."""

import logging
import random

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from booster import Booster
from booster.data import DataLoaderWrapper, check_sharded, prepare_dataloader
from booster.plugin import HybridParallelPlugin, TorchDDPPlugin


class Draws:
    """One random number of each library per sample, as an augmentation would take."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        import numpy

        return index, torch.rand((), dtype=torch.float64).item(), random.random(), float(numpy.random.rand())


def epochs_of_draws(rank, world_size, num_workers):
    # The ranks have drawn equally often so far, as they do in a training loop.
    loader = prepare_dataloader(Draws(), 1, rank=rank, world_size=world_size, shuffle=True, num_workers=num_workers)
    check_sharded(loader, world_size)
    boosted = DataLoaderWrapper(loader, "cpu")
    return [[tuple(float(value) for value in batch) for batch in boosted] for _ in range(2)]


def test_workers_differ_between_ranks_ids_epochs_and_libraries(ranks2):
    pytest.importorskip("numpy")
    results = ranks2(epochs_of_draws, 2)
    samples = [sample for epochs in results for epoch in epochs for sample in epoch]
    for library in range(1, 4):
        assert len({sample[library] for sample in samples}) == 16
    assert ranks2(epochs_of_draws, 2) == results


def test_epochs_differ_and_ranks_share_the_dataset(ranks2):
    results = ranks2(epochs_of_draws, 0)
    orders = [[[sample[0] for sample in epoch] for epoch in epochs] for epochs in results]
    for epoch in range(2):
        assert sorted(orders[0][epoch] + orders[1][epoch]) == list(range(8))
    assert orders[0][0] != orders[0][1]


# ---- samplers of several ranks, compared at boost


class ByItself(DistributedSampler):
    def __iter__(self):
        return iter(torch.randint(8, (4,), generator=torch.Generator().manual_seed(self.seed)).tolist())


class Cut(DistributedSampler):
    def __len__(self):
        return 2


class Stateful(DataLoader):
    """A loader with its own state, as torchdata's."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def of(sampler, **options):
    return DataLoader(range(8), sampler=sampler(range(8), **options))


def batched(**options):
    return DataLoader(range(8), batch_sampler=BatchSampler(DistributedSampler(range(8), **options), 2, False))


SEEDS, SAME, APART = "different orders", "have the same rank", "has another num_replicas"
LOADERS = {  # of this rank, and what is said of it
    "seed": (lambda rank: of(DistributedSampler, seed=rank), SEEDS),
    "seed of a subclass": (lambda rank: of(Cut, seed=rank), SEEDS),
    "seed of a batch sampler": (lambda rank: batched(seed=rank), SEEDS),
    "seed of a loader with a state": (
        lambda rank: Stateful(range(8), sampler=DistributedSampler(range(8), seed=rank)),
        SEEDS,
    ),
    "seed of prepare_dataloader": (
        lambda rank: DataLoaderWrapper(
            prepare_dataloader(range(8), 2, rank=rank, world_size=2, shuffle=True, seed=rank), "cpu"
        ),
        SEEDS,
    ),
    "shuffled on one rank": (lambda rank: of(DistributedSampler, shuffle=rank == 0), SEEDS),
    "rank": (lambda rank: of(DistributedSampler, num_replicas=2, rank=0), SAME),
    "rank of a sampler of one's own": (lambda rank: of(ByItself, num_replicas=2, rank=1), SAME),
    "another world": (lambda rank: of(DistributedSampler, num_replicas=4, rank=rank), APART),
    "another world, one rank": (lambda rank: of(DistributedSampler, num_replicas=2 + rank, rank=rank), APART),
    "right": (lambda rank: of(DistributedSampler, seed=3), ""),
    "ranks in another order": (lambda rank: of(DistributedSampler, num_replicas=2, rank=1 - rank), ""),
    "an unused seed": (lambda rank: of(DistributedSampler, shuffle=False, seed=rank), ""),
    "one that draws by itself": (lambda rank: of(ByItself, seed=rank), "WARNING"),
    "on one rank": (lambda rank: of(DistributedSampler, seed=rank) if rank else None, ""),
    "a stream": (lambda rank: iter([torch.ones(rank + 1)]), ""),
    "none": (lambda rank: None, ""),
}
DIVIDED = {  # where both ranks are to read the same
    "right": (lambda rank: of(DistributedSampler, num_replicas=1, rank=0), ""),
    "no sampler": (lambda rank: DataLoader(range(8)), ""),
    "dealt": (lambda rank: of(DistributedSampler), APART),
}


def said_at_boost(rank, world_size, loaders, plugin):
    found, logged = {}, []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("booster.data").addHandler(handler)
    for name, (make, _) in (LOADERS if loaders == "dealt" else DIVIDED).items():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        b = Booster("cpu", "fp32", plugin())
        try:
            b.boost(model, torch.optim.SGD(model.parameters()), dataloader=make(rank))
            found[name] = "".join(f"WARNING {line}" for line in logged if "different orders" in line)
        except ValueError as error:
            found[name] = str(error)
        logged.clear()
    logging.getLogger("booster.data").removeHandler(handler)
    return found


def divides():
    return HybridParallelPlugin(2, 1, tp_plan={"0": "colwise", "1": "rowwise"})


@pytest.mark.parametrize(
    ("loaders", "plugin", "said"), [("dealt", TorchDDPPlugin, LOADERS), ("same", divides, DIVIDED)]
)
def test_samplers_that_do_not_deal_one_dataset_among_ranks_are_refused_on_all_of_them(ranks2, loaders, plugin, said):
    one, other = ranks2(said_at_boost, loaders, plugin)
    assert one == other
    for name, (_, text) in said.items():
        assert text in one[name] if text else not one[name], (name, one[name])
    if loaders == "dealt":
        assert (
            "rank 0 has DistributedSampler(num_replicas=2, rank=0, shuffle=True, seed=0, epoch=0), rank 1 has"
            in one["seed"]
        )
