"""A part of a checkpoint: collected when it is saved, compared with the job and handed to it when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from booster.checkpoint.objects import Objects
from booster.checkpoint.saved_checkpoint import SavedCheckpoint
from booster.checkpoint.state_tree import HeldTensor, encode

Tensors = dict[str, HeldTensor]
WITHOUT_FROZEN = {"frozen weights": "left out"}
"""What a checkpoint says of its run that has no parameters of models that do not train."""


def leaves_out_frozen(run: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint that says `run` of its run has no parameters of models that do not train."""
    return {**run, **WITHOUT_FROZEN} == run


@dataclass
class SaveContext:
    """What one rank puts into a checkpoint.

    Attributes:
        rank: which one.
        frozen: whether parameters of models that do not train are among it.
        shared: tensors that all ranks have, or shards of them, by name.
        own: tensors of this rank alone.
    """

    rank: int
    frozen: bool = True
    shared: Tensors = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)

    def replicated(self, value: Any, name: str) -> Any:
        """Return `value` for the tree, with tensors under `name` that all ranks have, or shards of them."""
        return encode(value, name, self.shared)

    def per_rank(self, value: Any, name: str) -> Any:
        """Return `value` for the tree, with tensors under `name` that no other rank has under it."""
        return encode(value, name, self.own)


@dataclass(frozen=True)
class LoadContext:
    """A checkpoint, and the rank that loads it.

    Attributes:
        saved: the checkpoint, of which tensors are requested.
        rank: which one loads.
        strict: whether models must have just its entries.
    """

    saved: SavedCheckpoint
    rank: int
    strict: bool

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def same_ranks(self) -> bool:
        """Whether as many ranks saved it."""
        return len(self.saved.tree["random"]) == self.world_size


Step = tuple[str, Callable[[ExitStack], None]]
"""What is given a state, in words, and what gives it; the argument gets what takes it back, see `Part.steps`."""


class Part:
    """What a checkpoint says of one kind of object: keys of its tree, tensors that these refer to, and objects of the job.

    One is made for each save and each load. A save asks `collect`. A load asks every part to `compare`, reads all that they
    requested, asks every part to `prepare`, and then takes their `steps`, by `turn`. Where one raises, on any rank, all that
    came before is undone, and no object has changed. `finish` comes after all, and cannot fail.

    To add one: a subclass that overrides what it needs, and its name in `parts.PARTS`.

    Attributes:
        of_ranks: keys under which the tree has each rank's own, in a list; under others it has what ranks say together.
        turn: objects of the user's, which may refuse, come before what only copies.
        is_rehearsed: whether a save tries `prepare`, after `compare`, of what it wrote, with tensors on the meta device.
    """

    of_ranks: tuple[str, ...] = ()
    turn = 0
    is_rehearsed = True

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    @property
    def named(self) -> Mapping[str, Mapping[str, Any]]:
        """The objects of the job, by key of the tree and name, that a checkpoint must have."""
        return {}

    def collect(self, into: SaveContext) -> dict[str, Any]:
        """Return what this rank says under each key. Raises CheckpointError for what no load would take."""
        return {}

    def compare(self, found: LoadContext) -> Iterator[str]:
        """Say what differs between checkpoint and job, and makes a load impossible; note what is to be read."""
        return iter(())

    def prepare(self, found: LoadContext) -> None:
        """Make of what was read what objects take."""

    def steps(self) -> Iterator[Step]:
        """Return what gives objects their states, each as many times on every rank: a step ends in a collective."""
        return iter(())

    def finish(self) -> None:
        """Give what cannot be refused, once nothing else can fail."""
