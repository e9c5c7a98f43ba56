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

Gradients of leaves that a backward pass would add to, set aside while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from booster.common.torch_internals.autograd_internals import graph_task, without_function_modes
from booster.update.in_backward_pass import InBackwardPass

REENTRANT = (
    "release_gradients cannot know when gradients are complete under reentrant activation checkpointing, which runs backward "
    "passes inside the backward pass; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), as "
    "model.gradient_checkpointing_enable({'use_reentrant': False}) does in transformers"
)


class Aside:
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
def set_aside(leaves: Iterable[torch.Tensor]) -> Iterator[Aside]:
    """Inside, gradients of `leaves` are set aside; afterwards what a pass has brought is dropped, or added to them."""
    aside = Aside(leaves)
    try:
        yield aside
    finally:
        aside.restore()


def leaves(loss: torch.Tensor) -> list[torch.Tensor]:
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


def run_in_backward(
    members: Sequence[Any],
    loss: torch.Tensor,
    engine: Callable[[bool], None],
    end: Callable[[], None],
    *,
    retain_graph: bool,
) -> None:
    """Run a backward pass whose gradients are used within it, in one go through the graph or two.

    members: the gradients that take part in the pass, which has begun. engine: runs autograd from `loss`; its argument: whether
    the graph is used again. end: to be called when the gradients are known. A collective wherever backward and deciding on a
    step are.
    """
    passes: list[InBackwardPass] = [member.in_backward.decision.released_pass(member) for member in members]
    own = {param for each in passes for param in each.params}
    reached = leaves(loss)
    for each in passes:
        reached = each.gradients.shards.sharded_params(reached)
    twice = any(each.measures_first for each in passes)
    if twice:
        with set_aside(leaf for leaf in reached if leaf not in own) as others:
            _measure(passes, loss, engine, others)
            end()
            others.keep = skip = _decide(passes)
        if skip:
            for each in passes:
                each.finish()
                each.gradients.shards.clear_gradients(set_to_none=True)  # of earlier micro-batches, which were spared
            return
    for each in passes:
        each.begin()
    try:
        with _watching(passes, InBackwardPass.step_on, loss, again=False):
            engine(retain_graph)
        for each in passes:
            each.step_rest()
    except BaseException:
        for each in passes:
            each.mark_partial_step()
        raise
    if not twice:
        end()
        _decide([each for each in passes if each.measures_along])
    for each in passes:
        each.finish()
    torch.clear_autocast_cache()  # of weights as they were


def _measure(
    passes: Sequence[InBackwardPass], loss: torch.Tensor, engine: Callable[[bool], None], others: Aside
) -> None:
    _measure_once(passes, loss, engine)
    for each in passes:
        if each.overflows():
            each.look_again()
    if any(each.looks_again for each in passes):
        others.clear()
        _measure_once(passes, loss, engine)


def _measure_once(passes: Sequence[InBackwardPass], loss: torch.Tensor, engine: Callable[[bool], None]) -> None:
    with ExitStack() as held:
        for each in passes:
            held.enter_context(each.gradients.shards.preserving_accumulated_grads())
            held.enter_context(each.measuring())
        with _watching(passes, InBackwardPass.measure, loss, again=True):
            engine(True)
        for each in passes:
            each.measure_rest()


def _decide(passes: Sequence[InBackwardPass]) -> bool:
    """Take the norms, and return whether the step is to be skipped."""
    with ExitStack() as present:
        for each in passes:
            present.enter_context(each.gradients.present(each.measured))
        for each in passes:
            if each.counts:
                each.take_norm()
        skips = [each.decision.agree() for each in passes]  # of all, which may be collectives
        return any(skips)


@contextmanager
def _watching(
    passes: Sequence[InBackwardPass],
    action: Callable[[InBackwardPass, torch.Tensor], None],
    loss: torch.Tensor,
    *,
    again: bool,
) -> Iterator[None]:
    """Inside, `action` is called with each parameter as soon as its gradient of a backward pass from `loss` is complete on all
    ranks. again: another pass through the graph follows."""
    running: list[int] = []

    def watch(each: InBackwardPass) -> Callable[[torch.Tensor], None]:
        def filled(param: torch.Tensor) -> None:
            if graph_task() not in running:
                raise RuntimeError(REENTRANT)
            with torch.no_grad(), without_function_modes():
                action(each, param)

        return filled

    handles: list[Any] = [loss.register_hook(lambda grad: running.append(graph_task()))]
    try:
        for each in passes:
            handles += each.gradients.shards.register_grad_hooks(each.trained, watch(each), each.held, again=again)
        yield
    finally:
        for handle in handles:
            handle.remove()
