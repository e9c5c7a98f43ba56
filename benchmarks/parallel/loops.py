"""Training loops on two ranks: in raw torch, as somebody writes them who knows it and wants fused kernels, and with booster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scaling.job import TP_PLAN, Decoder, loss_of
from booster import Booster
from booster.memory.decoder import Model
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

GPT = Model(hidden=320, layers=6, heads=4, ffn=1280, vocabulary=2048, sequence=64, gated=False)
TINY = Model(hidden=64, layers=12, heads=4, ffn=128, vocabulary=256, sequence=16, gated=False)
PLAN = {name: style for name, style in TP_PLAN.items() if "gate" not in name}
MICRO_BATCHES = 4
MAX_NORM = 1.0


@dataclass
class Loop:
    """One way to train. `passes` is forward and backward."""

    model: nn.Module
    optimizer: Any
    passes: Callable[[], object]
    clip: Callable[[], object]

    def step(self) -> None:
        self.passes()
        self.clip()
        self.optimizer.step()

    def run(self) -> None:
        self.step()
        self.optimizer.zero_grad()


def nothing() -> None:
    """Clip nothing: torch refuses to where plain and DTensor gradients mix, and a pipeline's norm is written by hand."""


def tokens_of(model: Model, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(model.vocabulary, (batch, model.sequence), generator=generator)


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


# ---- raw torch

Cast = Callable[[], AbstractContextManager[Any]]


def casts(precision: str) -> Cast:
    return nullcontext if precision == "fp32" else lambda: torch.autocast("cpu", torch.bfloat16)


def by_hand(model: Any, optimizer: Any, x: torch.Tensor, cast: Cast, params: Callable[[], Iterator[Any]]) -> Loop:
    def passes() -> None:
        with cast():
            loss = loss_of(model(x), x)
        loss.backward()

    return Loop(model, optimizer, passes, lambda: nn.utils.clip_grad_norm_(params(), MAX_NORM))


def raw_single(size: Model, batch: int, precision: str) -> Loop:
    net = Decoder(size)
    return by_hand(net, adamw(net.parameters()), tokens_of(size, batch), casts(precision), net.parameters)


def raw_ddp(size: Model, batch: int, precision: str) -> Loop:
    net = Decoder(size)
    wrapped = DistributedDataParallel(net)
    return by_hand(wrapped, adamw(net.parameters()), tokens_of(size, batch), casts(precision), net.parameters)


def raw_zero(size: Model, batch: int, precision: str) -> Loop:
    net = Decoder(size)
    wrapped = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return by_hand(wrapped, optimizer, tokens_of(size, batch), casts(precision), net.parameters)


def raw_fsdp(size: Model, batch: int, precision: str) -> Loop:
    net = Decoder(size)
    policy = MixedPrecisionPolicy()
    if precision != "fp32":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return by_hand(net, adamw(net.parameters()), tokens_of(size, batch), nullcontext, net.parameters)


def raw_tp(size: Model, batch: int, precision: str) -> Loop:
    net = Decoder(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, {name: styles[style]() for name, style in PLAN.items()})
    params = list(net.parameters())
    groups = [{"params": [p for p in params if isinstance(p, DTensor) == divided]} for divided in (True, False)]
    loop = by_hand(net, adamw(groups), same_tokens(size, batch), casts(precision), net.parameters)
    return Loop(net, loop.optimizer, loop.passes, nothing)


class Part(nn.Module):
    """Half of a decoder."""

    def __init__(self, whole: Decoder, last: bool) -> None:
        super().__init__()
        half = len(whole.layers) // 2
        self.embedding = None if last else whole.embedding
        self.layers = whole.layers[half:] if last else whole.layers[:half]
        self.end = nn.Sequential(whole.norm, whole.head) if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


def raw_pp(size: Model, batch: int, precision: str) -> Loop:
    last = dist.get_rank() == 1
    part, x = Part(Decoder(size), last), same_tokens(size, batch * MICRO_BATCHES)
    stage = PipelineStage(part, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    cast = casts(precision)

    def passes() -> None:
        with cast():
            if last:
                schedule.step(target=x, return_outputs=False)
            else:
                schedule.step(x)

    return Loop(part, adamw(part.parameters()), passes, nothing)


def same_tokens(size: Model, batch: int) -> torch.Tensor:
    """The same on both ranks, which work on one batch."""
    return torch.randint(size.vocabulary, (batch, size.sequence), generator=torch.Generator().manual_seed(0))


# ---- booster


def boosted(plugin: Callable[[], Any], precision: str, size: Model, batch: int, shared: bool, *, clips: bool) -> Loop:
    booster = Booster("cpu", precision, plugin())
    net: Any = Decoder(size)
    model, optimizer, criterion, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-4), loss_of)
    x = same_tokens(size, batch) if shared else tokens_of(size, batch)

    def passes() -> None:
        if booster.plugin.pipeline(model.module) is None:
            booster.backward(criterion(model(x), x), optimizer)
        else:
            booster.execute_pipeline(iter([(x, x)]), model, criterion, optimizer, return_loss=False)

    return Loop(model, optimizer, passes, (lambda: optimizer.clip_grad_by_norm(MAX_NORM)) if clips else nothing)


@dataclass(frozen=True)
class Case:
    """raw: what is written by hand for the same, or for the nearest that torch has. clips: both clip by norm."""

    raw: Callable[[Model, int, str], Loop]
    plugin: Callable[[], Any]
    half: str = "bf16"  # booster's name for the precision that is raw's with bfloat16
    clips: bool = True
    shared: bool = False
    factor: int = 1

    def booster(self, size: Model, batch: int, precision: str) -> Loop:
        name = "fp32" if precision == "fp32" else self.half
        return boosted(self.plugin, name, size, batch * self.factor, self.shared, clips=self.clips)


def cases(only: Collection[str] = ()) -> dict[str, Case]:
    """By name; only: those of these names, or all."""
    together = {"clips": False, "shared": True}
    found = {
        "single": Case(raw_single, SingleDevice),
        "DDP": Case(raw_ddp, TorchDDPPlugin),
        "ZeRO-1": Case(raw_zero, LowLevelZeroPlugin),
        "ZeRO-2": Case(raw_zero, lambda: LowLevelZeroPlugin(stage=2)),
        "FSDP": Case(raw_fsdp, TorchFSDPPlugin, "bf16_naive"),
        "TP": Case(raw_tp, lambda: HybridParallelPlugin(2, 1, tp_plan=PLAN), **together),  # type: ignore[arg-type]
        "PP": Case(
            raw_pp,
            lambda: HybridParallelPlugin(1, 2, num_microbatches=MICRO_BATCHES),
            factor=MICRO_BATCHES,
            **together,  # type: ignore[arg-type]
        ),
    }
    return {name: case for name, case in found.items() if not only or name in only}
