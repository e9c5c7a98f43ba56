"""Gradient accumulation over known groups of micro-batches, and gradients that stay unsynchronised."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from booster.common.hang_watchdog import leaving_pass
from booster.common.torch_internals.tensor_internals import default_store
from booster.interface.optimizer import OptimizerWrapper
from booster.ranks import agreement

# Groups of a run in which ranks compare what they divide by: a wrong divisor is wrong from the first one on.
_LOOKS = 3


class Accumulation:
    """Context around the forward and backward passes of one group; `Booster.accumulate` makes it.

    Every backward in it is divided by `divisor`. Gradients are synchronised in the last of `num_micro_batches` only,
    so each backward must follow its own forward. Leaving before the last one, an additional one, or `step()` in between
    raise RuntimeError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[OptimizerWrapper],
        *,
        num_micro_batches: int,
        divisor: float,
        no_sync: Callable[[], AbstractContextManager[Any]],
        synchronises: bool,
        by_tokens: bool = False,
    ) -> None:
        self.by_tokens = by_tokens
        self.optimizers = tuple(optimizers)
        self.divisor = divisor
        # Of each loss, for reports: the mean of weighted losses is what the gradients are of, by tokens, not by micro-batches.
        self.weight = num_micro_batches / divisor
        self._model = model
        self._num_micro_batches = num_micro_batches
        self._no_sync = no_sync
        self._synchronises = synchronises
        self.num_backwards = 0
        self._ran_forward = False
        self._cleanup = ExitStack()
        self._unsynchronised = ExitStack()

    def __enter__(self) -> Accumulation:
        # With a single micro-batch its pass is the last one, which synchronises.
        if self._num_micro_batches > 1:
            self._unsynchronised.enter_context(self._no_sync())
        self._await_last()
        self._forbid_steps()
        for optimizer in self.optimizers:
            optimizer.accumulating = True
        return self

    @property
    def delayed(self) -> bool:
        """Whether more backward passes follow the present one."""
        return self.num_left > 1

    @property
    def num_left(self) -> int:
        """How many backward passes are to come."""
        return self._num_micro_batches - self.num_backwards

    def before_backward(self) -> None:
        """Raise RuntimeError if this backward is one too many, or if the last one could not synchronise."""
        if not self.num_left:
            raise RuntimeError(
                f"this is backward number {self.num_backwards + 1} in a group of num_micro_batches="
                f"{self._num_micro_batches}; pass the actual number, e.g. num_micro_batches=len(group)"
            )
        if self._synchronises and self.num_left == 1 and not self._ran_forward:
            raise RuntimeError(
                "the forward pass of the last micro-batch ran before the backward of the one before it, when gradients "
                "were not yet to be synchronised; inside accumulate() call backward after each forward"
            )

    def after_backward(self) -> None:
        self.num_backwards += 1
        self._await_last()
        self._forbid_steps()

    def __exit__(self, error_type: Any, error: Any, traceback: Any) -> None:
        self._unsynchronised.close()
        self._cleanup.close()
        for optimizer in self.optimizers:
            optimizer.forbid_step(None)
            optimizer.accumulating = False
        if error_type is None and self.num_left:
            raise RuntimeError(
                f"accumulate() was left after {self.num_backwards} of num_micro_batches={self._num_micro_batches} backward "
                "passes: the gradients are incomplete and not synchronised. Pass the actual number, e.g. "
                "num_micro_batches=len(group)"
            )

    def _await_last(self) -> None:
        if self.num_left == 1:
            # Before the last forward: DDP and FSDP decide in it whether its backward pass reduces.
            self._unsynchronised.close()
            if self._synchronises:
                handle = self._model.register_forward_pre_hook(lambda module, args: setattr(self, "_ran_forward", True))
                self._cleanup.callback(handle.remove)

    def _forbid_steps(self) -> None:
        reason = (
            f"optimizer.step() inside accumulate() after {self.num_backwards} of {self._num_micro_batches} micro-batches; "
            "step once the group is complete"
        )
        for optimizer in self.optimizers:
            optimizer.forbid_step(reason if self.num_left else None)


