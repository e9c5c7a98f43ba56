"""Loaders of the user's own, broken off and gone on with: what they yield is the same, or the save is refused."""

import itertools

import pytest
import torch
from loaders import BATCH, FULL, ORDERS, SIZE, WORKERS, Stream, broken_off, data, generator, loader
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from booster import Booster
from booster.data import DataLoaderWrapper

PLACES = {"not yet a batch": 0, "first": 1, "middle": 3, "last": "last", "between": None}
SIZES = [(False, BATCH), (True, BATCH), (False, FULL)]  # drop_last, and samples in a batch


def differing(orders, workers, *, owns=(False, True), sizes=SIZES, places=PLACES, epochs=(0, 1)):
    """The cases in which a resumed loader does not give what the unbroken one does."""
    cases = itertools.product(orders, owns, sizes, places, epochs)
    return [case for case in cases if case not in refused(workers) and not same(workers, *case)]


def refused(workers):
    """The cases of streams that do not exist, having no length by which the last batch is known, or are refused at save."""
    return [
        (order, own, size, place, epochs)
        for order in ("a stream", "a stream's")
        for own, size, place, epochs in itertools.product((False, True), SIZES, PLACES, (0, 1))
        if place == "last" or (workers == "persistent" and (epochs or place == "between"))
    ]


def same(workers, order, own, size, place, epochs):
    expected, resumed = broken_off(lambda: loader(order, own, workers, *size), epochs, PLACES[place])
    return resumed == expected


@pytest.mark.slow
def test_every_order_goes_on_to_the_bit():
    for own, size in ((False, SIZES[1]), (True, SIZES[2])):
        places = ("middle", "last", "between")
        assert differing(ORDERS, "no worker", owns=(own,), sizes=(size,), places=places, epochs=(1,)) == []


@pytest.mark.parametrize("workers", [pytest.param("2 workers", marks=pytest.mark.slow), "persistent"])
def test_orders_that_workers_read_go_on_to_the_bit(workers):
    for order, place in (("shuffle", "middle"), ("nested", "last")):
        assert differing([order], workers, owns=(True,), sizes=SIZES[2:], places=(place,), epochs=(1,)) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_goes_on_to_the_bit_from_every_place(order, workers):
    assert differing([order], workers) == []


def twice(loader, batches=2):
    """An epoch of `loader`, and `batches` of the next."""
    for _ in loader:
        torch.rand(3)
    running = iter(loader)
    for _ in range(batches):
        next(running)
        torch.rand(3)
    return running


class Lazy(Sampler):
    """Draws an index at a time, from torch's global generator or from its own one."""

    def __init__(self, own=None):
        self.own = own

    def __len__(self):
        return SIZE

    def __iter__(self):
        return (int(torch.randint(SIZE, (), generator=self.own)) for _ in range(SIZE))


class Counting(Sampler):
    """Shuffles by a count of its rounds, which no state has."""

    def __init__(self):
        self.rounds = 0

    def __len__(self):
        return SIZE

    def __iter__(self):
        self.rounds += 1
        return iter(torch.randperm(SIZE, generator=generator(self.rounds)).tolist())


class Buffer(Stream):
    """A stream that draws from the generator that dropout draws from."""

    def __iter__(self):
        return ((torch.randint(SIZE, ()),) for _ in range(SIZE))


REFUSED = {
    "an index at a time": (lambda: DataLoader(data, 4, sampler=Lazy()), "torch's global generator, which others drew"),
    "a stream that shuffles": (lambda: DataLoader(Buffer(), 4), "torch's global generator, which others drew"),
    "a count": (lambda: DataLoader(data, 4, sampler=Counting()), "Counting.rounds changed as the sampler was iterated"),
    "workers that keep a stream": (
        lambda: DataLoader(Stream(), 4, num_workers=1, persistent_workers=True),
        "keeps the state of an IterableDataset in workers",
    ),
    "any order": (lambda: DataLoader(data, 4, num_workers=2, in_order=False), "in_order=False yields batches"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_made_again_is_refused_at_save_with_the_reason(kind, tmp_path):
    make, reason = REFUSED[kind]
    booster = Booster("cpu", "fp32")
    model = torch.nn.Linear(1, 1)
    model, optimizer, _, boosted, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), None, make())
    running = twice(boosted)
    with pytest.raises(RuntimeError, match=f"position of this DataLoader cannot be kept: .*{reason}"):
        booster.save(tmp_path, model, optimizer, None, boosted)
    assert list(tmp_path.iterdir()) == []
    assert len(list(running)) >= 4, "the run goes on"
    booster.save(tmp_path, model, optimizer)


