"""Positions of dataloaders in checkpoints that were changed and sealed again: refused at the load, not at the next batch."""

import random

import numpy
import pytest
import torch
from resealed import change
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from booster import Booster
from booster.checkpoint import CheckpointError

ROWS = torch.arange(20.0)[:, None]


class Noisy(TensorDataset):
    """Rows that draw from a generator of their own."""

    def __init__(self, own):
        super().__init__(ROWS)
        self.own = own

    def __getitem__(self, index):
        self.own.random()
        return super().__getitem__(index)


def plain(**options):
    data = TensorDataset(ROWS)
    return DataLoader(data, 2, **{key: value(data) if callable(value) else value for key, value in options.items()})


LOADERS = {
    "plain": lambda: plain(shuffle=True, generator=torch.Generator().manual_seed(1)),
    "dealt": lambda: plain(sampler=lambda data: DistributedSampler(data, 1, 0)),
    "prepared": lambda: Booster("cpu").prepare_dataloader(TensorDataset(ROWS), batch_size=2, shuffle=True),
    "python": lambda: DataLoader(Noisy(random.Random(3)), 2),
    "numpy": lambda: DataLoader(Noisy(numpy.random.default_rng(3)), 2),
    "old numpy": lambda: DataLoader(Noisy(numpy.random.RandomState(3)), 2),
    "philox": lambda: DataLoader(Noisy(numpy.random.Generator(numpy.random.Philox(2**64 - 3))), 2),
}


def boosted(kind):
    booster, model = Booster("cpu"), nn.Linear(1, 1)
    model, optimizer, _, loader, _ = booster.boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dataloader=LOADERS[kind]()
    )
    return booster, model, optimizer, loader


def saved(kind, folder):
    """A checkpoint in the middle of an epoch, and the next batch of its run."""
    booster, model, optimizer, loader = boosted(kind)
    running = iter(loader)
    next(running), next(running)
    return booster.save(folder, model, optimizer, dataloader=loader, step=1), next(running)


def position(**changes):
    return lambda tree: tree["dataloaders"]["0"].update(changes)


def of_generators(**changes):
    """Change what is said of the loader's own generators; "tensor NAME" refers to one."""

    def edit(tree):
        refer = {
            key: {"__booster__": "tensor", "name": value[7:]} if str(value).startswith("tensor ") else value
            for key, value in changes.items()
        }
        for own in tree["loaders"]:
            for each in ("begin", "first"):
                states = own["0"]["draws"][each]["generators"]
                for place, state in states.items():
                    states[place] = refer[""] if "" in refer else replaced(state, refer)

    return edit


def replaced(state, changes):
    if not isinstance(state, dict) or "__booster__" in state:
        return state
    return {key: changes.get(key, replaced(value, changes)) for key, value in state.items()}


WRONG = {
    "an epoch beyond all seeds": (["plain", "dealt", "prepared"], position(epoch=2**64), "at most"),
    "batches beyond all": (["plain", "prepared"], position(batches=2**200, samples=2**201), "at most"),
    "more samples than there are": (["prepared"], position(batches=11, samples=22), "22 samples .* has 20"),
    "a billion samples": (["prepared"], position(samples=10**9), "1000000000 samples .* has 20"),
    "bytes of torch that are cut": (["plain"], of_generators(**{"": "tensor random/0/python/words"}), "torch's bytes"),
    "words of python that are cut": (["python"], of_generators(words="tensor models/0/bias"), "words"),
    "a normal number in words": (["python"], of_generators(gauss="x"), "next normal number"),
    "words of numpy that are cut": (["old numpy"], of_generators(key="tensor models/0/bias"), "."),
}


@pytest.mark.parametrize(("wrong", "kind"), [(wrong, kind) for wrong in WRONG for kind in WRONG[wrong][0]])
def test_a_position_that_no_loader_was_in_is_refused_at_the_load_and_nothing_is_touched(wrong, kind, tmp_path):
    folder, _ = saved(kind, tmp_path)
    change(folder, lambda content, tree: WRONG[wrong][1](tree))
    booster, model, optimizer, loader = boosted(kind)
    before, drawn = model.weight.clone(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=WRONG[wrong][2]):
        booster.load(folder, model, optimizer, dataloader=loader)
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (loader.epoch, len(list(loader))) == (0, 10)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_position_as_it_was_saved_goes_on_to_the_same_batch(kind, tmp_path):
    folder, following = saved(kind, tmp_path)
    change(folder, lambda content, tree: None)
    booster, model, optimizer, loader = boosted(kind)
    booster.load(folder, model, optimizer, dataloader=loader)
    assert str(next(iter(loader))) == str(following)
