"""Bytes a parameter on each of several gloo ranks, at rest and at the peak of a step, with and without gradient release.

`python -m benchmarks.memory --ranks 2,4 [--only NAME,...]` prints them, for the model, batch and optimizer of `mlp.py`.

Weights, masters, gradients and states: what the fullest rank holds after a step, counted by `Booster.memory`. Peak: the highest
point of the third step, with all that the rank has, DistributedDataParallel's buckets too; from the allocator's events.
"release" is `release_gradients="exact"`, "clip" with clip_grad_norm, which takes two passes. Buckets are of 2 MiB, since the
model has 10 to 20 MiB, which one bucket of the default 25 would hold.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.mlp import BATCH, MLP, adamw, data
from benchmarks.scaling.bytes import Counting, high_level
from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin

HEADER = f"| ranks | | weights | masters | gradients | states | held | peak |\n|{'---|' * 8}"
BUCKET = 2
PRECISIONS: dict[str, tuple[Any, str | None]] = {
    "bf16": (lambda: "bf16", None),
    "bf16, 8bit": (lambda: "bf16", "8bit"),
    "bf16_naive, split24, 8bit": (lambda: BF16NaiveMixedPrecision(master_weights="split24"), "8bit"),
    "fp16_naive, split24, 8bit": (lambda: FP16NaiveMixedPrecision(master_weights="split24"), "8bit"),
}
TP_PLAN = {f"layers.{index}": ("colwise", "rowwise")[index % 2] for index in range(4)}
PLUGINS: dict[str, Callable[[int], Plugin]] = {
    "DDP": lambda ranks: TorchDDPPlugin(bucket_cap_mb=BUCKET),
    "ZeRO-1": lambda ranks: LowLevelZeroPlugin(stage=1, bucket_cap_mb=BUCKET),
    "ZeRO-2": lambda ranks: LowLevelZeroPlugin(stage=2, bucket_cap_mb=BUCKET),
    "FSDP": lambda ranks: TorchFSDPPlugin(wrap_policy=torch.nn.Linear),
    "TP": lambda ranks: HybridParallelPlugin(ranks, 1, tp_plan=TP_PLAN),
}
RELEASES: dict[str, dict[str, Any]] = {
    "": {},
    ", release": {"release_gradients": "exact"},
    ", clip": {"clip_grad_norm": 1.0},
    ", release, clip": {"release_gradients": "exact", "clip_grad_norm": 1.0},
}


def print_ranks(ranks: int, parts: list[str]) -> None:
    """Start so many ranks, the first of which prints the cases whose names contain one of `parts`."""
    with tempfile.TemporaryDirectory() as folder:
        spawned = (ranks, f"{folder}/meeting", parts)
        torch.multiprocessing.spawn(on_rank, spawned, nprocs=ranks)  # type: ignore[attr-defined]


def on_rank(rank: int, world_size: int, meeting: str, parts: list[str]) -> None:
    """Measure this rank in every case; rank 0 prints the fullest."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    for plugin in PLUGINS:
        for name in PRECISIONS:
            for release in RELEASES:
                if not any(part in f"{plugin} {name}{release}" for part in parts):
                    continue
                found = on_this_rank(plugin, name, RELEASES[release])
                dist.all_reduce(found, dist.ReduceOp.MAX)
                if rank == 0:
                    *held, peak = found.tolist()
                    columns = " | ".join(f"{each:.2f}" for each in [*held, sum(held), peak])
                    print(f"| {plugin} x {world_size} | {name}{release} | {columns} |", flush=True)
    dist.barrier()
    gc.collect()  # of DistributedDataParallel: its reducer meeting the end of gloo's threads aborts
    dist.destroy_process_group()


def on_this_rank(plugin: str, name: str, options: dict[str, Any]) -> torch.Tensor:
    """Bytes of weights, masters, gradients and states, and at the peak of a step, for each parameter of the whole model."""
    precision, states = PRECISIONS[name]
    kept: list[Any] = []
    buffers: list[torch.UntypedStorage] = []  # of DDP, which no Python object holds

    def step() -> None:
        booster, model, optimizer, x = kept
        booster.backward(model(x).pow(2).mean(), optimizer)
        optimizer.step()

    def begin() -> None:
        booster = Booster("cpu", precision(), PLUGINS[plugin](dist.get_world_size()), states=states, **options)
        net = MLP()
        counts.append(sum(param.numel() for param in net.parameters()))
        model, optimizer, *_ = booster.boost(net, adamw(net.parameters()))
        kept.extend([booster, model, optimizer, data("cpu", BATCH)])
        step()
        optimizer.zero_grad()
        with Counting(frees_gradients=True) as counting:
            step()
        if "release_gradients" not in options:  # otherwise nobody keeps them
            buffers.extend(counting.buffers)

    counts: list[int] = []
    gc.collect()
    _, held = high_level(begin, buffers)
    booster, model, optimizer, _ = kept
    found = booster.memory(model, optimizer)
    _, freed = high_level(optimizer.zero_grad, buffers)
    highest, _ = high_level(step, buffers)
    sizes = [found.weights, found.masters, found.gradients, found.states, held + freed + highest]
    return torch.tensor(sizes, dtype=torch.float64) / counts[0]
