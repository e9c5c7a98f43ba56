"""Parameters that are whole on every rank, with gradients that hooks of a plugin or of DDP average during backward.

A `GradSyncTracker` knows which gradients `DistributedDataParallel` has averaged and which it has left alone, which DDP does not
say: a step on gradients of one rank alone would let ranks drift apart. `ReplicaCheck` compares learning rates and weights that
none of the ranks divides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.arguments import listed
from booster.common.devices import HostCopy
from booster.common.torch_internals.autograd_internals import graph_task
from booster.common.torch_internals.tensor_internals import version
from booster.model.modules import bare
from booster.model.params import local_shard
from booster.ranks.agreement import all_names, extremes, gather, reduced
from booster.shards.base import ALONE, FROZEN, RELAID, UNSYNCHRONISED, GradUse, Shards
from booster.tensors.grads import tensor_norms
from booster.tensors.trees import HALF_DTYPES, tensors

# Ranks are compared after the first backward pass that all of them make, after this one, and after one of so many.
EARLY, EVERY = 10, 100
# Relative, of weights to their norm: kernels of unlike devices round in unlike ways, and a bit of a half weight is 2**-8 of it.
_RATE, _WEIGHT = 1e-6, {False: 1e-3, True: 1e-2}
_DTYPES = frozenset((*HALF_DTYPES, torch.float32, torch.float64, torch.complex64, torch.complex128))
_NONE = -1e300  # in place of a NaN, which no backend compares
DRIFTED = (
    "{differences}, although all ranks step alike: they have drifted apart. Give every rank the same learning rates, as by "
    "scheduler.step(b.reduce(metric)), and write to weights, and load them, on all ranks alike, or before boost(), which "
    "gives all ranks the weights of rank 0"
)


class _Measured(NamedTuple):
    """What some ranks hold alike. names: of each number. allowed: by how much of its size it may differ. rows: each number, and
    its size."""

    ranks: dist.ProcessGroup
    names: list[str]
    allowed: list[float]
    rows: torch.Tensor


class ReplicaCheck:
    """Compares, now and then, the numbers of param_groups and `Shards.replicated_params` among the ranks that hold them.

    Two norms of each weight are read, and three numbers of all of them are sent, which a device does without a wait: they are
    read after the next pass. Only where they differ is more sent, to name what does. Backward passes that reduce gradients are
    counted, and no steps: a rank may skip a step by its own decision, but makes such passes with the others.
    """

    def __init__(self) -> None:
        self.num_passes = 0
        self.due = 1  # the pass after which `check` is to be called
        self._sent: tuple[list[_Measured], HostCopy] | None = None

    @torch.no_grad()
    def check(self, shards: Shards) -> None:
        """Send what is to be compared, or, after the pass behind that, raise RuntimeError, on all ranks, if ranks differed. A
        collective."""
        sent, self._sent = self._sent, None
        if sent is None:
            shards.wait_for_weights()
            replicated = shards.replicated_params()
            parts = [_measured(shards, *each, rates=not place) for place, each in enumerate(replicated)]
            # Read one pass later: then nothing waits for the device.
            self._sent = parts, HostCopy(_compare(parts))
            self.due += 1
            return
        # The first, the tenth, then one in a hundred: a comparison reads all weights.
        self.due = EARLY if self.due <= EARLY else (self.due // EVERY + 1) * EVERY
        parts, copy = sent
        most, least, apart = copy.tensor().tolist()
        if most != -least or apart:
            differences = all_names(
                tuple(text for part in parts if (text := _describe_difference(part))), parts[0].ranks
            )
            if differences:
                raise RuntimeError(DRIFTED.format(differences=listed(differences, 3)))


def trained(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of `optimizer` that train and that norms can be taken of."""
    held = (param for group in optimizer.param_groups for param in group["params"] if param.requires_grad)
    return [param for param in held if param.dtype in _DTYPES and type(local_shard(param.detach())) is torch.Tensor]


