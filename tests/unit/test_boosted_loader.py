"""The boosted loader in one process: epochs, iterators, and what it knows of its rows."""

import copy
import gc
import multiprocessing
import os
import weakref

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

from booster.data import DataLoaderWrapper, prepare_dataloader

META = torch.device("meta")


def numbers(length=10):
    return TensorDataset(torch.arange(length))


def flat(loader):
    return [int(x) for (batch,) in loader for x in batch]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def boosted(length=10, world_size=2, **options):
    options = {"batch_size": 2, "shuffle": True, **options}
    return DataLoaderWrapper(prepare_dataloader(numbers(length), rank=0, world_size=world_size, **options), "cpu")


def epochs(world_size, count):
    loader = boosted(world_size=world_size)
    return [flat(loader) for _ in range(count)]


def test_batches_arrive_on_the_device():
    loader = DataLoaderWrapper(DataLoader(numbers()), "meta")
    assert all(batch[0].device == META for batch in loader)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_epoch_has_another_order_and_a_new_run_has_the_same_ones(world_size):
    first = epochs(world_size, 3)
    assert len({tuple(order) for order in first}) == 3
    assert epochs(world_size, 3) == first


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_continues_with_the_epoch_it_is_given(world_size, workers):
    resumed = boosted(world_size=world_size, num_workers=workers)
    resumed.epoch = 2
    assert flat(resumed) == epochs(world_size, 3)[2]
    assert resumed.epoch == 3


def test_the_sampler_inside_a_batch_sampler_is_told_the_epoch():
    sampler = DistributedSampler(numbers(), num_replicas=2, rank=0)
    loader = DataLoaderWrapper(DataLoader(numbers(), batch_sampler=BatchSampler(sampler, 2, False)), "cpu")
    assert flat(loader) != flat(loader)
    assert sampler.epoch == 1


@pytest.mark.parametrize("target", [lambda loader: loader, lambda loader: loader.sampler])
def test_a_user_who_sets_the_epoch_is_followed_and_counting_goes_on_from_there(target):
    expected = epochs(2, 7)
    loader = boosted()
    assert flat(loader) == expected[0]
    target(loader).set_epoch(5)
    assert flat(loader) == expected[5]
    assert flat(loader) == expected[6]


def test_a_user_who_sets_every_epoch_himself_gets_what_he_sets():
    expected = epochs(2, 3)
    loader = boosted()
    for epoch in (2, 0, 1):
        loader.set_epoch(epoch)
        assert flat(loader) == expected[epoch]
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        assert flat(loader) == expected[epoch]


def test_an_epoch_set_before_boosting_is_the_first_one():
    plain = prepare_dataloader(numbers(), 2, rank=0, world_size=2, shuffle=True)
    plain.sampler.set_epoch(4)
    assert flat(DataLoaderWrapper(plain, "cpu")) == epochs(2, 5)[4]


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_live_iterators_are_each_of_their_own_epoch(world_size):
    expected = epochs(world_size, 3)
    loader = boosted(world_size=world_size)
    both = list(zip(loader, loader, strict=True))
    assert flat(a for a, _ in both) == expected[0]
    assert flat(b for _, b in both) == expected[1]
    assert flat(loader) == expected[2]


def test_a_loop_that_breaks_early_is_followed_by_a_whole_epoch():
    expected = epochs(2, 2)
    loader = boosted()
    next(iter(loader))
    assert flat(loader) == expected[1]


def test_attributes_are_the_loader_s():
    loader = boosted()
    assert loader.batch_size == 2
    assert len(loader.dataset) == 10
    assert len(loader) == 3
    assert loader.unwrap().sampler is loader.sampler
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = loader.no_such_thing


def test_a_loader_without_length_iterates_and_has_no_length():
    loader = DataLoaderWrapper(iter([1, 2]), "cpu")
    with pytest.raises(TypeError):
        len(loader)
    assert list(loader) == [1, 2]
    assert list(DataLoaderWrapper(DataLoader(Stream()), "cpu")) == [0, 1, 2, 3]


def test_a_boosted_loader_can_be_copied():
    assert flat(copy.deepcopy(boosted())) == flat(boosted())


def test_what_cannot_be_wrapped_is_refused():
    with pytest.raises(TypeError, match="boosted already"):
        DataLoaderWrapper(boosted(), "cpu")
    with pytest.raises(TypeError, match="iterable of batches, got int"):
        DataLoaderWrapper(3, "cpu")


def test_the_share_counts_rows_and_the_samples_repeated_at_the_end():
    loader = boosted(10, 4, batch_size=2)  # 3 samples on each of 4 ranks, 2 of the 12 repeated
    with pytest.raises(RuntimeError, match="has not yielded a batch yet"):
        _ = loader.share
    batches = iter(loader)
    next(batches)
    assert (loader.share.num_replicas, loader.share.num_padded, loader.share.rows) == (4, 0, {2})
    next(batches)
    assert (loader.share.num_padded, loader.share.rows) == (2, {1, 3})
    next(iter(loader))
    assert (loader.share.num_padded, loader.share.rows) == (0, {2})


