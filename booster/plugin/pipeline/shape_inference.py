"""Running the meta model stage by stage, to learn what crosses between stages before anything is computed.

What crosses is for micro-batches of one shape; what modules of other stages return is known from there too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from booster.common.torch_internals.tensor_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    version,
)
from booster.model.modules import fast_path_off
from booster.plugin.pipeline.meta_model import MetaModel, Results, is_fake
from booster.plugin.pipeline.split import Split
from booster.tensors.trees import leaves as leaves_of
from booster.tensors.trees import tensors as tensors_of
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
        written: by stage, the numbers of received tensors that its forward writes to.
        results: by stage, the cache of functions of fake activations before its first block; None where a function writes to
            one, so that they have to be made anew for every micro-batch.
    """

    boundaries: list[Boundary] = field(default_factory=list)
    received: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    outputs: dict[int, RecordedOutput] = field(default_factory=dict)
    written: dict[int, frozenset[int]] = field(default_factory=dict)
    results: dict[int, Results | None] = field(default_factory=dict)
    _constants: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)

    def constants(self, stage: int, first: int) -> dict[int, torch.Tensor]:
        """By position of a block before `first`, where `stage` begins: what it returns there, whatever its arguments."""
        if stage not in self._constants:
            outputs = {} if self.results.get(stage) is None else self.outputs
            earlier = {position: output.constant for position, output in outputs.items() if position < first}
            self._constants[stage] = {position: value for position, value in earlier.items() if value is not None}
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


def _may_be_written(value: torch.Tensor) -> bool:
    # In inference mode tensors have no version counter, so assume a write.
    return torch.is_inference_mode_enabled() or version(value) > 0


def _has_identity(leaf: Any) -> bool:
    return leaf is not None and not isinstance(leaf, (bool, int, float, str))


_NONE: frozenset[str] = frozenset()


