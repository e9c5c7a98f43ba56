"""Gradients that are averaged over ranks during backward, bucket by bucket, and may be used there as soon as they are."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from booster.common.torch_internals.autograd_internals import graph_task, when_backward_ends, without_function_modes
from booster.shards.base import GradUse

# Buckets that are being reduced at one time: a work holds what it sends until it is waited for, so without a bound all whole
# gradients are there when backward ends. Two follow each other without a gap; the third is being filled meanwhile.
MOST_IN_FLIGHT = 2

ALONE = (
    "the loss reaches {name}, which none of its optimizers holds, and release_gradients goes through the graph twice, which "
    "would count its gradient twice; name every optimizer of the loss, b.backward(loss, [optimizer_a, optimizer_b]), or "
    "freeze it by requires_grad_(False)"
)


def reached_anywhere(local: bytearray, device: torch.device, group: dist.ProcessGroup) -> Callable[[], list[bool]]:
    """Start to exchange which parameters got a gradient; returns a function that waits: has any rank one, for each?

    local: a byte for each parameter; overwritten.
    """
    has_all = all(local)
    anywhere = torch.frombuffer(local, dtype=torch.uint8).to(device)
    # A small all-reduce, which only a rank that lacks one reads on the host.
    work: Any = dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def wait() -> list[bool]:
        work.wait()  # even if the answer is known, so that no message outlives its pass
        return [True] * len(anywhere) if has_all else [found > 0 for found in anywhere.tolist()]

    return wait


class _Sent(NamedTuple):
    """A bucket in flight.

    Attributes:
        wait: waits for it; returns what this rank keeps.
        reached: waits for which parameters were reached; None where this is exchanged once, when backward ends.
    """

    bucket: int
    wait: Callable[[], torch.Tensor]
    reached: Callable[[], list[bool]] | None


@dataclass(eq=False)
class _Subscription:
    """A use of gradients that `reducer` averages, of the parameters `params`."""

    reducer: GradientReducer
    use: GradUse
    params: frozenset[torch.Tensor]

    def remove(self) -> None:
        self.reducer.subscriptions.remove(self)
        self.reducer.abandon()  # a pass that raised


class GradientReducer(ABC):
    """Averages the gradients of `params` over `group`, bucket by bucket while backward goes on, a few at a time.

    A bucket is sent once all its gradients are there and all buckets before it are sent, so that ranks send in one order;
    when backward ends, zeros are sent for parameters that it did not reach. A parameter that no rank reached gets no gradient.
    Gradients that are in `.grad` from passes that were not synchronised are averaged along.

    A subclass says what the buckets are, how one is sent, and where what arrives goes.

    Attributes:
        synchronises: whether backward passes average.
        left: passes that did not average have left gradients.
        subscriptions: uses of gradients within backward.
        agrees_at_once: ranks agree with each bucket which parameters were reached, also without `subscriptions`.
        keeps_apart: gradients of a pass are in `.grad`, where they can be stashed.
    """

    agrees_at_once = False
    keeps_apart = False

    def __init__(self, params: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
        self.synchronises = True
        self.left = False
        self.subscriptions: list[_Subscription] = []
        self._group = group
        self._task: int | None = None  # of the autograd engine, while a backward is under way
        self._all = list(params)
        self._index = {param: index for index, param in enumerate(self._all)}
        self._params: list[Sequence[torch.Tensor]] = []  # of each bucket
        self._members: list[list[int]] = []  # the same by their place in `_all`
        self._handles: list[Any] = []
        self._register_hooks()

    def _register_hooks(self) -> None:
        # A weak reference: hooks keep what they refer to as long as the parameter lives, unseen by the garbage collector.
        this = weakref.ref(self)
        for index, param in enumerate(self._all):
            self._handles.append(param.register_post_accumulate_grad_hook(partial(_on_gradient, this, index)))

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __contains__(self, param: object) -> bool:
        return param in self._index

    def register_grad_hooks(self, use: GradUse) -> _Subscription:
        """Begin `use`, once averages are there, to which gradients that it holds are added before; `remove` what is returned.

        A pass raises RuntimeError where the graph will be run again, for a parameter here that no subscription has.
        """
        subscription = _Subscription(self, use, frozenset(use.params))
        # Several optimizers may subscribe to one model, each to its own parameters.
        self.subscriptions.append(subscription)
        return subscription

    def start_pass(self, *_: Any) -> None:
        """Start the averaging of the backward pass that the engine is in, unless it has started."""
        if self._task is None and self.synchronises:
            self._task = graph_task()
            self._start()
            when_backward_ends(self._finish)

    def abandon(self) -> None:
        """Forget a backward pass that raised."""
        if self._task is not None:
            for sent in self._sent:
                sent.wait()
            self._sent.clear()
            self._waiting.clear()
            self._task = None

    def before_forward(self) -> None:
        """A forward pass follows."""
        self.abandon()

    # ------------------------------------------------------------------ what a subclass says

    @abstractmethod
    def buckets(self) -> Sequence[Sequence[torch.Tensor]]:
        """Return the parameters of each bucket, in the order in which they are sent, for the pass that begins."""

    def fill(self, index: int, param: torch.Tensor) -> None:
        """The gradient of `param`, of the bucket at `index`, is there; see `local_gradient`."""

    @abstractmethod
    def send(self, index: int, params: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Start to reduce a bucket, with zeros for missing gradients; returns a function that waits, and gives what stays."""

    @abstractmethod
    def store_reduced(self, index: int, reduced: torch.Tensor, reached: list[bool]) -> None:
        """Put what is kept of a bucket where gradients belong. reached: of each of its parameters, whether it has one."""

    def reached_anywhere(self) -> Callable[[], list[bool]]:
        """Start to agree, at the end of a pass, which parameters any rank reached; returns a function that waits for it."""
        return reached_anywhere(self._reached[:], self._all[0].device, self._group)

    # ------------------------------------------------------------------ one backward

    def local_gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of `param` on this rank, with those held from earlier passes, without a graph; None: none."""
        grad = param.grad
        if grad is not None and grad.requires_grad:
            grad = grad.detach()
        if not self.subscriptions:
            return grad
        held = next((each.use.held[param] for each in self.subscriptions if param in each.use.held), None)
        return grad if held is None else held if grad is None else held + grad

    def has_local_gradient(self, param: torch.Tensor) -> bool:
        return param.grad is not None or (
            bool(self.subscriptions) and any(param in subscription.use.held for subscription in self.subscriptions)
        )

    def _start(self) -> None:
        buckets = self.buckets()
        # Buckets are the same objects from pass to pass, so the tables below are made once.
        if len(buckets) != len(self._params) or not all(map(is_, buckets, self._params)):
            self._params = list(buckets)
            self._members = [[self._index[param] for param in params] for params in self._params]
            self._bucket = [0] * len(self._all)
            for index, members in enumerate(self._members):
                for member in members:
                    self._bucket[member] = index
        # By place in `_all`, not by parameter: a tensor as a key costs a call of Python.
        self._came = bytearray(len(self._all))
        self._reached = bytearray(len(self._all))
        self._missing = list(map(len, self._params))
        self._next = 0
        self._sent: deque[_Sent] = deque()
        self._waiting: list[tuple[int, torch.Tensor]] = []  # until ranks agreed which were reached

    def _mark_complete(self, index: int, place: int) -> None:
        if not self._came[place]:
            self._came[place] = True
            self._missing[index] -= 1

    def _send_full(self) -> None:
        """Send the buckets that are complete, in order; all ranks must send in one order."""
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._send(self._next)

    def _use_gradient(self, index: int, place: int, param: torch.Tensor) -> None:
        if self.has_local_gradient(param):
            self._reached[place] = True
            self.fill(index, param)

    @torch.no_grad()
    def _send(self, index: int) -> None:
        self._next = index + 1
        self._wait(MOST_IN_FLIGHT - 1)
        params, members = self._params[index], self._members[index]
        if self._missing[index]:
            for place, param in zip(members, params, strict=True):
                if not self._came[place]:  # not reached, but earlier passes may have left a gradient
                    self._use_gradient(index, place, param)
        wait, reached = self.send(index, params), None
        if self.agrees_at_once or self.subscriptions:
            local = bytearray(self._reached[place] for place in members)
            reached = reached_anywhere(local, params[0].device, self._group)
        self._sent.append(_Sent(index, wait, reached))

    def _wait(self, number: int) -> None:
        """Wait for the oldest reductions until `number` are left."""
        while len(self._sent) > number:
            index, wait, reached = self._sent.popleft()
            reduced = wait()
            del wait  # and what it was sent from
            if reached is None:
                self._waiting.append((index, reduced))
            else:
                self._store(index, reduced, reached())

    def _store(self, index: int, reduced: torch.Tensor, reached: list[bool]) -> None:
        if not any(reached):  # on no rank: such parameters keep .grad None, as in one process
            return
        if not self.subscriptions:
            self.store_reduced(index, reduced, reached)
            return
        again = any(subscription.use.again for subscription in self.subscriptions)
        reached_params = [param for param, local in zip(self._params[index], reached, strict=True) if local]
        # In a second pass through the graph a gradient that stays would be added to itself.
        if again and (self.left or not self.keeps_apart):
            for param in set(reached_params).difference(*(subscription.params for subscription in self.subscriptions)):
                raise RuntimeError(ALONE.format(name=f"a parameter of shape {tuple(param.shape)}"))
        self.store_reduced(index, reduced, reached)
        del reduced  # before `filled` steps, which needs memory
        for param in reached_params:
            for subscription in self.subscriptions:
                if param in subscription.params:
                    subscription.use.filled(param)

    def _finish(self) -> None:
        with torch.no_grad(), without_function_modes():
            self._complete()

    def _complete(self) -> None:
        while self._next < len(self._missing):
            self._send(self._next)
        agreed = None
        if not (self.agrees_at_once or self.subscriptions):
            agreed = self.reached_anywhere()
        self._wait(0)
        if agreed is not None:
            anywhere = agreed()
            for index, reduced in self._waiting:
                self._store(index, reduced, [anywhere[place] for place in self._members[index]])
        self._waiting.clear()
        self.left = False
        self._task = None


def _on_gradient(this: weakref.ref[GradientReducer], place: int, param: torch.Tensor) -> None:
    reducer = this()
    if reducer is None:
        return
    if not reducer.synchronises:  # under no_sync: the next pass that averages takes it along
        reducer.left = True
        return
    # In a mode that a precision keeps on in backward every look at a tensor would be a call of it.
    with without_function_modes():
        if reducer._task is None:
            reducer.start_pass()
        index = reducer._bucket[place]
        if index < reducer._next:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} got a second gradient in one backward after the first was "
                "averaged, as reentrant activation checkpointing of a shared module does; use "
                "checkpoint(..., use_reentrant=False), or stage=1"
            )
        reducer._use_gradient(index, place, param)
        reducer._mark_complete(index, place)
        if not reducer._missing[index]:
            reducer._send_full()
