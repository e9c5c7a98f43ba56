"""The optimizer in backward (`release_gradients`): parameters are stepped as soon as their gradients are complete.

A hook on each parameter is called when a backward pass has filled its gradient (`register_post_accumulate_grad_hook`). The
parameter is then stepped, with the others of its bucket where it shares one, and its gradient freed::

    backward   ... | gradient of w3 | step w3, free | gradient of w2 | step w2, free | gradient of w1 | ...

So there is one gradient at a time, and never all. A loss scale, a clip by norm and `skip_nonfinite` need a number of all
gradients before the first is used. There "exact" goes through the graph twice, with the same gradients both times::

    first pass    gradient of w3: its norm, free | gradient of w2: its norm, free | ...   ->  norm, skip or not, clip factor
    second pass   gradient of w3: step, free     | gradient of w2: step, free     | ...

"previous_norm" goes through it once and clips by the norm of the step before, which is another algorithm.
Source of the single pass: Lv et al. 2023 (LOMO), section 3.1, which has the two passes for clipping too.

`OptimizerInBackward` is what is known between passes, `in_backward_pass.InBackwardPass` one optimizer in one pass;
`run_in_backward` runs the passes of all optimizers that a loss is for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from booster.common.torch_internals.autograd_internals import graph_task, without_function_modes
from booster.shards.base import GradUse
from booster.update.in_backward_pass import InBackwardPass

REENTRANT = (
    "release_gradients cannot know when gradients are complete under reentrant activation checkpointing, which runs backward "
    "passes inside the backward pass; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), as "
    "model.gradient_checkpointing_enable({'use_reentrant': False}) does in transformers"
)


class OptimizerInBackward:
    """How one update steps within backward, and what of that is known between passes.

    decision: by which a pass steps; it holds the gradients that hold this, and so is held weakly.

    Attributes:
        mode: "exact" or "previous_norm".
        max_norm: to clip to; 0 does not.
        step_pending: whether a pass has stepped, or decided to skip, and `step()` is still to count it.
        sync: counts the last step, since schedules that wait for it write the learning rates by which a pass steps.
        previous: the norm of the last step, where that is what clips: a float, or a 0-dim tensor where a device decides.
    """

    def __init__(self, mode: str, max_norm: float, decision: Any) -> None:
        self.decision_is(decision)
        self.mode = mode
        self.max_norm = max_norm
        self.step_pending = False
        self.sync: Callable[[], None] = lambda: None
        self.previous: Any = None
        self._partial_step = ""

    def decision_is(self, decision: Any) -> None:
        """Step by `decision` from now on."""
        self.decision = weakref.proxy(decision)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "decision"}

    def check_weights(self) -> None:
        """Raise RuntimeError if a pass raised after some parameters were stepped."""
        if self._partial_step:
            raise RuntimeError(self._partial_step)

    def check(self, *, create_graph: bool) -> None:
        """Raise RuntimeError or ValueError if a pass cannot use its gradients."""
        self.check_weights()
        self.sync()
        if self.step_pending:
            raise RuntimeError(
                "a second backward pass before optimizer.step(): release_gradients has stepped on the gradients of the first, "
                "so they cannot be added up. Call step() after each backward pass, or put the passes of one step in "
                "b.accumulate(model, optimizer, num_micro_batches)"
            )
        if create_graph:
            raise ValueError(
                "create_graph=True makes gradients part of a graph, and release_gradients frees them within the pass; compute "
                "a penalty by torch.autograd.grad(..., create_graph=True) in the loss, or use release_gradients=False"
            )

    def refuse(self, what: str) -> None:
        """Raise RuntimeError if gradients were used already. what: the call that needs them."""
        if self.step_pending:
            raise RuntimeError(
                f"{what} comes too late: release_gradients has stepped on the gradients within backward and freed them. Clip "
                "by Booster(clip_grad_norm=...), or use release_gradients=False"
            )

    def mark_partial_step(self, stepped: int, number: int) -> None:
        """A pass raised after `stepped` of `number` parameters were stepped."""
        self._partial_step = (
            f"the last backward pass raised after {stepped} of {number} parameters were stepped within it, so the weights are "
            "those of no step; load a checkpoint before going on"
        )

    def reset(self, previous: float | None) -> None:
        """A state was loaded, with the norm `previous`: weights are those of a step again."""
        self._partial_step, self.previous = "", previous


class StashedGrads:
    """Inside, `params` have no gradients; afterwards what a pass has brought is dropped, or, where it is to `keep`, added to
    those that there were."""

    keep = False

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._before = {param: param.grad for param in params}

    def __enter__(self) -> StashedGrads:
        self.clear()
        return self

    def clear(self) -> None:
        """Drop what a pass has brought."""
        for param in self._before:
            param.grad = None

    def __exit__(self, *error: Any) -> None:
        for param, grad in self._before.items():
            brought = param.grad if self.keep else None
            param.grad = grad if brought is None else brought if grad is None else grad + brought


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a backward pass from `loss` fills the gradients of."""
    if loss.grad_fn is None:
        return [loss]
    nodes: dict[Any, None] = {loss.grad_fn: None}
    waiting, leaves = [loss.grad_fn], []
    while waiting:
        node: Any = waiting.pop()
        name = type(node).__name__
        if name == "AccumulateGrad":
            leaves.append(node.variable)
        elif name == "CheckpointFunctionBackward":
            # Its backward runs another engine inside, in which hooks of this pass would be called before their gradients are
            # complete.
            raise RuntimeError(REENTRANT)
        for after, _ in node.next_functions:
            if after is not None and after not in nodes:
                nodes[after] = None
                waiting.append(after)
    return leaves


