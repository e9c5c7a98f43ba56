"""Time of a whole step with gradient release, against the same step without it.

    python -m benchmarks.release [--rounds 15] [--ranks 2] [--only NAME,...]

5 x (Linear(1024, 1024), GELU), batch 512, AdamW, one core a rank: forward, backward and step. CPU time of rank 0, in which
waiting for others hardly counts, shuffled within one run; ratios to the same plugin and clip without release, of which "again"
is a second copy that shows what chance does. With a clip "exact" goes through the graph twice. --ranks 1: no plugin.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.mlp import MLP, adamw, data
from benchmarks.timing import describe_machine, interleave, ratio
from booster import Booster
from booster.plugin import LowLevelZeroPlugin, Plugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

BATCH, BUCKET = 512, 4
PLUGINS: dict[str, Callable[[], Plugin]] = {
    "single": SingleDevice,
    "DDP": lambda: TorchDDPPlugin(bucket_cap_mb=BUCKET),
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1, bucket_cap_mb=BUCKET),
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2, bucket_cap_mb=BUCKET),
    "FSDP": lambda: TorchFSDPPlugin(wrap_policy=torch.nn.Linear),
}
WAYS: dict[str, tuple[Any, float]] = {
    "none": (False, 0.0),
    "none again": (False, 0.0),
    "exact": ("exact", 0.0),
    "none, clip": (False, 1.0),
    "none again, clip": (False, 1.0),
    "exact, clip": ("exact", 1.0),
    "previous_norm, clip": ("previous_norm", 1.0),
}
HEADER = "| plugin | release | ms | / none |\n|---|---|---|---|"


def step_of(plugin: str, way: str) -> Callable[[], object]:
    release, clip = WAYS[way]
    booster = Booster("cpu", "bf16_naive", PLUGINS[plugin](), release_gradients=release, clip_grad_norm=clip)
    net = MLP(gelu=True)
    model, optimizer, *_ = booster.boost(net, adamw(net.parameters()))
    x = data("cpu", BATCH)

    def step() -> None:
        booster.backward(model(x).pow(2).mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def rows(plugin: str, rounds: int) -> list[str]:
    seconds = interleave({way: step_of(plugin, way) for way in WAYS}, rounds)
    found = []
    for way, (_, clip) in WAYS.items():
        base = "none, clip" if clip else "none"
        found.append(
            f"| {plugin} | {way} | {statistics.median(seconds[way]) * 1e3:.1f} | {ratio(seconds, way, base):.2f} |"
        )
    return found


def on_rank(rank: int, world_size: int, meeting: str, rounds: int, parts: list[str]) -> None:
    """Time all cases together with the other ranks; rank 0 prints."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    for plugin in PLUGINS:
        if plugin == "single" or not any(part in plugin for part in parts):
            continue
        found = rows(plugin, rounds)
        if rank == 0:
            print("\n".join(found), flush=True)
    dist.barrier()
    gc.collect()  # of DistributedDataParallel: its reducer meeting the end of gloo's threads aborts
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="comma-separated parts of names of plugins")
    options = parser.parse_args()
    print(f"{describe_machine()}; {options.ranks} ranks\n\n{HEADER}")
    if options.ranks == 1:
        torch.set_num_threads(1)
        print("\n".join(rows("single", options.rounds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        spawned = (options.ranks, f"{folder}/meeting", options.rounds, options.only.split(","))
        torch.multiprocessing.spawn(on_rank, spawned, nprocs=options.ranks)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
