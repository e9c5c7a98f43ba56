"""One container of every kind that a batch, an input or an output of a model can come in."""

import collections
import dataclasses
import types
from collections.abc import Mapping
from typing import NamedTuple

import torch


class Pair(NamedTuple):
    x: torch.Tensor
    rest: object


class TaggedPair(Pair):
    """With its own constructor, and more than its items."""

    def __new__(cls, x, *, tag):
        self = super().__new__(cls, x, [x, None])
        self.tag = tag
        return self


class TaggedTuple(tuple):
    def __new__(cls, *items, tag):
        self = super().__new__(cls, items)
        self.tag = tag
        return self


class TaggedList(list):
    def __init__(self, *items, tag):
        super().__init__(items)
        self.tag = tag


class TaggedDict(dict):
    def __init__(self, tag, **items):
        super().__init__(items)
        self.tag = tag


class FrozenDict(dict):
    """A dict that cannot be set."""

    def __setitem__(self, key, value):
        raise TypeError("this dict is frozen")


class Rows(Mapping):
    """A read-only mapping that is made of a mapping."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Columns(Rows):
    """A read-only mapping that is made of something else."""

    def __init__(self, x, text):
        super().__init__({"x": x, "text": text})


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    text: str = "text"
    unset: torch.Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    nested: dict


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    text: str = "text"


CONTAINERS = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, "text", None),
    "list": lambda x: [x, [x, 3]],
    "deque": lambda x: collections.deque([x, "text"], maxlen=3),
    "user list": lambda x: collections.UserList([x, "text"]),
    "set": lambda x: {x, "text"},
    "frozen set": lambda x: frozenset({x, "text"}),
    "named tuple": lambda x: Pair(x, (x, None)),
    "named tuple of torch": lambda x: torch.return_types.max((x, x)),
    "named tuple, subclass": lambda x: TaggedPair(x, tag="kept"),
    "tuple, subclass": lambda x: TaggedTuple(x, "text", tag="kept"),
    "list, subclass": lambda x: TaggedList(x, "text", tag="kept"),
    "dict": lambda x: {"x": x, "text": "text", "nested": {"x": [x]}},
    "dict, subclass": lambda x: TaggedDict("kept", x=x),
    "dict that cannot be set": lambda x: FrozenDict(x=x, text="text"),
    "ordered dict": lambda x: collections.OrderedDict(x=x, text="text"),
    "default dict": lambda x: collections.defaultdict(list, x=x),
    "user dict": lambda x: collections.UserDict(x=x, text="text"),
    "read-only mapping": lambda x: types.MappingProxyType({"x": x, "text": "text"}),
    "read-only mapping, made of one": lambda x: Rows({"x": x, "text": "text"}),
    "read-only mapping, made otherwise": lambda x: Columns(x, "text"),
    "dataclass": lambda x: Record(x),
    "frozen dataclass": lambda x: Frozen(x, {"x": x}),
    "slotted dataclass": lambda x: Slotted(x),
    "object in a tuple": lambda x: (Record(x), types.MappingProxyType({"x": x})),
}


def type_after(kind, container):
    """The type that `container` has once its tensors were replaced: its own, if that can be made."""
    return dict if kind == "read-only mapping, made otherwise" else type(container)


def leaves(tree):
    """What is in `tree`, read by the public ways of its types; in a set the tensors come first."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [leaf for key in tree for leaf in leaves(tree[key])]
    if isinstance(tree, (set, frozenset)):
        return sorted(tree, key=lambda item: not isinstance(item, torch.Tensor))
    if isinstance(tree, (tuple, list, collections.deque, collections.UserList)):
        return [leaf for item in tree for leaf in leaves(item)]
    if dataclasses.is_dataclass(tree):
        names = [field.name for field in dataclasses.fields(tree)]
        return [leaf for name in names if hasattr(tree, name) for leaf in leaves(getattr(tree, name))]
    return [tree]
