"""`Diagnosis`: where the first bad number of a step was made, why, and what helps; and its sentences.

Its cause is found back from a bad loss or gradient, operation by operation, to what made it of sound numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from booster.common.arguments import listed
from booster.numerics.diagnosis.nonfinite_trace import SUMMING_COLLECTIVES, NonFiniteInput, NonFiniteResult, is_intended
from booster.numerics.diagnosis.places import Numbers
from booster.numerics.diagnosis.replay import Outcome

CauseKind = Literal["data", "weights", "loss", "overflow", "loss_scale", "operation"]
Direction = Literal["forward", "loss", "backward"]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The first operation of a step that made an inf or NaN, and why. The same on every rank. None is what is not known.

    kind: "data": a tensor that the step was given held one. "weights": a parameter or buffer did. "loss": what computes the
        loss from the model's output made it, as log(0) or 0/0 do. "overflow": the true result is finite, and too large for the
        format. "loss_scale": the same in the backward pass, and a smaller scale is enough. "operation": an operation in the
        model has no finite result for these inputs, in any format. None: nothing bad was found, or not where it began.
    certain: with this operation's result mended, or by a remedy, everything was finite; or every way back led to it alone.

    module: the qualified name, "criterion" for a boosted one, the class's name for the model itself and for modules outside of
        it, "" outside of all.
    operation: as torch's dispatcher calls it, "aten.addmm".
    direction: of the pass.
    dtype: of the result, without "torch.".
    rank: where it was made.
    remedies: what was tried in the replay and made everything finite.
    advice: what was not tried.

    autograd_node, of: in a backward pass, the node, and the operation of the forward pass that it belongs to.
    parameter: the name of what is bad, for kind "weights".
    modules: those being called, the outermost first.
    passed: modules that the bad number went through afterwards.
    source: the line of the user's code, "file:line in function".
    inputs, output: ranges.
    rows: places along the first dimension of what is bad, for "data" the samples.
    micro_batch: which backward pass of the step, from 0, or which part of a pipeline's batch.
    stage: of a pipeline; None elsewhere.
    loss, loss_scale: of the replay; the loss is the mean over ranks.
    notes: what limits what is said here.
    """

    kind: CauseKind | None
    module: str = ""
    operation: str = ""
    direction: Direction | None = None
    dtype: str = ""
    rank: int = 0
    remedies: tuple[str, ...] = ()
    certain: bool = False
    advice: tuple[str, ...] = ()
    autograd_node: str = ""
    of: str = ""
    parameter: str = ""
    modules: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    source: str = ""
    inputs: tuple[Numbers, ...] = ()
    output: Numbers | None = None
    rows: tuple[int, ...] = ()
    micro_batch: int = 0
    stage: int | None = None
    loss: float | None = None
    loss_scale: float = 1.0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self._what(), *self._where(), *self._numbers()]
        if self.remedies:
            parts.append(f"Tried in the replay: {'; '.join(self.remedies)}.")
        if self.advice:
            parts.append(f"Not tried: {'; '.join(self.advice)}.")
        if self.kind is not None and not self.certain:
            parts.append("This is a suspicion: mending it in the replay did not make everything finite.")
        return " ".join([*parts, *self.notes])

    def _what(self) -> str:
        if self.kind is None:
            loss = "" if self.loss is None else f", the loss {self.loss:.6g}"
            return f"No cause was found. The replay ran at loss scale {self.loss_scale:g}{loss}."
        where = f" in {self.module}" if self.module else ""
        by = f"{self.operation}{where}"
        during = {"forward": "the forward pass", "loss": "the loss", "backward": "the backward pass"}[
            self.direction or ""
        ]
        if self.kind == "data":
            return f"Bad data: {by} was the first to read a tensor that already held {self._bad()}, in {during}."
        if self.kind == "weights":
            return f"Bad weights: {self.parameter} holds {self._bad()}; {by} read it first, in {during}."
        if self.kind == "loss_scale":
            return f"The loss scale {self.loss_scale:g} is too large: {by} overflowed {self.dtype} in {during}."
        if self.kind == "overflow":
            return f"Overflow of {self.dtype}: the result of {by} is too large for it, in {during}."
        if self.kind == "loss":
            return f"The loss: {by} made {self._bad()} out of finite numbers, in {during}."
        return f"An operation: {by} made {self._bad()} out of finite numbers, in {during}."

    def _bad(self) -> str:
        if self.output is None:
            return "an inf or NaN"
        counts = (("NaN", self.output.num_nan), ("inf", self.output.num_inf))
        return " and ".join(f"{count} {what}" for what, count in counts if count) or "an inf or NaN"

    def _where(self) -> list[str]:
        facts = [f"rank {self.rank}"]
        facts += [f"stage {self.stage}"] if self.stage is not None else []
        facts += [f"micro-batch {self.micro_batch}"] if self.micro_batch else []
        facts += [f"rows {', '.join(map(str, self.rows))}"] if self.rows and self.direction != "backward" else []
        facts += [f"{self.autograd_node} of {self.of}"] if self.autograd_node and self.of else []
        facts += [self.source] if self.source else []
        said = [f"Where: {'; '.join(facts)}."]
        if len(self.modules) > 1:
            said.append(f"Called through {' > '.join(self.modules)}.")
        if self.passed:
            said.append(f"From there it went through {listed(self.passed, 4)}.")
        return said

    def _numbers(self) -> list[str]:
        if self.kind is None or self.output is None:
            return []
        inputs = [f"Inputs: {'; '.join(map(str, self.inputs[:4]))}."] if self.inputs else []
        return [*inputs, f"Result: {self.output}."]


