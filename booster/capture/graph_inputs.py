"""What a graph reads and writes by address, learning rates among it, and what gradients are between two calls.

A graph is recorded with the addresses of its tensors, and replayed as long as they hold: `TensorAddresses` and `options_of`
say so. Gradients may wait from one call to the next, as within `accumulate`: which, and with which scale, is a
`GradientLayout`, which distinguishes graphs. What optimizers replace in every step, a graph has in `StaticScalars`; rates that
schedules write in `LRBuffers`.

A schedule goes on with steps that are made, not with those that are skipped, and a device knows first which those are. So
the host writes the rates of the next steps into a ring on the device, by copies of the schedules; a graph takes the row of
its place in it, and moves that place on where its step is made. The host has to wait for a step only when the ring is used
up.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

from booster.common.torch_internals.optimizer_internals import mark_step_called
from booster.common.torch_internals.tensor_internals import version
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.interface.scheduler import PendingSchedulerStep
from booster.loss_scaler import DeviceScale
from booster.update.backward import JointDecision
from booster.update.gradients import Gradients

_ADDRESS = torch.Tensor.data_ptr
_TENSORS = ("_parameters", "_buffers")
# Rates that are numbers are read from memory by the graph (`LRBuffers`), so a change of them needs no new one.
_READ = ("lr", "initial_lr")


class TensorAddresses:
    """The addresses of everything that graphs read and write: parameters, buffers, masters, states."""

    def __init__(self, addresses: list[int], held: list[Any]) -> None:
        self._addresses, self._held = addresses, held

    @classmethod
    def of(cls, modules: Sequence[nn.Module], optimizers: Sequence[OptimizerWrapper]) -> TensorAddresses:
        """Those of tensors in `modules`, each by itself, and in `optimizers`."""
        own = [vars(module) for module in modules]
        weights = [tensor for each in own for name in _TENSORS for tensor in each[name].values() if tensor is not None]
        held = [child for each in own for child in each["_modules"].values()]
        for optimizer in optimizers:
            held += update_of(optimizer).optimizer_state.master_tensors()
            for state in optimizer.unwrap().state.values():
                held += state.values()  # packed ones, too
            for group in optimizer.param_groups:
                held += group["params"]
        return cls(list(map(_ADDRESS, weights)), held)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TensorAddresses)
            # Weights are compared by address, since `p.data = ...` keeps the tensor; states by identity, since they are
            # replaced whole.
            and self._addresses == other._addresses
            and len(self._held) == len(other._held)
            and all(map(is_, self._held, other._held))
        )

    __hash__ = None  # type: ignore[assignment]


def options_of(optimizers: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return what graphs hold of groups of parameters as it was: all options but learning rates that are numbers."""
    return [
        (name, value)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params" and (name not in _READ or isinstance(value, torch.Tensor))
    ]


def changed_options(before: list[tuple[str, Any]], now: list[tuple[str, Any]]) -> str:
    """Return what differs between two lists of options, in words."""
    # By their text, because options may be tensors or lists, which neither hash nor compare as one.
    texts = [{(name, repr(value)) for name, value in options} for options in (before, now)]
    names = sorted({name for name, _ in texts[0] ^ texts[1]})
    return f"{', '.join(names) or 'groups'} of a group of parameters changed, which graphs hold as numbers,"


