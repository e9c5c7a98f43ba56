"""After a resume on another number of ranks, every sample of the epoch is seen once."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from booster import Booster
from booster.plugin import SingleDevice, TorchDDPPlugin

BATCH = 3  # on each rank
SEEN = 2  # batches of the epoch before the save


def loader_of(world_size, size, drop_last):
    booster = Booster("cpu", "fp32", TorchDDPPlugin() if world_size > 1 else SingleDevice())
    data = TensorDataset(torch.arange(size).float().reshape(size, 1))
    loader = booster.prepare_dataloader(data, BATCH, shuffle=True, seed=5, drop_last=drop_last)
    model = nn.Linear(1, 1)
    model, optimizer, _, loader, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), None, loader)
    return booster, model, optimizer, loader


def before(rank, world_size, cases, root):
    """For each case what this rank saw of the second epoch up to the save, in a folder of the case's."""
    seen = []
    for index, (size, drop_last) in enumerate(cases):
        booster, *parts, loader = loader_of(world_size, size, drop_last)
        list(loader)
        batches = iter(loader)
        seen.append([int(x) for _ in range(SEEN) for x in next(batches)[0]])
        booster.save(f"{root}/{index}", parts[0], parts[1], None, loader)
    return seen


def after(rank, world_size, cases, root):
    """What this rank sees of the rest of that epoch, and of the whole of the next."""
    seen = []
    for index, (size, drop_last) in enumerate(cases):
        booster, *parts, loader = loader_of(world_size, size, drop_last)
        booster.load(f"{root}/{index}", parts[0], parts[1], None, loader)
        seen.append([[int(x) for batch in loader for x in batch[0]] for _ in range(2)])
    return seen


# The rest divides among ranks and into batches, or not.
CASES = [(size, drop_last) for size in (36, 37, 41, 47) for drop_last in (False, True)]


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
def test_every_sample_is_seen_once(run_on_ranks, tmp_path, source, target):
    def on(function, world_size):
        if world_size == 1:
            return [function(0, 1, CASES, str(tmp_path))]
        return run_on_ranks(function, world_size, CASES, str(tmp_path))

    first, second = on(before, source), on(after, target)
    for index, (size, drop_last) in enumerate(CASES):
        seen = [x for rank in first for x in rank[index]]
        rest = [x for rank in second for x in rank[index][0]]
        assert len(seen) == len(set(seen)) == source * SEEN * BATCH
        assert not set(seen) & set(rest), "seen twice"
        left = size - len(seen)
        if drop_last:
            assert len(rest) == len(set(rest)) == left // (target * BATCH) * target * BATCH
        else:
            assert set(seen) | set(rest) == set(range(size)), "never seen"
            # As in any epoch, some are repeated so that ranks have equally many.
            assert len(rest) == -(-left // target) * target
            assert sum(count - 1 for count in Counter(rest).values()) == -left % target
        whole = Counter(x for rank in second for x in rank[index][1])
        assert len(whole) == (size if not drop_last else size // target // BATCH * BATCH * target)
