"""What was sent of gradients is let go of once it has arrived, even while who waited for it is still held."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster.plugin.ddp.averaged_gradients import ExchangedSum
from booster.plugin.zero import SliceReducer
from booster.shards.zero_buckets import ModuleBuckets

SIZE = 2**16  # elements of a bucket, of which each of two ranks keeps half


def buckets_seen():
    """How many tensors see memory as large as a whole float32 bucket."""
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.is_cpu]
    return sum(each.untyped_storage().nbytes() >= 4 * SIZE for each in tensors)


def exchanged():
    waiting = ExchangedSum(torch.ones(SIZE), [SIZE // 2] * 2, dist.group.WORLD)
    return waiting, waiting.wait


def sliced(fp8=False):
    param = nn.Parameter(torch.zeros(SIZE))
    reducer = SliceReducer(ModuleBuckets([param], group=dist.group.WORLD, bucket_bytes=4 * SIZE), fp8=fp8)
    reducer.buckets()
    param.grad = torch.ones(SIZE)
    return reducer, reducer.send(0, [param])


def sliced_in_fp8():
    return sliced(fp8=True)


@torch.no_grad()
def left_behind(rank, world_size, begin):
    """Buckets seen while one is under way, and once it has arrived; and how many elements came, of which value."""
    before = buckets_seen()
    held, sync = begin()
    under_way = buckets_seen() - before
    total = sync()
    end = time.monotonic() + 600
    while buckets_seen() > before and time.monotonic() < end:  # gloo's threads let go when they get to it
        time.sleep(0.01)
    assert held is not None
    return under_way, buckets_seen() - before, len(total), float(total.mean())


# In float8 the bucket itself is not sent, but a quarter as many bytes.
@pytest.mark.parametrize(
    ("begin", "sent", "value"), [(exchanged, True, 2.0), (sliced, True, 1.0), (sliced_in_fp8, False, 1.0)]
)
def test_nothing_that_was_sent_is_held_once_it_has_arrived(ranks2, begin, sent, value):
    for under_way, after, length, mean in ranks2(left_behind, begin):
        assert (under_way > 0, after) == (sent, 0)
        assert (length, mean) == (SIZE // 2, value)