class NoSync:
    """An open `no_sync`: backward passes of these optimizers leave gradients incomplete inside `context`, the plugin's own.

    optimizers: those of the passes; None means every optimizer of the model's parameters.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[OptimizerWrapper] | None, context: AbstractContextManager[Any]
    ) -> None:
        self.context = context
        self._model = model
        self._optimizers = optimizers
        self._known: dict[int, bool] = {}

    def covers(self, optimizer: OptimizerWrapper) -> bool:
        if self._optimizers is not None:
            return any(optimizer is each for each in self._optimizers)
        if id(optimizer) not in self._known:
            own = {id(param) for param in self._model.parameters()}
            self._known[id(optimizer)] = any(id(p) in own for g in optimizer.param_groups for p in g["params"])
        return self._known[id(optimizer)]


class Accumulations:
    """The groups that one Booster has open now, and what it leaves unsynchronised."""

    def __init__(self) -> None:
        self._groups: list[Accumulation] = []
        self._unsynchronised: list[NoSync] = []
        self._looks = _LOOKS
        self._key, self._first, self._count = "", "", 0
        self.any_open = False
        """Whether anything of either kind is open: without a call, as every backward pass asks."""

    def compare(self, number: int, num_tokens: float | None, ranks: dist.ProcessGroup | None, *, alike: bool) -> None:
        """Raise ValueError unless `ranks` gave one `num_tokens`, on all of them: a collective of the first groups of a run.

        alike: also where the `number` of micro-batches is not that of the rank which came first; a request to the store.
        """
        if alike and ranks is not None:
            self._compare_number(number, ranks)
        if not self._looks or ranks is None:
            return
        self._looks -= 1
        least, most = agreement.min_and_max(0.0 if num_tokens is None else num_tokens, ranks)
        if least != most:
            raise ValueError(
                f"accumulate() got num_tokens={num_tokens} on rank {dist.get_rank()}, and ranks gave from {least or None} to "
                f"{most:g}; it is the tokens of the whole group over all micro-batches and all data-parallel ranks: pass "
                "num_tokens=b.reduce(own_tokens, 'sum') on every rank, or leave it out on every rank"
            )

    def _compare_number(self, number: int, ranks: dist.ProcessGroup) -> None:
        store, rank = default_store(), dist.get_rank()
        if not self._key:  # all ranks make theirs in one order
            made = (store.add("booster/accumulate", 1) - 1) // dist.get_world_size()
            self._key = f"booster/accumulate/{made}/{ranks.group_name}"
        self._count += 1
        # The first of a group replaces what the one before left, and the others find what the first has written.
        self._first = store.compare_set(self._key, self._first, f"{self._count} {number} {rank}").decode()
        count, expected, first = self._first.split()
        if int(count) == self._count and int(expected) != number:
            raise ValueError(
                f"accumulate() got num_micro_batches={number} on rank {rank} and {expected} on rank {first}, but all ranks "
                "make every pass together here. Give every rank equally many micro-batches: drop the last batches that not all "
                "ranks have (drop_last=True); or use TorchDDPPlugin or LowLevelZeroPlugin(stage=1), where numbers may differ"
            )

    def group_of(self, optimizers: Sequence[OptimizerWrapper]) -> Accumulation | None:
        """Return the open group of `optimizers`. Raises ValueError where it is not of exactly these."""
        running = self._groups_of(optimizers)
        if len(running) > 1 or any(entry not in group.optimizers for group in running for entry in optimizers):
            raise ValueError("inside accumulate(), pass backward exactly the optimizer(s) that accumulate() was given")
        return running[0] if running else None

    def _groups_of(self, optimizers: Sequence[OptimizerWrapper]) -> list[Accumulation]:
        return [group for group in self._groups if any(each in group.optimizers for each in optimizers)]

    def any_of(self, optimizers: Sequence[OptimizerWrapper]) -> bool:
        """Return whether a group of any of `optimizers` is open."""
        return bool(self._groups_of(optimizers))

    def is_unsynchronised(self, optimizers: Sequence[OptimizerWrapper]) -> bool:
        """Return whether a `no_sync` of any of `optimizers` is open."""
        return any(entry.covers(optimizer) for entry in self._unsynchronised for optimizer in optimizers)

    def situation(self, optimizers: Sequence[OptimizerWrapper]) -> Hashable:
        """Return a key that differs where backward passes of `optimizers` do something else."""
        if not self.any_open:
            return ()
        groups = tuple((group.divisor, group.delayed, group.num_left) for group in self._groups_of(optimizers))
        return groups, self.is_unsynchronised(optimizers)

    def num_backwards(self, optimizers: Sequence[OptimizerWrapper]) -> int:
        """Return how many passes the open groups of `optimizers` have had."""
        return sum(group.num_backwards for group in self._groups_of(optimizers))

    def advance(self, optimizers: Sequence[OptimizerWrapper], passes: int) -> None:
        """Count so many passes, made without Python, in the open group of `optimizers`."""
        for group in self._groups_of(optimizers):
            for _ in range(passes):
                group.before_backward()
                group.after_backward()

    @contextmanager
    def open(self, group: Accumulation) -> Iterator[Accumulation]:
        """Return a context in which `group` is open. Raises RuntimeError inside another of the same optimizers."""
        with leaving_pass():
            if self.any_of(group.optimizers):
                raise RuntimeError("accumulate() is running for this optimizer already; it does not nest")
            with group, self._listed_in(self._groups, group):
                yield group

    @contextmanager
    def unsynchronised(self, entry: NoSync) -> Iterator[None]:
        """Return a context in which passes that `entry` covers leave gradients incomplete."""
        with entry.context, self._listed_in(self._unsynchronised, entry):
            yield

    @contextmanager
    def _listed_in(self, entries: list[Any], entry: Any) -> Iterator[None]:
        entries.append(entry)
        self.any_open = True
        try:
            yield
        finally:
            entries.remove(entry)
            self.any_open = bool(self._groups or self._unsynchronised)
