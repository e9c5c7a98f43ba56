"""Making loaders, checking that they are sharded, and the boosted loader, in one process."""

import collections
import copy
import logging
import random
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from booster.batch import to_device
from booster.data import DataLoaderWrapper, check_sharded, prepare_dataloader

META = torch.device("meta")


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


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="num_wrokers"):
        prepare_dataloader(numbers(), 2, rank=0, world_size=2, num_wrokers=2)


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
    with pytest.raises(ValueError, match=r"has no distributed sampler, so all 2 ranks.*booster.prepare_dataloader"):
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


# ---- batches


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str


Pair = collections.namedtuple("Pair", "x y")


class Movable:
    def to(self, device):
        return ("moved", device)


def test_every_tensor_moves_and_every_container_keeps_its_type():
    t = torch.ones(2)
    batch = {
        "list": [t, 1],
        "pair": Pair(t, None),
        "frozen": Frozen(t, "a"),
        "ordered": collections.OrderedDict(a=t),
        "default": collections.defaultdict(list, a=t),
        "user": collections.UserDict(a=t),
        "other": "text",
        "movable": Movable(),
        "class": torch.Tensor,
    }
    moved = to_device(batch, META)
    assert moved["list"][0].device == moved["pair"].x.device == moved["frozen"].x.device == META
    assert moved["ordered"]["a"].device == moved["default"]["a"].device == moved["user"]["a"].device == META
    assert moved["list"][1] == 1
    assert moved["pair"].y is None
    assert moved["frozen"].name == "a"
    assert moved["default"]["missing"] == []
    assert moved["movable"] == ("moved", META)
    assert (moved["other"], moved["class"]) == ("text", torch.Tensor)
    assert {k: type(v) for k, v in moved.items() if k != "movable"} == {
        k: type(v) for k, v in batch.items() if k != "movable"
    }
    assert batch["frozen"].x is t
    assert batch["ordered"]["a"] is t


def test_a_tensor_that_is_there_is_not_copied():
    t = torch.ones(2)
    assert to_device([t], torch.device("cpu"))[0] is t


def test_tokenizer_output_and_model_output_move(transformers):
    from transformers import BatchEncoding
    from transformers.modeling_outputs import BaseModelOutput

    encoding = to_device(BatchEncoding({"ids": torch.ones(1)}), META)
    assert isinstance(encoding, BatchEncoding)
    assert encoding["ids"].device == META
    output = to_device(BaseModelOutput(last_hidden_state=torch.ones(1)), META)
    assert isinstance(output, BaseModelOutput)
    assert output.last_hidden_state.device == output["last_hidden_state"].device == META


# ---- the boosted loader


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


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None])
def test_an_epoch_that_is_no_whole_number_is_refused(wrong):
    with pytest.raises(ValueError, match="epoch=.*whole number"):
        boosted().epoch = wrong


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


def test_nothing_is_known_of_the_rows_of_another_loader():
    loader = DataLoaderWrapper(DataLoader(numbers()), "cpu")
    next(iter(loader))
    assert loader.share is None
