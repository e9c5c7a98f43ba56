"""Where an inf or NaN began: back from a bad loss or gradient, operation by operation, to what made it of sound numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from booster.numerics.diagnosis.diagnosis import Diagnosis, Direction, Kind
from booster.numerics.diagnosis.nonfinite_trace import SUMS, NonFiniteInput, NonFiniteResult, is_intended
from booster.numerics.diagnosis.places import Numbers
from booster.numerics.diagnosis.replay import Outcome

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
    found: list[tuple[NonFiniteResult, NonFiniteInput | None]] = []
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
            found.append((event, leaves[0]))
        elif not worse:
            found.append(_reader_of_data(event) or (event, None))
        waiting += [(parent, parent.intended) for parent in worse if isinstance(parent, NonFiniteResult)]
    if found:
        # What collectives brought comes last: it was made elsewhere, or an operation here fed it.
        event, leaf = min(found, key=lambda pair: (pair[0].foreign, pair[0].index))
        alike = [(end, of) for end, of in found if _is_same_site(end, event) and (of is None) == (leaf is None)]
        repair = {end.index for end, _ in alike} | {of.key for _, of in alike if of is not None}
        return _cause(outcome, event, leaf, rank, repair, alone=len({end for end, _ in found}) == 1)
    if not seen:
        return None
    event = _where_masks_came_out(sinks)
    return _cause(outcome, event, None, rank, {event.index}, alone=False)


def _is_same_site(a: NonFiniteResult, b: NonFiniteResult) -> bool:
    return a.operation == b.operation and all(
        getattr(a.place, name) == getattr(b.place, name) for name in ("modules", "source", "backward")
    )


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
    kind: Kind
    if leaf is not None:
        kind = "weights" if leaf.name else "data"
    elif event.exact is not None and math.isfinite(event.exact):
        kind = "overflow"
    elif event.foreign and event.name in SUMS and not event.parents:
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
