"""Loaders of the user's own, one for each way that an order is drawn, and a run over them that is broken off."""

import random

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from booster.data import DataLoaderWrapper, prepare_dataloader

SIZE, BATCH = 24, 5  # the last batch is short; with drop_last its 4 are left out
FULL = 4  # a size of batch that divides the samples: the sampler's end comes after the last batch

data = TensorDataset(torch.arange(SIZE))


class Eager(Sampler):
    """Draws when it is iterated, not when the first index is asked for; of two ranks each has its share."""

    def __init__(self, generator, rank=0, num_replicas=1):
        self.generator, self.rank, self.num_replicas = generator, rank, num_replicas

    def __len__(self):
        return SIZE // self.num_replicas

    def __iter__(self):
        if isinstance(self.generator, torch.Generator):
            order = torch.randperm(SIZE, generator=self.generator).tolist()
        else:
            order = list(range(SIZE))
            self.generator.shuffle(order)
        return iter(order[self.rank :: self.num_replicas])


class Nested(Sampler):
    """Batches of an inner sampler in another order."""

    def __init__(self, inner, size):
        self.inner, self.size, self.generator = inner, size, torch.Generator().manual_seed(4)

    def __len__(self):
        return len(self.inner) // self.size

    def __iter__(self):
        order = list(self.inner)
        for batch in torch.randperm(len(self), generator=self.generator).tolist():
            yield order[batch * self.size : (batch + 1) * self.size]


class Remembering(Sampler):
    """Counts its rounds, and has them in its state."""

    def __init__(self):
        self.rounds = 0

    def __len__(self):
        return SIZE

    def __iter__(self):
        self.rounds += 1
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.rounds)).tolist())

    def state_dict(self):
        return {"rounds": self.rounds}

    def load_state_dict(self, state):
        self.rounds = state["rounds"]


class Drawn(Dataset):
    """Samples with numbers from a generator of the dataset's own."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return (torch.tensor(index * 1000 + (0 if get_worker_info() else int(self.rng.integers(1000)))),)


class Stream(IterableDataset):
    """A shuffled stream, dealt to workers; rng None: in the order of worker seeds, or of torch's global generator."""

    def __init__(self, rng=None):
        self.rng = rng

    def __iter__(self):
        worker = get_worker_info()
        order = list(range(SIZE))
        if self.rng is None:
            order = torch.randperm(SIZE).tolist()
        else:
            self.rng.shuffle(order)
        each = order if worker is None else [x for x in order if x % worker.num_workers == worker.id]
        return ((torch.tensor(x),) for x in each)


def generator(seed=7):
    return torch.Generator().manual_seed(seed)


# By name, what makes the arguments of a DataLoader besides those of workers; `own` is a generator, or None.
ORDERS = {
    "shuffle": lambda own, **o: {"shuffle": True, "generator": own, **o},
    "sequential": lambda own, **o: {"generator": own, **o},
    "random": lambda own, **o: {"sampler": RandomSampler(data, generator=own), **o},
    "with replacement": lambda own, **o: {"sampler": RandomSampler(data, True, 70, own), **o},
    "several rounds": lambda own, **o: {"sampler": RandomSampler(data, num_samples=60, generator=own), **o},
    "weighted": lambda own, **o: {"sampler": WeightedRandomSampler([1.0] * SIZE, SIZE, generator=own), **o},
    "subset": lambda own, **o: {"sampler": SubsetRandomSampler(range(3, SIZE), generator=own), "generator": own, **o},
    "batch sampler": lambda own, batch_size, drop_last: {
        "batch_sampler": BatchSampler(RandomSampler(data, generator=own), batch_size, drop_last),
        "generator": own,
    },
    "eager": lambda own, **o: {"sampler": Eager(own or generator(8)), "generator": own, **o},
    "python": lambda own, **o: {"sampler": Eager(random.Random(9)), "generator": own, **o},
    "numpy": lambda own, **o: {"sampler": Eager(np.random.default_rng(9)), "generator": own, **o},
    "numpy's older": lambda own, **o: {"sampler": Eager(np.random.RandomState(9)), "generator": own, **o},
    "nested": lambda own, batch_size, drop_last: {
        "batch_sampler": Nested(RandomSampler(data, generator=own), batch_size),
        "generator": own,
    },
    "no batches": lambda own, **o: {
        "sampler": RandomSampler(data, generator=own),
        "batch_size": None,
        "generator": own,
    },
    "remembering": lambda own, **o: {"sampler": Remembering(), "generator": own, **o},
    "a dataset's": lambda own, **o: {"dataset": Drawn(), "shuffle": True, "generator": own, **o},
    "a stream": lambda own, **o: {"dataset": Stream(), "generator": own, **o},
    "a stream's": lambda own, **o: {"dataset": Stream(random.Random(2)), "generator": own, **o},
}
WORKERS = {
    "no worker": {},
    "2 workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


def loader(order, own, workers, drop_last, size=BATCH):
    options = ORDERS[order](generator() if own else None, batch_size=size, drop_last=drop_last)
    return DataLoaderWrapper(DataLoader(options.pop("dataset", data), **options, **WORKERS[workers]), "cpu")


def dealt(order, own, workers, drop_last, rank, world_size):
    """The same on several ranks."""
    shared = generator(5) if own else None
    options = {"batch_size": BATCH, "drop_last": drop_last, "generator": shared, **WORKERS[workers]}
    if order == "prepared with its own sampler":
        prepared = prepare_dataloader(
            data,
            BATCH,
            rank=rank,
            world_size=world_size,
            distributed_sampler_cls=lambda dataset, num_replicas, rank, **_: Eager(generator(3), rank, num_replicas),
            drop_last=drop_last,
            **WORKERS[workers],
        )
        return DataLoaderWrapper(prepared, "cpu")
    if order == "eager":
        sampler = Eager(generator(3), rank, world_size)
    else:
        sampler = DistributedSampler(data, world_size, rank, drop_last=drop_last)
    return DataLoaderWrapper(DataLoader(data, sampler=sampler, **options), "cpu")


def taken(batches, count=None):
    found = []
    for batch in batches:
        found.append(batch[0].tolist())
        if len(found) == count:
            break
    return found


def broken_off(make, epochs, batches):
    """What an unbroken run sees after `batches` of the epoch after `epochs`, and what another sees that is loaded there.

    batches: a number; "last"; or None for between epochs. Each sees the rest of that epoch and two more.
    """
    torch.manual_seed(11), random.seed(11), np.random.seed(11)
    unbroken = make()
    for _ in range(epochs):
        for _ in unbroken:
            torch.rand(3)  # as dropout does
    running = None
    if batches is not None:
        running = iter(unbroken)
        for _ in range(len(unbroken) if batches == "last" else batches):
            next(running)
            torch.rand(3)
    state, numbers = unbroken.state_dict(), torch.get_rng_state()
    rest = [] if running is None else taken(running)
    expected = [*([rest] if rest else []), taken(unbroken), taken(unbroken), torch.rand(2).tolist()]
    torch.manual_seed(12), random.seed(12), np.random.seed(12)
    resumed = make()
    resumed.load_state_dict(state)
    torch.set_rng_state(numbers)
    return expected, [*(taken(resumed) for _ in expected[:-1]), torch.rand(2).tolist()]
