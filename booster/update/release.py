"""Gradient release: parameters are stepped within backward, as soon as their gradients are complete, which are then freed.

A hook on each parameter is called when a backward pass has filled its gradient (`register_post_accumulate_grad_hook`). The
parameter is then stepped, with the others of its bucket where it shares one, and its gradient freed::

    backward   ... | gradient of w3 | step w3, free | gradient of w2 | step w2, free | gradient of w1 | ...

So there is one gradient at a time, and never all. A loss scale, a clip by norm and `skip_nonfinite` need a number of all
gradients before the first is used. There "exact" goes through the graph twice, with the same gradients both times::

    first pass    gradient of w3: its norm, free | gradient of w2: its norm, free | ...   ->  norm, skip or not, clip factor
    second pass   gradient of w3: step, free     | gradient of w2: step, free     | ...

"previous_norm" goes through it once and clips by the norm of the step before, which is another algorithm.
Source of the single pass: Lv et al. 2023 (LOMO), section 3.1, which has the two passes for clipping too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from booster.casting import HALF_DTYPES
from booster.grads import gradient_values, nonfinite_indices, tensor_norms
from booster.torch_internals import graph_task, without_function_modes
from booster.update.parts import Parts

_FEWEST = 2**16  # elements; fewer are not stepped at once, as a call costs more
_SHARE = 64  # of all elements: so many wait at most for others to be stepped with

REENTRANT = (
    "release_gradients cannot know when gradients are complete under reentrant activation checkpointing, which runs backward "
    "passes inside the backward pass; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), as "
    "model.gradient_checkpointing_enable({'use_reentrant': False}) does in transformers"
)


def largest_part(num_elements: int) -> int:
    """Return how many of all elements are stepped at once, where nothing else binds parameters together."""
    return max(_FEWEST, num_elements // _SHARE)


HELD_BACK = (
    "release_gradients needs the norm of gradients before it uses them, which takes two backward passes, and the first would "
    "use up the gradients of earlier micro-batches, which fully_shard holds back; accumulate without a clip and without a "
    "loss scale, or leave release_gradients False"
)


class Release:
    """How the gradients of one update are released, and what of that is known between passes.

    mode: "exact" or "previous_norm". max_norm: to clip to; 0 does not. pending: a pass has stepped, or decided to skip, and
    `step()` is still to count it. previous: the norm of the last step, where that is what clips.
    """

    def __init__(self, mode: str, max_norm: float) -> None:
        self.mode = mode
        self.max_norm = max_norm
        self.pending = False
        self.previous: float | None = None
        self._torn = ""

    def check_weights(self) -> None:
        """Raise RuntimeError if a pass raised after some parameters were stepped."""
        if self._torn:
            raise RuntimeError(self._torn)

    def check(self, *, create_graph: bool) -> None:
        """Raise RuntimeError or ValueError if a pass cannot use its gradients."""
        self.check_weights()
        if self.pending:
            raise RuntimeError(
                "a second backward pass before optimizer.step(): release_gradients has stepped on the gradients of the first, "
                "so they cannot be added up. Call step() after each backward pass, or put the passes of one step in "
                "booster.accumulate(model, optimizer, num_micro_batches)"
            )
        if create_graph:
            raise ValueError(
                "create_graph=True makes gradients part of a graph, and release_gradients frees them within the pass; compute "
                "a penalty by torch.autograd.grad(..., create_graph=True) in the loss, or use release_gradients=False"
            )

    def refuse(self, what: str) -> None:
        """Raise RuntimeError if gradients were used already. what: the call that needs them."""
        if self.pending:
            raise RuntimeError(
                f"{what} comes too late: release_gradients has stepped on the gradients within backward and freed them. Clip "
                "by Booster(clip_grad_norm=...), or use release_gradients=False"
            )

    def tear(self, stepped: int, number: int) -> None:
        """A pass raised after `stepped` of `number` parameters were stepped."""
        self._torn = (
            f"the last backward pass raised after {stepped} of {number} parameters were stepped within it, so the weights are "
            "those of no step; load a checkpoint before going on"
        )

    def mend(self, previous: float | None) -> None:
        """A state was loaded. previous: the norm in it."""
        self._torn, self.previous = "", previous


def run_released(
    updates: Sequence[Any],
    loss: torch.Tensor,
    engine: Callable[[bool], None],
    end: Callable[[], None],
    *,
    retain_graph: bool,
) -> None:
    """Run a backward pass whose gradients are used within it, in one go through the graph or two.

    updates: of the pass, which has begun. engine: runs autograd from `loss`; its argument: whether the graph is used again.
    end: to be called when the gradients are known. A collective wherever backward and deciding on a step are.
    """
    passes = [_Pass(update) for update in updates]
    own = {param for each in passes for param in each.params}
    foreign = [leaf for leaf in _leaves(loss) if leaf not in own]
    twice = any(each.measures_first for each in passes)
    if twice and any(each.update.shards.holds_back for each in passes):
        raise ValueError(HELD_BACK)
    if twice:
        with _aside(foreign) as others:
            _measure(passes, loss, engine, others)
            end()
            others.keep = skip = _decide(passes)
        if skip:
            for each in passes:
                each.finish()
            return
    for each in passes:
        each.begin()
    try:
        with _watching(passes, _Pass.step_on, loss):
            engine(retain_graph)
        for each in passes:
            each.step_rest()
    except BaseException:
        for each in passes:
            each.tear()
        raise
    if not twice:
        end()
        _decide([each for each in passes if each.measures_along])
    for each in passes:
        each.finish()
    torch.clear_autocast_cache()  # of weights as they were


class _Pass:
    """What one update does in a backward pass that uses its gradients."""

    def __init__(self, update: Any) -> None:
        self.update = update
        self.release: Release = update.release
        self.params: list[torch.Tensor] = [p for group in update.optimizer.param_groups for p in group["params"]]
        self.trained = [param for param in self.params if param.requires_grad]
        self.norms: dict[torch.Tensor, torch.Tensor] = {}
        self.nonfinite: set[torch.Tensor] = set()
        self.looks_again = False
        dtypes = {param.dtype for param in self.params}
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        self._dtype = None if dtypes.isdisjoint(HALF_DTYPES) else wide
        self._held: dict[torch.Tensor, torch.Tensor] = {}
        self._num_stepped = 0
        exact = self.release.mode == "exact" or self.release.previous is None
        self.measures_first = exact and bool(update.looks or self.release.max_norm)
        self.measures_along = not exact and bool(self.release.max_norm)

    # ------------------------------------------------------------------ the first of two passes

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, gradients that there are already are set aside; a pass brings new ones."""
        self._held = {param: param.grad for param in self.params if param.grad is not None}
        for param in self._held:
            param.grad = None
        self.norms = {}
        try:
            yield
        finally:
            for param, grad in self._held.items():
                param.grad = grad
            self._held = {}

    def measure(self, param: torch.Tensor) -> None:
        """Look at the gradient of `param`, which is complete, and free it."""
        if param.grad is None:
            return
        held = self._held.get(param)
        if held is not None:
            param.grad = held + param.grad  # as autograd adds up
        self.norms[param] = self._norm(param)
        param.grad = None

    def measure_rest(self) -> None:
        """Look at gradients that there were before and to which the pass adds nothing."""
        for param, grad in self._held.items():
            if param not in self.norms:
                param.grad = grad
                self.norms[param] = self._norm(param)
                param.grad = None

    def overflows(self) -> bool:
        """Whether the norm of all is not finite: gradients are not, or the sum of their squares. Waits for the device."""
        if not self.counts:
            return False
        with self.update.present(self.measured):
            return not math.isfinite(self.update.total_norm(self.stacked()))

    @property
    def counts(self) -> bool:
        """Whether there are gradients; where ranks hold shards all go on together, also those without."""
        return bool(self.norms) or self.update.shards.sharded

    def look_again(self) -> None:
        """Let `measure` find what is not finite, with norms in float64 that finite numbers do not overflow."""
        self.looks_again, self._dtype = True, torch.float64

    def _norm(self, param: torch.Tensor) -> torch.Tensor:
        with self.update.shards.lent([param]) as parts:
            values = gradient_values(parts)
            if self.looks_again and not values[0].isfinite().all():
                self.nonfinite.add(param)
            return tensor_norms(values, 2.0, self._dtype)[0]

    # ------------------------------------------------------------------ the decision

    @property
    def measured(self) -> list[torch.Tensor]:
        """The parameters whose gradients were looked at, in the order of the groups."""
        return [param for param in self.params if param in self.norms]

    def stacked(self) -> torch.Tensor:
        norms = [self.norms[param] for param in self.measured]
        if not norms:
            return torch.zeros(0)
        return torch.stack([norm.to(norms[0].device) for norm in norms])

    def take_norm(self) -> None:
        """Tell the update, inside its `present(measured)`."""
        nonfinite = [index for index, param in enumerate(self.measured) if param in self.nonfinite]
        self.update.take_norm(self.stacked(), nonfinite)
        if self.release.max_norm and not self.measures_along:
            self.update.clip_by(self.release.max_norm, self.update.last_norm)

    # ------------------------------------------------------------------ the pass that steps

    def begin(self) -> None:
        if self.measures_along and self.release.previous is not None:
            self.update.clip_by(self.release.max_norm, self.release.previous)
        self._grad_scale = self.update.grad_scale
        shards = self.update.shards
        with shards.local():
            self._parts: Parts = self.update.make_parts()
            param_of = {shards.part_of(param): param for param in self.params}
            units = [[param_of[part] for part in unit] for unit in self._parts.units()]
        self._unit = {param: index for index, unit in enumerate(units) for param in unit}
        self._units = units
        self._missing = [sum(param.requires_grad for param in unit) for unit in units]
        self._loose: list[torch.Tensor] = []
        self._num_loose = 0
        self._most_loose = largest_part(sum(param.numel() for param in self.params))
        self._began = False

    def step_on(self, param: torch.Tensor) -> None:
        """The gradient of `param` is complete: step it, or what it completes."""
        if param.grad is None:
            return
        if self.measures_along:
            self.norms[param] = self._norm(param)
        index = self._unit.get(param)
        if index is not None:
            self._missing[index] -= 1
            if not self._missing[index] and all(p.grad is not None for p in self._units[index]):
                self._step(self._units[index])
            return
        self._loose.append(param)
        self._num_loose += param.numel()
        if self._num_loose >= self._most_loose:
            self._step_loose()

    def step_rest(self) -> None:
        """Step what has a gradient and was not stepped yet: what waited for others, and what had one before the pass."""
        self._step_loose()
        rest = [param for param in self.params if param.grad is not None]
        if rest:
            for param in rest:
                if self.measures_along and param not in self.norms:
                    self.norms[param] = self._norm(param)
            with self.update.shards.local():
                self._parts.rest([self.update.shards.part_of(param) for param in rest])
            self._step(rest)
        if self._began:
            self._parts.end()

    def _step_loose(self) -> None:
        loose, self._loose, self._num_loose = self._loose, [], 0
        if loose:
            self._step(loose)

    def _step(self, params: Sequence[torch.Tensor]) -> None:
        if not (self.measures_along and self._stops_at(params)):
            if not self._began:
                self._began = True
                self._parts.begin()
            with self.update.shards.lent(params) as parts:
                self.update.look_at_part(parts)
                self._parts.step(parts, self._grad_scale)
            self._num_stepped += len(params)
        for param in params:
            param.grad = None

    def _stops_at(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether `params`, or what came before, has gradients that are not finite. Waits for the device."""
        norms = torch.stack([self.norms[param] for param in params])
        with self.update.shards.lent(params) as parts:
            bad = nonfinite_indices(gradient_values(parts), norms)
        self.nonfinite.update(params[index] for index in bad)
        return bool(self.nonfinite)

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """The gradients were used, or dropped."""
        self.release.pending = bool(self.norms) or self._num_stepped > 0
        for param in self.params:
            param.grad = None
        total = self.update.last_norm
        if self.release.mode == "previous_norm" and not self.nonfinite and total is not None and math.isfinite(total):
            self.release.previous = total

    def tear(self) -> None:
        if self._num_stepped:
            self.release.tear(self._num_stepped, len(self.params))


def _measure(passes: Sequence[_Pass], loss: torch.Tensor, engine: Callable[[bool], None], others: _Aside) -> None:
    _measure_once(passes, loss, engine)
    for each in passes:
        if each.overflows():
            each.look_again()
    if any(each.looks_again for each in passes):
        others.clear()
        _measure_once(passes, loss, engine)


def _measure_once(passes: Sequence[_Pass], loss: torch.Tensor, engine: Callable[[bool], None]) -> None:
    with ExitStack() as held:
        for each in passes:
            held.enter_context(each.measuring())
        with _watching(passes, _Pass.measure, loss):
            engine(True)
        for each in passes:
            each.measure_rest()


def _decide(passes: Sequence[_Pass]) -> bool:
    """Take the norms, and return whether the step is to be skipped."""
    with ExitStack() as present:
        for each in passes:
            present.enter_context(each.update.present(each.measured))
        for each in passes:
            if each.counts:
                each.take_norm()
        skips = [each.update.agree() for each in passes]  # of all, which may be collectives
        return any(skips)


@contextmanager
def _watching(
    passes: Sequence[_Pass], action: Callable[[_Pass, torch.Tensor], None], loss: torch.Tensor
) -> Iterator[None]:
    """Inside, `action` is called with each parameter as soon as a backward pass from `loss` has filled its gradient."""
    running: list[int] = []

    def watch(each: _Pass) -> Callable[[torch.Tensor], None]:
        def filled(param: torch.Tensor) -> None:
            if graph_task() not in running:
                raise RuntimeError(REENTRANT)
            with torch.no_grad(), without_function_modes():
                action(each, param)

        return filled

    handles: list[Any] = [loss.register_hook(lambda grad: running.append(graph_task()))]
    try:
        for each in passes:
            filled = watch(each)
            handles += [param.register_post_accumulate_grad_hook(filled) for param in each.trained]
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Aside:
    """Leaves whose gradients are set aside. keep: whether those that a pass brings are added to them at the end."""

    keep = False

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self._before = {leaf: leaf.grad for leaf in leaves}
        self.clear()

    def clear(self) -> None:
        """Drop what a pass has brought."""
        for leaf in self._before:
            leaf.grad = None

    def restore(self) -> None:
        for leaf, grad in self._before.items():
            brought = leaf.grad if self.keep else None
            leaf.grad = grad if brought is None else brought if grad is None else grad + brought


@contextmanager
def _aside(leaves: Iterable[torch.Tensor]) -> Iterator[_Aside]:
    """Inside, gradients of `leaves` are set aside; afterwards what a pass has brought is dropped, or added to them."""
    aside = _Aside(leaves)
    try:
        yield aside
    finally:
        aside.restore()


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors whose gradients a backward pass from `loss` fills. Raises RuntimeError for a graph with others
    inside, as reentrant checkpointing makes."""
    nodes: dict[Any, None] = {loss.grad_fn: None}
    waiting, found = [loss.grad_fn], [loss] if loss.grad_fn is None else []
    while waiting:
        node: Any = waiting.pop()
        if node is None:
            continue
        name = type(node).__name__
        if name == "AccumulateGrad":
            found.append(node.variable)
        elif name == "CheckpointFunctionBackward":
            raise RuntimeError(REENTRANT)
        for after, _ in node.next_functions:
            if after is not None and after not in nodes:
                nodes[after] = None
                waiting.append(after)
    return found