def test_samples_that_a_batch_drops_take_the_repeated_ones_along():
    sampler = DistributedSampler(numbers(), num_replicas=4, rank=0)
    loader = DataLoaderWrapper(DataLoader(numbers(), batch_size=2, sampler=sampler, drop_last=True), "cpu")
    assert len(flat(loader)) == 2
    assert (loader.share.num_padded, loader.share.rows) == (0, {2})


@pytest.mark.parametrize(("drop_last", "rows", "padded"), [(False, 2, 1), (True, 1, 0)])
def test_an_epoch_that_other_ranks_go_on_with_counts_the_rows_that_these_are_dealt(drop_last, rows, padded):
    before = boosted(13, 2, batch_size=3, shuffle=False, drop_last=drop_last)
    next(iter(before))
    loader = boosted(13, 4, batch_size=1 if drop_last else 3, shuffle=False, drop_last=drop_last)
    loader.load_state_dict(before.state_dict())  # 7 of 13 are left for 4 ranks
    assert len(flat(loader)) == rows
    assert (loader.share.num_padded, loader.share.rows) == (padded, {rows})
    flat(loader)  # the next epoch is a whole one
    assert loader.share.num_padded == (0 if drop_last else 3)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"length": 12},
            "drawn of 10 samples by seed=1024, and this SeededDataLoader has one drawn of 12 samples by seed=1024",
        ),
        ({"seed": 1}, "by seed=1024, and this SeededDataLoader has one drawn of 10 samples by seed=1,"),
        ({"shuffle": False}, "and this SeededDataLoader has one that of the dataset"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_that_would_go_on_in_another_order_is_refused(world_size, changed, says):
    before = boosted()
    next(iter(before))
    with pytest.raises(ValueError, match=says):
        boosted(world_size=world_size, **changed).load_state_dict(before.state_dict())
    boosted(world_size=world_size, **changed).load_state_dict(before.state_dict() | {"batches": 0, "samples": 0})


def test_a_shuffled_loader_of_the_users_own_is_not_gone_on_with_over_more_samples():
    before = DataLoaderWrapper(DataLoader(numbers(), 2, shuffle=True), "cpu")
    next(iter(before))
    with pytest.raises(ValueError, match="drawn of 10 samples, and this DataLoader has one drawn of 12 samples"):
        DataLoaderWrapper(DataLoader(numbers(12), 2, shuffle=True), "cpu").load_state_dict(before.state_dict())
    before = DataLoaderWrapper(DataLoader(numbers(), 2), "cpu")
    next(iter(before))
    after = DataLoaderWrapper(DataLoader(numbers(12), 2), "cpu")
    after.load_state_dict(before.state_dict())
    assert flat(after) == list(range(2, 12))


def test_a_position_is_none_any_more_once_another_epoch_is_chosen():
    before = boosted()
    next(iter(before))
    loader = boosted()
    loader.load_state_dict(before.state_dict())
    loader.set_epoch(7)
    assert loader.state_dict() == boosted().state_dict() | {"epoch": 7}


def test_nothing_is_known_of_the_rows_of_another_loader():
    loader = DataLoaderWrapper(DataLoader(numbers()), "cpu")
    next(iter(loader))
    assert loader.share is None


def test_the_position_of_an_epoch_that_is_over_is_the_next_one_also_of_an_epoch_gone_on_with():
    before, after = boosted(12, 1), boosted(12, 1)
    batches = iter(before)
    next(batches)
    after.load_state_dict(before.state_dict())
    for one, other in zip(range(5), after, strict=False):
        next(batches)
        assert after.state_dict() == before.state_dict(), (one, other)
    assert (after.state_dict()["epoch"], after.state_dict()["batches"]) == (1, 0)


@pytest.mark.parametrize("drawn", [0, 1, 2])
@pytest.mark.parametrize("kind", ["prepared", "foreign"])
def test_a_position_survives_being_saved_again(kind, drawn):
    """drawn: batches between the first resume and the second save."""

    def make():
        data = torch.arange(12.0)
        prepared = prepare_dataloader(TensorDataset(data), 2, rank=0, world_size=1, shuffle=True)
        return DataLoaderWrapper(prepared if kind == "prepared" else list(data.split(2)), "cpu")

    def values(batches):
        return [torch.as_tensor(batch[0]).flatten().tolist() for batch in batches]

    first = make()
    batches = iter(first)
    next(batches), next(batches)
    second, third = make(), make()
    second.load_state_dict(first.state_dict())
    resumed = iter(second)
    for _ in range(drawn):
        assert values([next(resumed)]) == values([next(batches)])
    state = second.state_dict()
    assert state == first.state_dict()
    third.load_state_dict(state)
    assert values(third) == values(batches)
    assert len(list(third)) == 6, "the next epoch is whole"


class Noisy(TensorDataset):
    """Samples that draw random numbers while they are read."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0] + torch.rand(())


@pytest.mark.crossed
@pytest.mark.parametrize("seen", [0, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffled_loader_of_the_users_own_goes_on_in_the_order_that_it_drew(seen, workers):
    def loader():
        data = numbers() if workers else Noisy(torch.arange(10.0))
        return DataLoaderWrapper(DataLoader(data, 2, shuffle=True, num_workers=workers), "cpu")

    torch.manual_seed(3)
    unbroken = loader()
    batches = iter(unbroken)
    for _ in range(seen):
        next(batches)
        torch.rand(5)  # as dropout does
    position, random_numbers = unbroken.state_dict(), torch.get_rng_state()
    rest = [list(batches), list(unbroken), torch.rand(2)]

    resumed = loader()
    resumed.load_state_dict(position)
    torch.set_rng_state(random_numbers)
    assert str([list(resumed), list(resumed), torch.rand(2)]) == str(rest)


def test_a_position_in_batches_of_another_size_is_refused():
    first, second = (DataLoaderWrapper(DataLoader(numbers(), size), "cpu") for size in (2, 5))
    next(iter(first))
    with pytest.raises(ValueError, match="reads 5 samples in a step over all ranks, and 2 when the state was taken"):
        second.load_state_dict(first.state_dict())


def left_in_the_middle():
    """The workers of loaders that were left in the middle, in every way that one leaves them."""

    def made(**options):
        return DataLoaderWrapper(DataLoader(numbers(), 2, num_workers=1, **options), "cpu")

    def looped(loader):
        for _ in loader:
            return

    def asked_again(loader):
        batches = iter(loader)
        next(batches)
        loader.state_dict()
        next(iter(loader))

    def resumed(loader):
        looped(loader)
        again = made()
        again.load_state_dict(loader.state_dict())
        looped(again)

    for leave in (looped, asked_again, resumed):
        leave(made())
    looped(boosted(num_workers=1))
    looped(made(persistent_workers=True))
    persistent = boosted(num_workers=1, persistent_workers=True)
    looped(persistent)
    persistent.load_state_dict(persistent.state_dict())
    looped(persistent)


@pytest.mark.slow
def test_workers_of_loaders_left_in_the_middle_end_by_reference_count_alone(capfd):
    left_in_the_middle()  # a first time, for what multiprocessing keeps for itself
    gc.collect()
    gc.disable()
    try:
        before, others = (
            len(os.listdir("/proc/self/fd")),
            set(multiprocessing.active_children()),
        )  # ranks of other tests
        left_in_the_middle()
        assert set(multiprocessing.active_children()) <= others
        assert not [each for each in gc.get_objects() if "DataLoaderIter" in type(each).__name__]
        assert len(os.listdir("/proc/self/fd")) < before + 4, "one loader's are 6; threads close theirs when they like"
    finally:
        gc.enable()
    assert capfd.readouterr() == ("", "")


def test_a_loader_keeps_no_iterator_that_is_left():
    class Batches:
        def __iter__(self):
            return iter(self.made)

        made = [1, 2]

    class Iterating(list):
        def __iter__(self):
            batches = Batches()
            found.append(weakref.ref(batches))
            return (batch for batch in batches if batches)

    found = []
    loader = DataLoaderWrapper(Iterating([1, 2]), "cpu")
    gc.disable()
    try:
        for _ in loader:
            break
        assert [each() for each in found] == [None]
    finally:
        gc.enable()


@pytest.mark.crossed
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("warm", [False, True], ids=["a new loader", "one that has run"])
def test_epochs_after_a_resumed_one_are_whole(options, warm):
    unbroken = boosted(world_size=1, **options)
    batches = iter(unbroken)
    next(batches), next(batches)
    state = unbroken.state_dict()
    expected = [flat(batches), flat(unbroken), flat(unbroken)]
    resumed = boosted(world_size=1, **options)
    if warm:
        flat(resumed)
    resumed.load_state_dict(state)
    assert [flat(resumed) for _ in range(3)] == expected


def test_an_iterator_that_resumes_is_its_own_though_another_was_made_before_its_first_batch():
    expected = epochs(1, 2)
    state = boosted(world_size=1).state_dict() | {"batches": 2, "samples": 4}
    loader = boosted(world_size=1)
    loader.load_state_dict(state)
    resumed, following = iter(loader), iter(loader)
    assert (flat(following), flat(resumed)) == (expected[1], expected[0][4:])
