"""After a resume on another number of ranks, every sample of the epoch is seen once."""

import itertools
from collections import Counter

import pytest
import torch
from loaders import WORKERS, Eager, broken_off, data, dealt, generator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster import Booster
from booster.checkpoint import CheckpointError
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
    """For each case what this rank saw of the second epoch up to the save, in a folder of the case's, and after it."""
    seen = []
    for index, (size, drop_last) in enumerate(cases):
        booster, *parts, loader = loader_of(world_size, size, drop_last)
        list(loader)
        batches = iter(loader)
        early = [int(x) for _ in range(SEEN) for x in next(batches)[0]]
        booster.save(f"{root}/{index}", parts[0], parts[1], None, loader)
        seen.append([early, [int(x) for batch in batches for x in batch[0]]])
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
QUICK = [(36, False), (37, True), (41, False), (47, True)]


@pytest.mark.crossed
@pytest.mark.parametrize(
    "cases",
    [QUICK, pytest.param([case for case in CASES if case not in QUICK], marks=pytest.mark.slow)],
    ids=["some", "rest"],
)
@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
def test_every_sample_is_seen_once(run_on_ranks, tmp_path, source, target, cases):
    def on(function, world_size):
        if world_size == 1:
            return [function(0, 1, cases, str(tmp_path))]
        return run_on_ranks(function, world_size, cases, str(tmp_path))

    first, second = on(before, source), on(after, target)
    for index, (size, drop_last) in enumerate(cases):
        seen = [x for rank in first for x in rank[index][0]]
        rest = [x for rank in second for x in rank[index][0]]
        assert len(seen) == len(set(seen)) == source * SEEN * BATCH
        left = size - len(seen)
        if drop_last:
            assert not set(seen) & set(rest), "seen twice"
            assert len(rest) == len(set(rest)) == left // (target * BATCH) * target * BATCH
        else:
            assert set(seen) | set(rest) == set(range(size)), "never seen"
            # As in any epoch, some are repeated so that ranks have equally many.
            assert len(rest) == -(-left // target) * target
            assert sum(count - 1 for count in Counter(seen + rest).values()) == -left % target
        whole = Counter(x for rank in second for x in rank[index][1])
        assert len(whole) == (size if not drop_last else size // target // BATCH * BATCH * target)


def test_the_same_ranks_repeat_at_the_end_what_they_repeat_without_a_break(ranks2, tmp_path):
    cases = [(41, False), (47, False)]
    first, second = (ranks2(function, cases, str(tmp_path)) for function in (before, after))
    for index in range(len(cases)):
        assert [rank[index][0] for rank in second] == [rank[index][1] for rank in first]


OWN = list(
    itertools.product(("distributed", "eager", "prepared with its own sampler"), (False, True), WORKERS, (False, True))
)


def broken_off_on_ranks(rank, world_size, cases):
    """The cases in which a loader of the user's own differs after a resume, at each place; the state goes by ranks."""
    wrong = []
    for *case, place, epochs in cases:
        expected, resumed = broken_off(lambda: dealt(*case, rank, world_size), epochs, place)  # noqa: B023
        if expected != resumed:
            wrong.append((*case, place, epochs))
    return wrong


def test_a_loader_of_the_users_own_goes_on_to_the_bit_on_every_rank(ranks2):
    cases = [(*case, place, 1) for case in OWN if case[2] == "no worker" for place in (2, "last", None)]
    assert ranks2(broken_off_on_ranks, cases) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("case", OWN, ids=str)
def test_a_loader_of_the_users_own_goes_on_to_the_bit_on_every_rank_from_every_place(ranks2, case):
    cases = [(*case, place, epochs) for place in (0, 1, 2, "last", None) for epochs in (0, 1)]
    assert ranks2(broken_off_on_ranks, cases) == [[], []]


def own_loader(world_size, rank, size, lazy=False):
    sampler = Eager(generator(3), rank, world_size)
    booster = Booster("cpu", "fp32", TorchDDPPlugin() if world_size > 1 else SingleDevice())
    model = nn.Linear(1, 1)
    loader = DataLoader(data, size, sampler=sampler, num_workers=2 * lazy, in_order=not lazy)
    model, optimizer, _, loader, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), None, loader)
    return booster, model, optimizer, loader


def saved_in_the_middle(rank, world_size, root):
    booster, model, optimizer, loader = own_loader(world_size, rank, 4)
    next(iter(loader))
    booster.save(root, model, optimizer, None, loader)
    booster, model, optimizer, loader = own_loader(world_size, rank, 4, lazy=rank == 1)
    next(iter(loader))
    try:
        booster.save(f"{root}/refused", model, optimizer, None, loader)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def test_what_one_rank_cannot_save_is_refused_on_all_and_another_number_of_ranks_too(ranks2, tmp_path):
    first, second = ranks2(saved_in_the_middle, str(tmp_path))
    assert "in_order=False yields batches as workers finish them" in second
    assert "on rank 1" in first
    assert second.split(": ", 1)[1] in first
    booster, model, optimizer, loader = own_loader(1, 0, 8)
    with pytest.raises(CheckpointError, match="in the middle of an epoch of 2 ranks, and this job has 1"):
        booster.load(tmp_path, model, optimizer, None, loader)
