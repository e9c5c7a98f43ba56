"""What helps against the cause of a bad step, tried by replaying it; on several ranks all try the same together."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from booster.communicate import exchange
from booster.numerics.cause import Cause, cause_of
from booster.numerics.meeting import Meeting, RanksApart
from booster.numerics.replay import Replay, StoppedElsewhere
from booster.numerics.widened import in_float32
from booster.update import agreement

_MAX_FAULTS = 4  # that may be mended one after another before giving up
_MAX_SCALES = 12


@dataclass(frozen=True)
class Shown:
    """What one replay shows, on all ranks alike but for `own`.

    bad: whether any rank's loss or gradient was. cause: that all ranks name. own: of this rank's bad numbers, as it sees it.
    loss: the mean of the ranks that have one. largest_gradient: of all ranks, with its loss scale.
    """

    bad: bool
    cause: Cause | None
    own: Cause | None
    loss: float | None
    largest_gradient: float


class ReplayError(RuntimeError):
    """Another rank could not replay the step."""


class Trials:
    """Replays of one step on all ranks of `group`, and what they agree that it shows. Made on all of them together."""

    def __init__(self, replay: Replay, group: dist.ProcessGroup | None, device_type: str) -> None:
        self._replay = replay
        self._group = group
        self._device_type = device_type
        self._rank = dist.get_rank() if group is not None else 0
        self._meeting = None if group is None else Meeting.of(group)

    def run(self, **how: Any) -> Shown:
        """Replay on all ranks. If it raises on any, all raise: there its own error, elsewhere `ReplayError`.

        Raises `RanksApart` where others wait in a collective for a rank that raised.
        """
        problem: Exception | None = None
        own: Cause | None = None
        try:
            outcome = self._replay.run(agree=self._meet, **how)
            own = cause_of(outcome, self._rank)
            report: dict[str, Any] = {"bad": outcome.bad, "loss": outcome.loss, "largest": outcome.largest_gradient}
            report["cause"] = None if own is None else own.dump()
        except StoppedElsewhere:
            report = {"error": ""}
        except RanksApart:
            raise
        except Exception as error:
            problem = error  # raised once the others know
            report = {"error": f"{type(error).__name__}: {error}"}
        told = [json.loads(data) for data in exchange(json.dumps(report).encode(), self._group)]
        if problem is not None:
            raise problem
        for rank, each in enumerate(told):
            if each.get("error"):
                raise ReplayError(f"rank {rank} of the group could not replay the step: {each['error']}")
        causes = [Cause.read(each["cause"]) for each in told if each["cause"] is not None]
        losses = [each["loss"] for each in told if each["loss"] is not None]
        return Shown(
            bad=any(each["bad"] for each in told),
            cause=min(causes, key=lambda cause: cause.order, default=None),
            own=own,
            loss=sum(losses) / len(losses) if losses else None,
            largest_gradient=max(each["largest"] for each in told),
        )

    def _meet(self, failed: bool) -> bool:
        return failed if self._meeting is None else self._meeting.any(failed)

    def _agree(self, failed: bool) -> bool:
        return bool(agreement.largest(float(failed), self._group))

    def first(self) -> Shown:
        """Replay the step as it is."""
        self._first = self.run()
        return self._first

    def largest_scale(self, cause: Cause) -> float | None:
        """Return the largest loss scale found, a power of two below this one and at least 1, at which all is finite."""
        scale, overflow = self._replay.scale, cause
        for _ in range(_MAX_SCALES):
            scale = 2.0 ** math.floor(math.log2(scale)) / 2.0 ** _excess(overflow)
            if scale < 1.0:
                return None
            shown = self.run(scale=scale)
            if not shown.bad:
                return scale
            found = shown.cause
            if found is None or found.kind != "overflow" or found.direction != "backward":
                return None
            overflow = found
        return None

    def module_in_float32(self, cause: Cause) -> str | None:
        """Return the innermost module around the cause that, computed in float32, makes all finite."""
        named = self._replay.modules
        for name in reversed(cause.chain):
            in_stages = self._replay.is_partial
            if not self._agree(name in named) or (in_stages and self.is_root(name)):  # no rank calls all of it
                continue
            module = named.get(name)  # None where another stage has it
            try:
                shown = self.run(within=partial(in_float32, module, self._device_type, alike=in_stages))
            except (RuntimeError, TypeError, ValueError):
                continue
            if not shown.bad:
                return name
        return None

    def is_root(self, name: str) -> bool:
        """Return whether `name` is that of a whole boosted model."""
        return self._replay.modules.get(name) in self._replay.roots

    def is_mended(self, cause: Cause) -> bool:
        """Return whether all is finite once what the cause made, and after it what other causes made, is replaced by zeros."""
        repair: set[int] = set()
        named, own = cause, self._first.own
        for _ in range(_MAX_FAULTS):
            if named.foreign:
                return False
            if own is not None and own.is_alike(named):
                repair.update(own.repair)
            shown = self.run(repair=frozenset(repair))
            if not shown.bad:
                return True
            if shown.cause is None:
                return False
            named, own = shown.cause, shown.own
        return False


def _excess(cause: Cause) -> int:
    """By how many powers of two the result of the cause is too large for its format; at least 1."""
    if not cause.exact or not math.isfinite(cause.exact):
        return 1
    largest = torch.finfo(getattr(torch, cause.dtype)).max
    return max(1, math.ceil(math.log2(cause.exact / largest)))
