"""What crosses from stage to stage for micro-batches of one shape, and what modules of other stages return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from booster.plugin.pipeline.meta_model import Results, is_fake
from booster.tensors.trees import leaves as leaves_of
from booster.tensors.trees import with_leaves


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Boundary:
    """The arguments that the first block of a stage receives from the stage before it.

    Attributes:
        positions: among the leaves of its (args, kwargs).
        specs: what they are.
        relays: for each, its number among the tensors that the sending stage itself received and passes on; None for one that
            the sending stage computes.
    """

    positions: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    relays: tuple[int | None, ...]


@dataclass
class StageIO:
    """What shape inference found for micro-batches of one shape.

    Attributes:
        boundaries: one between each two stages.
        received: by position of a block, the leaves of its arguments that are received, as (leaf, number of the tensor).
        outputs: by position of a block, what it returns on stages that do not have it.
        results: by stage, the cache of functions of fake activations before its first block; None where a function writes to
            one, so that they have to be made anew for every micro-batch.
    """

    boundaries: list[Boundary] = field(default_factory=list)
    received: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    outputs: dict[int, RecordedOutput] = field(default_factory=dict)
    results: dict[int, Results | None] = field(default_factory=dict)
    _constants: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)

    def constants(self, stage: int, first: int) -> dict[int, torch.Tensor]:
        """By position of a block before `first`, where `stage` begins: what it returns there, whatever its arguments."""
        if stage not in self._constants:
            outputs = {} if self.results.get(stage) is None else self.outputs
            found = {position: output.constant for position, output in outputs.items() if position < first}
            self._constants[stage] = {position: value for position, value in found.items() if value is not None}
        return self._constants[stage]


class RecordedOutput:
    """Returns what a module returned once, with fake tensors in place of what depends on parameters.

    A leaf of the result that was an argument is taken from the arguments of the present call.
    """

    def __init__(self, args: Any, kwargs: Any, output: Any, to_fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """to_fake: makes a real tensor of the result fake, which otherwise would seem to be known everywhere."""
        given = {id(leaf): number for number, leaf in enumerate(leaves_of((args, kwargs))) if _has_identity(leaf)}
        leaves = leaves_of(output)
        self._form = with_leaves(output, range(len(leaves)))  # the containers, without what is in them
        self._passed = [given.get(id(leaf)) if _has_identity(leaf) else None for leaf in leaves]
        self._leaves: list[Any] = []
        first: list[Any] = []  # the leaves of this first call
        for leaf, passed in zip(leaves, self._passed, strict=True):
            kept = to_fake(leaf) if isinstance(leaf, torch.Tensor) and passed is None else leaf
            self._leaves.append(kept if passed is None else None)
            first.append(leaf if is_fake(leaf) else kept)
        self.output = with_leaves(self._form, first)
        self._shared: list[Any] | None = None

    def __call__(self, args: Any, kwargs: Any, *, again: bool = False) -> Any:
        """again: return the same fake tensors as before; only where nothing writes to them."""
        made = self._again() if again else self._detached()
        if any(passed is not None for passed in self._passed):
            given = leaves_of((args, kwargs))
            made = [leaf if passed is None else given[passed] for leaf, passed in zip(made, self._passed, strict=True)]
        return with_leaves(self._form, made)

    @property
    def constant(self) -> torch.Tensor | None:
        """The one tensor that is returned again whatever the arguments are; None where the result is anything else."""
        alone = isinstance(self._form, int) and self._passed[0] is None
        return self._again()[0] if alone and isinstance(self._leaves[0], torch.Tensor) else None

    def _again(self) -> list[Any]:
        if self._shared is None:
            self._shared = self._detached()
        return self._shared

    def _detached(self) -> list[Any]:
        return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]


def substitute(args: Any, kwargs: Any, slots: list[tuple[int, int]], received: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return (args, kwargs) with received tensors in the places that `slots` says."""
    if not kwargs and all(isinstance(arg, torch.Tensor) for arg in args):  # as most blocks are called
        flat = list(args)
        for leaf, number in slots:
            flat[leaf] = received[number]
        return tuple(flat), kwargs
    call = (args, kwargs)
    leaves = leaves_of(call)
    for leaf, number in slots:
        leaves[leaf] = received[number]
    args, kwargs = with_leaves(call, leaves)
    return args, kwargs


def _has_identity(leaf: Any) -> bool:
    return leaf is not None and not isinstance(leaf, (bool, int, float, str))
