"""The memory of a training step, before there is one: for a precision, a plugin and a number of ranks; and what fits.

What fits into a given memory: which of several estimates, how large a batch, and what to change first.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.torch_internals import tensor_internals
from booster.masters.formats import MasterOptions
from booster.masters.offload import can_offload
from booster.memory.fake_passes import run_passes
from booster.memory.measured_memory import StepMemory, step_memory
from booster.memory.pass_memory import Bucketed, GradientArrivals, Sizes, StepsInBackward, Unsharded
from booster.mixed_precision import MixedPrecision, make
from booster.plugin import base
from booster.plugin.sequence_parallel import shard_batch
from booster.plugin.zero import check_gathers
from booster.tensors import trees
from booster.update.context import UpdateOptions

Plugin = Literal["single", "ddp", "zero1", "zero2", "fsdp"]
PLUGINS: dict[str, tuple[bool, bool]] = {
    "single": (False, False),
    "ddp": (False, False),
    "zero1": (False, True),
    "zero2": (True, True),
    "fsdp": (False, False),
}
"""By plugin, whether its ranks shard gradients, and whether they shard states, of those that its passes count whole."""
_ZERO_BUCKETS = 3  # of unsharded gradients, which ZeRO-2 has at once


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank.

    precision: its name.
    plugin: its name, see `Plugin`.
    world_size: number of ranks.
    weights: with buffers.
    masters: float32 copies of half weights, or what is kept of them; for a small model on a CPU also the scratch of a step.
    gradients: of all parameters, after backward.
    states: of the optimizer.
    inputs: the batch.
    communication: buffers that stay between steps.

    held: what is there after a step, gradients included: the sum of those above.
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
    sp_size: int = 1,
    ep_size: int = 1,
) -> Estimate:
    """Estimate what a training step takes on one rank, without taking it: no memory, no process group, no step of yours.

    model, optimizer: not boosted.
    batch: of one rank, (inputs..., target), or a mapping that the model takes by keyword and the criterion whole; with sp_size
        as the loader gives it, before `Booster.shard_sequence` cuts it.
    criterion: a function of output and target.
    precision: as of `Booster`; None is float32.
    plugin: how ranks share the work.
    world_size: number of ranks.
    device: what is estimated for; "cuda" needs a GPU, or a build of torch for CUDA that goes backward without one.
    fused_optimizer: as of `Booster`.
    release_gradients: optimizer step in backward, as of `Booster`.
    clips: whether gradients are clipped, or looked at otherwise, which may take two passes.
    offload_states: optimizer states and masters in the host's memory, as of `Booster`.
    bucket_cap_mb: MiB, as of `TorchDDPPlugin` and `LowLevelZeroPlugin`.
    sp_size: ranks that share sequences, as of `TorchFSDPPlugin`: activations of a rank are of its tokens.
    ep_size: ranks that experts are dealt to, as of `TorchFSDPPlugin`. Activations are those of tokens spread evenly.

    Weights, states, masters and gradients are counted; activations come from a forward and backward pass on fake tensors. Under
    "zero1", "zero2" and "fsdp" what is gathered or reduced at a time comes from formulas, see docs/memory.md.
    Memory that a kernel takes for itself while it runs is not seen. Raises ValueError where training would be refused, or
    where the forward reads numbers out of tensors."""
    arguments.choice("plugin", plugin, list(PLUGINS))
    arguments.count("world_size", world_size)
    if plugin == "single" and world_size != 1:
        raise ValueError(f"world_size={world_size} needs a plugin that uses ranks; choose one of {list(PLUGINS)[1:]}")
    for name, size in (("sp_size", sp_size), ("ep_size", ep_size)):
        if arguments.count(name, size) > 1 and (plugin != "fsdp" or world_size % size):
            raise ValueError(
                f"{name}={size} with plugin={plugin!r} and world_size={world_size}: the estimate knows it of "
                "plugin='fsdp', where it divides the world size"
            )
    cut = None
    if sp_size > 1:
        ways: dict[str, Any] = {
            "averaging_group": None,
            "labels": None,
            "shift_labels": False,
            "documents": None,
            "whole": (),
        }
        batch, cut = shard_batch(batch, size=sp_size, rank=0, zigzag=False, ignore_index=-100, **ways)
    gradient_shards, state_shards = (world_size if sharded else 1 for sharded in PLUGINS[plugin])
    device = checked_device(device)
    # A copy, because the device that is estimated for is written into it.
    own = copy.copy(make(precision, "precision"))
    own._device = device  # which need not be there, nor run it
    arguments.choice("release_gradients", release_gradients, (False, "exact", "previous_norm"))
    arguments.flag("clips", clips)
    bucket_bytes = arguments.number("bucket_cap_mb", bucket_cap_mb, above=0) * 2**20
    own = own.with_kept(offload=arguments.flag("offload_states", offload_states))
    if own.kept.offload:
        MasterOptions(offload=True).check(optimizer)
    options = own.masters_on(device)
    policy = own.policy_for(model)
    if plugin in ("zero1", "zero2"):
        check_gathers(policy)
    if options is None and own.has_own_update:
        raise ValueError(f"what {type(own).__name__} keeps besides weights is not known to the estimate")
    if plugin == "fsdp" and options is not None and policy.store is None:
        # Float32 shards are the masters. Masters of their own remain where they or the states are kept in another form.
        kept_so = options.states != "fp32" or (options.offload and can_offload(device))
        options = dataclasses.replace(options, master_weights="auto") if kept_so else None

    def step_of(sizes: Sizes, **params: Any) -> StepMemory:
        may_fuse = fused_optimizer and own.may_fuse(optimizer)
        in_backward = bool(release_gradients)
        return step_memory(optimizer, sizes, options, fused=may_fuse, in_backward=in_backward, device=device, **params)

    def arrivals_of(params: Sequence[torch.Tensor]) -> GradientArrivals:
        if world_size == 1:
            return Unsharded(params)
        return Bucketed(
            params,
            world_size=world_size,
            shards=state_shards,
            reduce_scatter=gradient_shards > 1,
            bucket_bytes=bucket_bytes,
        )

    in_backward = None
    if release_gradients:
        # A norm or an overflow is known after a first pass only; the second one steps.
        twice = release_gradients == "exact" and (clips or own.make_scaler().enabled)
        in_backward = StepsInBackward(twice, step_of, arrivals_of)
    shards = world_size if plugin == "fsdp" else None
    passes = run_passes(model, own, batch, criterion, device, shards, ep_size, cut, in_backward)
    sizes = tuple((dtype, -(-n // state_shards)) for dtype, n in passes.sizes)
    step = step_of(sizes) if state_shards > 1 else step_of(sizes, shapes=passes.shapes, idle=passes.idle)
    gradients = passes.gradients // gradient_shards
    without_peak = Estimate(
        precision=precision if isinstance(precision, str) else "fp32" if precision is None else type(own).__name__,
        plugin=plugin,
        world_size=world_size,
        weights=passes.weights,
        masters=step.masters,
        gradients=gradients,
        states=step.states,
        inputs=passes.inputs,
        communication=passes.gradients if plugin in ("ddp", "zero1") and world_size > 1 else 0,  # DDP's buckets
        activations=passes.activations,
        peak=0,
        host=step.host,
    )
    # The end of the passes may be higher than the step, so both are compared below.
    highest = passes.highest
    if plugin == "zero2" and passes.gradients > _ZERO_BUCKETS * bucket_bytes:
        highest = int(passes.highest - passes.gradients + gradients + _ZERO_BUCKETS * bucket_bytes)
    elif plugin == "zero2" and world_size > 1:
        # At the end of a bucket: its gradients as they are sent and as they come, from which the rank's shard is summed.
        highest = max(passes.highest, 2 * passes.gradients)
    # With the optimizer in backward, the passes have followed what its steps take.
    stepping = gradients + (0 if in_backward is not None else step.temporaries)
    return dataclasses.replace(without_peak, peak=without_peak.held - gradients + max(highest, stepping))


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
    name: Any = plugin.divides_as
    if name is None:
        raise ValueError(
            f"what a rank holds under this {type(plugin).__name__} is not known to the estimate; it knows {list(PLUGINS)}, as "
            "their plugins are without further options: booster.memory.estimate(..., plugin='fsdp', world_size=8)"
        )
    return estimate(
        model,
        optimizer,
        batch,
        criterion,
        precision=precision,
        plugin=name,
        world_size=1 if name == "single" else plugin.averaging_size,
        device=device,
        fused_optimizer=bool(options.fused_optimizer),
        release_gradients=options.release_gradients,  # type: ignore[arg-type]
        clips=bool(options.clip_grad_norm) or options.skip_nonfinite,
        bucket_cap_mb=plugin.bucket_cap_mb,
        sp_size=1 if plugin.sequence_parallel is None else plugin.sequence_parallel.size,
        ep_size=plugin.ep_size,
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
    device, release_gradients, clips, offload_states: those of `estimate`."""
    where: dict[str, Any] = {
        "device": device,
        "release_gradients": release_gradients,
        "clips": clips,
        "offload_states": offload_states,
    }
    return [
        estimate(model, optimizer, batch, criterion, precision=precision, plugin=plugin, world_size=size, **where)
        for precision in precisions
        for plugin in plugins
        for size in ((1,) if plugin == "single" else world_sizes)
    ]


