"""Tensors between the layout of a running job and the whole names and shapes of a checkpoint.

JSON-like values with tensors in them, as text and a dict of tensors, and back: what is never a pickle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from booster.common.torch_internals.tensor_internals import gather_whole
from booster.model.dtensors import is_dtensor, local_shard
from booster.shards.flat_shard import FlatShard

Held = torch.Tensor | FlatShard  # what a rank holds of a tensor


def storable(tensor: Held) -> Held:
    """Return `tensor` as the planners take it: a DTensor of plain shards as it is, any other one whole.

    A collective for a DTensor whose shards are not boxes of the whole, as those of a fused projection are that tensor
    parallelism divides part by part.
    """
    if is_dtensor(tensor) and not _is_boxes(tensor):  # type: ignore[arg-type]
        return gather_whole(tensor)
    return tensor


def empty_like_whole(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor | None) -> torch.Tensor:
    """Return memory to read a whole tensor of `shape` into: divided as `like` is where that has this shape, else plain."""
    if like is None or tuple(like.shape) != shape or not is_dtensor(like) or not _is_boxes(like):
        return torch.empty(shape, dtype=dtype, device="cpu" if like is None else like.device)
    return torch.empty_like(like, dtype=dtype)


def placed_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value`, whole on every rank, divided as `like` is; no communication."""
    if not is_dtensor(like) or is_dtensor(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def can_be_read_into(held: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the bytes of a tensor of `shape` and `dtype`, or this rank's part of them, lie in `held` as in a file."""
    if held.dtype != dtype or tuple(held.shape) != shape or (is_dtensor(held) and not _is_boxes(held)):
        return False
    local = local_shard(held)
    return (
        local.device.type == "cpu"
        and type(local) in (torch.Tensor, torch.nn.Parameter)
        and local.layout is torch.strided
        and local.is_contiguous()
        and not (local.is_conj() or local.is_neg() or local.is_inference())
        and bool(local.numel())
    )


def note_written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that the memory of `tensors` was written to, which a read from a file does past it."""
    written = list(tensors)
    torch.autograd.graph.increment_version([*written, *(local_shard(each) for each in written if is_dtensor(each))])


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Torch's planner for tensors under their whole names, some of them `FlatShard`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """As torch's, which also makes real what is on the meta device, and for that takes tensors alone."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """As torch's, which looks for parts in tensors alone."""
        held = self.state_dict[index.fqn]
        return held.box_at(index.offset) if isinstance(held, FlatShard) else super().lookup_tensor(index)


class SavePlanner(dcp.DefaultSavePlanner):
    """Torch's planner for tensors under their whole names, some of them `FlatShard`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """As torch's, which looks for parts in tensors alone."""
        held = self.state_dict[index.fqn]
        return held.box_at(index.offset) if isinstance(held, FlatShard) else super().lookup_object(index)


def _is_boxes(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements = tensor.placements  # type: ignore[attr-defined]
    return all(type(placement) in (Replicate, Shard, Partial) for placement in placements)


_TAG = "__booster__"  # the key of everything that JSON has no form for
_ORDER = "order"  # of a reference to a tensor whose dimensions lie in memory otherwise than in a file


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor | FlatShard]) -> Any:
    """Return `value` as what `json.dumps` takes; its tensors go into `tensors`, under names that begin with `where`.

    Takes None, booleans, numbers, strings, lists, tuples, sets of them, mappings with any of these as keys, tensors, dtypes
    and devices. Raises TypeError that names the place of anything else.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, (torch.Tensor, FlatShard)):
        refuse_made_of_tensors(where, value)
        tensors[where] = value if isinstance(value, FlatShard) else value.detach()
        order = None if isinstance(value, FlatShard) or is_dtensor(value) else _order_of(value)
        return {_TAG: "tensor", "name": where, **({} if order is None else {_ORDER: order})}
    if isinstance(value, (torch.dtype, torch.device)):
        return {_TAG: type(value).__name__, "value": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        items = [[key, encode(entry, f"{where}/{key}", tensors)] for key, entry in value.items()]
        if all(isinstance(key, str) and key != _TAG for key, _ in items):
            return dict(items)
        keys = [encode(key, f"{where}/keys", tensors) for key, _ in items]
        return {_TAG: "dict", "items": [[key, entry] for key, (_, entry) in zip(keys, items, strict=True)]}
    if type(value) in (list, tuple, set, frozenset):
        entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        coded = [encode(entry, f"{where}/{index}", tensors) for index, entry in enumerate(entries)]
        return coded if type(value) is list else {_TAG: type(value).__name__, "items": coded}
    number = getattr(value, "item", None)
    if callable(number) and getattr(value, "shape", None) == ():  # a scalar of numpy
        return encode(number(), where, tensors)
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold: give tensors, numbers, strings, lists, "
        "tuples, dicts of these, or an object with state_dict() and load_state_dict()"
    )


def _order_of(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions of a tensor from the slowest in memory to the fastest; None where that is their own order, or where
    the memory has gaps.

    In another order products of the same numbers end in other bits, as those with eigenvectors, which LAPACK makes by columns.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else None


def has_order(value: Any) -> bool:
    """Return whether an entry of what `encode` gave refers to a tensor that `decode` lays out in another order of memory."""
    return isinstance(value, dict) and _ORDER in value


def _laid(held: torch.Tensor | FlatShard, order: Any) -> torch.Tensor | FlatShard:
    """Return `held` with its dimensions in memory in the order of `_order_of`, where this rank has all of it."""
    if order is None or isinstance(held, FlatShard) or is_dtensor(held):
        return held
    if not isinstance(order, list) or sorted(map(repr, order)) != sorted(map(repr, range(held.dim()))):
        raise ValueError(f"{str(order)[:80]} is no order of {held.dim()} dimensions")
    return held.permute(order).contiguous().permute([order.index(dim) for dim in range(held.dim())])


def refuse_made_of_tensors(where: str, tensor: Held) -> None:
    """Raise TypeError for a tensor made of others inside, as those of torchao in few bits and sparse ones are."""
    held = tensor.values if isinstance(tensor, FlatShard) else tensor
    local = held.to_local() if is_dtensor(held) else held  # type: ignore[attr-defined]
    if hasattr(type(local), "__tensor_flatten__"):
        raise TypeError(
            f"{where} is a {type(local).__name__}, made of tensors inside, which no checkpoint holds; leave weights that do "
            "not train out with b.save(frozen=False), and keep states of optimizers in few bits with Booster(states='8bit')"
        )
    if local.layout is not torch.strided:
        layout = str(local.layout).removeprefix("torch.")
        raise TypeError(
            f"{where} is a tensor of layout {layout}, which no checkpoint holds; a buffer that the model makes anew is "
            "left out with register_buffer(..., persistent=False), any other is kept as its indices and its values"
        )


def decode(value: Any, tensors: Mapping[str, torch.Tensor | FlatShard]) -> Any:
    """Return what `encode` was given. Raises ValueError for what it did not write."""
    if isinstance(value, list):
        return [decode(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(entry, tensors) for key, entry in value.items()}
    kind = value[_TAG]
    if kind == "tensor":
        return _laid(tensors[value["name"]], value.get(_ORDER))
    if kind == "float":
        return float(value["value"])
    if kind == "dtype":
        return _dtype(value["value"])
    if kind == "device":
        return torch.device(value["value"])
    if kind == "dict":
        return {decode(key, tensors): decode(entry, tensors) for key, entry in value["items"]}
    made = {"tuple": tuple, "set": set, "frozenset": frozenset}.get(kind)
    if made is None:
        raise ValueError(f"{kind!r} is no kind of value that a checkpoint holds")
    return made(decode(entry, tensors) for entry in value["items"])


def reference(value: Any) -> str | None:
    """Return the name of the tensor that an entry of what `encode` gave refers to; None for any other entry.

    Raises ValueError for a reference without a name.
    """
    if not isinstance(value, dict) or value.get(_TAG) != "tensor":
        return None
    if not isinstance(value.get("name"), str):
        raise ValueError("a tensor is referred to by no name")
    return str(value["name"])


def references(tree: Any) -> Iterator[str]:
    """Yield the names of the tensors that all entries of what `encode` gave refer to, in order, however deep it is."""
    left = [tree]
    while left:
        value = left.pop()
        name = reference(value)
        if name is not None:
            yield name
        elif isinstance(value, (dict, list)):
            left += reversed(value.values() if isinstance(value, dict) else value)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
