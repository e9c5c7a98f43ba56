"""Training loops on two ranks: in raw torch, as somebody writes them who knows it and wants fused kernels, and with booster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
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

from benchmarks.scaling.decoder import Model
from benchmarks.scaling.job import TP_PLAN, Decoder, loss_of
from booster import Booster
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

# torch 2.13 renamed the collectives and warns about the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

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

    def parts(self) -> tuple[Callable[[], object], ...]:
        """What a step consists of."""
        return self.passes, self.clip, self.optimizer.step, self.optimizer.zero_grad

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


class SlicedGradients:
    """ZeRO-2 by hand: flat buckets of parameters, whose gradients are reduce-scattered during backward, two at a time.

    by_all_to_all: sum slices after an all-to-all, which gloo sends half as many bytes for as for its own reduce-scatter.
    """

    def __init__(self, net: nn.Module, *, by_all_to_all: bool, bucket: int = 25 * 2**20) -> None:
        self.ranks, self.rank, self._exchanges = dist.get_world_size(), dist.get_rank(), by_all_to_all
        self._flats: list[torch.Tensor] = []
        self.slices: list[nn.Parameter] = []
        self._places: dict[torch.Tensor, tuple[int, int]] = {}
        self._left: list[int] = []
        self._gradients: list[torch.Tensor | None] = []
        self._works: list[tuple[int, Any, torch.Tensor, torch.Tensor]] = []
        members: list[torch.Tensor] = []
        for param in [*reversed(list(net.parameters())), None]:
            if param is None or sum(each.nbytes for each in members) + param.nbytes > bucket:
                self._lay_down(members)
                members = []
            if param is not None:
                members.append(param)
                param.register_post_accumulate_grad_hook(self._collect)

    def _lay_down(self, members: list[torch.Tensor]) -> None:
        share = -(-sum(each.numel() for each in members) // self.ranks)
        flat, start = torch.zeros(share * self.ranks), 0
        for param in members:
            view = flat[start : start + param.numel()].view_as(param)
            view.copy_(param.detach())
            param.data = view
            self._places[param] = len(self._flats), start
            start += param.numel()
        self._flats.append(flat)
        self._left.append(len(members))
        self._gradients.append(None)
        self.slices.append(nn.Parameter(flat.chunk(self.ranks)[self.rank]))

    @torch.no_grad()
    def _collect(self, param: torch.Tensor) -> None:
        index, start = self._places[param]
        values = self._gradients[index]
        if values is None:
            values = self._gradients[index] = torch.zeros_like(self._flats[index])
        torch.mul(param.grad, 1 / self.ranks, out=values[start : start + param.numel()].view_as(param))  # type: ignore[arg-type]
        param.grad = None
        self._left[index] -= 1
        if not self._left[index]:
            self._send(index, values)

    def _send(self, index: int, values: torch.Tensor) -> None:
        if len(self._works) == 2:
            self._receive()
        self._left[index] = sum(place[0] == index for place in self._places.values())
        self._gradients[index] = None
        if self._exchanges:
            own = torch.empty_like(values)
            work: Any = dist.all_to_all_single(own, values, async_op=True)
        else:
            own = torch.empty_like(self.slices[index])
            work = reduce_scatter(own, values, async_op=True)
        self._works.append((index, work, own, values))

    @torch.no_grad()
    def finish(self) -> None:
        """Give each slice its gradient."""
        while self._works:
            self._receive()

    def _receive(self) -> None:
        index, work, own, _ = self._works.pop(0)
        work.wait()
        self.slices[index].grad = sum(own.chunk(self.ranks)) if self._exchanges else own  # type: ignore[assignment]

    def clip(self) -> None:
        """Clip to `MAX_NORM`, as `clip_grad_norm_` does."""
        gradients: list[Any] = [each.grad for each in self.slices]
        square = torch.stack([each.square().sum() for each in gradients]).sum()
        dist.all_reduce(square)
        torch._foreach_mul_(gradients, torch.clamp(MAX_NORM / (square.sqrt() + 1e-6), max=1.0))

    @torch.no_grad()
    def gather(self, *_: Any) -> None:
        """Give every rank all slices."""
        for flat, own in zip(self._flats, self.slices, strict=True):
            all_gather(flat, own.detach())


def raw_slices(size: Model, batch: int, precision: str, *, by_all_to_all: bool) -> Loop:
    net = Decoder(size)
    sliced = SlicedGradients(net, by_all_to_all=by_all_to_all)
    optimizer = adamw(sliced.slices)
    optimizer.register_step_post_hook(sliced.gather)
    loop = by_hand(net, optimizer, tokens_of(size, batch), casts(precision), net.parameters)

    def passes() -> None:
        loop.passes()
        sliced.finish()

    return Loop(net, optimizer, passes, sliced.clip)


def raw_fsdp(size: Model, batch: int, precision: str) -> Loop:
    net = Decoder(size)
    inner = outer = MixedPrecisionPolicy()
    if precision != "fp32":
        inner = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        outer = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, mp_policy=inner)
    fully_shard(net, mesh=mesh, mp_policy=outer)
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


def raw_pp(size: Model, batch: int, precision: str, *, micro_batches: int) -> Loop:
    last = dist.get_rank() == 1
    part, x = Part(Decoder(size), last), same_tokens(size, batch * micro_batches)
    stage = PipelineStage(part, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_of)
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

    def precision(self, precision: str) -> str:
        """Booster's name for raw's `precision`."""
        return self.half if precision == "bf16" else precision

    def booster(self, size: Model, batch: int, precision: str) -> Loop:
        return boosted(self.plugin, self.precision(precision), size, batch * self.factor, self.shared, clips=self.clips)


def pipeline(micro_batches: int) -> Case:
    """A pipeline of two stages, with a batch that grows as the number of micro-batches."""
    return Case(
        partial(raw_pp, micro_batches=micro_batches),
        lambda: HybridParallelPlugin(1, 2, num_microbatches=micro_batches),
        clips=False,
        shared=True,
        factor=micro_batches,
    )


def cases(only: Collection[str] = ()) -> dict[str, Case]:
    """By name; only: those of these names, or all."""
    found = {
        "single": Case(raw_single, SingleDevice),
        "DDP": Case(raw_ddp, TorchDDPPlugin),
        "ZeRO-1": Case(raw_zero, LowLevelZeroPlugin),
        "ZeRO-1 reduce_scatter": Case(raw_zero, lambda: LowLevelZeroPlugin(reduce_scatter=True)),
        "ZeRO-2": Case(raw_zero, lambda: LowLevelZeroPlugin(stage=2)),
        "ZeRO-2 beside reduce-scatter": Case(
            partial(raw_slices, by_all_to_all=False), lambda: LowLevelZeroPlugin(stage=2)
        ),
        "ZeRO-2 beside all-to-all": Case(partial(raw_slices, by_all_to_all=True), lambda: LowLevelZeroPlugin(stage=2)),
        "FSDP": Case(raw_fsdp, TorchFSDPPlugin, "bf16_naive"),
        "TP": Case(raw_tp, lambda: HybridParallelPlugin(2, 1, tp_plan=PLAN), clips=False, shared=True),
        "PP": pipeline(MICRO_BATCHES),
    }
    return {name: case for name, case in found.items() if not only or name in only}