def checked_device(device: str | torch.device) -> torch.device:
    """Return `device`. Raises ValueError for one that tensors without memory cannot be on by name in this build of torch."""
    arguments.instance("device", device, (str, torch.device), "'cpu', 'cuda' or a torch.device")
    try:
        checked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device; choose 'cpu' or 'cuda'") from error
    if checked.type == "cuda" and not (torch.backends.cuda.is_built() and _runs_backward(checked)):
        raise ValueError(
            f"device={str(device)!r} cannot be estimated here: autograd of torch {torch.__version__} does not go backward over "
            "CUDA tensors without memory. It needs a GPU, or a build of torch for CUDA that does so without one; or estimate "
            "for device='cpu': all but activations and temporaries is the same, of which it says what kernels for CPUs take"
        )
    return checked


def _runs_backward(device: torch.device) -> bool:
    """Whether autograd, which may ask the driver for streams, goes backward over tensors without memory on `device`."""
    try:
        with tensor_internals.FakeTensorMode():
            # The smallest backward there is: a build without a driver raises here, and not in the user's model.
            torch.ones((), dtype=torch.float32, device=device, requires_grad=True).mul(2.0).backward()
    except RuntimeError:
        return False
    return True


_MIB = 2**20
_LARGEST = 2**24  # samples
_REMEDIES = {
    "states": "keep them in 8 bits (states='8bit'), or divide them among ranks (zero1)",
    "masters": "keep one byte of them (master_weights='split24'), or divide them among ranks (zero1)",
    "gradients": "divide them among ranks (zero2), or train in a naive precision, whose gradients are half",
    "weights": "divide them among ranks (fsdp)",
    "communication": "let gradients be views of DDP's buckets, or divide them among ranks (zero2)",
    "temporaries": "take a smaller batch and accumulate, or recompute activations (torch.utils.checkpoint)",
    "inputs": "take a smaller batch and accumulate",
}


