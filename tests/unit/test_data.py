"""Making loaders, and checking that they are sharded, in one process."""

import logging
import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from booster.data import DataLoaderWrapper, check_sharded, prepare_dataloader


def numbers(length=10):
    return TensorDataset(torch.arange(length))


def flat(loader):
    return [int(x) for (batch,) in loader for x in batch]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


# ---- prepare_dataloader


def test_ranks_get_disjoint_shares_that_cover_the_dataset():
    shares = [flat(prepare_dataloader(numbers(12), 2, rank=r, world_size=4, shuffle=True)) for r in range(4)]
    assert sorted(sum(shares, [])) == list(range(12))
    assert all(len(share) == 3 for share in shares)


def test_seed_and_drop_last_reach_the_sampler():
    loader = prepare_dataloader(numbers(), 2, rank=1, world_size=4, shuffle=True, seed=7, drop_last=True)
    sampler = loader.sampler
    assert (sampler.seed, sampler.drop_last, sampler.rank, sampler.num_replicas) == (7, True, 1, 4)
    assert loader.drop_last


def test_at_world_size_one_the_seed_decides_the_order():
    def order(seed, **options):
        return flat(prepare_dataloader(numbers(), 3, rank=0, world_size=1, shuffle=True, seed=seed, **options))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == list(range(10))
    assert len(order(1, drop_last=True)) == 9


def test_a_loader_that_is_not_boosted_still_shuffles_anew_each_epoch():
    loader = prepare_dataloader(numbers(), 3, rank=0, world_size=1, shuffle=True)
    assert flat(loader) != flat(loader)


def test_without_shuffle_the_order_is_the_dataset_s():
    assert flat(prepare_dataloader(numbers(), 3, rank=0, world_size=1)) == list(range(10))


def test_a_sampler_class_of_the_user_is_called_with_everything():
    class Mine(DistributedSampler):
        pass

    for world_size in (1, 2):
        loader = prepare_dataloader(
            numbers(), 2, rank=0, world_size=world_size, shuffle=True, seed=3, distributed_sampler_cls=Mine
        )
        assert type(loader.sampler) is Mine
        assert (loader.sampler.num_replicas, loader.sampler.shuffle, loader.sampler.seed) == (world_size, True, 3)


class Draws:
    """One random number of each library per sample, as an augmentation would take."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        numpy = pytest.importorskip("numpy")
        return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def test_workers_draw_different_numbers_on_all_ranks_worker_ids_and_epochs_and_the_same_ones_again():
    def draws(rank):
        loader = prepare_dataloader(Draws(), 1, rank=rank, world_size=2, num_workers=2)
        loader = DataLoaderWrapper(loader, "cpu")
        return [tuple(float(x) for x in batch) for _ in range(2) for batch in loader]

    first, second = draws(0), draws(1)
    for library in zip(*(first + second), strict=True):
        assert len(set(library)) == 16
    assert draws(0) == first


@pytest.mark.parametrize("name", ["sampler", "batch_sampler", "generator"])
def test_an_option_that_it_makes_itself_is_refused_with_the_fix(name):
    with pytest.raises(ValueError, match=rf"got {name}, which it makes itself; .*(boost|seed)"):
        prepare_dataloader(numbers(), 2, rank=0, world_size=2, **{name: None})


def test_options_of_the_dataloader_are_passed_on():
    loader = prepare_dataloader(numbers(), 2, rank=0, world_size=2, collate_fn=list, timeout=0)
    assert loader.collate_fn is list


@pytest.mark.parametrize("options", [{"world_size": 2}, {"world_size": 1, "shuffle": True}])
def test_an_iterable_dataset_is_neither_sharded_nor_shuffled(options):
    with pytest.raises(ValueError, match="Stream is an IterableDataset"):
        prepare_dataloader(Stream(), 2, rank=0, **options)
    assert len(list(prepare_dataloader(Stream(), 2, rank=0, world_size=1))) == 2


# ---- check_sharded


def sharded(world_size):
    return DistributedSampler(numbers(), num_replicas=world_size, rank=0)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(numbers(), sampler=sharded(2)),
        DataLoader(numbers(), batch_sampler=BatchSampler(sharded(2), 2, False)),
        prepare_dataloader(numbers(), 2, rank=0, world_size=2),
    ],
)
def test_a_sharded_loader_passes(loader):
    check_sharded(loader, 2)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(numbers()),
        DataLoader(numbers(), shuffle=True),
        DataLoader(numbers(), batch_sampler=BatchSampler(RandomSampler(numbers()), 2, False)),
        [1, 2, 3],
    ],
)
def test_a_loader_that_is_not_sharded_raises_only_where_ranks_share_data(loader):
    check_sharded(loader, 1)
    with pytest.raises(ValueError, match=r"has no distributed sampler, so all 2 ranks.*b.prepare_dataloader"):
        check_sharded(loader, 2)


def test_a_loader_sharded_for_another_world_raises():
    with pytest.raises(ValueError, match=r"num_replicas=2, but 4 ranks see different data; .*prepare_dataloader"):
        check_sharded(DataLoader(numbers(), sampler=sharded(2)), 4)


def test_a_loader_whose_sharding_cannot_be_seen_is_accepted_with_a_logged_warning(caplog):
    for loader in (DataLoader(Stream()), iter([1])):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "booster"):
            check_sharded(loader, 2)
        assert "cannot see whether this" in caplog.text