def _measured(shards: Shards, ranks: dist.ProcessGroup, params: Sequence[torch.Tensor], *, rates: bool) -> _Measured:
    """Return norms of orders 1 and 2 of each of `params`, where those are, behind the numbers of groups if `rates`."""
    named = list(_rates(shards.optimizer)) if rates else []
    values = [local_shard(param.detach()) for param in params]
    numbers = torch.tensor(
        [0.0 if isinstance(rate, torch.Tensor) else float(rate) for _, rate in named], dtype=torch.float64
    )
    norms = numbers.new_empty(0, 2)
    if values:
        norms = torch.stack([tensor_norms(values, order, torch.float64) for order in (1.0, 2.0)], dim=1)
        numbers = numbers.to(norms.device, non_blocking=True)
    for place, (_, rate) in enumerate(named):
        if isinstance(rate, torch.Tensor):
            numbers[place].copy_(rate.reshape(()))
    rows = torch.cat([torch.stack([numbers, numbers], dim=1), norms])
    return _Measured(
        ranks,
        [name for name, _ in named] + list(map(shards.name_of, params)),
        [_RATE] * len(named) + [_WEIGHT[param.dtype in HALF_DTYPES] for param in params],
        rows.nan_to_num(nan=_NONE, posinf=-_NONE, neginf=_NONE),
    )


