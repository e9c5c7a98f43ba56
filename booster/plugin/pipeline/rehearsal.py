"""Running a model's skeleton stage by stage, to learn what crosses between stages before anything is computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from booster.common.torch_internals.tensor_internals import DataDependentOutputException, DynamicOutputShapeException
from booster.model.modules import fast_path_off
from booster.plugin.pipeline.provenance import NOWHERE, Origins, foreign_use
from booster.plugin.pipeline.route import Boundary, Echo, Route, TensorSpec, substitute
from booster.plugin.pipeline.skeleton import Skeleton, is_fake
from booster.plugin.pipeline.split import Split
from booster.tensors.trees import leaves as leaves_of


class StageEnd(BaseException):
    """Leaves the forward of a stage at the first block of the next one. No error, so no `except Exception` takes it."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__()
        self.values = values


def rehearse(skeleton: Skeleton, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Route:
    """The route of micro-batches shaped like (args, kwargs), under the precision context and grad mode that are active.

    Every stage of the pipeline is run here, on fake tensors: a forward that uses what its stage does not have raises
    RuntimeError on all ranks alike, before any of them waits for another. No real parameter or buffer is read or written, and
    random generators are left as they were. Cost: about one forward pass without arithmetic.
    """
    route = Route()
    with _random_state_kept(args, kwargs), fast_path_off():
        for stage in range(split.num_stages):
            _Rehearsal(skeleton, split, stage, route).run(args, kwargs)
    return route


class _Rehearsal:
    """One stage: parts before it replay, its own run, and the first block after it ends it."""

    def __init__(self, skeleton: Skeleton, split: Split, stage: int, route: Route) -> None:
        self._skeleton = skeleton
        self._split = split
        self._stage = stage
        self._route = route
        self._origins = Origins(partial(_names_of, skeleton.stages, stage), skeleton.buffers, stage)
        self._called: set[int] = set()
        self._stand_ins: dict[int, int] = {}  # by id of a leaf: the number of the received tensor that replaces it
        self._received: tuple[torch.Tensor, ...] = ()
        self._kept: list[Any] = []  # so that no id is used again meanwhile

    @property
    def _is_last(self) -> bool:
        return self._stage == self._split.num_stages - 1

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._origins.closed = self._stage == 0
        self._skeleton.call = self._call
        mode = self._skeleton.mode
        mode.watching, mode.wrote = self._stage > 0, False
        try:
            with self._origins:
                output = self._skeleton.module(*args, **kwargs)
        except StageEnd:
            return
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if self._is_last and self._origins.closed:
                return  # after the blocks: no shape has to be known there
            raise RuntimeError(
                f"the forward reads values of activations in Python ({error}), so shapes between pipeline stages cannot be "
                "known before they are computed. Keep such code out of the blocks and of what comes before them"
            ) from error
        finally:
            self._skeleton.call = None
            mode.watching = False
        if not self._is_last:
            raise RuntimeError(
                f"the forward returned without calling {self._split.name_of(self._split.starts[self._stage])}, which begins "
                f"stage {self._stage + 1} of the pipeline; name other split_points"
            )
        if not self._origins.closed:
            raise RuntimeError(
                f"the forward returned without calling {self._split.name_of(self._split.starts[self._stage - 1])}, which "
                f"begins stage {self._stage} of the pipeline; name other split_points"
            )
        foreign = [self._origins.of(leaf) for leaf in leaves_of(output) if is_fake(leaf)]
        if any(foreign):
            raise foreign_use(NOWHERE.union(*foreign), self._stage)

    def _call(self, position: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A child of the container is called."""
        name = self._split.name_of(position)
        if position in self._called:
            raise RuntimeError(
                f"{name} is called twice in one forward, which a pipeline stage cannot do; name other split_points"
            )
        self._called.add(position)
        owner = self._split.stage_of(position)
        if owner < self._stage:
            return self._replay(position, args, kwargs)
        if owner > self._stage:
            self._end(position, args, kwargs)
        leaves = leaves_of((args, kwargs))
        if self._stage and position == self._split.starts[self._stage - 1]:
            self._receive(leaves)
        elif self._stage and not self._origins.closed:
            first = self._split.name_of(self._split.starts[self._stage - 1])
            raise RuntimeError(
                f"{name} is called before {first}, which begins its pipeline stage; name other split_points"
            )
        slots = [
            (leaf, self._stand_ins[id(value)]) for leaf, value in enumerate(leaves) if id(value) in self._stand_ins
        ]
        if slots:
            self._route.slots[position] = slots
            args, kwargs = substitute(args, kwargs, slots, self._received)
        replay = Echo(args, kwargs, forward(*args, **kwargs), self._to_fake)
        self._route.replays[position] = replay
        return replay.output

    def _replay(self, position: int, args: Any, kwargs: Any) -> Any:
        if position not in self._route.replays:
            raise RuntimeError(
                f"{self._split.name_of(position)} is called on one pipeline stage and not on another: the forward differs "
                "from run to run, or calls modules in another order than they are registered"
            )
        given = {id(leaf) for leaf in leaves_of((args, kwargs))}
        output = self._route.replays[position](args, kwargs)
        made = [leaf for leaf in leaves_of(output) if id(leaf) not in given]
        self._origins.tag(made, frozenset({self._split.name_of(position)}))
        return output

    def _receive(self, leaves: list[Any]) -> None:
        boundary = self._route.boundaries[self._stage - 1]
        if boundary.positions and boundary.positions[-1] >= len(leaves):
            raise RuntimeError(f"the first block of stage {self._stage} gets other arguments than it did before")
        for number, leaf in enumerate(boundary.positions):
            self._stand_ins[id(leaves[leaf])] = number
            self._kept.append(leaves[leaf])
        devices = [leaves[leaf].device for leaf in boundary.positions]
        self._received = tuple(
            self._skeleton.fake(spec.shape, spec.dtype, device, requires_grad=spec.requires_grad)
            for spec, device in zip(boundary.specs, devices, strict=True)
        )
        self._origins.closed = True
        self._skeleton.mode.watching = False
        self._route.answers[self._stage] = None if self._skeleton.mode.wrote else {}

    def _end(self, position: int, args: Any, kwargs: Any) -> None:
        """The stage is over: write down what the next one receives."""
        if position != self._split.starts[self._stage]:
            raise RuntimeError(
                f"{self._split.name_of(position)} is called before {self._split.name_of(self._split.starts[self._stage])}, "
                "which begins its pipeline stage; name other split_points"
            )
        if not self._origins.closed:
            raise RuntimeError(f"{self._split.name_of(position)} is called before any block of stage {self._stage}")
        leaves = leaves_of((args, kwargs))
        positions, relays = [], []
        for number, leaf in enumerate(leaves):
            if not is_fake(leaf):
                continue
            relay = self._stand_ins.get(id(leaf))
            if relay is None and self._origins.of(leaf):
                raise foreign_use(self._origins.of(leaf), self._stage)
            positions.append(number)
            relays.append(relay)
        if not positions:
            raise RuntimeError(
                f"{self._split.name_of(position)} gets no tensor that depends on what comes before it, so no pipeline "
                "stage can begin there; name other split_points"
            )
        specs = [self._received[r] if r is not None else leaves[p] for p, r in zip(positions, relays, strict=True)]
        self._route.boundaries.append(
            Boundary(
                tuple(positions),
                tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad and t.is_floating_point()) for t in specs),
                tuple(relays),
            )
        )
        raise StageEnd(())

    def _to_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_fake(tensor):
            return tensor.detach()
        return self._skeleton.fake(tensor.shape, tensor.dtype, tensor.device)


def _names_of(known: dict[int, tuple[str, frozenset[int]]], stage: int, tensor: torch.Tensor) -> frozenset[str]:
    name, stages = known.get(id(tensor), ("", frozenset()))
    return frozenset({name}) if name and stage not in stages else NOWHERE


@contextmanager
def _random_state_kept(*trees: Any) -> Iterator[None]:
    devices = {leaf.device for leaf in leaves_of(trees) if isinstance(leaf, torch.Tensor)}
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[device.index for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(state)