def resized(batch: Any, size: int) -> Any:
    """Return `batch` with tensors of `size` samples, without memory; what has another first dimension stays."""
    # The size of a batch is the first dimension of its first tensor.
    old = samples(batch)
    if old is None:
        raise ValueError("the batch holds no tensor with a batch dimension, so its size cannot be changed")

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != old:
            return tensor
        # On the meta device: sizes are all that an estimate reads.
        return torch.empty(size, *tensor.shape[1:], dtype=tensor.dtype, device="meta")

    return trees.map_tensors(part, batch)


def samples(batch: Any) -> int | None:
    """Return the size of `batch`: the first dimension of its first tensor that has any; None where none has."""
    return next((int(tensor.shape[0]) for tensor in trees.tensors(batch) if tensor.dim()), None)


def largest_batch(
    peak_of: Callable[[int], int], limit: int, start: int = 1, *, known: Mapping[int, int] | None = None
) -> int:
    """Return the largest batch with a peak of at most `limit` bytes, 0 if not even one sample fits; at most 2**24.

    peak_of: bytes at the peak for a batch size, which grows with it.
    limit: bytes.
    start: a size to begin with.
    known: peaks that are known already, by size, which are not asked for again; None are none.

    Cost: some six calls, since peaks grow nearly linearly, and at most twice as many as bisection takes.
    """
    points: dict[int, int] = {}
    given = dict(known or {})
    low, high, size, halves = 0, _LARGEST + 1, start if not given else min(given), False
    while high - low > 1:
        points[size] = given[size] if size in given else peak_of(size)
        width = high - low
        low, high = (size, high) if points[size] <= limit else (low, size)
        # A line that cuts off little on one side is followed by a cut in the middle.
        halves = not halves and high <= _LARGEST and 2 * (high - low) > width
        size = (low + high) // 2 if halves else _on_line(points, limit)
        # As long as no size is known that does not fit, sizes grow by an eighth at least.
        step = low // 8 if high > _LARGEST else 0
        size = min(max(size, low + 1 + step), high - 1)
    return low


def _on_line(points: dict[int, int], limit: int) -> int:
    """Return the size at which the line through the two points nearest to `limit` meets it."""
    if len(points) < 2:
        ((size, peak),) = points.items()
        return int(size * min(limit / max(peak, 1), 64.0))
    one, two = sorted(points, key=lambda size: abs(points[size] - limit))[:2]
    if points[one] == points[two]:
        return 2 * max(points)
    # Half a sample further than the line, so that both sides are met.
    return round(one + (limit - points[one]) * (two - one) / (points[two] - points[one]) + 0.5)


def what_to_change(estimates: Sequence[Estimate], limit: int) -> str:
    """Return one sentence: whether the first of `estimates` fits into `limit` bytes, else the first that does, else where its
    peak is largest and what makes that smaller."""
    wanted = estimates[0]
    if wanted.peak <= limit:
        return f"{wanted.name} fits: {_mib(limit - wanted.peak)} are left at the peak"
    fitting = [each for each in estimates if each.peak <= limit]
    short = f"{wanted.name} lacks {_mib(wanted.peak - limit)}"
    if fitting:
        return f"{short}; {fitting[0].name} fits"
    least = min(estimates, key=lambda each: each.peak)
    part = max(_REMEDIES, key=lambda name: getattr(least, name))
    share = getattr(least, part) / least.peak
    nearest = "" if least is wanted else f"; {least.name} lacks {_mib(least.peak - limit)}"
    return f"{short}{nearest}; {share:.0%} of its peak are {part}: {_REMEDIES[part]}"


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"
