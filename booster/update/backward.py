"""One backward pass on behalf of one or several boosted optimizers, by what holds the gradients of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from booster.common import arguments
from booster.tensors.cast_regions import region
from booster.tensors.trees import HALF_DTYPES
from booster.update.decision import NonFiniteParams, SkippedReason, SkipReport
from booster.update.in_backward import run_in_backward

Gradients = Any  # of `update.gradients`, which imports this file
_IN_BACKWARD = attrgetter("in_backward")


class JointDecision:
    """Optimizers that share a backward and therefore step together or not at all.

    members: the gradients of those that have not stepped yet. What the others contributed to a decision is kept for the last
    one's report. A single member, which holds this, is held weakly: a cycle would keep its parameters in memory.
    """

    def __init__(self, members: list[Gradients]) -> None:
        self.members: list[Any] = members if len(members) > 1 else [weakref.proxy(member) for member in members]
        self.found_inf: Any = None
        self.nonfinite_loss: bool | None = None  # of any rank; None: not asked
        self._losses: list[torch.Tensor] = []
        self._blame: list[NonFiniteParams] = []

    def remove_member(self, member: Gradients) -> None:
        """`member` has stepped."""
        self.members.remove(member)
        if len(self.members) == 1:
            self.members[0] = weakref.proxy(self.members[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "members": self.members if len(self.members) > 1 else []}

    def has_nonfinite_loss(self) -> bool:
        """Return whether a loss on this rank is inf or NaN; waits for the device."""
        return any(not bool(loss.isfinite().all()) for member in self.members for loss in member.losses)

    def decide(self, found_inf: Any) -> None:
        """Take the decision for all: `found_inf` is a bool, or a 0-dim tensor."""
        self.found_inf = found_inf
        # Losses and culprits are kept where there may be a skip to report: on a device that is not known yet.
        if found_inf is not False:
            self._losses = [loss for member in self.members for loss in member.losses]
            self._blame = [member.norms.nonfinite_params(member) for member in self.members]

    def report(self) -> SkipReport:
        """Return what tells reason and culprits if this decision is to skip; calling it waits for the device."""
        return _Report(self._losses, self._blame, self.nonfinite_loss)


class _Report(NamedTuple):
    losses: list[torch.Tensor]
    nonfinite_params: list[NonFiniteParams]
    nonfinite_loss: bool | None

    def __call__(self) -> tuple[SkippedReason, tuple[str, ...]]:
        known = self.nonfinite_loss
        finite_loss = all(bool(loss.isfinite().all()) for loss in self.losses) if known is None else not known
        culprit = tuple(name for names in self.nonfinite_params for name in names())
        return "nonfinite_grad" if finite_loss else "nonfinite_loss", culprit


@dataclass(eq=False)
class BackwardPass:
    """One backward pass, as the gradients that take part in it see it.

    Attributes:
        members: the gradients of the optimizers that the loss is for.
        loss_id: which of the precision's loss scalers.
        delayed: whether the gradients are not complete after it, as inside `no_sync`, and may not be read yet.
        checked: whether an overflow in it counts.
        create_graph: whether gradients are part of a graph, as a penalty on them needs.
        loss: where this rank has it.
        found_inf: what was found in those of each optimizer, for a decision that all of them share.
    """

    members: Sequence[Gradients]
    loss_id: int = 0
    delayed: bool = False
    checked: bool = True
    create_graph: bool = False
    loss: torch.Tensor | None = None
    found_inf: list[Any] = field(default_factory=list)


def run_backward(
    loss: torch.Tensor,
    members: Sequence[Gradients],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    divisor: float = 1.0,
    weight: float = 1.0,
    loss_id: int = 0,
    delayed: bool = False,
    inputs: Any = None,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> None:
    """Accumulate the gradients of `loss / divisor`, scaled for all of `members` by the smallest of their scales.

    loss: one element, any floating dtype. members: those given together step together, with one decision for all. weight: of
    the loss in the mean over the passes of a step, for who listens. context: what the pass runs under. loss_id, delayed: see
    `BackwardPass`. Side effect: the plugin's gradient collectives run inside. If the pass raises, gradients that were set aside
    for it come back.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex() or not loss.requires_grad:
        _refuse_loss(loss)
    if retain_graph is not False:
        arguments.flag("retain_graph", retain_graph)
    if create_graph is not False:
        arguments.flag("create_graph", create_graph)
    inputs = None if inputs is None else _checked_inputs(inputs)
    if members[0].check_loss is not None:
        check_first(loss, members)
    # Gradients of a pass that others follow are sums that are not complete, so nothing is stepped in it.
    released = not delayed and any(map(_IN_BACKWARD, members))
    if released:
        for member in members:
            if member.in_backward is not None:
                member.in_backward.check(create_graph=create_graph)
    this, scale = prepare_backward(members, loss, loss_id=loss_id, delayed=delayed, create_graph=create_graph)
    if loss.dtype in HALF_DTYPES:
        # A large scale would overflow a half loss.
        loss = loss.float()
    # A scale on a device stays a tensor: to divide it by 1 would be one more launch.
    seed = scale if isinstance(scale, torch.Tensor) and divisor == 1.0 else scale / divisor
    if isinstance(seed, torch.Tensor):
        gradient: torch.Tensor | None = seed.to(loss.device, loss.dtype).expand_as(loss)
    elif seed == 1.0:
        gradient = None
    else:
        # The scale seeds the backward pass in place of a product with the loss: one node less, and no float16 loss overflows.
        gradient = torch.full_like(loss, seed, requires_grad=False)

    # Who listens gets the loss by its weight in the mean over the group, not by that of one micro-batch.
    shown = loss if weight == 1.0 else loss.detach() * weight
    try:
        if released:

            def engine(retain: bool) -> None:
                with region(context):
                    torch.autograd.backward(loss, gradient, retain or None, create_graph, inputs=inputs)

            run_in_backward(members, loss, engine, lambda: end_backward(this, shown), retain_graph=retain_graph)
        else:
            with region(context):
                torch.autograd.backward(loss, gradient, retain_graph or None, create_graph, inputs=inputs)
    # KeyboardInterrupt too: gradients that were set aside would be lost with it.
    except BaseException as error:
        abandon_backward(this)
        if isinstance(error, RuntimeError) and "sparse" in str(error):
            for member in members:
                member.parameters.refuse_sparse_halves()
        if isinstance(error, NotImplementedError) and "Sparse" in str(error):  # torch's words of ranks do not say whose
            raise RuntimeError(
                "a gradient is sparse, as F.embedding(..., sparse=True) makes it, and ranks cannot average it; write "
                "sparse=False. Under TorchDDPPlugin nn.Embedding(..., sparse=True) can be trained"
            ) from error
        raise
    if not released:
        for member in members:
            member.after_backward(shown)