def _rates(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Return the numbers that `optimizer` goes by, as its groups have them, each with its name."""
    for index, group in enumerate(optimizer.param_groups):
        for name in optimizer.defaults:
            value = group.get(name)
            for number in value if isinstance(value, (tuple, list)) else (value,):
                is_scalar = isinstance(number, torch.Tensor) and number.numel() == 1 and not number.is_complex()
                if is_scalar or arguments.is_number(number):
                    yield f"{name} of param_groups[{index}]", number


def _compare(parts: Sequence[_Measured]) -> torch.Tensor:
    """Return of a checksum of the first part the largest and the negative of the smallest, and whether other parts differ."""
    first, *others = parts
    number = _checksum(first.rows)
    apart = torch.zeros_like(number)
    for part in others:
        least, most = extremes(_checksum(part.rows), part.ranks)
        apart += (least != most).to(apart.device)
    # One MAX gives the largest number and, by the negative, the smallest: ranks agree where they are equal.
    return reduced(torch.stack([number, -number, apart]), dist.ReduceOp.MAX, first.ranks)


def _checksum(rows: torch.Tensor) -> torch.Tensor:
    return rows.flatten() @ torch.arange(1, rows.numel() + 1, dtype=rows.dtype, device=rows.device)


def _describe_difference(part: _Measured) -> str:
    """Say what first differs among the ranks of `part`, if anything does. Small collectives."""
    allowed = torch.tensor(part.allowed, dtype=torch.float64)
    rows_of_ranks = gather(part.rows.tolist(), part.ranks)
    first, *others = [torch.tensor(rows, dtype=torch.float64).view(-1, 2) for rows in rows_of_ranks]
    root = dist.get_global_rank(part.ranks, 0)
    for index, other in enumerate(others, 1):
        rank = dist.get_global_rank(part.ranks, index)
        if len(other) != len(first):
            return f"the optimizers of rank {root} and rank {rank} do not train the same number of parameters"
        sizes = torch.minimum(first[:, 1].abs(), other[:, 1].abs())
        apart = ((first - other).abs() > (allowed * sizes)[:, None]).any(dim=1).nonzero().flatten().tolist()
        if not apart:
            continue
        name, (one, two) = part.names[apart[0]], (rows[apart[0], 0] for rows in (first, other))
        if part.allowed[apart[0]] == _RATE:
            return f"{name} is {one:g} on rank {root} and {two:g} on rank {rank}"
        return f"the weight {name!r} is not the same on rank {root} and rank {rank}"
    return ""


_Stamp = tuple[torch.Tensor | None, int]


def _stamp(param: torch.Tensor) -> _Stamp:
    """Return the gradient of `param`, and how often it was written to."""
    grad = param.grad
    return grad, -1 if grad is None else version(grad)


class GradSyncTracker:
    """Knows which gradients of a module `DistributedDataParallel` averages, and which it leaves alone.

    module: the placed module, wrapped or, where it has nothing to train, not. What is frozen now is never averaged.
    """

    averaged = False
    """Whether a backward pass was averaged."""

    def __init__(self, module: nn.Module) -> None:
        self._frozen = [param for param in bare(module).parameters() if not param.requires_grad]
        self._params = list(bare(module).parameters())
        unshared = getattr(module, "parameters_to_ignore", ())
        named = getattr(module, "module", module).named_parameters() if unshared else ()
        self.own = [param for name, param in named if name in unshared]
        """Parameters that each rank has for itself."""
        # Only tensors of this many dimensions have a memory format; looking at all would cost a step too much.
        self._orders = {
            param: (name, param.stride()) for name, param in bare(module).named_parameters() if param.dim() >= 4
        }
        self.unsynchronised = False  # passes inside no_sync have left gradients that no other pass has averaged since
        self._watches = False
        self._averaging: int | None = None  # the backward pass that averages
        self._averages_once = hasattr(module, "require_backward_grad_sync")  # in one pass after forward ones alone
        self._prepared = False  # to average what the next backward pass brings
        self._follows_forward = False  # it comes after a forward pass, and not after a backward pass
        self._stamps: Sequence[_Stamp] | None = None  # of gradients before the backward pass under way
        self._alone: list[torch.Tensor] = []  # what such passes brought that followed none
        # The module, once two forward passes went before a backward one: it awaits what the outputs of the last one reach.
        self._several: Any = None
        module.register_forward_hook(self._on_forward)

    def check(self, shards: Shards) -> None:
        """Raise RuntimeError if the optimizer of `shards` holds a gradient that is of this rank alone."""
        if self._orders:
            self.check_order()
        if not (self._frozen or self._alone or self.unsynchronised):
            return
        held = {param for group in shards.optimizer.param_groups for param in group["params"]}
        for param in held.intersection(self._frozen):
            if param.requires_grad and param.grad is not None:
                raise RuntimeError(FROZEN.format(name=shards.name_of(param)))
        left = self._params if self.unsynchronised else ()
        for params, text in ((left, UNSYNCHRONISED), (self._alone, ALONE)):
            for param in params:
                if param in held and param.grad is not None:
                    raise RuntimeError(text.format(name=shards.name_of(param)))

    def check_order(self) -> None:
        """Raise RuntimeError if a parameter that trains has another memory order than when the module was placed."""
        for name in self.with_new_layout():
            raise RuntimeError(RELAID.format(name=name))

    def with_new_layout(self) -> dict[str, torch.Tensor]:
        """Return, by name, parameters that train and have another memory order than when the module was placed."""
        return {
            name: param
            for param, (name, strides) in self._orders.items()
            # A dimension of 1 has no order: a flat bucket lays out a kernel of 1 x 1 in other strides, and the same memory.
            if param.requires_grad
            and param.stride() != strides
            and any(
                now != then and length > 1
                for now, then, length in zip(param.stride(), strides, param.shape, strict=True)
            )
        }

    def on_zero_grad(self) -> None:
        """Take note that some gradients were zeroed."""
        if self.unsynchronised and all(param.grad is None or not param.grad.any() for param in self._params):
            self.unsynchronised = False
        if self._alone:
            self._alone = [param for param in self._alone if param.grad is not None and param.grad.any()]

    def before_backward(self, loss: torch.Tensor | None, *, only: bool) -> None:
        """A backward pass of an optimizer begins. only: no other module is there that it could be of."""
        several, self._several = self._several, None
        if several is not None and loss is not None and self._prepared:
            several.reducer.prepare_for_backward([loss])
        if self._averages_once:
            self._stamps = () if only and self._prepared else list(map(_stamp, self._params))

    def after_backward(self) -> None:
        """Take note of what `DistributedDataParallel` did with the gradients of a pass."""
        before, self._stamps = self._stamps, None
        if before is None:  # nothing to see, or another optimizer of the pass has called this
            return
        stamps = zip(self._params, before, map(_stamp, self._params), strict=True) if before else ()
        touched = [param for param, (old, was), (new, now) in stamps if old is not new or was != now]
        if before and not touched:
            return
        # DDP averages in the first pass that follows its forward passes, and leaves the gradients of others alone, without a
        # word.
        if self._prepared:
            self.averaged = True
            self.unsynchronised = False
            self._alone = []
        elif self._follows_forward:
            self.unsynchronised = True
        else:
            self._alone = [*self._alone, *touched]
        self._prepared = self._follows_forward = False

    def abandon_backward(self) -> None:
        """The pass raised."""
        self._stamps = None

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Return a context after which passes inside have left no trace here."""
        before = self.unsynchronised, self._alone
        try:
            yield
        finally:
            self.unsynchronised, self._alone = before

    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        averages = getattr(module, "require_backward_grad_sync", True)
        if torch.is_grad_enabled():
            if self._orders:
                self.check_order()
            self._prepared = self._prepared or averages
            if self._follows_forward and getattr(module, "find_unused_parameters", False) and not module.static_graph:
                self._several = module
            self._follows_forward = True
        if (averages and not self._watches) or not torch.is_grad_enabled():
            return
        self._watches = True
        for tensor in tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_averaged if averages else self._on_left)

    # DistributedDataParallel averages all gradients of a backward pass if one of its forward passes was outside of no_sync.
    def _on_averaged(self, grad: torch.Tensor) -> None:
        self._averaging = graph_task()
        self.unsynchronised = False

    def _on_left(self, grad: torch.Tensor) -> None:
        if graph_task() != self._averaging:
            self.unsynchronised = True