_SITE = attrgetter("operation", "place.modules", "place.source", "place.backward")
_ORDER = ("forward", "loss", "backward")
_NORMALISES = frozenset({"_softmax", "_safe_softmax", "_log_softmax", "logsumexp"})  # what masks are for
_TRANSPARENT = frozenset({"mean", "sum", "view", "reshape", "_to_copy", "clone", "detach", "squeeze", "_unsafe_view"})


@dataclass(frozen=True, kw_only=True)
class Cause(Diagnosis):
    """The first operation that made a bad number, as one rank saw it; what ranks send each other.

    Too large a loss scale counts as an overflow here, and nothing was tried yet.

    Attributes:
        exact: see `NonFiniteResult`.
        foreign: the number came from another rank.
        alone: every way back leads to this operation.
        repair: what `NonFiniteTrace` has to repair: its result, and those of the same operation in the same module, as of other
            micro-batches.
    """

    exact: float | None
    foreign: bool
    alone: bool
    repair: tuple[int, ...]

    @property
    def order(self) -> tuple[Any, ...]:
        """What sorts the causes that ranks found: those made there first, then by the course of a step."""
        return self.foreign, _ORDER.index(self.direction or "forward"), self.micro_batch, self.rank

    def is_alike(self, other: Cause) -> bool:
        """Whether both are of one operation in one place of the program, maybe on two ranks."""
        return all(getattr(self, name) == getattr(other, name) for name in ("kind", "operation", "module", "direction"))

    @classmethod
    def read(cls, data: dict[str, Any]) -> Cause:
        """Return the inverse of `dataclasses.asdict`, after a passage through JSON."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        fields["inputs"] = tuple(map(Numbers.read, fields["inputs"]))
        fields["output"] = fields["output"] and Numbers.read(fields["output"])
        return cls(**fields)


def cause_of(outcome: Outcome, rank: int) -> Cause | None:
    """Return the earliest cause of the bad numbers in `outcome`; None if there are none, or none can be traced."""
    cause = _traced(outcome, outcome.sinks, rank)
    if cause is not None and cause.foreign and outcome.trace.sent:
        # A stage of a pipeline gets back a bad loss, or gradient, of what it sent.
        sent = _traced(outcome, outcome.trace.sent, rank)
        cause = sent if sent is not None and not sent.foreign else cause
    return cause


def _traced(outcome: Outcome, sinks: Sequence[NonFiniteResult | NonFiniteInput], rank: int) -> Cause | None:
    # With each event, whether the infinities in it, if they were meant for a mask, were taken for numbers.
    waiting = [(sink, False) for sink in sinks if isinstance(sink, NonFiniteResult)]
    seen: set[tuple[NonFiniteResult, bool]] = set()
    ends: list[tuple[NonFiniteResult, NonFiniteInput | None]] = []
    while waiting:
        event, misused = waiting.pop()
        if (event, misused) in seen:
            continue
        seen.add((event, misused))
        if event.earlier is not None:
            waiting.append((event.earlier, misused))
        if event.intended and not misused:
            continue
        worse = [parent for parent in event.parents if misused or not is_intended(parent, event.name)]
        leaves = [parent for parent in worse if isinstance(parent, NonFiniteInput)]
        if leaves:
            ends.append((event, leaves[0]))
        elif not worse:
            ends.append(_reader_of_data(event) or (event, None))
        waiting += [(parent, parent.intended) for parent in worse if isinstance(parent, NonFiniteResult)]
    if ends:
        # What collectives brought comes last: it was made elsewhere, or an operation here fed it.
        event, leaf = min(ends, key=lambda pair: (pair[0].foreign, pair[0].index))
        alike = [(end, of) for end, of in ends if _SITE(end) == _SITE(event) and (of is None) == (leaf is None)]
        repair = {end.index for end, _ in alike} | {of.key for _, of in alike if of is not None}
        return _cause(outcome, event, leaf, rank, repair, alone=len({end for end, _ in ends}) == 1)
    if not seen:
        return None
    event = _where_masks_came_out(sinks)
    return _cause(outcome, event, None, rank, {event.index}, alone=False)


def _reader_of_data(event: NonFiniteResult) -> tuple[NonFiniteResult, NonFiniteInput] | None:
    """Return, of an operation that made NaN of infinities like a mask's, what read them, if they were in the data."""
    if event.name in _NORMALISES:
        return None
    waiting, seen = [event], {event}
    while waiting:
        now = waiting.pop()
        for parent in now.parents:
            if isinstance(parent, NonFiniteInput):
                return (now, parent) if not parent.name else None
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return None


