"""Tensors in containers: visiting them, replacing them, joining those of several containers into one; and a batch so divided
into the micro-batches of `execute_pipeline` (`MicroBatch`).

A container is a tuple, named tuple, list, deque, set, mapping (read-only or not), dataclass (frozen or not), or an
instance of a subclass of one; transformers' ModelOutput is one. All else is a leaf. Containers nest.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserList, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from booster.common.torch_internals.tensor_internals import version

_SEQUENCES = (tuple, list, deque, UserList)
_SETS = (set, frozenset)


def map_tensors(
    function: Callable[[torch.Tensor], Any],
    tree: Any,
    *,
    instead: Callable[[Any], Any] | None = None,
    copy_containers: bool = False,
) -> Any:
    """Return `tree` with every tensor replaced by `function` of it, in containers of the same types.

    A container in which nothing was replaced is returned itself; copy_containers: where it can be changed, a copy. No container
    of `tree` is changed. instead: asked first about everything that is not a tensor; what it returns takes the place, unless
    that is NotImplemented.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if instead is not None and (replaced := instead(tree)) is not NotImplemented:
        return replaced
    items = _items(tree)
    if items is None:
        return tree
    # A mapping that can neither be set nor made of its items becomes a dict.
    new = [map_tensors(function, item, instead=instead, copy_containers=copy_containers) for item in items]
    unchanged = all(map(operator.is_, new, items))
    # The same object where nothing changed: no copy is made, and identity is kept.
    if unchanged and (not copy_containers or isinstance(tree, (tuple, frozenset))):
        return tree
    return _with_items(tree, new)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in `tree`."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    for item in _items(tree) or ():
        yield from tensors(item)


def leaves(tree: Any) -> list[Any]:
    """Return everything in `tree` that is no container, in order."""
    items = _items(tree)
    return [tree] if items is None else [leaf for item in items for leaf in leaves(item)]


def with_leaves(tree: Any, new: Iterable[Any]) -> Any:
    """Return containers like those of `tree`, which stay as they are, with `new` in the places of `leaves(tree)`."""
    return _filled(tree, iter(new))


def form(tree: Any) -> Hashable:
    """Return what is equal for trees with their leaves in containers of the same classes, under the same keys."""
    items = _items(tree)
    if items is None:
        return None
    names = tuple(tree) if isinstance(tree, Mapping) else ()
    if not names and dataclasses.is_dataclass(tree):
        names = tuple(_set_fields(tree))
    described: tuple[Hashable, ...] = (type(tree).__qualname__, id(type(tree)), names)
    return (*described, *map(form, items))


def _filled(tree: Any, new: Iterator[Any]) -> Any:
    items = _items(tree)
    return next(new) if items is None else _with_items(tree, [_filled(item, new) for item in items])


def join(trees: Sequence[Any]) -> Any:
    """Join containers of one form into one: tensors along their first dimension, of 0-dim ones one row each.

    A mapping has the keys of the first. None stays None; sets and other leaves become the list of them. A single tree is
    returned itself."""
    first = trees[0]
    if len(trees) == 1 or first is None:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([tensor if tensor.dim() else tensor.reshape(1) for tensor in trees])
    items = None if isinstance(first, _SETS) else _items(first)
    if items is None:
        return list(trees)
    if isinstance(first, Mapping):
        each = [[tree[key] for key in first] for tree in trees]
    else:
        each = [_items(tree) or [] for tree in trees]
    return _with_items(first, [join(parts) for parts in zip(*each, strict=True)])


def is_container(tree: Any) -> bool:
    """Return whether `tree` is a container; see the module docstring."""
    return _items(tree) is not None


def _items(tree: Any) -> list[Any] | None:
    """What is in a container, in the order in which `_with_items` takes it; None for a leaf."""
    if tree is None:  # torch 2.11 cannot compile a look at the fields of its class
        return None
    if isinstance(tree, (*_SEQUENCES, *_SETS)):
        return list(tree)
    if isinstance(tree, Mapping):  # before dataclasses: a ModelOutput is both, and its items are what it has
        return [tree[key] for key in tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, torch.nn.Module)):
        # Fields that nobody set have no attribute: they are left out here and in the copy.
        return [getattr(tree, name) for name in _set_fields(tree)]
    return None