class ReplicatedShards(Shards):
    """All of every parameter, on each rank.

    Arguments:
        sync_trackers: of the modules that the optimizer may hold parameters of.
        reducers: by placed module the `GradientReducer` of gradients that `DistributedDataParallel` does not average.
        ranks: those that hold the parameters alike; None where they need not.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        sync_trackers: Mapping[nn.Module, GradSyncTracker],
        reducers: Mapping[nn.Module, Any],
        ranks: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(optimizer)
        self.sync_trackers = sync_trackers
        self._reducers = reducers
        self._ranks, self.replica_check = ranks, None if ranks is None else ReplicaCheck()

    def replicated_params(self) -> list[tuple[dist.ProcessGroup, list[torch.Tensor]]]:
        own = {param for tracker in self.sync_trackers.values() for param in tracker.own}
        shared = [param for param in trained(self.optimizer) if param not in own]
        return [] if self._ranks is None else [(self._ranks, shared)]

    def check_gradients(self) -> None:
        for tracker in self.sync_trackers.values():
            tracker.check(self)
        # Passes without synchronisation may have left some where no tracker sees.
        for reducer in self._reducers.values():
            if reducer.left and any(param.grad is not None and param in reducer for param in self.held_params()):
                raise RuntimeError(UNSYNCHRONISED)

    def register_grad_hooks(self, use: GradUse) -> list[Any]:
        reducers = list(self._reducers.values())
        for param in use.params:
            own = next((each for each in reducers if param in each), None)
            if own is None:
                raise RuntimeError(FROZEN.format(name=self.name_of(param)))
            if not own.synchronises:
                raise RuntimeError(UNSYNCHRONISED)
        return [each.register_grad_hooks(use) for each in reducers]

    def clear_gradients(self, set_to_none: bool) -> None:
        for tracker in self.sync_trackers.values():
            tracker.on_zero_grad()

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        with ExitStack() as stack:
            for tracker in self.sync_trackers.values():
                stack.enter_context(tracker.preserved())
            yield
