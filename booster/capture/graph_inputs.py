"""What a graph reads and writes by address, and what gradients are between two calls.

A graph is recorded with the addresses of its tensors, and replayed as long as they hold: `TensorAddresses` and `options_of`
say so. Gradients may wait from one call to the next, as within `accumulate`: which, and with which scale, is a
`GradientLayout`, which distinguishes graphs. What optimizers replace in every step, a graph has in `StaticScalars`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from booster.interface.optimizer import OptimizerWrapper, update_of
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


def difference(before: Any, now: Any) -> str | None:
    """Return what differs between two pairs of addresses and options; None where nothing does."""
    if before == now:
        return None
    if before[0] != now[0]:
        return "weights or states were put elsewhere, as by loading them,"
    # By their text, because options may be tensors or lists, which neither hash nor compare as one.
    texts = [{(name, repr(value)) for name, value in options} for _, options in (before, now)]
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
        """Return the numbers that are carried, without gradients, in an order that the key fixes."""
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
        for scaler, buffers in zip(self._scalers, self._buffers, strict=True):
            for buffer, value in zip(buffers, _numbers(scaler), strict=True):
                if value is not buffer:
                    buffer.copy_(value)
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