class StageEnd(BaseException):
    """Leaves the forward of a stage at the first block of the next one. No error, so no `except Exception` takes it."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__()
        self.values = values


def infer_shapes(meta_model: MetaModel, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageIO:
    """Return what stages send for micro-batches shaped like (args, kwargs), under the active precision and grad mode.

    Every stage of the pipeline runs here, on fake tensors: a forward that uses what its stage does not have raises RuntimeError
    on all ranks, before any of them waits for another.
    """
    io = StageIO()
    devices = {leaf.device for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    # No real parameter or buffer is read or written, and random generators are restored.
    with _random_states_restored(devices), fast_path_off():
        for stage in range(split.num_stages):
            # About one forward pass without arithmetic; every stage, so that all ranks raise alike.
            _StageRun(meta_model, split, stage, io).run(args, kwargs)
    return io


@contextmanager
def _random_states_restored(devices: Iterable[torch.device]) -> Iterator[None]:
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[device.index for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(state)


class _StageRun:
    """The inference of one stage: blocks before it return what was recorded, its own run, the first one after it ends it."""

    def __init__(self, meta_model: MetaModel, split: Split, stage: int, io: StageIO) -> None:
        self._meta_model = meta_model
        self._split = split
        self._stage = stage
        self._io = io
        self._sources = _Sources(meta_model, stage)
        self._called: set[int] = set()
        self._received_as: dict[int, int] = {}  # by id of a leaf: the number of the received tensor that replaces it
        self._received: tuple[torch.Tensor, ...] = ()
        self._held: list[Any] = []  # keeps the ids of these leaves from being used again

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_last, begins = self._stage == self._split.num_stages - 1, (0, *self._split.starts)
        self._sources.closed = self._stage == 0
        self._meta_model.call = self._call
        mode = self._meta_model.mode
        # Stage 0 has no foreign blocks before its own, so nothing of it is cached.
        mode.records_writes, mode.wrote = self._stage > 0, False
        try:
            with self._sources:
                output = self._meta_model.module(*args, **kwargs)
        except StageEnd:
            return
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if is_last and self._sources.closed:
                return  # after the last block no shape has to be known
            raise RuntimeError(
                f"the forward reads values of activations in Python ({error}), so shapes between pipeline stages cannot be "
                "known before they are computed. Keep such code out of the blocks and of what comes before them"
            ) from error
        finally:
            self._meta_model.call = None
            mode.records_writes = False
            self._io.written[self._stage] = frozenset(
                number for number, value in enumerate(self._received) if _may_be_written(value)
            )
        if not is_last or not self._sources.closed:
            stage = self._stage if is_last else self._stage + 1
            raise RuntimeError(
                f"the forward returned without calling {self._split.name_of(begins[stage])}, which begins "
                f"stage {stage} of the pipeline; name other split_points"
            )
        foreign = [self._sources.of(leaf) for leaf in leaves_of(output) if is_fake(leaf)]
        if any(foreign):
            raise _foreign_use(_NONE.union(*foreign), self._stage)

    def _call(self, position: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The forward of the child of the container at `position`."""
        name, owner = self._split.name_of(position), self._split.stage_of(position)
        if position in self._called:
            raise RuntimeError(
                f"{name} is called twice in one forward, which a pipeline stage cannot do; name other split_points"
            )
        self._called.add(position)
        leaves = leaves_of((args, kwargs))
        if owner < self._stage:
            return self._recorded(position, args, kwargs)
        if owner > self._stage:
            self._end(position, leaves)
        if self._stage and position == self._split.starts[self._stage - 1]:
            # The first block of the stage is called: from here on activations come from what was received
            boundary = self._io.boundaries[self._stage - 1]
            if boundary.positions and boundary.positions[-1] >= len(leaves):
                raise RuntimeError(f"the first block of stage {self._stage} gets other arguments than it did before")
            replaced = [leaves[leaf] for leaf in boundary.positions]
            self._received_as.update({id(leaf): number for number, leaf in enumerate(replaced)})
            self._held += replaced
            self._sources.closed = True
            self._meta_model.mode.records_writes = False
            # Clones, since a leaf that requires gradients takes no write in place; see `Stage.compute`.
            self._received = tuple(
                self._meta_model.fake(spec.shape, spec.dtype, leaf.device, requires_grad=spec.requires_grad).clone()
                for spec, leaf in zip(boundary.specs, replaced, strict=True)
            )
            self._io.results[self._stage] = None if self._meta_model.mode.wrote else {}
        elif not self._sources.closed:
            first = self._split.name_of(self._split.starts[self._stage - 1])
            raise RuntimeError(
                f"{name} is called before {first}, which begins its pipeline stage; name other split_points"
            )
        slots = [
            (leaf, self._received_as[id(value)]) for leaf, value in enumerate(leaves) if id(value) in self._received_as
        ]
        if slots:
            self._io.received[position] = slots
            args, kwargs = substitute(args, kwargs, slots, self._received)

        def to_fake(tensor: torch.Tensor) -> torch.Tensor:
            if is_fake(tensor):
                return tensor.detach()
            return self._meta_model.fake(tensor.shape, tensor.dtype, tensor.device)

        recorded = RecordedOutput(args, kwargs, forward(*args, **kwargs), to_fake)
        self._io.outputs[position] = recorded
        return recorded.output

    def _recorded(self, position: int, args: Any, kwargs: Any) -> Any:
        name = self._split.name_of(position)
        if position not in self._io.outputs:
            raise RuntimeError(
                f"{name} is called on one pipeline stage and not on another: the forward differs "
                "from run to run, or calls modules in another order than they are registered"
            )
        given = {id(leaf) for leaf in leaves_of((args, kwargs))}
        output = self._io.outputs[position](args, kwargs)
        # Arguments that a block only passes on keep their own sources.
        self._sources.tag([leaf for leaf in leaves_of(output) if id(leaf) not in given], frozenset({name}))
        return output

    def _end(self, position: int, leaves: list[Any]) -> None:
        """The stage is over: record what the next one receives."""
        name, first = self._split.name_of(position), self._split.starts[self._stage]
        if position != first:
            raise RuntimeError(
                f"{name} is called before {self._split.name_of(first)}, which begins its pipeline stage; name other "
                "split_points"
            )
        if not self._sources.closed:
            raise RuntimeError(f"{name} is called before any block of stage {self._stage}")
        positions, relays, specs = [], [], []
        for number, leaf in enumerate(leaves):
            if not is_fake(leaf):
                continue
            relay = self._received_as.get(id(leaf))
            if relay is None and self._sources.of(leaf):
                raise _foreign_use(self._sources.of(leaf), self._stage)
            sent = leaf if relay is None else self._received[relay]
            positions.append(number)
            relays.append(relay)
            requires_grad = sent.requires_grad and sent.is_floating_point()
            specs.append(TensorSpec(tuple(sent.shape), sent.dtype, requires_grad))
        if not positions:
            raise RuntimeError(
                f"{name} gets no tensor that depends on what comes before it, so no pipeline "
                "stage can begin there; name other split_points"
            )
        self._io.boundaries.append(Boundary(tuple(positions), tuple(specs), tuple(relays)))
        raise StageEnd(())


