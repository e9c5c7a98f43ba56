"""The memory of a training step, before there is one: for a precision, a plugin and a number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from booster import arguments
from booster.memory.decoder import Plan, ddp, fsdp, zero
from booster.memory.passes import Passes, run_passes
from booster.memory.stepped import Stepped, stepped
from booster.mixed_precision import MixedPrecision, make
from booster.mixed_precision.policy import DtypePolicy

Plugin = Literal["single", "ddp", "zero1", "zero2", "fsdp"]
PLANS: dict[str, Callable[[int], Plan]] = {
    "single": lambda n: Plan(),
    "ddp": ddp,
    "zero1": lambda n: zero(n, 1),
    "zero2": lambda n: zero(n, 2),
    "fsdp": fsdp,
}
_ZERO_BUCKETS, _BUCKET = 3, 25 * 2**20  # whole gradients that ZeRO-2 has at once, in bytes


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank. weights: with buffers; inputs: the batch; communication: buffers that stay between steps.

    held: what is there after a step, gradients included: the sum of those. activations: alive between forward and backward.
    peak: the highest point of a step. temporaries: by how much that is above what is held.
    """

    precision: str
    plugin: str
    world_size: int
    weights: int
    masters: int
    gradients: int
    states: int
    inputs: int
    communication: int
    activations: int
    peak: int

    @property
    def held(self) -> int:
        return self.weights + self.masters + self.gradients + self.states + self.inputs + self.communication

    @property
    def temporaries(self) -> int:
        return self.peak - self.held

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {**dataclasses.asdict(self), "held": self.held, "temporaries": self.temporaries}


def estimate(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    criterion: Callable[..., Any],
    *,
    precision: str | MixedPrecision | None = None,
    plugin: Plugin = "single",
    world_size: int = 1,
    device: str | torch.device = "cpu",
    fused_optimizer: bool = True,
) -> Estimate:
    """Estimate what a training step takes on one rank, without taking it: no memory, no process group, no step of yours.

    batch: of one rank, (inputs..., target), or a mapping that the model takes by keyword and the criterion whole. Weights,
    states, masters and gradients are counted; activations come from a forward and backward pass on fake tensors. Under
    "zero1", "zero2" and "fsdp" what is gathered or reduced at a time comes from formulas, see docs/memory.md.
    Memory that a kernel takes for itself while it runs is not seen. Raises ValueError where training would be refused, or
    where the forward reads numbers out of tensors.
    """
    plan = _plan(plugin, world_size)
    own = make(precision)
    device = torch.device(device)
    passes = run_passes(model, own, batch, criterion, device)
    policy = own.policy_for(model)
    name = precision if isinstance(precision, str) else "fp32" if precision is None else repr(own)
    options = own.master_options
    if options is None and own.has_own_update:
        raise ValueError(f"what {type(own).__name__} keeps beside weights is not known to the estimate")
    if plan.engine == "fully_shard" and options is not None and policy.store is None:
        options = dataclasses.replace(options, master_weights="auto") if options.states != "fp32" else None
        passes = _with_float32_shards(passes)
    sizes = tuple((dtype, -(-n // plan.state_shards)) for dtype, n in passes.sizes)
    step = stepped(optimizer, sizes, options, fused=fused_optimizer and own.may_fuse(optimizer))
    return _estimate(name, plugin, plan, passes, step, policy)


def _estimate(name: str, plugin: str, plan: Plan, passes: Passes, step: Stepped, policy: DtypePolicy) -> Estimate:
    gradients = passes.gradients // plan.gradient_shards
    communication = passes.gradients if plugin == "ddp" and plan.dp > 1 else 0
    weights = passes.weights // plan.weight_shards + passes.buffers
    found = Estimate(
        name,
        plugin,
        plan.world_size,
        weights,
        step.masters,
        gradients,
        step.states,
        passes.inputs,
        communication,
        passes.activations,
        peak=0,
    )
    fixed = found.held - gradients
    during = passes.highest
    if plugin == "zero2":
        whole = min(_ZERO_BUCKETS * _BUCKET, passes.gradients)
        during = passes.highest - passes.gradients + gradients + whole
    if plan.engine == "fully_shard":
        during = passes.highest - passes.gradients + gradients + _gathered(passes, policy)
    return dataclasses.replace(found, peak=fixed + max(during, gradients + step.temporaries))


def _gathered(passes: Passes, policy: DtypePolicy) -> int:
    """Whole weights that are there at once under fully_shard: two blocks and what is outside, and a block's gradients."""
    block, outside, count = passes.blocks
    stored = 4 if policy.param is None or policy.store is None else policy.param.itemsize
    ratio = (policy.param.itemsize if policy.param is not None else 4) / stored
    at_once = (min(count, 2) * block + outside) * ratio
    return int(at_once + block * ratio + block * 4 / stored)


def _with_float32_shards(passes: Passes) -> Passes:
    """The weights and gradients of half parameters as float32 shards, which are their own masters."""
    half = sum(n * dtype.itemsize for dtype, n in passes.sizes if dtype.itemsize == 2)
    sizes = tuple((torch.float32, n) if dtype.itemsize == 2 else (dtype, n) for dtype, n in passes.sizes)
    block, outside, count = passes.blocks
    return dataclasses.replace(
        passes,
        weights=passes.weights + half,
        gradients=passes.gradients + half,
        highest=passes.highest + half,
        sizes=sizes,
        blocks=(2 * block, 2 * outside, count),
    )


def compare(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    criterion: Callable[..., Any],
    *,
    precisions: Sequence[str | MixedPrecision] = ("fp32", "bf16", "bf16_naive"),
    plugins: Sequence[Plugin] = ("single",),
    world_sizes: Sequence[int] = (1,),
    device: str | torch.device = "cpu",
) -> list[Estimate]:
    """Return the estimates for every precision under every plugin on every number of ranks; "single" counts once."""
    return [
        estimate(model, optimizer, batch, criterion, precision=precision, plugin=plugin, world_size=size, device=device)
        for precision in precisions
        for plugin, size in _placements(plugins, world_sizes)
    ]


def _placements(plugins: Iterable[Plugin], world_sizes: Sequence[int]) -> Iterator[tuple[Plugin, int]]:
    for plugin in plugins:
        for size in (1,) if plugin == "single" else world_sizes:
            yield plugin, size


def _plan(plugin: str, world_size: int) -> Plan:
    arguments.choice("plugin", plugin, list(PLANS))
    arguments.count("world_size", world_size)
    if plugin == "single" and world_size != 1:
        raise ValueError(f"world_size={world_size} needs a plugin that uses ranks; choose one of {list(PLANS)[1:]}")
    return PLANS[plugin](world_size)
