"""What a checkpoint says besides its tensors: a tree of names, as JSON, with a reference in each tensor's place.

`encode` makes it of what objects say of themselves, and `decode` gives that back, without a pickle. `read_tree` reads the file
and holds it to its form, so that what loads it may index without asking. A reference has the whole shape of a tensor; the last
functions go between that and the layout of a running job.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from booster.checkpoint.manifest import STATE, CheckpointError, Manifest, hash_of, read_text, room_of
from booster.common.torch_internals.tensor_internals import gather_full
from booster.common.untrusted_files import ANY, TEXT, check_form, one_of, parse_json
from booster.model.params import is_dtensor, local_shard
from booster.shards.base import FlatShard
from booster.update.state_dict import STATE_KEY

HeldTensor = torch.Tensor | FlatShard  # what a rank holds of a tensor


def as_planned(tensor: HeldTensor) -> HeldTensor:
    """Return `tensor` as the planners take it: a DTensor of plain shards as it is, any other one whole."""
    # A collective for a DTensor with shards that are not boxes of the whole, as those of a fused projection are that tensor
    # parallelism divides part by part.
    if is_dtensor(tensor) and not is_boxes(tensor):  # type: ignore[arg-type]
        return gather_full(tensor)
    return tensor


def empty_like_whole(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor | None) -> torch.Tensor:
    """Return memory to read a whole tensor of `shape` into: divided as `like` is where that has this shape, else plain."""
    if like is None or tuple(like.shape) != shape or not is_dtensor(like) or not is_boxes(like):
        return torch.empty(shape, dtype=dtype, device="cpu" if like is None else like.device)
    return torch.empty_like(like, dtype=dtype)


def shard_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value`, whole on every rank, divided as `like` is; no communication."""
    if not is_dtensor(like) or is_dtensor(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def can_be_read_into(held: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the bytes of a tensor of `shape` and `dtype`, or this rank's part of them, are in `held` as in a file."""
    if held.dtype != dtype or tuple(held.shape) != shape or (is_dtensor(held) and not is_boxes(held)):
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


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that the memory of `tensors` was written to, which a read from a file does past it."""
    # A backward that saved one of them must raise, as after any write in place.
    written = list(tensors)
    torch.autograd.graph.increment_version([*written, *(local_shard(each) for each in written if is_dtensor(each))])


def is_boxes(tensor: torch.Tensor) -> bool:
    """Return whether what each rank has of a DTensor is one box of it."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements = tensor.placements  # type: ignore[attr-defined]
    return all(type(placement) in (Replicate, Shard, Partial) for placement in placements)


def refuse_made_of_tensors(where: str, tensor: HeldTensor) -> None:
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


BESIDE = "beside"  # of an optimizer: states of no parameter, by the optimizer's keys
OWN = "own"  # key of the tree: by rank, under which name of the checkpoint it has another tensor, by the common name
_TAG = "__booster__"  # the key of everything that JSON has no form for
_ORDER = "order"  # key of a reference to a tensor with dimensions in another order of memory than in a file


def encode(value: Any, where: str, tensors: dict[str, HeldTensor]) -> Any:
    """Return `value` as what `json.dumps` takes; its tensors go into `tensors`, under names that begin with `where`.

    Takes None, booleans, numbers, strings, lists, tuples, sets of them, mappings with any of these as keys, tensors, dtypes
    and devices. Raises TypeError that names the place of anything else.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        # JSON has no inf and no NaN.
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
    the memory has gaps."""
    if tensor.is_contiguous():
        return None
    # In another order products of the same numbers end in other bits, as those with eigenvectors, which LAPACK makes by
    # columns.
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else None


def has_order(value: Any) -> bool:
    """Return whether an entry of what `encode` gave refers to a tensor that `decode` lays out in another order of memory."""
    return isinstance(value, dict) and _ORDER in value


def _laid(held: HeldTensor, order: Any) -> HeldTensor:
    """Return `held` with its dimensions in memory in the order of `_order_of`, where this rank has all of it."""
    if order is None or isinstance(held, FlatShard) or is_dtensor(held):
        return held
    if not isinstance(order, list) or sorted(map(repr, order)) != sorted(map(repr, range(held.dim()))):
        raise ValueError(f"{str(order)[:80]} is no order of {held.dim()} dimensions")
    return held.permute(order).contiguous().permute([order.index(dim) for dim in range(held.dim())])


def decode(value: Any, tensors: Mapping[str, HeldTensor]) -> Any:
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


# ---- read from a file ----

_OBJECT: dict[str, Any] = {}
_OBJECTS = {"*": _OBJECT}
_OPTIMIZER = {
    "class": TEXT,
    "state": _OBJECTS,
    "groups": [{"options": _OBJECT, "params": _OBJECT}],
    f"{BESIDE}?": _OBJECT,
    STATE_KEY: {"loss_scaler": _OBJECT},
}
_FORM = {
    **dict.fromkeys(("models?", "criteria?", "dataloaders?"), _OBJECTS),
    **dict.fromkeys(("lr_schedulers?", "run?"), _OBJECT),
    "pins?": {"*": {"names?": [TEXT], "skips?": {"*": [one_of(int, "a whole number")]}}},
    "optimizers?": {"*": _OPTIMIZER},
    "masters?": {"*": TEXT},
    "random": [_OBJECT],
    "loaders": [_OBJECTS],
    "carried?": [_OBJECTS],
    "extra": ANY,
    "extras?": [ANY],
    f"{OWN}?": [{"*": TEXT}],
}


def read_tree(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read and check the tree of the checkpoint in `folder`: what is named in it is of the kind that a load takes it for.

    Raises CheckpointError for damage, and for what `save` did not write.
    """
    path = folder / STATE
    if STATE not in manifest.files:
        raise CheckpointError(f"{folder} is damaged: its manifest names no {STATE}")
    try:
        text = read_text(folder, STATE)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if hash_of(text) != manifest.files[STATE].digest:
        raise CheckpointError(f"{STATE} holds other bytes than were written")
    try:
        tree = parse_json(text, room_of(folder))
        check_form("it", tree, _FORM)
        tree = {key.removesuffix("?"): {} for key, form in _FORM.items() if isinstance(form, dict)} | tree
        _check_names(tree)
        _check_references(tree, manifest)
    except ValueError as error:
        raise CheckpointError(f"{path} does not say what a checkpoint says: {error}") from error
    return tree


def _check_names(tree: Mapping[str, Any]) -> None:
    """States and masters are of parameters that the groups name, and a master behind a weight is one of an optimizer."""
    kept: set[Any] = set()
    for name, optimizer in tree["optimizers"].items():
        params = {param for group in optimizer["groups"] for param in group["params"]}
        _of_these(f"the state of optimizers {name!r}", optimizer["state"], params)
        masters = optimizer[STATE_KEY].get("masters")
        if masters is None:
            continue
        check_form(f"the masters of optimizers {name!r}", masters, {"weights?": _OBJECT})
        weights = masters.get("weights", {})
        _of_these(f"the masters of optimizers {name!r}", weights, params)
        for param, value in weights.items():
            if reference(value) is None:  # a load would take the half weight in its place
                raise ValueError(f"the master of {param} in optimizers {name!r} is no tensor")
            kept.add(reference(value))
    modules = [f"{kind}/{name}/" for kind in ("models", "criteria") for name in tree[kind]]
    for weight, master in tree["masters"].items():
        if master not in kept or not weight.startswith(tuple(modules)):
            raise ValueError(f"it has a master {master!r} behind {weight!r}, and one of them is not in it")


def _check_references(tree: Mapping[str, Any], manifest: Manifest) -> None:
    """What is referred to is there, and masters have the shapes of the weights that they stand behind."""
    tensors = manifest.tensors
    if missing := sorted({name for name in references(tree) if name not in tensors}):
        raise ValueError(f"it refers to tensors {missing[:3]}, which the checkpoint does not hold")
    for name, own in (pair for each in tree.get(OWN, []) for pair in each.items()):
        if name not in tensors or own not in tensors:
            raise ValueError(f"it has {own!r} for {name!r}, which the checkpoint does not hold")
        if not name.startswith("extra/") and (tensors[name].shape, tensors[name].dtype) != (
            tensors[own].shape,
            tensors[own].dtype,
        ):
            raise ValueError(f"{own} is no tensor like {name}")
    for weight, master in tree["masters"].items():
        if weight in tensors and tensors[weight].shape != tensors[master].shape:
            raise ValueError(f"the master of {weight} has shape {tensors[master].shape}, not {tensors[weight].shape}")


def _of_these(what: str, found: Mapping[str, Any], params: Collection[str]) -> None:
    if unknown := sorted(found.keys() - params):
        raise ValueError(f"{what} names {unknown[:3]}, and none of its groups has such a parameter")
