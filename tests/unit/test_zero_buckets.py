"""Flat stretches of parameters, and the slice of their gradients that a rank keeps."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from booster.shards.zero_buckets import FlatParameters


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def bucket_with_gradient(value):
    bucket = FlatParameters([torch.zeros(5), torch.zeros(3)], world_size=1, rank=0)
    bucket.add_gradient(torch.full((bucket.size,), value), {0, 1})
    return bucket


def test_a_gradient_that_is_dropped_is_not_added_to_later_ones():
    bucket = bucket_with_gradient(2.0)
    bucket.clear_gradient(0)
    assert bucket.grad_shard(0) is None
    bucket.add_gradient(torch.full((bucket.size,), 3.0), {0, 1})
    assert bucket.grad_shard(0).tolist() == [3.0] * 5
    assert bucket.grad_shard(1).tolist() == [5.0] * 3


def test_a_gradient_that_is_dropped_and_started_again_is_zero():
    bucket = bucket_with_gradient(2.0)
    bucket.clear_gradient(0)
    bucket.start_gradient(0)
    assert bucket.grad_shard(0).tolist() == [0.0] * 5


def test_dropping_all_gradients_frees_their_memory_and_writes_nothing():
    bucket = bucket_with_gradient(2.0)
    with Calls() as calls:
        for index in range(2):
            bucket.clear_gradient(index)
    assert (calls.names, bucket.gradient) == ([], None)


def test_gaps_between_parameters_are_cleared_and_nothing_else():
    bucket = FlatParameters([torch.zeros(5), torch.zeros(64), torch.zeros(3)], world_size=3, rank=0)
    values = torch.ones(bucket.size)
    places = bucket.zero_gaps(values)
    assert [place.sum().item() for place in places] == [5.0, 64.0, 3.0]
    assert all(place.data_ptr() == bucket.view(values, index).data_ptr() for index, place in enumerate(places))
    assert values.sum().item() == 72.0


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_parts_of_a_gradient_lie_where_those_of_parameters_do(rank):
    bucket = FlatParameters([torch.zeros(5), torch.zeros(70, 3), torch.zeros(64), torch.zeros(3)], 3, rank)
    whole = torch.arange(float(bucket.size))
    bucket.add_gradient(bucket.slice_of(whole, rank).clone(), set(range(4)))
    for index in range(4):
        start, stop = bucket.overlap(index, rank)
        assert torch.equal(bucket.grad_shard(index), bucket.view(whole, index)[start:stop])
    bucket.clear_gradients()
    bucket.add_gradient(bucket.slice_of(-whole, rank).clone(), {1})  # of other memory
    start, stop = bucket.overlap(1, rank)
    assert torch.equal(bucket.grad_shard(1), bucket.view(-whole, 1)[start:stop])
    assert bucket.grad_shard(0) is None


def test_views_are_made_of_parts_that_a_rank_has_and_of_nothing_else():
    bucket = FlatParameters([torch.zeros(64) for _ in range(8)], world_size=2, rank=1)
    bucket.add_gradient(torch.ones(256), set(range(8)))
    bucket.grad_shard(0)
    views = [each for each in gc.get_objects() if type(each) is torch.Tensor and each._base is bucket.gradient]
    assert sorted(view.numel() for view in views if view.numel()) == [64] * 4
    assert list(bucket.grad_shards()) == [4, 5, 6, 7]
    bucket.clear_gradient(5)
    assert list(bucket.grad_shards()) == [4, 6, 7]
