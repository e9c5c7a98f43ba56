"""What `execute_pipeline` makes of a batch: how it is divided, and what of it the model and the criterion get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from booster.tensors.trees import leaves, map_tensors, tensors


@dataclass(frozen=True)
class MicroBatch:
    """`model(*args, **kwargs)`, then `criterion(output, target)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any

    @classmethod
    def of(cls, batch: Any) -> MicroBatch:
        """A tuple or list is (inputs..., target); a mapping goes to the model by keyword, and as a whole is the target;
        anything else is input and target."""
        if isinstance(batch, Mapping):
            return cls((), dict(batch), batch)
        if isinstance(batch, (tuple, list)):
            if len(batch) < 2:
                raise ValueError(
                    f"a batch of {len(batch)} elements has no target; yield (inputs..., target), or a mapping of what the "
                    "model takes by keyword"
                )
            return cls(tuple(batch[:-1]), {}, batch[-1])
        return cls((batch,), {}, batch)


def at_stage(stage: int, micro_batch: int, is_loss: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, which is what this stage of a pipeline computes of this micro-batch, or the loss of it."""
    # Whoever looks at operations reads from Python's stack, where this is, what they belong to.
    return function(*args)


def divide(batch: Any, count: Callable[[int], int]) -> list[MicroBatch]:
    """`batch` as micro-batches, as many as `count` makes of its size, which is the first dimension of its first tensor.

    Tensors with that first dimension are divided, in whatever containers; all else goes to every micro-batch. Raises
    ValueError if the size is not a multiple of their number, and TypeError for an object that has such tensors as attributes
    and is no container that can be divided.
    """
    size = next((tensor.shape[0] for tensor in tensors(batch) if tensor.dim()), None)
    if size is None:
        raise ValueError("the batch holds no tensor with a batch dimension, so it cannot be divided into micro-batches")
    num = count(size)
    if size % num:
        raise ValueError(
            f"a batch of {size} samples does not divide into {num} micro-batches; make the batch size a multiple of it, and "
            "drop the last, smaller batch of an epoch (drop_last=True)"
        )
    if num == 1:
        return [MicroBatch.of(batch)]
    for leaf in leaves(batch):
        _check_divisible(leaf, size)

    def part(tensor: torch.Tensor, index: int) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != size:
            return tensor
        return tensor.narrow(0, index * size // num, size // num)

    return [MicroBatch.of(map_tensors(partial(part, index=index), batch)) for index in range(num)]


def _check_divisible(leaf: Any, size: int) -> None:
    if isinstance(leaf, (torch.Tensor, torch.nn.Module, type)):
        return
    for name, value in getattr(leaf, "__dict__", {}).items():
        if any(tensor.dim() and tensor.shape[0] == size for tensor in tensors(value)):
            cls = type(leaf).__name__
            raise TypeError(
                f"the batch holds an object of {cls}, its attribute {name!r} has the {size} samples of the batch, and how to "
                f"divide it into micro-batches is not known: give a tuple, list, mapping or dataclass instead, or make {cls} a "
                "dataclass"
            )