class GradientLayout:
    """What the gradients of `optimizers` are and carry between two calls: which there are, the scale and clips that wait.

    Attributes:
        grads: of each parameter of each optimizer.
        unread: whether no norm was read of them, since a graph would not read it again.
    """

    def __init__(self, optimizers: Sequence[OptimizerWrapper]) -> None:
        self._all = [optimizer._update.gradients for optimizer in optimizers]
        self._params = [each.parameters.held() for each in self._all]
        self._kept = [each.snapshot() for each in self._all]
        self._joint = [self._partners(each) for each in self._all]
        self.grads = [[param.grad for param in params] for params in self._params]
        self.unread = not any(each.read for each in self._all)

    def key(self) -> tuple[Any, ...]:
        """Return what is equal where a graph that was recorded at one layout can be replayed at another."""
        grads = tuple(
            tuple(None if g is None else (g.dtype, g.shape, g.stride()) for g in grads) for grads in self.grads
        )
        return grads, tuple(tuple(map(_described, kept.values())) for kept in self._kept), tuple(self._joint)

    def tensors(self) -> list[torch.Tensor]:
        """Return the factors of gradients, without these, in an order that the key fixes."""
        values = [value for kept in self._kept for value in kept.values()]
        flat = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
        return [entry for entry in flat if isinstance(entry, torch.Tensor)]

    def apply(self) -> None:
        """Have the gradients be and carry this again, with nothing read of them."""
        for each, kept, joint in zip(self._all, self._kept, self._joint, strict=True):
            # Optimizers that shared a decision when the graph was recorded have to share one object again: it counts once.
            if self._partners(each) != joint:
                decision = JointDecision([self._all[index] for index in joint])
                for index in joint:
                    self._all[index].joint = decision
            each.restore(kept)
        for params, grads in zip(self._params, self.grads, strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad

    def _partners(self, gradients: Gradients) -> tuple[int, ...]:
        """Return which optimizers share the decision of `gradients`, by number."""
        return tuple(index for index, each in enumerate(self._all) if each.joint is gradients.joint)


class StaticScalars:
    """Loss scales and their counters in memory that does not move, as graphs read and write them.

    Outside of a graph a `DeviceScale` replaces its tensors in every step, and whoever has one may keep it.
    """

    def __init__(self, optimizers: Sequence[OptimizerWrapper]) -> None:
        scalers = [optimizer._update.gradients.scaler for optimizer in optimizers]
        self._scalers = [scaler for scaler in scalers if isinstance(scaler, DeviceScale)]
        self._buffers = [tuple(value.clone() for value in _numbers(scaler)) for scaler in self._scalers]

    def enter(self) -> None:
        """Bring what the scales are now into that memory."""
        self.write_back()
        for scaler, buffers in zip(self._scalers, self._buffers, strict=True):
            scaler.hold_tensors(*buffers)
            scaler.lend(None)  # while the graph runs or is recorded, `factor` is the buffer itself

    def write_back(self) -> None:
        """Bring what a step made of them into that memory. Of what runs in a graph."""
        for scaler, buffers in zip(self._scalers, self._buffers, strict=True):
            for buffer, value in zip(buffers, _numbers(scaler), strict=True):
                if value is not buffer:
                    buffer.copy_(value)

    def release_buffers(self) -> None:
        """Have the scales read that memory, and give away copies of it alone, since a replay writes it."""
        for scaler, buffers in zip(self._scalers, self._buffers, strict=True):
            scaler.hold_tensors(*buffers)
            # A replay writes the buffers in place; a scale that somebody keeps from this step must not change with the next
            # one.
            scaler.lend(buffers[0])


def _numbers(scaler: DeviceScale) -> tuple[torch.Tensor, ...]:
    return scaler.tensor, *scaler.trackers


def _described(value: Any) -> Any:
    """Return `value`, with dtype and shape in the place of a tensor."""
    if isinstance(value, list):
        return tuple(map(_described, value))
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value


_logger = logging.getLogger(__name__)
AHEAD = 64  # rows of a table; the host never launches so many steps ahead of what it knows

Numbers = tuple[float | None, ...]


class LRBuffers:
    """The rates of all groups of `optimizers` as tensors, which a graph reads; outside of it groups hold their numbers."""

    def __init__(self, optimizers: Sequence[OptimizerWrapper], device: torch.device) -> None:
        # Fused kernels of CUDA read float32; those of a CPU any.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        self.lookaheads = [LRLookahead(optimizer, dtype, device) for optimizer in optimizers]

    def read_next(self) -> None:
        """Have the tensors hold the rates of the step that comes. Of what runs in a graph."""
        for lookahead in self.lookaheads:
            lookahead.read_next()

    @contextmanager
    def read_as_tensors(self, *, recorded: bool = False) -> Iterator[None]:
        """Inside, the rates of the groups are tensors; no step waits to be counted. Raises RuntimeError if somebody wrote one
        meanwhile.

        recorded: torch's optimizers let themselves be recorded, which they refuse without capturable=True.
        """
        held = []
        for lookahead in self.lookaheads:
            lookahead.set_next()
            # What is recorded begins with `read_next`.
            lookahead.read_next()
            for index, group in enumerate(lookahead.groups):
                if "lr" in group and not isinstance(group["lr"], torch.Tensor):
                    # Fused kernels count steps on the device, and so compute the same as with capturable=True.
                    held.append((group, group["lr"], lookahead.row[index], lookahead))
                    group["lr"] = held[-1][2]
        groups = [group for lookahead in self.lookaheads for group in lookahead.groups]
        capturable = [(group, group["capturable"]) for group in groups if recorded and "capturable" in group]
        for group, _ in capturable:
            group["capturable"] = True
        try:
            yield
        finally:
            for group, before in capturable:
                group["capturable"] = before
            written = [group for group, _, rate, lookahead in held if group["lr"] is not rate or lookahead.is_written]
            for group, number, _, _ in held:
                group["lr"] = number
        if written:
            raise RuntimeError(
                "train_step writes a learning rate itself, as by a scheduler that was not given to boost(), or is stepped "
                "before the optimizer: a graph would go on with the number of its recording. Give the scheduler to boost(), "
                "and step it after optimizer.step()"
            )


class LRLookahead:
    """The rates of one optimizer: `row`, one for each group, is taken from a table of those to come.

    A schedule goes on with steps that are made, and not with those that are skipped, which a device knows first. So a graph
    takes the row of its place in the table, and goes on by one where its step is made; the host fills the table ahead, by a
    copy of the schedules, and needs to know of a step only when the table comes to its end.
    """

    def __init__(self, optimizer: OptimizerWrapper, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._optimizer_ref = weakref.ref(optimizer)  # in its history `step_synced` waits
        self._ahead: list[Numbers] = []  # from the place on that the device has come to as far as the host knows
        self._known = 0
        self._copies: _ScheduleCopies | None = None  # of the schedules, as they will be at the last that is foreseen
        self._num_syncs = optimizer._history.num_syncs
        self._may_look_ahead = True
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._make(len(self.groups))

    def _make(self, num_groups: int) -> None:
        self.row = torch.zeros(num_groups, dtype=self._dtype, device=self._device)
        self._table = torch.zeros(AHEAD, num_groups, dtype=self._dtype, device=self._device)
        self._written = version(self.row)

    @property
    def _optimizer(self) -> Any:
        return self._optimizer_ref()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Groups of the optimizer."""
        return self._optimizer.unwrap().param_groups

    @property
    def is_written(self) -> bool:
        """Whether somebody wrote to the row since it was taken."""
        return version(self.row) != self._written

    # ------------------------------------------------------------------ on the device

    def read_next(self) -> None:
        """Bring the rates of the step that comes into the row."""
        torch.index_select(self._table, 0, self._place, out=self.row.view(1, -1))
        self._written = version(self.row)

    def count(self, applied: torch.Tensor) -> None:
        """Go on by one where a step was `applied`, 0-dim."""
        # On the device, since it alone knows at once whether the step was made.
        self._place.add_(applied).remainder_(AHEAD)

    # ------------------------------------------------------------------ on the host

    def set_next(self) -> None:
        """Have the next step read what groups hold now. Nothing that waits to be counted changes them."""
        now = self._numbers()
        if len(now) != self.row.numel():
            self._make(len(now))
            self._ahead = []
        # Somebody wrote a rate by hand: what was foreseen from the old one is dropped.
        if not self._ahead or self._ahead[0] != now:
            self._ahead, self._copies = [now], None
            self._write(self._known, [now])

    def make_ready(self, deferred: Sequence[Any], *, counts: bool) -> None:
        """Before a replay in which the optimizer steps: have it read the right rates; `deferred` waits for the outcome."""
        history = self._optimizer._history
        if history.waiting:
            self._apply_writes()
        history.sync(ready_only=True)
        if history.num_syncs != self._num_syncs:  # who looked may have changed something
            self._num_syncs, self._copies = history.num_syncs, None
            del self._ahead[1:]
        # Rates that cannot be foreseen depend on whether the last step was skipped.
        if history.waiting and not self._knows_next(deferred, counts):
            # Waits for steps before only where they cannot be foreseen.
            history.sync()
        if not history.waiting:
            self.set_next()

    def step_synced(self) -> None:
        """The host learned of a step that the device counted."""
        if self._optimizer._history.num_consecutive_skips == 0:
            self._known += 1
            self._ahead = self._ahead[1:]

    def _knows_next(self, deferred: Sequence[Any], counts: bool) -> bool:
        """Return whether the rates of the next step are in the table, whatever becomes of those that wait."""
        history = self._optimizer._history
        before = history.waiting[-1][1]
        if len(history.waiting) > AHEAD - 2 or len(before) != len(deferred) + counts:
            return False
        if not counts:
            if deferred:
                return False
            self.set_next()
            return True
        alike = all(
            isinstance(one, PendingSchedulerStep)
            and not other.has_arguments
            and one.scheduler is other.scheduler
            and one.has_seen(history.progress)
            for one, other in zip(before[1:], deferred, strict=True)
        )
        if not alike or not self._may_look_ahead or None in self._numbers():
            return False
        if self._ahead[0] != self._numbers():
            self._may_look_ahead = False
            _logger.warning(
                "a schedule of %s went to %s, and %s was foreseen, which steps that were launched meanwhile used: what it "
                "computes from has changed. Captured steps wait for the outcome of the one before from now on",
                type(self._optimizer.unwrap()).__name__,
                self._numbers(),
                self._ahead[0],
            )
            return False
        return self._fill([each.scheduler for each in deferred], len(history.waiting))

    def _fill(self, schedules: Sequence[Any], count: int) -> bool:
        """Have the table hold `count` more rates than that of the next step; return False where they cannot be known."""
        if len(self._ahead) > count:
            return True
        new: list[Numbers] = []
        try:
            if self._copies is None:
                del self._ahead[1:]
                self._copies = _ScheduleCopies(schedules, self._optimizer)
            # Twice as many as are needed now, so that the host copies rates seldom.
            while len(self._ahead) + len(new) < min(2 * count + 1, AHEAD):
                new.append(self._copies.step())
        except Exception:  # a schedule that cannot be copied, or ends; where it is due its own step says so
            self._copies = None
        self._write(self._known + len(self._ahead), new)
        self._ahead += new
        return len(self._ahead) > count

    def _apply_writes(self) -> None:
        """If somebody wrote a rate while steps wait: count them as if each had been counted before the next was made."""
        history, now = self._optimizer._history, self._numbers()
        before = self._ahead[0] if self._ahead else now
        if now == before or len(now) != len(before):
            return
        written = [(group, new, old) for group, new, old in zip(self.groups, now, before, strict=True) if new != old]
        for group, _, old in written:
            group["lr"] = old
        # The write came before the last step was launched and after those before it were.
        last = history.waiting.pop()
        history.sync()
        for group, new, _ in written:
            group["lr"] = new
        history.waiting.append(last)
        history.sync()

    def _numbers(self) -> Numbers:
        """What groups hold; None for a tensor, which schedules write to."""
        rates = [group.get("lr") for group in self.groups]
        return tuple(None if isinstance(rate, torch.Tensor) else rate for rate in rates)

    def _write(self, place: int, rows: Sequence[Numbers]) -> None:
        """Bring `rows` into the table, from `place` on. Nobody waits."""
        if not rows:
            return
        values = torch.tensor([[rate or 0.0 for rate in row] for row in rows], dtype=self._dtype)
        values = values.pin_memory() if self._device.type == "cuda" else values
        first = place % AHEAD
        for part, start in ((values[: AHEAD - first], first), (values[AHEAD - first :], 0)):
            self._table[start : start + len(part)].copy_(part, non_blocking=True)


class _ScheduleCopies:
    """Schedules of one optimizer, to be stepped ahead of it. Raises ValueError where they write more than rates."""

    def __init__(self, schedules: Sequence[Any], optimizer: OptimizerWrapper) -> None:
        if any("step" in vars(schedule) for schedule in schedules):
            raise ValueError("somebody replaced a schedule's step, and that of a copy might step the schedule itself")
        # Schedules hold their optimizer: the memo below gives copies this in its place.
        self._groups = _GroupsProxy(optimizer.unwrap().param_groups)
        memo: dict[int, Any] = {id(each): self._groups for each in (optimizer, optimizer.unwrap())}
        self._schedules = [copy.deepcopy(schedule, memo) for schedule in schedules]
        self._options = options_of([self._groups])

    def step(self) -> Numbers:
        for schedule in self._schedules:
            schedule.step()
        if options_of([self._groups]) != self._options:
            raise ValueError("a schedule writes more than rates")
        return tuple(group["lr"] for group in self._groups.param_groups)


class _GroupsProxy:
    """An optimizer's groups, as copies of its schedules step them ahead."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        mark_step_called(self)  # type: ignore[arg-type]
        self.param_groups = [{**group, "params": []} for group in groups]

    def step(self) -> None: ...

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
