"""What `execute_pipeline` makes of a batch: how it is divided, and what of it the model and the criterion get."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch


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


def divide(batch: Any, count: Callable[[int], int]) -> list[MicroBatch]:
    """`batch` as micro-batches, as many as `count` makes of its size, which is the first dimension of its first tensor.

    Tensors with that first dimension are divided, in whatever containers; all else goes to every micro-batch. Raises
    ValueError if the size is not a multiple of their number.
    """
    tensors = [tensor for tensor in _tensors(batch) if tensor.dim()]
    if not tensors:
        raise ValueError("the batch holds no tensor with a batch dimension, so it cannot be divided into micro-batches")
    size = tensors[0].shape[0]
    num = count(size)
    if size % num:
        raise ValueError(
            f"a batch of {size} samples does not divide into {num} micro-batches; make the batch size a multiple of it, and "
            "drop the last, smaller batch of an epoch (drop_last=True)"
        )
    if num == 1:
        return [MicroBatch.of(batch)]
    return [MicroBatch.of(_part(batch, size, index * size // num, size // num)) for index in range(num)]


def joined(outputs: list[Any]) -> Any:
    """What the model returned for each micro-batch, as for one batch: tensors joined along their first dimension."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([out if out.dim() else out.reshape(1) for out in outputs])
    if isinstance(first, MutableMapping):
        whole = copy.copy(first)
        for key in first:
            whole[key] = joined([output[key] for output in outputs])
        return whole
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(joined(list(parts)) for parts in zip(*outputs, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(joined(list(parts)) for parts in zip(*outputs, strict=True))
    return outputs


def _part(value: Any, size: int, start: int, length: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.narrow(0, start, length) if value.dim() and value.shape[0] == size else value
    if isinstance(value, MutableMapping):
        part = copy.copy(value)
        for key, entry in value.items():
            part[key] = _part(entry, size, start, length)
        return part
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_part(entry, size, start, length) for entry in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_part(entry, size, start, length) for entry in value)
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
