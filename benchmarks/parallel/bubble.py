"""The share of a pipelined step in which a rank has nothing to do, with blocks that sleep, so that cores do not matter."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from booster import Booster
from booster.plugin import HybridParallelPlugin
from booster.plugin.pipeline.schedule_runner import STYLES, stage_ranks

FORWARD, BACKWARD = 0.02, 0.04  # seconds of a rank's share of one micro-batch
WIDTH, RANKS = 8, 2
Say = Callable[[str], None]


class _Sleep(torch.autograd.Function):
    """Gives back what it got, and sleeps for a while in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.backward)
        return grad, None, None


class Sleeper(nn.Module):
    """One of `count` blocks that a rank has."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.share = 1.0 / count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Of backward one half is for the input and one for the weight, which "zbv" computes at different times.
        half = BACKWARD * self.share / 2
        return _Sleep.apply(x, FORWARD * self.share, half) * _Sleep.apply(self.weight, 0.0, half)  # type: ignore[no-any-return]


class Chain(nn.Module):
    def __init__(self, blocks: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sleeper(count) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def raw(style: str, micro_batches: int) -> Callable[[], object]:
    chunks = 2 if style in ("interleaved", "zbv") else 1
    rank, x = dist.get_rank(), torch.ones(micro_batches, WIDTH, requires_grad=True)
    own = [index for index, owner in enumerate(stage_ranks(style, RANKS, chunks)) if owner == rank]
    stages = [PipelineStage(Chain(1, chunks), index, RANKS * chunks, torch.device("cpu")) for index in own]
    schedule = STYLES[style](stages if chunks > 1 else stages[0], micro_batches, loss_fn=loss_of)
    last = RANKS * chunks - 1 in own
    args = [x] if 0 in own else []
    return lambda: schedule.step(*args, **({"target": x.detach()} if last else {}), return_outputs=False)


def booster(style: str, micro_batches: int) -> Callable[[], object]:
    chunks = 2 if style in ("interleaved", "zbv") else 1
    options = {"num_model_chunks": 2} if style == "interleaved" else {}
    plugin = HybridParallelPlugin(1, RANKS, pp_style=style, num_microbatches=micro_batches, **options)  # type: ignore[arg-type]
    made, net = Booster("cpu", "fp32", plugin), Chain(RANKS * chunks, chunks)
    x = torch.ones(micro_batches, WIDTH, requires_grad=True)  # so that the first stage has as much to do as others
    model, optimizer, criterion, *_ = made.boost(net, torch.optim.SGD(net.parameters(), lr=0.0), loss_of)
    return lambda: made.execute_pipeline(iter([(x, x.detach())]), model, criterion, optimizer, return_loss=False)


def share_idle(run: Callable[[], object], micro_batches: int, rounds: int) -> float:
    found = []
    for index in range(rounds + 2):
        dist.barrier()
        start = time.perf_counter()
        run()
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if index >= 2:
            found.append(1 - micro_batches * (FORWARD + BACKWARD) / float(taken))
    return statistics.median(found)


def bubbles(say: Say, rounds: int) -> None:
    say(f"\nShare of a step in which a rank waits, {RANKS} stages of sleeping blocks: booster (raw torch)\n")
    say("| micro-batches | " + " | ".join(STYLES) + " |\n|---|" + "---|" * len(STYLES))
    for micro_batches in (4, 8):
        cells = []
        for style in STYLES:
            ours, theirs = (share_idle(make(style, micro_batches), micro_batches, rounds) for make in (booster, raw))
            cells.append(f"{ours:.3f} ({theirs:.3f})")
        say(f"| {micro_batches} | {' | '.join(cells)} |")
