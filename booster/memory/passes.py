"""One forward and backward pass on fake tensors: shapes and dtypes are real, and no memory is taken."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.common.frames import where_raised
from booster.common.torch_internals import tensor_internals
from booster.memory.released import Arrivals, Released, Sizes, Whole
from booster.memory.sharding import Sharding
from booster.memory.tracker import StorageTracker
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.policy import cast_parameters
from booster.model.meta import copy_on_meta
from booster.tensors import trees
from booster.tensors.micro_batch import MicroBatch


@dataclass(frozen=True)
class Passes:
    """Bytes. weights, buffers, inputs: of tensors that are there before; gradients: there after it; activations: alive
    between forward and backward; highest: beside what is there before, at the highest point.

    sizes: elements of each trainable parameter, by the dtype that it is stored in. shapes: theirs, in the same order, and
    idle: which of them backward does not reach; both empty under `shards`.
    """

    weights: int
    buffers: int
    inputs: int
    gradients: int
    activations: int
    highest: int
    sizes: Sizes
    shapes: tuple[tuple[int, ...], ...] = ()
    idle: tuple[bool, ...] = ()


def run_passes(
    model: nn.Module,
    precision: MixedPrecision,
    batch: Any,
    criterion: Callable[..., Any],
    device: torch.device,
    shards: int | None = None,
    released: Released | None = None,
    arrivals_of: Callable[[Sequence[torch.Tensor]], Arrivals] = Whole,
) -> Passes:
    """Run `criterion(model(*inputs), target)` and its backward under `precision`, as on `device`, on copies without memory.

    shards: so many ranks divide the weights by `fully_shard`, and what is told is that of one rank. released: how gradients
    are stepped on within backward. arrivals_of: when gradients of parameters that are whole are complete for that.
    Nothing of the arguments changes. Raises ValueError for a model that does not copy, or whose forward reads numbers out of
    tensors, which have none here.
    """
    precision.check(model)
    placed = copy_on_meta(model, "an estimate")
    policy = precision.policy_for(model)
    placed = cast_parameters(precision.convert(placed), policy)
    errors = (tensor_internals.DataDependentOutputException, tensor_internals.DynamicOutputShapeException)
    with tensor_internals.FakeTensorMode(allow_non_fake_inputs=True):
        _give_fakes(placed, device)
        cut = MicroBatch.of(trees.map_tensors(lambda tensor: _fake(tensor, device), batch))
        own_criterion = criterion
        if isinstance(criterion, nn.Module):
            own_criterion = copy_on_meta(criterion, "an estimate")
            _give_fakes(own_criterion, device)
        sharding = None if shards is None else Sharding(placed, policy, shards, device)
        if shards is None and precision.conversion is not None:
            precision.conversion.cache_weights(placed)
        wrapped, loss_of = precision.wrap_model(placed), precision._wrap_criterion(own_criterion, device)
        params, buffers = list(placed.parameters()), list(placed.buffers())
        trained = [param for param in params if param.requires_grad]
        reached: set[torch.Tensor] = set()
        for param in trained:
            param.register_post_accumulate_grad_hook(reached.add)
        inputs = [*trees.tensors((cut.args, cut.kwargs)), *trees.tensors(cut.target)]
        tracker = StorageTracker([*params, *buffers, *inputs])
        try:
            with tracker:
                loss = loss_of(wrapped(*cut.args, **cut.kwargs), cut.target)  # type: ignore[misc]
                activations = tracker.now
                with precision.backward_context():
                    if released is None:
                        loss.backward()
                    else:
                        released.run(loss, sharding or arrivals_of(params), device)
                if sharding is not None:
                    sharding.finish()
        except errors as error:
            raise ValueError(_reading(model, error)) from error
        finally:
            if precision.conversion is not None:
                precision.conversion.drop_weights()
        gradients = [param.grad for param in params if param.grad is not None]
    found = Passes(
        weights=_bytes(params),
        buffers=_bytes(buffers),
        inputs=_bytes(inputs),
        gradients=_bytes(gradients),
        activations=activations,
        highest=tracker.highest,
        sizes=tuple((param.dtype, param.numel()) for param in trained),
        shapes=tuple(tuple(param.shape) for param in trained),
        idle=tuple(param not in reached for param in trained),
    )
    if sharding is None:
        return found
    return dataclasses.replace(
        found,
        weights=sum(dtype.itemsize * size for dtype, size, _ in sharding.stored),
        gradients=_bytes(sharding.gradients),
        sizes=sharding.sizes,
        shapes=(),
        idle=(),
    )


def _reading(model: nn.Module, error: Exception) -> str:
    """Return what to say of a pass that read a number, or a number of elements, out of a tensor: where, and the way out."""
    place = where_raised(error)
    at = f" at {place}" if place else ""
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    fix = "estimate the model without that line, or a part of the model that does not read any"
    if "_detect_is_causal_mask" in functions:
        fix = "torch looks whether the mask is causal: say so by tgt_is_causal=True of nn.Transformer, is_causal=True of others"
    return (
        f"{type(model).__name__} cannot be estimated, because it reads a number out of a tensor{at}; "
        f"tensors of an estimate have shapes and no numbers ({error}). The way out: {fix}"
    )


def _fake(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _give_fakes(model: nn.Module, device: torch.device) -> None:
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                known.setdefault(id(param), (nn.Parameter(_fake(param, device), param.requires_grad), param))
                module._parameters[name] = known[id(param)][0]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                known.setdefault(id(buffer), (_fake(buffer, device), buffer))
                module._buffers[name] = known[id(buffer)][0]


def _bytes(tensors: Any) -> int:
    storages = {
        id(s): s
        for s in (part.untyped_storage() for tensor in tensors for part in tensor_internals.dense_parts(tensor))
    }
    return sum(storage.nbytes() for storage in storages.values())