def run_in_backward(
    members: Sequence[Any],
    loss: torch.Tensor,
    engine: Callable[[bool], None],
    end: Callable[[], None],
    *,
    retain_graph: bool,
) -> None:
    """Run a backward pass with gradients that are used within it, in one go through the graph or two.

    members: the gradients that take part in the pass, which has begun. engine: runs autograd from `loss`; its argument: whether
    the graph is used again. end: to be called when the gradients are known.
    """
    passes: list[InBackwardPass] = [member.in_backward.decision.backward_pass(member) for member in members]
    own = {param for each in passes for param in each.params}
    reached = leaves_of(loss)
    for each in passes:
        # A leaf is what was gathered for forward; the optimizer knows the shard of it.
        reached = each.gradients.shards.sharded_params(reached)
    twice = any(each.measures_first for each in passes)
    if twice:
        with StashedGrads(leaf for leaf in reached if leaf not in own) as others:
            _measure(passes, loss, engine, others)
            end()
            # A collective wherever backward and deciding on a step are.
            others.keep = skip = _decide(passes)
        if skip:
            for each in passes:
                each.finish()
                each.gradients.shards.clear_gradients(set_to_none=True)  # of earlier micro-batches, which were spared
            return
    for each in passes:
        each.prepare()
    try:
        with _with_hooks(passes, InBackwardPass.step_on, loss, again=False):
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
    passes: Sequence[InBackwardPass], loss: torch.Tensor, engine: Callable[[bool], None], others: StashedGrads
) -> None:
    _measure_once(passes, loss, engine)
    for each in passes:
        if each.overflows():
            each.read_exactly()
    if any(each.reads_exactly for each in passes):
        others.clear()
        _measure_once(passes, loss, engine)


def _measure_once(passes: Sequence[InBackwardPass], loss: torch.Tensor, engine: Callable[[bool], None]) -> None:
    with ExitStack() as regions:
        for each in passes:
            regions.enter_context(each.gradients.shards.preserving_accumulated_grads())
            regions.enter_context(each.measuring())
        with _with_hooks(passes, InBackwardPass.measure, loss, again=True):
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
                each.set_norm()
        skips = [each.decision.should_skip() for each in passes]  # of all, which may be collectives
        return any(skips)


@contextmanager
def _with_hooks(
    passes: Sequence[InBackwardPass],
    action: Callable[[InBackwardPass, torch.Tensor], None],
    loss: torch.Tensor,
    *,
    again: bool,
) -> Iterator[None]:
    """Inside, `action` is called with each parameter as soon as its gradient of a backward pass from `loss` is complete on all
    ranks. again: another pass through the graph follows."""
    running: list[int] = []

    def hook_of(each: InBackwardPass) -> Callable[[torch.Tensor], None]:
        def filled(param: torch.Tensor) -> None:
            # An engine inside of this one fills gradients that the graph fills again.
            if graph_task() not in running:
                raise RuntimeError(REENTRANT)
            with torch.no_grad(), without_function_modes():
                action(each, param)

        return filled

    handles: list[Any] = [loss.register_hook(lambda grad: running.append(graph_task()))]
    try:
        for each in passes:
            use = GradUse(each.trained, hook_of(each), each.stashed, again)
            handles += each.gradients.shards.register_grad_hooks(use)
        yield
    finally:
        for handle in handles:
            handle.remove()
