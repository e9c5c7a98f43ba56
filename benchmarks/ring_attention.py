"""CPU time of ring attention, summed over ranks, beside that of one process over the same tokens, forward and backward.

    booster run --nproc_per_node 2 -m benchmarks.ring_attention [TOKENS] [ROUNDS]

One process runs `F.scaled_dot_product_attention` on the whole sequence, twice in every round, so that the ratio of its two
runs says how far figures of this machine can be trusted. Process time, not the clock; the others wait in a barrier.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

from booster.plugin.sequence_parallel.all_to_all import Attention
from booster.plugin.sequence_parallel.ring import attend_in_ring
from booster.plugin.sequence_parallel.sequence_cut import SequenceCut

HEADS, FEATURES = 4, 64


def whole(tensors):
    query, key, value = (x.detach().requires_grad_() for x in tensors)
    F.scaled_dot_product_attention(query, key, value, is_causal=True).backward(torch.ones_like(query))


def in_ring(tensors, cut):
    query, key, value = (x.detach().requires_grad_() for x in tensors)
    call = Attention(0.0, True, None, cut, dist.group.WORLD)
    attend_in_ring(query, key, value, None, call).backward(torch.ones_like(query))


def measured(run, *args):
    """Seconds of this process."""
    begin = time.process_time()
    run(*args)
    return time.process_time() - begin


def rounds(tokens, count):
    """Ratios of each round: ring to one process, and one process to itself. On every rank the same."""
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, HEADS, tokens, FEATURES, generator=draw) for _ in range(3)]
    cut = SequenceCut(1, tokens, size, rank, zigzag=True)
    own = [cut.cut(x, 2, 0) for x in tensors]
    in_ring(own, cut)  # connects
    found = []
    for _ in range(count):
        seconds = torch.zeros(3, dtype=torch.float64)
        if rank == 0:
            seconds[0] = measured(whole, tensors)
        dist.barrier()
        seconds[1] = measured(in_ring, own, cut)
        dist.barrier()
        if rank == 0:
            seconds[2] = measured(whole, tensors)
        dist.all_reduce(seconds)
        found.append((float(seconds[1] * 2 / (seconds[0] + seconds[2])), float(seconds[2] / seconds[0])))
    return found


def main(tokens=8192, count=5):
    dist.init_process_group("gloo")
    found = rounds(int(tokens), int(count))
    if dist.get_rank() == 0:
        ring, again = (statistics.median(each) for each in zip(*found, strict=True))
        print(
            f"{tokens} tokens, {dist.get_world_size()} ranks: ring {ring:.3f} of one process, which was {again:.3f} of itself"
        )
        print([tuple(round(x, 3) for x in each) for each in found])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