class _Sources(TorchFunctionMode):
    """While active, tracks through every torch function which foreign parameters and blocks a fake tensor was computed from.

    Foreign is what another stage has.

    Attributes:
        closed: what is foreign may not meet the stage's own from now on; results of before are in what was received.
    """

    def __init__(self, meta_model: MetaModel, stage: int) -> None:
        super().__init__()
        self._meta_model = meta_model
        self._stage = stage
        self._names: dict[int, frozenset[str]] = {}
        self._held: list[torch.Tensor] = []  # keeps ids in `_names` from being used again
        self.closed = False

    def of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the names of the foreign modules and parameters that `tensor` depends on."""
        if found := self._names.get(id(tensor)):
            return found
        name, stages = self._meta_model.stages.get(id(tensor), ("", frozenset()))
        return frozenset({name}) if name and self._stage not in stages else _NONE

    def tag(self, tensors: Iterable[Any], names: frozenset[str]) -> None:
        """Record that the fake ones of `tensors` depend on `names`."""
        for tensor in tensors:
            if names and is_fake(tensor):
                self._names[id(tensor)] = names
                self._held.append(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_of((args, kwargs)))
        if not any(is_fake(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        # The copied buffers of the meta model may be written to: nothing reads them afterwards.
        if written is not None and not is_fake(written) and not self._meta_model.is_buffer(written):
            raise RuntimeError(
                f"{func.__name__} writes what depends on parameters into a tensor that was made without any, of shape "
                f"{tuple(written.shape)}. On other stages of the pipeline those values are not there; make the tensor from "
                "one that depends on parameters (x.new_zeros, torch.zeros_like), or use torch.where or torch.cat"
            )
        foreign = [self.of(tensor) for tensor in tensors]
        names = _NONE.union(*foreign)
        if self.closed and names and not all(foreign):
            raise _foreign_use(names, self._stage)
        result = func(*args, **kwargs)
        self.tag(leaves_of(result), names)
        if written is not None:
            self.tag([written], names)
        return result


def _foreign_use(names: Iterable[str], stage: int) -> RuntimeError:
    return RuntimeError(
        f"stage {stage} of the pipeline uses {', '.join(sorted(names))}, or what was computed from it, which is on another "
        "stage; between stages only the arguments of blocks are passed on. Choose other split_points; or register what is "
        "needed before the blocks ahead of them, and what is needed after the blocks behind them, in a module; or pass it to "
        "every block as an argument"
    )


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor that `func` changes, if any."""
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    in_place = name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )
    return args[0] if in_place and args and isinstance(args[0], torch.Tensor) else None
