"""One forward and backward pass on fake tensors: shapes and dtypes are real, and no memory is taken."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster import torch_internals, trees
from booster.casting import HALF_DTYPES
from booster.memory.sharding import Sharding
from booster.memory.tracker import StorageTracker
from booster.micro_batch import MicroBatch
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.policy import cast_parameters

Sizes = tuple[tuple[torch.dtype, int], ...]


@dataclass(frozen=True)
class Passes:
    """Bytes. weights, buffers, inputs: of tensors that are there before; gradients: there after it; activations: alive
    between forward and backward; highest: beside what is there before, at the highest point.

    sizes: elements of each trainable parameter, by the dtype that it is stored in.
    """

    weights: int
    buffers: int
    inputs: int
    gradients: int
    activations: int
    highest: int
    sizes: Sizes


@dataclass(frozen=True)
class Released:
    """How gradients are stepped on within backward. twice: the graph is gone through for their norm before. piece: elements
    of half gradients that are widened at a time for it. step: bytes that stepping takes, and elements that are stepped at
    once, of parameters of these dtypes and sizes."""

    twice: bool
    piece: int
    step: Callable[[Sizes], tuple[int, int]]

    def run(self, loss: torch.Tensor, params: list[Any], device: torch.device) -> None:
        """Go through the graph of `loss`, on fake tensors, and free each gradient when it would be."""
        trained = [param for param in params if param.requires_grad]
        scratch, at_once = self.step(tuple((param.dtype, param.numel()) for param in trained))
        waiting: list[Any] = []

        def measure(param: Any) -> None:
            wide = param.dtype in HALF_DTYPES and param.numel() > 0
            taken = torch.empty(min(param.numel(), self.piece) * 4 * wide, dtype=torch.uint8, device=device)
            param.grad = None
            del taken

        def step(param: Any) -> None:
            waiting.append(param)
            if sum(each.numel() for each in waiting) >= at_once:
                step_all()

        def step_all() -> None:
            taken = torch.empty(scratch, dtype=torch.uint8, device=device)
            for param in waiting:
                param.grad = None
            waiting.clear()
            del taken

        for action in (measure, step) if self.twice else (step,):
            handles = [param.register_post_accumulate_grad_hook(action) for param in trained]
            loss.backward(retain_graph=action is measure)
            for handle in handles:
                handle.remove()
        step_all()


def run_passes(
    model: nn.Module,
    precision: MixedPrecision,
    batch: Any,
    criterion: Callable[..., Any],
    device: torch.device,
    shards: int | None = None,
    released: Released | None = None,
) -> Passes:
    """Run `criterion(model(*inputs), target)` and its backward under `precision`, as on `device`, on copies without memory.

    shards: so many ranks divide the weights by `fully_shard`, and what is told is that of one rank. released: how gradients
    are stepped on within backward.
    Nothing of the arguments changes. Raises ValueError for a model that does not copy, or whose forward reads numbers out of
    tensors, which have none here.
    """
    precision.check(model)
    placed = _without_memory(model)
    policy = precision.policy_for(model)
    placed = cast_parameters(precision.convert(placed), policy)
    errors = (torch_internals.DataDependentOutputException, torch_internals.DynamicOutputShapeException)
    with torch_internals.FakeTensorMode(allow_non_fake_inputs=True):
        _give_fakes(placed, device)
        cut = MicroBatch.of(trees.map_tensors(lambda tensor: _fake(tensor, device), batch))
        own_criterion = criterion
        if isinstance(criterion, nn.Module):
            own_criterion = _without_memory(criterion)
            _give_fakes(own_criterion, device)
        sharding = None if shards is None else Sharding(placed, policy, shards, device)
        wrapped, loss_of = precision.wrap_model(placed), precision._wrap_criterion(own_criterion, device)
        params, buffers = list(placed.parameters()), list(placed.buffers())
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
                        released.run(loss, params, device)
                if sharding is not None:
                    sharding.finish()
        except errors as error:
            raise ValueError(
                f"the forward of {type(model).__name__} cannot be estimated, because it reads numbers out of tensors, which "
                f"are not computed here ({error}); estimate a part of the model that does not"
            ) from error
        gradients = [param.grad for param in params if param.grad is not None]
    found = Passes(
        weights=_bytes(params),
        buffers=_bytes(buffers),
        inputs=_bytes(inputs),
        gradients=_bytes(gradients),
        activations=activations,
        highest=tracker.highest,
        sizes=tuple((param.dtype, param.numel()) for param in params if param.requires_grad),
    )
    if sharding is None:
        return found
    return dataclasses.replace(
        found,
        weights=sum(dtype.itemsize * size for dtype, size, _ in sharding.sizes),
        gradients=_bytes(sharding.gradients),
        sizes=tuple((dtype, size) for dtype, size, trained in sharding.sizes if trained),
    )


def _without_memory(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {id(p): nn.Parameter(_meta(p), p.requires_grad) for p in model.parameters()}
    memo |= {id(buffer): _meta(buffer) for buffer in model.buffers()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied, which an estimate needs: {error}. Keep what does not copy out of the "
            "model's attributes"
        ) from error


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


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
    storages = {id(s): s for s in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
