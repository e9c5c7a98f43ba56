"""Parameters that lie whole on every rank, while another's hooks average their gradients during backward.

What averages gradients over ranks within backward, as shards see it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from booster.ground.torch_internals import graph_task
from booster.model.modules import bare
from booster.shards.base import FROZEN, RELAID, UNSYNCHRONISED, Shards
from booster.tensors.trees import tensors


class Reducer(Protocol):
    """Averages gradients of some parameters; `booster.plugin.ddp.gradient_reducer.GradientReducer` is the one here.

    synchronises: whether it does at present. left: whether passes in which it did not have left gradients.
    """

    synchronises: bool
    left: bool

    def __contains__(self, param: object) -> bool: ...

    def watch(
        self,
        params: Collection[torch.Tensor],
        filled: Callable[[torch.Tensor], None],
        held: Mapping[torch.Tensor, torch.Tensor],
        *,
        again: bool,
    ) -> Any: ...


def watch_reduced(
    shards: Shards,
    reducers: Iterable[Reducer],
    params: Sequence[torch.Tensor],
    filled: Callable[[torch.Tensor], None],
    held: Mapping[torch.Tensor, torch.Tensor],
    *,
    again: bool,
) -> list[Any]:
    """Do what `Shards.watch` says, of parameters whose gradients `reducers` average."""
    several = list(reducers)
    for param in params:
        own = next((each for each in several if param in each), None)
        if own is None:
            raise RuntimeError(FROZEN.format(name=shards.name_of(param)))
        if not own.synchronises:
            raise RuntimeError(UNSYNCHRONISED)
    return [each.watch(params, filled, held, again=again) for each in several]


def check_averaged(shards: Shards, reducers: Iterable[Reducer]) -> None:
    """Raise RuntimeError if the optimizer of `shards` holds a gradient that passes without synchronisation left."""
    for reducer in reducers:
        if not reducer.left:
            continue
        held = (param for group in shards.optimizer.param_groups for param in group["params"])
        if any(param.grad is not None and param in reducer for param in held):
            raise RuntimeError(UNSYNCHRONISED)


class Replica:
    """Notes which gradients of a module `DistributedDataParallel` averages, and which it was told to leave alone.

    module: the placed module, wrapped or, where it has nothing to train, not. What is frozen now is never averaged.
    """

    def __init__(self, module: nn.Module) -> None:
        self._frozen = [param for param in bare(module).parameters() if not param.requires_grad]
        self._params = list(bare(module).parameters())
        # Only tensors of this many dimensions have a memory format; looking at all would cost a step too much.
        self._orders = {
            param: (name, param.stride()) for name, param in bare(module).named_parameters() if param.dim() >= 4
        }
        self._unsynchronised = False  # passes inside no_sync have left gradients that no other pass has averaged since
        self._watches = False
        self._averaging: int | None = None  # the backward pass that averages
        self._averages_once = hasattr(
            module, "require_backward_grad_sync"
        )  # in the first pass after each forward alone
        self._was_to_average = False  # when the last forward pass ran
        self._hooks: list[Any] = []  # while the graph of that is kept
        self._first_pass: int | None = None  # through that graph
        module.register_forward_hook(self._on_forward)

    def unshared(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what has a gradient of this rank alone: parameters that were frozen, and those left by `no_sync`."""
        late: list[torch.Tensor] = [param for param in self._frozen if param.requires_grad and param.grad is not None]
        return late, [param for param in self._params if param.grad is not None] if self._unsynchronised else []

    def check_order(self) -> None:
        """Raise RuntimeError if a parameter that trains lies in another memory order than when the module was placed."""
        for name in self.relaid():
            raise RuntimeError(RELAID.format(name=name))

    def relaid(self) -> dict[str, torch.Tensor]:
        """Return, by name, what trains and lies in another memory order than when the module was placed."""
        return {
            name: param
            for param, (name, strides) in self._orders.items()
            if param.requires_grad and param.stride() != strides
        }

    def forget(self) -> None:
        """Take note that some gradients were zeroed."""
        if self._unsynchronised and all(param.grad is None or not param.grad.any() for param in self._params):
            self._unsynchronised = False

    def keep_graph(self) -> None:
        """Take note that a backward pass follows which keeps its graph. `DistributedDataParallel` leaves gradients of a second
        pass through it alone, without a word."""
        if not self._averages_once or not self._was_to_average or self._hooks:
            return
        self._watches = True
        self._first_pass = None
        trained = [param for param in self._params if param.requires_grad]
        self._hooks = [param.register_post_accumulate_grad_hook(self._on_gradient) for param in trained]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Return a context whose passes are forgotten."""
        before = self._unsynchronised
        try:
            yield
        finally:
            self._unsynchronised = before

    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        averages = getattr(module, "require_backward_grad_sync", True)
        if torch.is_grad_enabled():
            self.check_order()
            self._was_to_average = averages
            if self._hooks:
                self._forget_graph()
        if (averages and not self._watches) or not torch.is_grad_enabled():
            return
        self._watches = True
        for tensor in tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_averaged if averages else self._on_left)

    def _forget_graph(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_gradient(self, param: torch.Tensor) -> None:
        if self._first_pass is None:
            self._first_pass = graph_task()
        elif graph_task() != self._first_pass:
            self._unsynchronised = True

    # DistributedDataParallel averages all that a backward pass brings if one of its forward passes told it to.
    def _on_averaged(self, grad: torch.Tensor) -> None:
        self._averaging = graph_task()
        self._unsynchronised = False

    def _on_left(self, grad: torch.Tensor) -> None:
        if graph_task() != self._averaging:
            self._unsynchronised = True


class ReplicatedShards(Shards):
    """All of every parameter. replicas: of the modules that the optimizer may hold parameters of. reducers: of those whose
    gradients are not averaged by `DistributedDataParallel`."""

    def __init__(
        self,
        optimizer: Optimizer,
        replicas: Mapping[nn.Module, Replica],
        reducers: Mapping[nn.Module, Reducer] = MappingProxyType({}),
    ) -> None:
        super().__init__(optimizer)
        self._replicas = replicas
        self._reducers = reducers

    def keep_graph(self) -> None:
        for replica in self._replicas.values():
            replica.keep_graph()

    def check_gradients(self) -> None:
        check_replicas(self, self._replicas.values())
        check_averaged(self, self._reducers.values())

    def watch(
        self,
        params: Sequence[torch.Tensor],
        filled: Callable[[torch.Tensor], None],
        held: Mapping[torch.Tensor, torch.Tensor],
        *,
        again: bool,
    ) -> list[Any]:
        return watch_reduced(self, self._reducers.values(), params, filled, held, again=again)

    def clear_gradients(self, set_to_none: bool) -> None:
        for replica in self._replicas.values():
            replica.forget()

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        with ExitStack() as stack:
            for replica in self._replicas.values():
                stack.enter_context(replica.kept())
            yield


def check_replicas(shards: Shards, replicas: Iterable[Replica]) -> None:
    """Raise RuntimeError if the optimizer of `shards` holds a gradient that ranks do not share."""
    for replica in replicas:
        replica.check_order()
        frozen, left = replica.unshared()
        if frozen or left:
            held = {param for group in shards.optimizer.param_groups for param in group["params"]}
            for param in held.intersection(frozen):
                raise RuntimeError(FROZEN.format(name=shards.name_of(param)))
            if not held.isdisjoint(left):
                raise RuntimeError(UNSYNCHRONISED)
