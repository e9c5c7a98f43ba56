"""Loaders in real ranks: what the workers of two ranks draw, and what a shuffled epoch holds."""

import random

import pytest
import torch

from booster.data import DataLoaderWrapper, check_sharded, prepare_dataloader


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
