"""A training step run once more under a trace, with nothing left changed, on all ranks or on none.

After `restored_after` weights, buffers, gradients, random states and the update's own counters are what they were.
`Replay` runs the step inside it, as often as asked. A rank that raises would leave the others in a collective; `ReplayBarrier`
lets ranks ask each other by the store of the process group, between the passes, whether any did.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.common import arguments
from booster.common.hang_watchdog import StoreBarrier
from booster.common.snapshot import ContainerSnapshot, MemorySnapshot, attributes, random_state, set_random_state
from booster.common.torch_internals.autograd_internals import uncompiled
from booster.common.torch_internals.tensor_internals import default_store
from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.model.modules import bare
from booster.model.params import local_shard
from booster.numerics.diagnosis.nonfinite_trace import NonFiniteInput, NonFiniteResult, NonFiniteTrace
from booster.numerics.diagnosis.places import MemoryNames, PlaceFinder
from booster.ranks.agreement import gather_bytes
from booster.tensors.cast_regions import region
from booster.tensors.trees import HALF_DTYPES, tensors
from booster.update.update import Update

_OF_TORCH = frozenset(nn.Module().__dict__)  # children, parameters and hooks, which no forward pass adds
PATIENCE = timedelta(seconds=60)  # of a rank that failed, for the others to come


def _keep_all(containers: ContainerSnapshot, value: Any) -> None:
    """Keep `value` if it is a list, dict or set, and those inside of it."""
    if type(value) in (list, dict, set):
        for inner in containers.keep(value):
            _keep_all(containers, inner)


@contextmanager
def restored_after(modules: Iterable[nn.Module], updates: Iterable[Update], scale: float) -> Iterator[MemorySnapshot]:
    """Inside there are no gradients; afterwards, gradients and all else are what and where they were.

    modules: those that compute. Their buffers come back, and plain attributes such as counters, with what is in lists, dicts
    and sets among them.
    """
    modules, updates = list(modules), list(updates)
    # Other memory comes back if the `MemorySnapshot` that this yields keeps it before it is written.
    memory, random = MemorySnapshot(), random_state()
    for module in modules:
        for buffer in module.buffers():
            if type(buffer) is torch.Tensor:
                memory.keep(buffer)
    inner = {child: None for module in modules for child in module.modules()}
    containers = ContainerSnapshot()
    for child in inner:
        for name, value in child.__dict__.items():
            if name not in _OF_TORCH:
                _keep_all(containers, value)
        for own in (child.__dict__, child._buffers):
            containers.keep(own)
    with ExitStack() as gradients:
        params = {param: None for module in modules for param in module.parameters()}
        held = [param for update in updates for group in update.optimizer.param_groups for param in group["params"]]
        gradients.enter_context(attributes([*params, *(param for param in held if param not in params)], grad=None))
        for update in updates:
            gradients.enter_context(update.shards.without_gradients())
            gradients.enter_context(update.for_replay(scale))
        try:
            yield memory
        finally:
            containers.restore()
            memory.restore()
            torch.clear_autocast_cache()
            set_random_state(random)


@dataclass
class Outcome:
    """What one replay found.

    Attributes:
        sinks: what made the inf or NaN in the loss, or, where that is finite, in gradients.
        bad: whether either holds one.
        loss: None where this rank has none.
        largest_gradient: of this rank, with its loss scale.
    """

    trace: NonFiniteTrace
    sinks: list[NonFiniteResult | NonFiniteInput]
    bad: bool
    loss: float | None
    largest_gradient: float


class RanksApart(Exception):
    """This rank failed while others wait for it in a collective, which nothing but the end of this process ends."""


class ReplayBarrier:
    """Rounds in which all ranks say whether they failed, by the store, so that none waits in a collective."""

    def __init__(self, rounds: StoreBarrier) -> None:
        self._rounds, self._number = rounds, 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> ReplayBarrier:
        """Return the barrier of all ranks of `group`. A small collective."""
        name = f"booster/meeting/{gather_bytes(os.urandom(16), group)[0].hex()}"
        return cls(StoreBarrier(default_store(), name, dist.get_rank(group), dist.get_world_size(group)))

    def any(self, failed: bool) -> bool:
        """Return whether any rank failed, once all have come. A rank that failed waits `PATIENCE` for them, others as long as
        the store does.

        Raises RanksApart where some have not come by then: they may wait for this rank in a collective, until the timeout of
        the process group.
        """
        self._number += 1
        self._rounds.post(self._number, failed)
        # A rank that failed cannot wait for the others for ever: they may be in a collective that it never joins.
        posted = self._rounds.wait(self._number, PATIENCE if failed else None)
        missing = [rank for rank in range(self._rounds.size) if rank not in posted]
        if missing:
            raise RanksApart(
                f"a replay {'raised' if failed else 'ended'} on rank {self._rounds.rank} of the group, and ranks {missing} "
                "did not come to its end: they may wait for this rank in a collective, which the end of this process ends"
            )
        return any(posted.values())


class StoppedElsewhere(Exception):
    """A forward or backward pass raised on another rank."""


class Replay:
    """Runs `forward` and its backward pass under `NonFiniteTrace`, as often as asked, each time from the same state.

    forward: computes and returns the loss; or runs backward passes too, by boosted optimizers, and returns the loss, the
        dictionary of `execute_pipeline`, or in place of the loss what it is computed from.
    models: boosted ones, by their labels, "" for a single one.
    criteria: boosted modules.
    scale: of the loss.
    quiet: makes a context in which what layers compute is not recorded.

    Attributes:
        modules: of the models, by the name that a diagnosis gives them.
        roots: the models.
        is_partial: a model is in stages, on several ranks.
    """

    def __init__(
        self,
        forward: Callable[[], Any],
        optimizers: Sequence[OptimizerWrapper],
        models: Mapping[str, ModelWrapper],
        criteria: Sequence[nn.Module],
        scale: float,
        quiet: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.scale = scale
        self._quiet = quiet
        self.modules: dict[str, nn.Module] = {}
        self.roots = [bare(model.unwrap()) for model in models.values()]
        self.is_partial = any(getattr(model.module, "is_partial", False) for model in models.values())
        self._forward = forward
        self._context = optimizers[0].backward_context
        self._updates = list(map(update_of, optimizers))
        self._wrappers: list[nn.Module] = [*models.values(), *criteria]
        self._names: dict[nn.Module, str] = {}
        self._params: dict[torch.Tensor, tuple[str, str]] = {}
        for label, model in models.items():
            inner = bare(model.unwrap())
            own = label or _class_name(inner)
            layer: nn.Module = model
            while layer is not inner:  # what this library, plugins and torch.compile wrap around it
                self._names[layer] = own
                layer = layer._modules.get("_orig_mod") or layer.module  # type: ignore[assignment]
            named = {(f"{label}.{name}" if label else name) if name else own: m for name, m in inner.named_modules()}
            self._names |= {module: name for name, module in named.items()}
            self.modules |= named
            for module_name, module in named.items():
                prefix = "" if module is inner else f"{module_name}."
                for name, param in module.named_parameters(recurse=False):
                    self._params.setdefault(param, (f"{prefix}{name}", module_name))
        self._criteria = {
            module: ".".join(filter(None, ("criterion", name)))
            for criterion in criteria
            for name, module in bare(getattr(criterion, "module", criterion)).named_modules()
        } | dict.fromkeys(criteria, "criterion")
        self._memory_names = _names_of_memory([*models.items(), *(("criterion", each) for each in criteria)])

    def run(
        self,
        *,
        scale: float | None = None,
        repair: Collection[int] = (),
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
        agree: Callable[[bool], bool] = bool,
    ) -> Outcome:
        """Replay the step.

        scale: of the loss; None means its own.
        repair: see `NonFiniteTrace`.
        within: makes a context in which it is computed.
        agree: called after the forward pass, and again after the backward pass, with whether it raised; returns whether it did
            on any rank.
        """
        scale = self.scale if scale is None else scale
        with restored_after(self._wrappers, self._updates, scale) as memory, self._quiet(), within():
            return self._run(scale, repair, memory, agree)

    def _run(
        self, scale: float, repair: Collection[int], memory: MemorySnapshot, agree: Callable[[bool], bool]
    ) -> Outcome:
        counted = self._updates[0]
        trace = NonFiniteTrace(
            PlaceFinder(self._names, self._criteria, self._params, _call.__code__),
            self._memory_names,
            memory.keep,
            repair=repair,
            micro_batch=lambda: counted.gradients.num_backwards,
        )
        loss = _together(lambda: _call(trace, self._forward), agree)
        if isinstance(loss, Mapping):
            loss = loss.get("loss")
        if not counted.gradients.num_backwards:
            _together(lambda: _call(trace, lambda: self._backward(loss, scale)), agree)
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
        bad_roots = [root.detach() for root in tensors(loss) if not bool(root.isfinite().all())]
        gradients = self._gradients()
        bad = [grad for grad in gradients if not bool(grad.isfinite().all())]
        largest = max((float(grad.abs().max()) for grad in gradients if grad.numel()), default=0.0)
        made_by = [trace.origin_of(tensor) for tensor in (bad_roots or bad)]
        sinks = [origin for origin in made_by if origin is not None]
        # Events of the forward pass for a bad loss, of the backward pass for bad gradients.
        if not sinks and (bad_roots or bad):  # it reached them by ways that no operation shows
            sinks = [event for event in trace.results if event.place.backward is not bool(bad_roots)] or [
                *trace.results
            ]
        return Outcome(trace, sinks, bool(bad_roots or bad), value, largest)

    def _backward(self, loss: Any, scale: float) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            legal = "the loss, a tensor of one element that requires gradients, unless it runs backward passes itself"
            raise TypeError(arguments.refusal("what forward() returned", loss, legal))
        loss = loss.float() if loss.dtype in HALF_DTYPES else loss
        gradient = None if scale == 1.0 else torch.full_like(loss, scale, requires_grad=False)
        with region(self._context):
            torch.autograd.backward(loss, gradient)

    def _gradients(self) -> list[torch.Tensor]:
        grads: list[torch.Tensor] = []
        for update in self._updates:
            with update.shards.local():
                grads += [grad.detach() for grad in update.gradients.values()]
        return [local_shard(grad) for grad in grads]


def replayed_scale(optimizers: Sequence[OptimizerWrapper]) -> float:
    """The loss scale to replay at: that of the last step where it was skipped, else the next one's; the smallest of them."""
    scales = []
    for optimizer in optimizers:
        optimizer.sync()
        last = optimizer.last_step
        scales.append(optimizer.loss_scale if last is None or last.applied else last.loss_scale)
    return min(scales)


def _together(function: Callable[[], Any], agree: Callable[[bool], bool]) -> Any:
    """Return what `function` returns. If it raises on any rank, raise on all: its own error, elsewhere `StoppedElsewhere`."""
    try:
        result = function()
    except Exception:
        agree(True)
        raise
    if agree(False):
        # What comes next has collectives, in which this rank would wait for the missing one.
        raise StoppedElsewhere
    return result


def _call(trace: NonFiniteTrace, function: Callable[[], Any]) -> Any:
    """Call `function` under `trace`; what is above this on Python's stack is not the user's computation."""
    with trace, uncompiled():
        return function()


def _names_of_memory(modules: Sequence[tuple[str, nn.Module]]) -> MemoryNames:
    names = MemoryNames()
    for label, module in modules:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            name = name.replace("_orig_mod.", "")  # of what torch.compile wraps around a module
            names.add(local_shard(tensor), f"{label}.{name}" if label else name)
    return names


def _class_name(module: nn.Module) -> str:
    """The name of the user's class; `fully_shard` makes another one of it."""
    kind = type(module)
    own = kind.__bases__[-1]
    return own.__name__ if kind.__name__ == f"FSDP{own.__name__}" else kind.__name__