def _where_masks_came_out(sinks: Sequence[NonFiniteResult | NonFiniteInput]) -> NonFiniteResult:
    """Return, of infinities that were meant for a mask all the way, the operation that chose them."""
    event = next(sink for sink in sinks if isinstance(sink, NonFiniteResult))
    while True:
        parents = [parent for parent in event.parents if isinstance(parent, NonFiniteResult)]
        before = parents[0].output if parents else None
        all_bad = before is not None and before.num_bad == math.prod(before.shape)
        if not parents or (event.name not in _TRANSPARENT and not all_bad):
            return event
        event = parents[0]


def _cause(
    outcome: Outcome,
    event: NonFiniteResult,
    leaf: NonFiniteInput | None,
    rank: int,
    repair: Collection[int],
    *,
    alone: bool,
) -> Cause:
    place = event.place
    last = outcome.trace.last_in_model.get(event.micro_batch, -1)
    after = place.is_loss or event.index > last
    direction: Direction = "backward" if place.backward else "loss" if not place.inside and after else "forward"
    kind: CauseKind
    if leaf is not None:
        kind = "weights" if leaf.name else "data"
    elif event.exact is not None and math.isfinite(event.exact):
        kind = "overflow"
    elif event.foreign and event.name in SUMMING_COLLECTIVES and not event.parents:
        kind = "overflow"  # of a sum of parts that are finite; if another rank's is not, that rank names its cause
    else:
        # The backward of what the loss is made of is the loss's doing too.
        kind = "loss" if not place.inside and direction != "forward" else "operation"
    name = leaf.name if leaf is not None else ""
    module, owner = place.modules[-1] if place.modules else "", name.rpartition(".")[0]
    if owner and (
        len(place.modules) < 2 or owner.startswith(f"{module}.")
    ):  # read before its module is called, as shards are
        module = owner
    passed: dict[str, None] = {}
    reached: set[NonFiniteResult | NonFiniteInput] = {event}
    for later in outcome.trace.results:
        if not reached.isdisjoint(later.parents):
            reached.add(later)
            if later.place.modules and later.place.modules[-1] != module:
                passed[later.place.modules[-1]] = None
    shown = leaf.numbers if leaf is not None else event.output
    return Cause(
        rank=rank,
        kind=kind,
        module=module,
        operation=event.operation,
        direction=direction,
        dtype="" if shown is None else shown.dtype,
        inputs=tuple(event.inputs),
        output=None if event.foreign and leaf is None else shown,  # when it was seen, nothing had been brought yet
        rows=tuple(leaf.rows if leaf is not None else event.rows),
        modules=place.modules,
        passed=tuple(passed),
        source=place.source,
        autograd_node=place.node,
        of=place.of,
        parameter=name,
        micro_batch=event.micro_batch,
        exact=event.exact,
        foreign=event.foreign,
        alone=alone,
        repair=tuple(sorted(repair)),
        stage=place.stage,
    )
