"""What keeps a step out of a graph: by the names of what it is made with (`check`), and by a trial of it (`reads_of`).

A graph knows no host. The trial runs the step twice where it is, as a device's update would decide it, while `reads.Reads`
watches for reads of tensors; afterwards all is as it was."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from booster.capture.reads import Reads, origin_of
from booster.common.snapshot import StateSnapshot
from booster.common.torch_internals.autograd_internals import uncompiled
from booster.interface.optimizer import OptimizerWrapper
from booster.interface.scheduler import LRSchedulerWrapper
from booster.loss_scaler import HostRule
from booster.masters.update import MasterApplication
from booster.update.application import decides_on_device, honours_grad_scale
from booster.update.choice import Stepping, on_device, update_on_device
from booster.update.context import UpdateContext, UpdateOptions
from booster.update.device import DeviceDecision
from booster.update.gradients import Gradients
from booster.update.host import HostDecision
from booster.update.update import Update


def check(optimizers: Sequence[OptimizerWrapper], *, plugin: str, several_ranks: bool) -> None:
    """Raise RuntimeError, by name, for what a graph cannot follow, whatever the step does."""
    if several_ranks:
        raise RuntimeError(
            f"capture() makes graphs of steps on one device, and {plugin} has several ranks: what sends their gradients keeps "
            "nodes of autograd on the stream that boost() ran on, which the stream of a graph may not wait for, and gloo sends "
            "from the host; call the step as it is"
        )
    check_optimizers(optimizers)


def check_optimizers(optimizers: Sequence[OptimizerWrapper]) -> None:
    """Raise RuntimeError, by name, for optimizers with steps that no graph follows."""
    for optimizer in optimizers:
        reason = _refusal(optimizer)
        if reason is not None:
            raise RuntimeError(
                f"capture() makes no graph of steps of this {type(optimizer.unwrap()).__name__}: {reason}"
            )


def _refusal(optimizer: OptimizerWrapper) -> str | None:
    update = optimizer._update
    gradients, application = update.gradients, update.decision.application
    if update.shards.sharded:
        return "this rank holds shards of its parameters, which hooks gather"
    if gradients.in_backward is not None:
        return (
            f"release_gradients={gradients.in_backward.mode!r} steps within backward, as the host says; leave it False"
        )
    if optimizer._after_step is not None:
        return "its precision follows each step on the host"
    if isinstance(gradients.scaler, HostRule):
        return f"the rule of its loss scale, {type(gradients.scaler.host).__name__}, runs on the host; use DynamicScale"
    if not isinstance(update.decision, DeviceDecision):
        return _of_the_host(update)
    if len({param.device for group in update.optimizer.param_groups for param in group["params"]}) > 1:
        return "its parameters lie on several devices, and a graph is of one"
    if isinstance(application, MasterApplication) and (
        application.masters.hosts or application.masters.options.offload
    ):
        return "its states lie in the host's memory; leave offload_states False"
    return None


def _of_the_host(update: Update) -> str:
    if not decides_on_device(update.optimizer):
        return (
            "it has no fused kernel, so the host decides on its steps and counts them; build it with capturable=True where its "
            "class takes that, or use Adam, AdamW, SGD or Adagrad, and leave fused_optimizer True"
        )
    return "the host decides on its steps, as under fused_optimizer='compile', apex's levels, and what reports on them"


# ---------------------------------------------------------------------- by trial


def reads_of(
    train_step: Callable[..., Any],
    batch: Sequence[Any],
    *,
    roots: Sequence[Any],
    optimizers: Sequence[OptimizerWrapper],
    device: torch.device,
) -> list[str]:
    """Run `train_step(*batch)` as on a device, and return what it reads of one, as `path:line: what`; nothing in `roots`
    changes."""
    for optimizer in optimizers:
        optimizer.sync()
        optimizer.wait_for_weights()
    # It runs twice, since a first step may read what later ones do not, and a later one what is only then there.
    snapshot = StateSnapshot([*roots, *optimizers, *_schedules_of(optimizers)])
    origin = origin_of(train_step)
    reads = Reads(snapshot, origin, device, _counts_on_host(optimizers))
    try:
        for optimizer in optimizers:
            _prepare(optimizer)
        with uncompiled(), reads.watched(), _numbers_watched(optimizers, reads):
            train_step(*batch)
            for optimizer in optimizers:
                optimizer.sync()
            reads.on = True
            try:
                train_step(*batch)
            finally:
                reads.on = False
    finally:
        snapshot.restore()
    return list(reads.found)


def _prepare(optimizer: OptimizerWrapper) -> None:
    """Have `optimizer` decide where a device's would, as before any pass, without listeners."""
    update = decided_on_device(optimizer._update)
    optimizer._update = update
    update.gradients.listeners.clear()
    update.gradients.reset(None)
    for param in (param for group in optimizer.unwrap().param_groups for param in group["params"]):
        param.grad = None