def _with_items(tree: Any, items: list[Any]) -> Any:
    """A container like `tree`, with its other attributes, and with other items."""
    if isinstance(tree, tuple):
        return _tuple_like(tree, items)
    if isinstance(tree, Mapping):
        return _mapping_like(tree, items)
    if isinstance(tree, frozenset):
        return type(tree)(items)
    if type(tree) in (list, set):
        return type(tree)(items)
    clone = copy.copy(tree)  # keeps the type, and attributes of a subclass
    # Item by item, since a subclass may take other arguments, and a deque has a length of its own.
    if isinstance(tree, (list, deque, UserList)):
        for position, item in enumerate(items):
            clone[position] = item
    elif isinstance(tree, set):
        clone.clear()
        clone.update(items)
    else:
        for name, item in zip(_set_fields(tree), items, strict=True):
            object.__setattr__(clone, name, item)  # past the class: it may be frozen
    return clone


def _tuple_like(tree: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    kind = type(tree)
    if kind is tuple or hasattr(kind, "n_sequence_fields"):  # such as torch.return_types.max
        return kind(items)
    clone: tuple[Any, ...] = tuple.__new__(kind, items)  # past the class: it may take other arguments
    if hasattr(tree, "__dict__"):
        clone.__dict__.update(tree.__dict__)
    return clone


def _mapping_like(tree: Mapping[Any, Any], items: list[Any]) -> Mapping[Any, Any]:
    new = dict(zip(tree, items, strict=True))
    if type(tree) is dict:  # torch.compile does not trace a copy of one
        return new
    if isinstance(tree, MutableMapping):
        try:
            clone = copy.copy(tree)
            for key, item in new.items():
                clone[key] = item
        except (TypeError, AttributeError, NotImplementedError):
            pass  # a read-only subclass of dict
        else:
            return clone
    try:
        made: Any = type(tree)(new)  # type: ignore[call-arg]
        # A class may drop or convert what it is made of; then a plain dict is nearer to the original.
        alike = list(made) == list(new) and all(made[key] is item for key, item in new.items())
    except Exception:  # of the user's class, which need not take a mapping
        alike = False
    return made if alike else new


def _set_fields(tree: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]


HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})


class Writes:
    """What a function writes into `casts` of its arguments `given`, in place or into containers, brought back to those.

    Made before the call. Nothing is of inference tensors, which count no writes.
    """

    def __init__(self, given: Any, casts: Any) -> None:
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._containers: list[tuple[Any, Any, list[Any]]] = []
        self._add_pair(given, casts)

    def _add_pair(self, given: Any, cast: Any) -> None:
        if given is cast:
            return
        if isinstance(cast, torch.Tensor):
            if not cast.is_inference():
                self._tensors.append((given, cast, version(cast)))
            return
        items = _items(cast) or []
        self._containers.append((given, cast, items))
        for pair in zip(_items(given) or (), items, strict=True):
            self._add_pair(*pair)

    def bring_back(self, finish: Callable[[Any], Any]) -> list[Any]:
        """Do to what was given what was done to the casts since; returns what is new in containers, as `finish` makes it."""
        made: list[Any] = []
        for given, cast, before in self._tensors:
            if version(cast) != before and given.data_ptr() != cast.data_ptr():
                given.copy_(cast)
        own = {id(cast): given for given, cast, *_ in (*self._tensors, *self._containers)}
        for given, cast, items in self._containers:
            now = _items(cast) or []
            if len(now) == len(items) and all(map(operator.is_, now, items)):
                continue
            known = {id(item) for item in items} | own.keys()
            fresh = {id(item): finish(item) for item in now if id(item) not in known}
            made += fresh.values()
            new = [fresh.get(id(item), own.get(id(item), item)) for item in now]
            if isinstance(cast, MutableMapping):
                for key in [key for key in given if key not in cast]:
                    del given[key]
                given.update(zip(cast, new, strict=True))
            elif isinstance(cast, (set, *_SEQUENCES)):
                given.clear()
                (given.update if isinstance(cast, set) else given.extend)(new)
            else:
                for name, item in zip(_set_fields(cast), new, strict=True):
                    setattr(given, name, item)
        return made


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