def test_a_generator_that_others_draw_from_is_refused_only_where_the_order_is_drawn_meanwhile():
    shared = generator()
    samplers = {True: Lazy(shared), False: RandomSampler(data, generator=shared)}
    for lazy, sampler in samplers.items():
        wrapper = DataLoaderWrapper(DataLoader(data, 4, sampler=sampler), "cpu")
        running = iter(wrapper)
        next(running)
        wrapper.state_dict()  # nothing else has drawn
        torch.rand(2, generator=shared)
        next(running)
        if lazy:
            with pytest.raises(RuntimeError, match="from batch_sampler.sampler.own and sampler.own"):
                wrapper.state_dict()
        else:
            assert wrapper.state_dict()["batches"] == 2


def test_an_order_drawn_before_others_draw_from_its_generator_goes_on_to_the_bit():
    def resumed_and_unbroken(make):
        unbroken, shared = make()
        running = iter(unbroken)
        next(running)
        torch.rand(2, generator=shared)
        next(running)
        state = unbroken.state_dict()
        after = [str(list(running)), str(list(unbroken)), torch.rand(2, generator=shared).tolist()]
        again, shared = make()
        again.load_state_dict(state)
        return after, [str(list(again)), str(list(again)), torch.rand(2, generator=shared).tolist()]

    def made():
        shared = generator()
        return DataLoaderWrapper(DataLoader(data, 4, shuffle=True, generator=shared), "cpu"), shared

    after, again = resumed_and_unbroken(made)
    assert again == after


def test_an_iterator_made_before_the_global_generator_moved_on_is_resumed_from_both_states():
    def made():
        return DataLoaderWrapper(DataLoader(data, 4, shuffle=True), "cpu")

    torch.manual_seed(2)
    unbroken = made()
    running = iter(unbroken)
    torch.rand(7)  # the order is drawn after it, the seed of workers before
    next(running)
    state, rest = unbroken.state_dict(), str(list(running))
    again = made()
    again.load_state_dict(state)
    assert str(list(again)) == rest


def test_a_state_of_another_loader_is_refused():
    drawn, plain = (DataLoaderWrapper(DataLoader(data, 4, generator=own), "cpu") for own in (generator(), None))
    for wrapper in (drawn, plain):
        next(iter(wrapper))
    with pytest.raises(ValueError, match=r"generators.* at \['generator'\], and this DataLoader has them at no place"):
        plain.load_state_dict(drawn.state_dict())
    state = drawn.state_dict()
    wrong = {"warm": 3, "now": None, "apart": [[]], "first": {"generators": {}}, "begin": {}}
    for broken in [{key: value} for key, value in wrong.items()] + [{"begin": state["draws"]["first"], "apart": 5}]:
        with pytest.raises(ValueError, match="this is no state of a boosted dataloader"):
            drawn.load_state_dict(state | {"draws": state["draws"] | broken})
    stream, other = (DataLoaderWrapper(DataLoader(Stream(), 4, num_workers=count), "cpu") for count in (1, 2))
    next(iter(stream))
    with pytest.raises(ValueError, match="make the dataloader with num_workers=1"):
        other.load_state_dict(stream.state_dict())


def test_less_data_than_was_seen_says_so():
    wrapper = DataLoaderWrapper(DataLoader(data, 4), "cpu")
    running = iter(wrapper)
    for _ in range(4):
        next(running)
    shorter = DataLoaderWrapper(DataLoader(TensorDataset(torch.arange(8)), 4), "cpu")
    shorter.load_state_dict(wrapper.state_dict())
    with pytest.raises(RuntimeError, match="ended after 2 batches, and 4 were seen"):
        iter(shorter)


def test_a_length_that_is_too_small_loses_no_batch():
    class Longer(list):
        def __len__(self):
            return 2

    assert list(DataLoaderWrapper(Longer([1, 2, 3]), "cpu")) == [1, 2, 3]


def test_an_error_at_the_end_comes_after_the_last_batch():
    class Failing:
        def __len__(self):
            return 2

        def __iter__(self):
            yield from (1, 2)
            raise OSError("no more")

    running = iter(DataLoaderWrapper(Failing(), "cpu"))
    assert [next(running), next(running)] == [1, 2]
    with pytest.raises(OSError, match="no more"):
        next(running)
    assert list(running) == []


@pytest.mark.parametrize("part", ["begin", "first"])
def test_random_states_that_no_generator_takes_are_refused_at_load_and_change_nothing(part):
    wrapper = DataLoaderWrapper(DataLoader(data, 4, shuffle=True, generator=generator()), "cpu")
    next(iter(wrapper))
    state = wrapper.state_dict()
    states = dict.fromkeys(state["draws"]["now"], torch.zeros(3))
    state["draws"] = state["draws"] | {part: state["draws"][part] | {"generators": states}}
    own = generator()
    other = DataLoaderWrapper(DataLoader(data, 4, shuffle=True, generator=own), "cpu")
    before, own_before = torch.get_rng_state(), own.get_state()
    with pytest.raises((RuntimeError, TypeError)):
        other.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(own.get_state(), own_before)
