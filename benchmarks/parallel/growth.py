"""How the cost of what is done per tensor grows with their number, beside raw torch."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from booster import Booster
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

COUNTS = (10, 100, 1000, 4000, 16000)
MOST_RAW_FSDP = 1000  # beyond, raw torch takes minutes
SIDE = 8
ELEMENTS = SIDE * SIDE
TP_PLAN = {"pairs.*.0": "colwise", "pairs.*.1": "rowwise"}
Say = Callable[[str], None]


class Many(nn.Module):
    """So many small vectors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.zeros(ELEMENTS) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.stack(list(self.vectors)) * x).sum()

    def input(self) -> torch.Tensor:
        return torch.ones(ELEMENTS)


class Pairs(nn.Module):
    """So many small matrices, two after another, as tensor parallelism divides them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        made = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(count)]
        self.pairs = nn.ModuleList(nn.Sequential(*pair) for pair in zip(made[::2], made[1::2], strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([pair(x) for pair in self.pairs]).sum()

    def input(self) -> torch.Tensor:
        return torch.ones(1, SIDE)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def raw_single(net: nn.Module) -> tuple[Any, Any]:
    return net, adamw(net.parameters())


def raw_ddp(net: nn.Module) -> tuple[Any, Any]:
    return DistributedDataParallel(net), adamw(net.parameters())


def raw_zero(net: nn.Module) -> tuple[Any, Any]:
    return DistributedDataParallel(net), ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, lr=1e-4, fused=True
    )


def raw_fsdp(net: nn.Module) -> tuple[Any, Any]:
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net, adamw(net.parameters())


def raw_tp(net: Any) -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for pair in net.pairs:
        parallelize_module(pair, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return net, adamw(net.parameters())


def tensor_parallel() -> HybridParallelPlugin:
    return HybridParallelPlugin(2, 1, tp_plan=TP_PLAN)


ROWS: dict[str, tuple[Callable[[nn.Module], tuple[Any, Any]], Callable[[], Any], str]] = {
    "single fp32": (raw_single, SingleDevice, "fp32"),
    "single bf16_naive": (raw_single, SingleDevice, "bf16_naive"),
    "DDP fp32": (raw_ddp, TorchDDPPlugin, "fp32"),
    "ZeRO-1 fp32": (raw_zero, LowLevelZeroPlugin, "fp32"),
    "ZeRO-2 fp32": (raw_zero, lambda: LowLevelZeroPlugin(stage=2), "fp32"),
    "ZeRO-2 bf16_naive": (raw_zero, lambda: LowLevelZeroPlugin(stage=2), "bf16_naive"),
    "FSDP fp32": (raw_fsdp, TorchFSDPPlugin, "fp32"),
    "FSDP bf16_naive": (raw_fsdp, TorchFSDPPlugin, "bf16_naive"),
    "TP fp32": (raw_tp, tensor_parallel, "fp32"),
    "TP bf16_naive": (raw_tp, tensor_parallel, "bf16_naive"),
}
TASKS = ("boost", "step", "zero_grad", "state_dict", "load", "state[p]")


def measured(run: Callable[[], object], repeats: int = 3) -> float:
    """Milliseconds of CPU time, the median of `repeats`."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        found.append((time.process_time() - start) * 1e3)
    return statistics.median(found)


def of_raw(wrap: Callable[[nn.Module], tuple[Any, Any]], net: Many | Pairs) -> dict[str, float]:
    made: list[tuple[Any, Any]] = []
    x = net.input()
    found = {"boost": measured(lambda: made.append(wrap(net)), 1)}
    model, optimizer = made[0]

    def passes() -> None:
        model(x).backward()

    return found | tasks(passes, optimizer, isinstance(optimizer, ZeroRedundancyOptimizer))


def of_booster(plugin: Callable[[], Any], precision: str, net: Many | Pairs) -> dict[str, float]:
    booster, made, x = Booster("cpu", precision, plugin()), [], net.input()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    found = {"boost": measured(lambda: made.append(booster.boost(net, optimizer)), 1)}
    model, boosted, *_ = made[0]

    def passes() -> None:
        booster.backward(model(x).float(), boosted)

    return found | tasks(passes, boosted, False)


def tasks(passes: Callable[[], None], optimizer: Any, gathers: bool) -> dict[str, float]:
    """Milliseconds of each task on a warm optimizer. gathers: its state must be brought together first, on one rank; what it
    takes to bring it to the other, too, so that both can load it, is not measured.

    state[p]: the state of every parameter that has any here, one after another.
    """
    steps, zeros = [], []
    for _ in range(4):
        passes()
        steps.append(measured(optimizer.step, 1))
        zeros.append(measured(optimizer.zero_grad, 1))
    states: list[Any] = []

    def state_dict() -> None:
        if gathers:
            optimizer.consolidate_state_dict()
            if dist.get_rank():
                return
        states.append(optimizer.state_dict())

    found = {"step": min(steps[1:]), "zero_grad": min(zeros[1:]), "state_dict": measured(state_dict, 2)}
    for other in range(1, dist.get_world_size()) if gathers else ():
        optimizer.consolidate_state_dict(to=other)
        if dist.get_rank() == other:
            states.append(optimizer.state_dict())
    plain = {key: value for key, value in states[-1].items() if key != "booster"}  # as torch's: without masters
    found["load"] = measured(lambda: optimizer.load_state_dict(plain), 2)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found["state[p]"] = measured(lambda: [optimizer.state.get(param) for param in params], 2)
    return found


def growth(say: Say, most: int, only: set[str]) -> None:
    """only: rows of these parallelisms, or all."""
    counts = [count for count in COUNTS if count <= most]
    say(
        f"\nCPU ms on rank 0 for n tensors of {ELEMENTS} elements, booster / raw torch; load: of a state without masters\n"
    )
    say(f"| | | {' | '.join(map(str, counts))} |\n|---|---|{'---|' * len(counts)}")
    for name, (wrap, plugin, precision) in ROWS.items():
        if only and name.rpartition(" ")[0] not in only:
            continue
        kind = Pairs if name.startswith("TP") else Many
        rows: dict[str, list[str]] = {task: [] for task in TASKS}
        for count in counts:
            alone = name.startswith("FSDP") and count > MOST_RAW_FSDP
            raw = {} if alone else of_raw(wrap, kind(count))
            gc.collect()
            ours = of_booster(plugin, precision, kind(count))
            gc.collect()
            for task in TASKS:
                rows[task].append(f"{ours[task]:.2f} / {raw[task]:.2f}" if task in raw else f"{ours[task]:.2f} / -")
        for task, cells in rows.items():
            say(f"| {name} | {task} | {' | '.join(cells)} |")
