"""A training step that is a graph: what is copied in, what comes out, and what the host does between two replays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter, is_, methodcaller
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import SGD

from booster.capture.graph import Recorder
from booster.capture.layout import Layout, difference, options_of
from booster.capture.learning_rates import Course, Rates
from booster.capture.posture import Cells, Posture
from booster.capture.reads import origin_of
from booster.capture.refusals import check_optimizers
from booster.common import arguments
from booster.common.snapshot import StateSnapshot
from booster.data.boosted_loader import to_device
from booster.interface.optimizer import OptimizerWrapper
from booster.masters.masters import Masters
from booster.masters.update import MasterApplication
from booster.model.modules import LinearProxy
from booster.tensors.trees import form, leaves, map_tensors, tensors, with_leaves
from booster.update.application import honours_grad_scale
from booster.update.outcome import StepHistory, StepResult

_logger = logging.getLogger(__name__)
_UPDATE = attrgetter("_update")
_MOMENTUM = methodcaller("get", "momentum")
_TRAINING, _WANTED, _WIDE = attrgetter("training"), attrgetter("requires_grad"), attrgetter("in_high_precision")
_WORD = 8  # bytes, at a multiple of which numbers lie
_TIMES = 3  # that a graph is given up in a row before a WARNING says that it brings nothing


class PassCount(Protocol):
    """What is counted of backward passes; see `Accumulations`."""

    def situation(self, optimizers: Sequence[OptimizerWrapper]) -> Hashable: ...
    def num_backwards(self, optimizers: Sequence[OptimizerWrapper]) -> int: ...
    def advance(self, optimizers: Sequence[OptimizerWrapper], passes: int) -> None: ...


class CapturedStep:
    """`train_step` as a graph for each kind of call; `Booster.capture` makes it.

    A kind of call is shapes, strides and dtypes of the batch and its numbers, which parameters train, modules in training or
    not, layers that multiply in low precision or wide, where in a group of `accumulate` it is, and what gradients wait. The
    first call of a kind runs `train_step` itself, the second is recorded, and those after it are replayed. recorder: None never
    records. follow: goes over to the precision that is due, which a forward pass does that is not replayed.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        *,
        modules: Sequence[nn.Module],
        optimizers: Sequence[OptimizerWrapper],
        passes: PassCount,
        device: torch.device,
        recorder: Recorder | None,
        max_graphs: int,
        follow: Callable[[], object],
    ) -> None:
        self._train_step = train_step
        self._roots = list(modules)
        self._optimizers = list(optimizers)
        self._passes = passes
        self._device = device
        self._recorder = recorder
        self._max_graphs, self._go_over = max_graphs, follow
        self._rates = Rates(self._optimizers, device)
        self._given_up = 0
        self._told: set[str] = set()
        if recorder is not None:
            self._begin()

    def _begin(self) -> None:
        """Know of no graph, and of what the optimizers are stepped by now. Raises RuntimeError where there can be none."""
        check_optimizers(self._optimizers)
        self._graphs: dict[Any, _Graph | None] = {}  # None: seen once
        self._updates = [optimizer._update for optimizer in self._optimizers]
        modules = [module for root in self._roots for module in root.modules()]
        self._modules = [module for module in modules if "_parameters" in vars(module)]
        self._proxies = [module for module in self._modules if isinstance(module, LinearProxy)]
        self._cells = Cells(self._optimizers)
        applications = [update.decision.application for update in self._updates]
        self._draws = [
            _Draws(each.masters, self._device) for each in applications if isinstance(each, MasterApplication)
        ]
        self._layout, self._options = Layout.of(self._modules, self._optimizers), options_of(self._optimizers)

    @property
    def num_graphs(self) -> int:
        """How many graphs there are now."""
        return 0 if self._recorder is None else sum(graph is not None for graph in self._graphs.values())

    def __call__(self, *batch: Any) -> Any:
        """Make the next step, on `batch`: what `train_step` returns, its tensors without a graph of autograd, as copies."""
        if self._recorder is None:
            return _detached(self._train_step(*batch))
        self._go_over()
        if not all(map(is_, map(_UPDATE, self._optimizers), self._updates)):
            self._begin()  # the precision was switched
        why = self._unfit()
        if why is not None:
            self._tell(why)
            return self._eager(to_device(batch, self._device))
        for update in self._updates:
            update.optimizer_state.take_loaded()  # which eager steps do by themselves
        posture = Posture(self._optimizers)
        if not posture.unread:
            return self._eager(to_device(batch, self._device))
        self._follow(Layout.of(self._modules, self._optimizers), self._options)
        key = (*_kind(batch), posture.key(), self._situation())
        graph = self._graphs.get(key)
        if graph is not None:
            graph.bring(batch, posture)
            # As late as can be, since the host may wait here.
            for course, made in zip(self._rates.courses, graph.steps, strict=True):
                if made is not None:
                    course.make_ready(made.deferred, counts=made.counts)
            if not self._follow(self._layout, options_of(self._optimizers)):
                return self._replay(graph)
        return self._step(key, batch, posture)

    def _step(self, key: Any, batch: Any, posture: Posture) -> Any:
        """Make a step of a kind of which there is no graph."""
        self._settle()
        self._follow(self._layout, options_of(self._optimizers))
        batch = to_device(batch, self._device)
        if key in self._graphs:
            graph = self._record(batch, posture)
            # What makes states, as for a parameter that had no gradient before, is a graph of this step alone.
            moved = self._follow(Layout.of(self._modules, self._optimizers), self._options)
            self._graphs[key] = None if moved else graph
            return self._launch(graph)
        if len(self._graphs) < self._max_graphs:
            result = self._eager(batch)
            if self._has_begun():
                self._graphs[key] = None
            return result
        self._tell(
            f"a call of another kind than the {self._max_graphs} before runs without a graph, as all new ones will: other "
            "shapes, dtypes or numbers. Give numbers that change as tensors, or raise max_graphs="
        )
        return self._eager(batch)

    # ------------------------------------------------------------------ without a graph

    def _eager(self, batch: Any) -> Any:
        assert self._recorder is not None
        self._settle()
        with self._rates.read_as_tensors():
            result = self._recorder.warm(lambda: self._train_step(*batch))
        _check_returned(result, self._train_step)
        self._layout, self._options = Layout.of(self._modules, self._optimizers), options_of(self._optimizers)
        return _detached(result)

    def _settle(self) -> None:
        """Count all steps, waiting for the last."""
        for optimizer in self._optimizers:
            optimizer.sync()

    def _has_begun(self) -> bool:
        """Return whether every optimizer has the states that its next step reads. Waits for the last step of some.

        Momentum of torch's SGD begins with the first step that is not skipped, for which the host has to know, and all states
        of optimizers without a fused kernel do."""
        return not any(
            optimizer.step_was_skipped
            for optimizer in self._optimizers
            if not honours_grad_scale(optimizer.unwrap())
            or (isinstance(optimizer.unwrap(), SGD) and any(map(_MOMENTUM, optimizer.param_groups)))
        )

    def _unfit(self) -> str | None:
        """Return why this call cannot be a graph's, None if it can."""
        listeners = [listener for optimizer in self._optimizers for listener in optimizer._update.gradients.listeners]
        if not all(getattr(listener, "closed", False) for listener in listeners):
            return "while a record is written, or skipped steps are diagnosed, steps run without a graph"
        return None

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            _logger.warning("%s", what)

    # ------------------------------------------------------------------ what graphs depend on

    def _situation(self) -> Any:
        params = [
            param for optimizer in self._optimizers for group in optimizer.param_groups for param in group["params"]
        ]
        return (
            tuple(map(_TRAINING, self._modules)),
            tuple(map(_WIDE, self._proxies)),  # which a load may change, where layers were measured
            tuple(map(_WANTED, params)),
            torch.is_grad_enabled(),
            self._passes.situation(self._optimizers),
        )

    def _follow(self, layout: Layout, options: list[tuple[str, Any]]) -> bool:
        """Drop all graphs if tensors that they read or write lie elsewhere now, or if options have changed that they hold.

        Returns whether that is so."""
        before, self._layout, self._options = (self._layout, self._options), layout, options
        changed = difference(before, (layout, options))
        if changed is None:
            return False
        self._graphs.clear()
        self._given_up += 1
        if self._given_up == _TIMES:
            self._tell(f"steps run without a graph, since {changed} in nearly every one of them")
        return True

    # ------------------------------------------------------------------ with one

    def _record(self, batch: Any, posture: Posture) -> _Graph:
        """Run `train_step` once for its launches alone; on the host it is a whole step. Where it raises it is none: nothing was
        launched, and what this library keeps is put back."""
        before = StateSnapshot([*self._roots, *self._optimizers, self._passes], numbers=False)
        try:
            return self._recorded(batch, posture)
        except BaseException:
            before.restore()
            raise

    def _recorded(self, batch: Any, posture: Posture) -> _Graph:
        assert self._recorder is not None
        static = map_tensors(_placed, batch)  # where later batches are copied to, from the host or the device
        graph = _Graph(batch=list(tensors(static)), carried=posture.tensors(), grads=posture.grads)
        counts = [optimizer._history.num_steps for optimizer in self._optimizers]
        passes = self._passes.num_backwards(self._optimizers)
        drawn = [draws.count for draws in self._draws]
        torch.clear_autocast_cache()  # weights that an autocast around the loop has cast are those of now
        self._forget_weights()
        self._cells.enter()

        def body() -> None:
            self._rates.take()
            graph.returned = self._train_step(*static)
            histories = [optimizer._history for optimizer in self._optimizers]
            graph.steps = [
                _Made.by(history, course) if history.num_steps > count else None
                for history, course, count in zip(histories, self._rates.courses, counts, strict=True)
            ]
            graph.pack()
            graph.after = Posture(self._optimizers)
            self._cells.write_back()

        generators = [each for draws in self._draws for each in draws.generators]
        try:
            with self._rates.read_as_tensors(recorded=True), ExitStack() as fixed:
                for draws in self._draws:
                    fixed.enter_context(draws.fixed())
                for update in self._updates:
                    fixed.enter_context(update.decision.held_by(graph.read))
                _, graph.replay = self._recorder.record(body, generators)
        finally:
            self._cells.leave()
            self._forget_weights()  # what was rounded lies in the memory of the graph
        _check_returned(graph.returned, self._train_step)
        self._check_steps(counts)
        graph.draws = [draws.count > count for draws, count in zip(self._draws, drawn, strict=True)]
        graph.passes = self._passes.num_backwards(self._optimizers) - passes
        return graph

    def _check_steps(self, counts: Sequence[int]) -> None:
        for optimizer, count in zip(self._optimizers, counts, strict=True):
            if optimizer._history.num_steps - count > 1:
                raise RuntimeError(
                    f"train_step steps {type(optimizer.unwrap()).__name__} {optimizer._history.num_steps - count} times, and "
                    "the second needs to know on the host what became of the first; capture a function that steps it once, and "
                    "call it as often"
                )

    def _forget_weights(self) -> None:
        for optimizer in self._optimizers:
            optimizer.forget_weights()

    def _replay(self, graph: _Graph) -> Any:
        self._forget_weights()
        self._cells.enter()
        for optimizer, made in zip(self._optimizers, graph.steps, strict=True):
            if made is not None:
                optimizer._history.record(made.result)
                optimizer._history.waiting[-1][1].extend(made.deferred)
        for draws, draws_here in zip(self._draws, graph.draws, strict=True):
            if draws_here:
                draws.next()
        self._passes.advance(self._optimizers, graph.passes)
        self._cells.leave()
        return self._launch(graph)

    def _launch(self, graph: _Graph) -> Any:
        """Replay, then give what came out: the memory of the graph is overwritten by the next replay."""
        assert graph.after is not None
        self._given_up = 0
        for draws, draws_here in zip(self._draws, graph.draws, strict=True):
            if draws_here:
                draws.bring()
        graph.replay()
        graph.after.take()
        torch.clear_autocast_cache()  # as a step does; the weights are others now
        returned, results = graph.copies()
        for optimizer, course, made, result in zip(
            self._optimizers, self._rates.courses, graph.steps, results, strict=True
        ):
            if made is not None and result is not None:
                history = optimizer._history
                history.last, waiting = result, [course.step_synced] if made.counts else []
                history.waiting[-1] = (result, waiting + history.waiting[-1][1])
        return returned


