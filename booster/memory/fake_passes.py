"""One forward and backward pass on fake tensors: shapes and dtypes are real, and no memory is taken."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from booster.common.misuse import where_raised
from booster.common.torch_internals import tensor_internals
from booster.memory.measured_memory import StorageTracker, storage_bytes
from booster.memory.pass_memory import FullySharded, Sizes, StepsInBackward
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.configure import wrap_criterion
from booster.mixed_precision.policy import cast_parameters
from booster.model.modules import copy_on_meta, replace_tensors
from booster.plugin.sequence_parallel.attention_mode import CutShapes, SequenceMode
from booster.plugin.sequence_parallel.sequence_cut import SequenceCut
from booster.plugin.sequence_parallel.transformers_attention import is_of_transformers, use_own_masks
from booster.tensors import trees
from booster.tensors.trees import MicroBatch


@dataclass(frozen=True)
class Passes:
    """Bytes, and what the optimizer is to step.

    Attributes:
        weights, inputs: of tensors that are there before, buffers among the weights.
        gradients: that are there after backward.
        activations: alive between forward and backward.
        highest: above what is there before, at the highest point.
        sizes: dtype and elements of each trainable parameter.
        shapes: of these parameters; empty where they are shards.
        idle: which of them backward does not reach; likewise.
    """

    weights: int
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
    shards: int | None,
    ep_size: int,
    cut: SequenceCut | None,
    in_backward: StepsInBackward | None,
) -> Passes:
    """Run `criterion(model(*inputs), target)` and its backward under `precision`, as on `device`, on copies without memory.

    shards: over so many ranks `fully_shard` shards the weights, and the result is one rank's; None: it does not.
    ep_size: to so many of these experts are dealt.
    cut: how sequences were cut, of which `batch` is a rank's part; None: they are whole.
    in_backward: how parameters are stepped within backward; None: they are not.

    Nothing of the arguments changes. Raises ValueError for a model that does not copy, or reads numbers out of tensors in its
    forward, which have none here.
    """
    precision.check(model)
    policy = precision.policy_for(model)
    placed = cast_parameters(precision.convert(copy_on_meta(model, "an estimate")), policy)
    errors = (tensor_internals.DataDependentOutputException, tensor_internals.DynamicOutputShapeException)
    # Copies are made on the meta device first: precisions convert real modules, and a fake tensor knows the device it acts for.
    if cut is not None and is_of_transformers(placed):
        use_own_masks(placed)
    with tensor_internals.FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(placed, device)
        given = MicroBatch.of(trees.map_tensors(lambda tensor: _fake(tensor, device), batch))
        own_criterion = criterion
        if isinstance(criterion, nn.Module):
            own_criterion = copy_on_meta(criterion, "an estimate")
            _make_fake(own_criterion, device)
        sharded = None if shards is None else FullySharded(placed, policy, shards, device, ep_size)
        if shards is None and precision.conversion is not None:
            precision.conversion.cache_weights(placed)
        wrapped, loss_of = precision.wrap_model(placed), wrap_criterion(precision, own_criterion, device)
        params, buffers = list(placed.parameters()), list(placed.buffers())
        joined: Any = (
            nullcontext() if cut is None else SequenceMode(CutShapes(cut.size, {id(each) for each in buffers}), cut)
        )
        trained = [param for param in params if param.requires_grad]
        reached: set[torch.Tensor] = set()
        for param in trained:
            param.register_post_accumulate_grad_hook(reached.add)
        inputs = [*trees.tensors((given.args, given.kwargs)), *trees.tensors(given.target)]
        tracker = StorageTracker([*params, *buffers, *inputs])
        try:
            with tracker:
                with _GroupedProducts(), joined:
                    output = wrapped(*given.args, **given.kwargs)
                loss = loss_of(output, given.target)  # type: ignore[misc]
                del output
                activations = tracker.now
                with precision.backward_context(), _GroupedProducts(), joined:  # for what is computed again
                    if in_backward is None:
                        loss.backward()
                    else:
                        in_backward.run(loss, sharded or in_backward.arrivals_of(params), device)
                if sharded is not None:
                    sharded.reduce_all()
        except errors as error:
            raise ValueError(_reading(model, error)) from error
        finally:
            if precision.conversion is not None:
                precision.conversion.drop_weights()
        gradients = [param.grad for param in params if param.grad is not None]
    stepped = trained if sharded is None else []
    return Passes(
        weights=storage_bytes(buffers) + (storage_bytes(params) if sharded is None else sharded.weights),
        inputs=storage_bytes(inputs),
        gradients=storage_bytes(gradients if sharded is None else sharded.gradients),
        activations=activations,
        highest=tracker.highest,
        sizes=tuple((param.dtype, param.numel()) for param in trained) if sharded is None else sharded.sizes,
        shapes=tuple(tuple(param.shape) for param in stepped),
        idle=tuple(param not in reached for param in stepped),
    )


class _GroupedProducts(TorchFunctionMode):
    """Gives products of experts in any dtype, as kernels do; torch's function of their shapes knows bfloat16 alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in tensor_internals.GROUPED_PRODUCTS
            and args[0].dim() == 2
            and args[1].dim() == 3
            and args[0].dtype == args[1].dtype
        ):
            return _GroupedProduct.apply(*args[:2])
        return func(*args, **(kwargs or {}))


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty((len(rows), weights.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors)


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


def _make_fake(model: nn.Module, device: torch.device) -> None:
    """Replace the tensors of `model` by fake ones on `device`; tied ones stay tied."""
    done: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        replace_tensors(module, lambda tensor: _fake(tensor, device), done)