def decided_on_device(update: Update) -> Update:
    """Return the update that an optimizer of parameters on a GPU would have in the place of `update`, on the same masters."""
    optimizer, gradients, application = update.optimizer, update.gradients, update.decision.application
    devices = {param.device for group in optimizer.param_groups for param in group["params"]}
    fits = decides_on_device(optimizer) and len(devices) == 1 and gradients.in_backward is None
    if not fits or application.compiled or (type(gradients), type(update.decision)) != (Gradients, HostDecision):
        return update
    context = UpdateContext(
        optimizer=optimizer,
        scaler=gradients.scaler,
        names=gradients.parameters.names,
        group=gradients.group,
        shards=gradients.shards,
        options=UpdateOptions(skip_nonfinite=gradients.skip_nonfinite),
    )
    return update_on_device(
        on_device(context, next(iter(devices))), Stepping(lambda _: application, lambda _: update.optimizer_state)
    )


def _counts_on_host(optimizers: Sequence[OptimizerWrapper]) -> list[torch.Tensor]:
    """Return states that are on the host on every machine: step counts of optimizers that read them there."""
    found = []
    for optimizer in map(OptimizerWrapper.unwrap, optimizers):
        if not honours_grad_scale(optimizer) and not any(group.get("capturable") for group in optimizer.param_groups):
            states = [value for own in optimizer.state.values() for value in own.values()]
            found += [value for value in states if isinstance(value, torch.Tensor) and value.dim() == 0]
    return found


class _Group(dict[str, Any]):
    """A group of parameters that tells who writes an option of it."""

    def __init__(self, group: dict[str, Any], index: int, reads: Reads, *, by_ours: bool) -> None:
        super().__init__(group)
        self._index, self._reads, self._by_ours = index, reads, by_ours

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "params" and self.get(key) is not value:
            self._reads.note_written(key, self._index, by_ours=self._by_ours)
        super().__setitem__(key, value)


@contextmanager
def _numbers_watched(optimizers: Sequence[OptimizerWrapper], reads: Reads) -> Iterator[None]:
    """Inside, options that are written in groups of `optimizers` are noted: a graph would read them as they were."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            groups = optimizer.param_groups
            before = list(groups)
            # A boosted schedule waits until such a step is over, unless it is stepped before the optimizer.
            late = optimizer._update.decision.on_device
            groups[:] = [_Group(group, index, reads, by_ours=late) for index, group in enumerate(groups)]
            stack.callback(groups.__setitem__, slice(None), before)
        yield


def _schedules_of(optimizers: Iterable[OptimizerWrapper]) -> list[Any]:
    """Return the schedulers of `optimizers` in this process, boosted and others, which no other list has."""
    theirs = {id(each) for wrapper in optimizers for each in (wrapper, wrapper.unwrap())}
    found: list[Any] = []
    for each in gc.get_objects():
        if issubclass(type(each), LRSchedulerWrapper):
            found += [each, vars(each).get("scheduler")]
        elif issubclass(type(each), LRScheduler) and id(vars(each).get("optimizer")) in theirs:
            found.append(each)
    return found