@dataclass(frozen=True, eq=False)
class _Made:
    """A step of an optimizer in a graph.

    result: of it. deferred: what waits for its outcome, such as a step of a schedule. counts: whether the graph counts it,
    since rates of later steps depend on what becomes of it, which a device knows.
    """

    result: StepResult
    deferred: list[Callable[[], None]]
    counts: bool

    @classmethod
    def by(cls, history: StepHistory, course: Course) -> _Made:
        """The last of `history`, counted in `course`. Of what runs in a graph."""
        result, deferred = history.waiting[-1]
        decision = result.decision if deferred else True
        if isinstance(decision, torch.Tensor):
            course.count(decision)
        return cls(result, list(deferred), isinstance(decision, torch.Tensor))


@dataclass(eq=False)
class _Graph:
    """One graph, the memory that it reads, and what it does on the host.

    batch, carried, grads: where its inputs lie. returned: what `train_step` returned. steps: of each optimizer, None where it
    makes none. after: what optimizers carry then. passes: backward passes in it of a group of `accumulate`. draws: of each
    optimizer with masters, whether it draws. read: what launches read by its address, which others may let go.
    """

    batch: list[torch.Tensor]
    carried: list[torch.Tensor]
    grads: list[list[torch.Tensor | None]]
    replay: Callable[[], None] = lambda: None
    returned: Any = None
    steps: list[_Made | None] = field(default_factory=list)
    after: Posture | None = None
    passes: int = 0
    draws: list[bool] = field(default_factory=list)
    read: list[Any] = field(default_factory=list)
    packed: torch.Tensor | None = None
    _places: dict[int, tuple[int, int]] = field(default_factory=dict)
    _held: list[torch.Tensor] = field(default_factory=list)

    @torch.no_grad()
    def bring(self, batch: Any, posture: Posture) -> None:
        """Copy what a call brings, and what waits of calls before, to where the graph reads it."""
        pairs: list[tuple[Any, Any]] = [*zip(self.batch, tensors(batch), strict=True)]
        pairs += zip(self.carried, posture.tensors(), strict=True)
        for own, given in zip(self.grads, posture.grads, strict=True):
            pairs += zip(own, given, strict=True)
        for static, given in pairs:
            if static is not given:  # None is where there is no gradient
                static.copy_(given, non_blocking=True)

    def pack(self) -> None:
        """Bring all numbers of the results into one tensor, so that one copy of it takes them out."""
        bytes_: list[torch.Tensor] = []
        size = 0

        def note(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal size
            if id(tensor) not in self._places:
                own = tensor.detach().reshape(-1).view(torch.uint8)
                self._places[id(tensor)] = (size, own.numel())
                self._held.append(tensor)  # whose id stands for it
                bytes_.append(nn.functional.pad(own, (0, -own.numel() % _WORD)))
                size += bytes_[-1].numel()
            return tensor

        results = [made.result for made in self.steps if made is not None]
        for result in (result for result in (*results, *leaves(self.returned)) if isinstance(result, StepResult)):
            result.copied(note)
        if bytes_:
            self.packed = torch.cat(bytes_)

    def copies(self) -> tuple[Any, list[StepResult | None]]:
        """Return copies of what `train_step` returned, and of the results."""
        packed = None if self.packed is None else self.packed.clone()
        made: dict[int, StepResult] = {}

        def number(tensor: torch.Tensor) -> torch.Tensor:
            assert packed is not None
            start, size = self._places[id(tensor)]
            return packed[start : start + size].view(tensor.dtype).view(tensor.shape)

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.detach().clone()
            if isinstance(value, StepResult):
                if id(value) not in made:
                    made[id(value)] = value.copied(number)
                return made[id(value)]
            return value

        results = [None if made is None else leaf(made.result) for made in self.steps]
        return with_leaves(self.returned, map(leaf, leaves(self.returned))), results


class _Draws:
    """Random numbers that masters and states are rounded with: the host draws them, and brings them to where graphs read."""

    def __init__(self, masters: Masters, device: torch.device) -> None:
        self._masters, self._rng, self._device = masters, masters.rng, device
        self._lanes: dict[tuple[str, torch.device], torch.Tensor] = {}

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that draw on a device, where graphs go on with them."""
        formats = {id(bucket.format): bucket.format for bucket in self._masters.buckets}
        return [each for form in formats.values() for each in getattr(form, "generators", {}).values()]

    @property
    def count(self) -> int:
        """How many steps have drawn."""
        return self._rng.count

    def next(self) -> None:
        self._rng.next()

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Inside, what has been drawn in steps before is read from memory that does not move."""
        asked = {(name, device if device.type != "cpu" else self._device) for name, device in self._rng.asked}
        for name, device in asked - self._lanes.keys():
            self._lanes[name, device] = self._rng.draw(name, device).to(device)
        self._rng.fixed = self._lanes
        try:
            yield
        finally:
            self._rng.fixed = {}

    def bring(self) -> None:
        """Bring the numbers of this step there. Nobody waits."""
        for (name, device), lanes in self._lanes.items():
            lanes.copy_(self._rng.draw(name, device), non_blocking=True)


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `tensor`, with its numbers, in memory of its own."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _kind(batch: Any) -> tuple[Any, ...]:
    """Return what is equal for batches that differ in their tensors' numbers alone. Raises TypeError for other objects."""
    described: list[Any] = []
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            strides = None if leaf.is_contiguous() else leaf.stride()
            described.append((leaf.shape, strides, leaf.dtype, leaf.requires_grad))
        elif leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
            described.append((type(leaf), leaf))
        else:
            raise TypeError(
                f"a captured step was given {arguments.described(leaf)}; it takes tensors, numbers, strings and None, and "
                "containers of them"
            )
    return form(batch), tuple(described)


def _check_returned(returned: Any, function: Callable[..., Any]) -> None:
    """Raise TypeError for what a graph would return as it was in its recording."""
    for leaf in leaves(returned):
        if not (leaf is None or isinstance(leaf, (torch.Tensor, StepResult, str))):
            path, line = origin_of(function)
            raise TypeError(
                f"train_step ({path}:{line}) returned {arguments.described(leaf)}, which a graph would return unchanged every "
                "time; return tensors, step results, strings or None, and read numbers outside of it"
            )


def _detached(returned: Any) -> Any:
    return map_tensors(torch.Tensor.detach, returned)