def check_first(loss: torch.Tensor, members: Sequence[Gradients]) -> None:
    """Refuse the first loss of `members` by raising, where it cannot be trained on."""
    if members[0].check_loss is not None:
        members[0].check_loss(loss)
        members[0].check_loss = None


def prepare_backward(
    members: Sequence[Gradients],
    loss: Any = None,
    *,
    loss_id: int = 0,
    delayed: bool = False,
    create_graph: bool = False,
) -> tuple[BackwardPass, Any]:
    """Make `members` ready for gradients of a loss; returns the pass and the scale to multiply the loss with, a float or
    0-dim tensor. `end_backward` or `abandon_backward` must follow."""
    scale: Any = None
    for member in members:
        if member.scaler.enabled:
            # The smallest of all, because one scaled loss has to overflow in none of their gradients.
            own = member.scale_for(loss_id)
            scale = own if scale is None else _smaller(scale, own)
    if scale is None:
        scale = 1.0
    if len(members) > 1:
        # Who took part in an earlier loss of one of them joins too: one overflow then skips the steps of all.
        joints = [member.joint.members if len(member.joint.members) > 1 else [member] for member in members]
        decision = JointDecision(list({id(other): other for each in joints for other in each}.values()))
        for member in decision.members:
            member.joint = decision
    this = BackwardPass(members, loss_id=loss_id, delayed=delayed, create_graph=create_graph, loss=loss)
    for member in members:
        member.before_backward(scale, this)
    return this, scale


def end_backward(this: BackwardPass, loss: torch.Tensor | None) -> None:
    """The gradients of `loss` are there; None where another pipeline stage has it."""
    for member in this.members:
        member.after_backward(loss)


def abandon_backward(this: BackwardPass) -> None:
    """The pass raised: gradients that were set aside for it come back."""
    for member in this.members:
        for tracker in member.shards.sync_trackers.values():
            tracker.abandon_backward()
        member.abandon_backward()
        member.shards.abandon_backward()


def _refuse_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else arguments.described(loss)
        raise ValueError(f"the loss must be a tensor of one element, got {shape}; reduce it first, e.g. loss.mean()")
    if loss.is_complex():
        raise ValueError(f"the loss must be real, got {loss.dtype}; take its real part or absolute value")
    raise RuntimeError(
        "the loss does not require gradients: it was computed under no_grad, or from detached tensors. A batch with nothing "
        "to learn from gives a zero of the model's output: loss = 0.0 * output.sum()"
    )


def _checked_inputs(inputs: Any) -> tuple[Any, ...]:
    one = isinstance(inputs, (torch.Tensor, GradientEdge))
    several = (inputs,) if one else tuple(inputs) if isinstance(inputs, Iterable) else ()
    if isinstance(inputs, Sequence) and not inputs:
        raise ValueError(
            "inputs are empty, so no gradient would be computed; name tensors, or pass None for all leaves"
        )
    if not several or not all(isinstance(entry, (torch.Tensor, GradientEdge)) for entry in several):
        legal = "a tensor, several in a list, or None for all leaves of the graph"
        raise TypeError(arguments.refusal("inputs", inputs, legal))
    if any(isinstance(entry, torch.Tensor) and not entry.requires_grad for entry in several):
        raise ValueError("inputs hold a tensor that does not require gradients, so none can be accumulated in it")
    return several


def _smaller(scale: Any, other: Any) -> Any:
    if isinstance(scale, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.minimum(torch.as_tensor(scale, dtype=torch.float32), torch.as_tensor(other, dtype=torch.float32))
    return min(scale, other)
