"""Parallel training on two gloo ranks beside raw torch with fused kernels; see benchmarks/results for a table.

    python -m benchmarks.parallel [--only time,phases,...] [--rounds 9] [--cases DDP,FSDP] [--largest 16000]

Parts: time, phases, micro_batches, messages, memory, growth, bubble.
        [--precisions fp32,bf16]

Time is CPU time summed over both ranks, one thread each, in rounds shuffled alike on both; a ratio is the median over rounds of
that within a round, and "raw again" is the A/A control. What is not fp32 is autocast in raw torch, or `MixedPrecisionPolicy`,
and the precision of that name in booster. Waits of a GPU cannot be measured on a CPU: what would wait is counted, on CPU
tensors that take the path of a GPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings

import torch
import torch.distributed as dist

from benchmarks.parallel.bubble import bubbles
from benchmarks.parallel.cost import memory, messages, micro_batches, phases, times
from benchmarks.parallel.growth import growth
from benchmarks.timing import describe_machine

PARTS = ("time", "phases", "micro_batches", "messages", "memory", "growth", "bubble")


def on_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Run the parts on this rank of two; rank 0 prints."""
    warnings.filterwarnings("ignore")  # of raw torch, about its own
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(f"{describe_machine()}; 2 gloo ranks; load {os.getloadavg()[0]:.1f}")
    if "time" in options.only:
        for precision in options.precisions:
            times(say, options.rounds, precision, options.cases)
    for precision in options.precisions:
        if "phases" in options.only:
            phases(say, 2 * options.rounds, precision, options.cases)
        if "micro_batches" in options.only:
            micro_batches(say, options.rounds, precision)
    if "messages" in options.only:
        for precision in options.precisions:
            messages(say, precision, options.cases)
    if "memory" in options.only:
        memory(say, options.precisions, options.cases)
    if "growth" in options.only:
        growth(say, options.largest, options.cases)
    if "bubble" in options.only:
        bubbles(say, 3)
    say(f"\nload {os.getloadavg()[0]:.1f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--cases", type=lambda text: set(text.split(",")), default=set())
    parser.add_argument("--precisions", type=lambda text: text.split(","), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--largest", type=int, default=16000)
    options = parser.parse_args()
    unknown = sorted(set(options.only) - set(PARTS))
    if unknown:
        parser.error(f"--only {','.join(unknown)} is unknown; choose of {','.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (folder, options), nprocs=2)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
