"""The memory of a training step, before there is one: for a precision, a plugin and a number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.masters.offload import can_offload
from booster.masters.options import MasterOptions
from booster.memory.passes import Passes, run_passes
from booster.memory.plan import Plan, ddp, fsdp, zero
from booster.memory.released import Arrivals, Bucketed, Released, Sizes, Whole
from booster.memory.stepped import Stepped, stepped
from booster.mixed_precision import MixedPrecision, make
from booster.plugin import base
from booster.plugin.zero.plugin import check_gathers
from booster.tensors.grads import PIECE
from booster.update.outcome import UpdateOptions

Plugin = Literal["single", "ddp", "zero1", "zero2", "fsdp"]
PLANS: dict[str, Callable[[int], Plan]] = {
    "single": lambda n: Plan(),
    "ddp": ddp,
    "zero1": lambda n: zero(n, 1),
    "zero2": lambda n: zero(n, 2),
    "fsdp": fsdp,
}
_ZERO_BUCKETS = 3  # of whole gradients that ZeRO-2 has at once


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank.

    precision: its name.
    plugin: its name, see `Plugin`.
    world_size: number of ranks.
    weights: with buffers.
    masters: float32 copies of half weights, or what is kept of them; for a small model on a CPU also the scratch of a step.
    gradients: of all parameters, as they lie after backward.
    states: of the optimizer.
    inputs: the batch.
    communication: buffers that stay between steps.

    held: what is there after a step, gradients included: the sum of those.
    activations: alive between forward and backward.
    peak: the highest point of a step.
    temporaries: by how much that is above what is held.
    host: states and masters in the host's memory, which are in none of the others.
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
    host: int = 0

    @property
    def held(self) -> int:
        return self.weights + self.masters + self.gradients + self.states + self.inputs + self.communication

    @property
    def name(self) -> str:
        """Precision, plugin and ranks."""
        return self.precision if self.plugin == "single" else f"{self.precision}, {self.plugin} x {self.world_size}"

    @property
    def temporaries(self) -> int:
        return self.peak - self.held

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {"name": self.name, **dataclasses.asdict(self), "held": self.held, "temporaries": self.temporaries}


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
    release_gradients: Literal[False, "exact", "previous_norm"] = False,
    clips: bool = False,
    offload_states: bool = False,
    bucket_cap_mb: float = 25,
) -> Estimate:
    """Estimate what a training step takes on one rank, without taking it: no memory, no process group, no step of yours.

    model, optimizer: not boosted.
    batch: of one rank, (inputs..., target), or a mapping that the model takes by keyword and the criterion whole.
    criterion: a function of output and target.
    precision: as of `Booster`; None is float32.
    plugin: how ranks share the work.
    world_size: number of ranks.
    device: what is estimated for; "cuda" needs a build of torch for CUDA, and no GPU.
    fused_optimizer: as of `Booster`.
    release_gradients: optimizer step in backward, as of `Booster`.
    clips: whether gradients are clipped, or looked at otherwise, which may take two passes.
    offload_states: optimizer states and masters in the host's memory, as of `Booster`.
    bucket_cap_mb: MiB, as of `TorchDDPPlugin` and `LowLevelZeroPlugin`.

    Weights, states, masters and gradients are counted; activations come from a forward and backward pass on fake tensors. Under
    "zero1", "zero2" and "fsdp" what is gathered or reduced at a time comes from formulas, see docs/memory.md.
    Memory that a kernel takes for itself while it runs is not seen. Raises ValueError where training would be refused, or
    where the forward reads numbers out of tensors.
    """
    plan = _plan(plugin, world_size)
    device = checked_device(device)
    own = make(precision, "precision").on(device)
    sharded = plan.engine == "fully_shard"
    arguments.choice("release_gradients", release_gradients, (False, "exact", "previous_norm"))
    arguments.flag("clips", clips)
    bucket_bytes = arguments.number("bucket_cap_mb", bucket_cap_mb, above=0) * 2**20
    own = own.with_kept(offload=arguments.flag("offload_states", offload_states))
    if own.kept.offload:
        MasterOptions(offload=True).check(optimizer)
    options, fused = own.masters_on(device), fused_optimizer
    policy = own.policy_for(model)
    if plugin in ("zero1", "zero2"):
        check_gathers(policy)
    if options is None and own.has_own_update:
        raise ValueError(f"what {type(own).__name__} keeps beside weights is not known to the estimate")
    if sharded and options is not None and policy.store is None:  # float32 shards are the masters
        kept_so = options.states != "fp32" or (options.offload and can_offload(device))
        options = dataclasses.replace(options, master_weights="auto") if kept_so else None

    def step_of(sizes: Sizes, shapes: tuple[tuple[int, ...], ...] = (), idle: tuple[bool, ...] = ()) -> Stepped:
        may_fuse = fused and own.may_fuse(optimizer)
        released = bool(release_gradients)
        return stepped(
            optimizer, sizes, options, fused=may_fuse, released=released, device=device, shapes=shapes, idle=idle
        )

    def arrivals_of(params: Sequence[torch.Tensor]) -> Arrivals:
        if plan.dp == 1:
            return Whole(params)
        return Bucketed(
            params,
            world_size=plan.dp,
            parts=plan.state_shards,
            slices=plan.gradient_shards > 1,
            bucket_bytes=bucket_bytes,
        )

    released = None
    if release_gradients:
        twice = release_gradients == "exact" and (clips or own.make_scaler().enabled)
        released = Released(twice, PIECE, lambda sizes: (step_of(sizes).temporaries, step_of(sizes).part))
    shards = world_size if sharded else None
    passes = run_passes(model, own, batch, criterion, device, shards, released, arrivals_of)
    name = precision if isinstance(precision, str) else "fp32" if precision is None else type(own).__name__
    divisor = 1 if sharded else plan.state_shards
    sizes = tuple((dtype, -(-n // divisor)) for dtype, n in passes.sizes)
    step = step_of(sizes, passes.shapes if divisor == 1 else (), passes.idle if divisor == 1 else ())
    if released is not None:  # what it takes was followed in time
        step = dataclasses.replace(step, temporaries=0)
    return _estimate(name, plugin, plan, passes, step, bucket_bytes)


def _estimate(name: str, plugin: str, plan: Plan, passes: Passes, step: Stepped, bucket_bytes: float) -> Estimate:
    gradients = passes.gradients // (1 if plugin == "fsdp" else plan.gradient_shards)
    communication = passes.gradients if plugin in ("ddp", "zero1") and plan.dp > 1 else 0  # DDP's buckets
    weights = passes.weights + passes.buffers
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
        host=step.host,
    )
    fixed = found.held - gradients
    during = passes.highest
    if plugin == "zero2" and passes.gradients > _ZERO_BUCKETS * bucket_bytes:
        during = int(passes.highest - passes.gradients + gradients + _ZERO_BUCKETS * bucket_bytes)
    elif plugin == "zero2" and plan.dp > 1:
        # At the end of a bucket: its gradients as they are sent and as they come, from which the rank's part is summed.
        during = max(passes.highest, 2 * passes.gradients)
    return dataclasses.replace(found, peak=fixed + max(during, gradients + step.temporaries))


def estimate_placed(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    criterion: Callable[..., Any],
    *,
    precision: MixedPrecision,
    plugin: base.Plugin,
    device: torch.device,
    options: UpdateOptions,
) -> Estimate:
    """Estimate as `estimate` does, for a rank of the plugin's job. Raises ValueError where that one's memory is not known.

    model, optimizer: not boosted.
    batch: of one rank, (inputs..., target), or a mapping that the model takes by keyword and the criterion whole.
    criterion: a function of output and target.
    precision, plugin: objects.
    device: of the rank.
    options: how the optimizer steps, see `UpdateOptions`.
    """
    known: Any = plugin.divides_as
    if known is None:
        raise ValueError(
            f"what a rank holds under this {type(plugin).__name__} is not known to the estimate; it knows {list(PLANS)}, as "
            "their plugins are without further options: booster.memory.estimate(..., plugin='fsdp', world_size=8)"
        )
    return estimate(
        model,
        optimizer,
        batch,
        criterion,
        precision=precision,
        plugin=known,
        world_size=1 if known == "single" else plugin.data_parallel_size,
        device=device,
        fused_optimizer=bool(options.fused_optimizer),
        release_gradients=options.release_gradients,  # type: ignore[arg-type]
        clips=bool(options.clip_grad_norm) or options.skip_nonfinite,
        bucket_cap_mb=plugin.bucket_cap_mb,
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
    release_gradients: Literal[False, "exact", "previous_norm"] = False,
    clips: bool = False,
    offload_states: bool = False,
) -> list[Estimate]:
    """Return the estimates for every precision under every plugin on every number of ranks; "single" counts once.

    model, optimizer: not boosted.
    batch: of one rank, (inputs..., target), or a mapping that the model takes by keyword and the criterion whole.
    criterion: a function of output and target.
    precisions: names or objects.
    plugins: names, see `Plugin`.
    world_sizes: numbers of ranks.
    device, release_gradients, clips, offload_states: those of `estimate`.
    """
    where: dict[str, Any] = {
        "device": device,
        "release_gradients": release_gradients,
        "clips": clips,
        "offload_states": offload_states,
    }
    return [
        estimate(model, optimizer, batch, criterion, precision=precision, plugin=plugin, world_size=size, **where)
        for precision in precisions
        for plugin, size in _placements(plugins, world_sizes)
    ]


def checked_device(device: str | torch.device) -> torch.device:
    """Return `device`. Raises ValueError for one that tensors without memory cannot be on by name in this build of torch."""
    arguments.instance("device", device, (str, torch.device), "'cpu', 'cuda' or a torch.device")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device; choose 'cpu' or 'cuda'") from error
    if found.type == "cuda" and not torch.backends.cuda.is_built():
        raise ValueError(
            f"device={str(device)!r} cannot be estimated by this build of torch, which is for CPUs: its autograd does not know "
            "CUDA tensors, not even such without memory. Install a build of torch for CUDA, which needs no GPU here, or "
            "estimate for device='cpu': weights, masters, gradients and states are the same, and of activations and "
            "temporaries it says what kernels for CPUs take"
        )
    return found


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
