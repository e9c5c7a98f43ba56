"""A training step that is a graph: what is copied in, what comes out, and what the host does between two replays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from operator import attrgetter, is_, methodcaller
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import SGD

from booster.capture.graph import RecordedStep, Recorder, RoundingDraws, StepGraph
from booster.capture.graph_inputs import (
    GradientLayout,
    LRBuffers,
    StaticScalars,
    TensorAddresses,
    changed_options,
    options_of,
)
from booster.capture.trial import check_optimizers, origin_of
from booster.common import arguments
from booster.common.snapshot import StateSnapshot
from booster.data.boosted_loader import to_device
from booster.interface.optimizer import OptimizerWrapper
from booster.masters.update import MasterApplication
from booster.model.modules import LinearProxy
from booster.tensors.trees import form, leaves, map_tensors, tensors
from booster.update.application import honours_grad_scale
from booster.update.decision import StepResult

_logger = logging.getLogger(__name__)
_UPDATE = attrgetter("_update")
_MOMENTUM = methodcaller("get", "momentum")
_TRAINING, _WANTED, _WIDE = attrgetter("training"), attrgetter("requires_grad"), attrgetter("in_high_precision")
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
        switch_if_due: Callable[[], object],
    ) -> None:
        self._train_step = train_step
        self._roots = list(modules)
        self._optimizers = list(optimizers)
        self._passes = passes
        self._device = device
        self._recorder = recorder
        self._max_graphs, self._switch_if_due = max_graphs, switch_if_due
        self._rates = LRBuffers(self._optimizers, device)
        self._given_up = 0
        self._warned: set[str] = set()
        if recorder is not None:
            self._reset()

    def _reset(self) -> None:
        """Know of no graph, and of what the optimizers are stepped by now. Raises RuntimeError where there can be none."""
        check_optimizers(self._optimizers)
        self._graphs: dict[Any, StepGraph | None] = {}  # None: seen once
        self._updates = [optimizer._update for optimizer in self._optimizers]
        modules = [module for root in self._roots for module in root.modules()]
        self._modules = [module for module in modules if "_parameters" in vars(module)]
        self._proxies = [module for module in self._modules if isinstance(module, LinearProxy)]
        self._scalars = StaticScalars(self._optimizers)
        applications = [update.decision.application for update in self._updates]
        self._draws = [
            RoundingDraws(each.masters, self._device) for each in applications if isinstance(each, MasterApplication)
        ]
        self._set_baseline()

    def _set_baseline(self) -> None:
        """Have the next call compare with the tensors and options of now."""
        self._addresses = TensorAddresses.of(self._modules, self._optimizers)
        self._options = options_of(self._optimizers)

    @property
    def num_graphs(self) -> int:
        """How many graphs there are now."""
        return 0 if self._recorder is None else sum(graph is not None for graph in self._graphs.values())

    def __call__(self, *batch: Any) -> Any:
        """Make the next step, on `batch`: what `train_step` returns, its tensors without a graph of autograd, as copies."""
        if self._recorder is None:
            return _detached(self._train_step(*batch))
        self._switch_if_due()
        if not all(map(is_, map(_UPDATE, self._optimizers), self._updates)):
            self._reset()  # the precision was switched
        if self._is_listened_to():
            self._warn_once("while a record is written, or skipped steps are diagnosed, steps run without a graph")
            return self._eager(to_device(batch, self._device))
        for update in self._updates:
            update.optimizer_state.adopt_loaded()  # which eager steps do by themselves
        layout = GradientLayout(self._optimizers)
        if (
            not layout.unread
        ):  # a clip was read before the call: the graph would read gradients anew, and clip otherwise
            return self._eager(to_device(batch, self._device))
        self._drop_if_moved()
        key = (*_kind(batch), layout.key(), self._situation())
        graph = self._graphs.get(key)
        if graph is not None:
            graph.copy_in(batch, layout)
            # As late as can be, since the host may wait here.
            for lookahead, made in zip(self._rates.lookaheads, graph.steps, strict=True):
                if made is not None:
                    lookahead.make_ready(made.deferred, counts=made.counts)
            if not self._drop_if_options_changed():
                return self._replay(graph)
        return self._step(key, batch, layout)

    def _step(self, key: Any, batch: Any, layout: GradientLayout) -> Any:
        """Make a step of a kind of which there is no graph."""
        self._sync_steps()
        self._drop_if_options_changed()
        batch = to_device(batch, self._device)
        if key in self._graphs:
            graph = self._record(batch, layout)
            # What makes states, as for a parameter that had no gradient before, is a graph of this step alone.
            self._graphs[key] = None if self._drop_if_moved() else graph
            return self._launch(graph)
        if len(self._graphs) < self._max_graphs:
            result = self._eager(batch)
            if self._has_begun():
                self._graphs[key] = None
            return result
        self._warn_once(
            f"a call of another kind than the {self._max_graphs} before runs without a graph, as all new ones will: other "
            "shapes, dtypes or numbers. Give numbers that change as tensors, or raise max_graphs="
        )
        return self._eager(batch)

    # ------------------------------------------------------------------ without a graph

    def _eager(self, batch: Any) -> Any:
        assert self._recorder is not None
        self._sync_steps()
        with self._rates.read_as_tensors():
            result = self._recorder.warm(lambda: self._train_step(*batch))
        _check_returned(result, self._train_step)
        self._set_baseline()
        return _detached(result)

    def _sync_steps(self) -> None:
        """Count all steps, waiting for the last."""
        for optimizer in self._optimizers:
            optimizer.sync()

    def _has_begun(self) -> bool:
        """Return whether every optimizer has the states that its next step reads. Waits for the last step of some."""
        return not any(
            optimizer.step_was_skipped
            for optimizer in self._optimizers
            if not honours_grad_scale(optimizer.unwrap())
            # Momentum of torch's SGD begins with the first step that is not skipped, for which the host has to know, and all
            # states of optimizers without a fused kernel do.
            or (isinstance(optimizer.unwrap(), SGD) and any(map(_MOMENTUM, optimizer.param_groups)))
        )

    def _is_listened_to(self) -> bool:
        """Return whether somebody listens to a step, which a graph would not tell."""
        listeners = [listener for optimizer in self._optimizers for listener in optimizer._update.gradients.listeners]
        return not all(getattr(listener, "closed", False) for listener in listeners)

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
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

    def _drop_if_moved(self) -> bool:
        """Drop all graphs if tensors that they read or write have moved; returns whether that is so."""
        before, self._addresses = self._addresses, TensorAddresses.of(self._modules, self._optimizers)
        return before != self._addresses and self._drop("weights or states were put elsewhere, as by loading them,")

    def _drop_if_options_changed(self) -> bool:
        """Drop all graphs if options have changed that they hold as numbers; returns whether that is so."""
        before, self._options = self._options, options_of(self._optimizers)
        return before != self._options and self._drop(changed_options(before, self._options))

    def _drop(self, changed: str) -> bool:
        self._graphs.clear()
        # To record in nearly every step costs more than graphs save.
        self._given_up += 1
        if self._given_up == _TIMES:
            self._warn_once(f"steps run without a graph, since {changed} in nearly every one of them")
        return True

    # ------------------------------------------------------------------ with one

    def _record(self, batch: Any, layout: GradientLayout) -> StepGraph:
        """Run `train_step` once for its launches alone; on the host it is a whole step. Where it raises it is none: nothing was
        launched, and what this library keeps is put back."""
        before = StateSnapshot([*self._roots, *self._optimizers, self._passes], numbers=False)
        try:
            return self._recorded(batch, layout)
        except BaseException:
            before.restore()
            raise

    def _recorded(self, batch: Any, layout: GradientLayout) -> StepGraph:
        assert self._recorder is not None
        # Where later batches are copied to, from the host or the device.
        static = map_tensors(lambda each: each.detach().clone().requires_grad_(each.requires_grad), batch)
        graph = StepGraph(batch=list(tensors(static)), grad_factors=layout.tensors(), grads=layout.grads)
        counts = [optimizer._history.num_steps for optimizer in self._optimizers]
        passes = self._passes.num_backwards(self._optimizers)
        drawn = [draws.count for draws in self._draws]
        torch.clear_autocast_cache()  # weights that an autocast around the loop has cast are those of now
        self._forget_weights()
        self._scalars.enter()

        def body() -> None:
            self._rates.read_next()
            graph.returned = self._train_step(*static)
            histories = [optimizer._history for optimizer in self._optimizers]
            graph.steps = [
                RecordedStep.by(history, lookahead) if history.num_steps > count else None
                for history, lookahead, count in zip(histories, self._rates.lookaheads, counts, strict=True)
            ]
            graph.pack()
            graph.after = GradientLayout(self._optimizers)
            self._scalars.write_back()

        generators = [each for draws in self._draws for each in draws.generators]
        try:
            with self._rates.read_as_tensors(recorded=True), ExitStack() as fixed:
                for draws in self._draws:
                    fixed.enter_context(draws.fixed())
                for update in self._updates:
                    fixed.enter_context(update.decision.held_by(graph.read))
                graph.replay = self._recorder.record(body, generators)
        finally:
            self._scalars.release_buffers()
            self._forget_weights()  # what was rounded is in the memory of the graph
        _check_returned(graph.returned, self._train_step)
        for optimizer, count in zip(self._optimizers, counts, strict=True):
            if optimizer._history.num_steps - count > 1:
                raise RuntimeError(
                    f"train_step steps {type(optimizer.unwrap()).__name__} {optimizer._history.num_steps - count} times, and "
                    "the second needs to know on the host what became of the first; capture a function that steps it once, and "
                    "call it as often"
                )
        graph.draws = [draws.count > count for draws, count in zip(self._draws, drawn, strict=True)]
        graph.passes = self._passes.num_backwards(self._optimizers) - passes
        return graph

    def _forget_weights(self) -> None:
        for optimizer in self._optimizers:
            optimizer.forget_weights()

    def _replay(self, graph: StepGraph) -> Any:
        self._forget_weights()
        self._scalars.enter()
        for optimizer, made in zip(self._optimizers, graph.steps, strict=True):
            if made is not None:
                optimizer._history.record(made.result)
                optimizer._history.waiting[-1][1].extend(made.deferred)
        for draws, draws_here in zip(self._draws, graph.draws, strict=True):
            if draws_here:
                draws.next()
        self._passes.advance(self._optimizers, graph.passes)
        self._scalars.release_buffers()
        return self._launch(graph)

    def _launch(self, graph: StepGraph) -> Any:
        """Replay, then give what came out: the memory of the graph is overwritten by the next replay."""
        assert graph.after is not None
        self._given_up = 0
        for draws, draws_here in zip(self._draws, graph.draws, strict=True):
            if draws_here:
                draws.copy_in()
        graph.replay()
        graph.after.apply()
        torch.clear_autocast_cache()  # as a step does; the weights are others now
        returned, results = graph.copies()
        for optimizer, lookahead, made, result in zip(
            self._optimizers, self._rates.lookaheads, graph.steps, results, strict=True
        ):
            if made is not None and result is not None:
                history = optimizer._history
                history.last, waiting = result, [lookahead.step_synced] if made.counts else []
                history.waiting[-1] = (result, waiting + history.waiting[-1][1])
        return returned


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
