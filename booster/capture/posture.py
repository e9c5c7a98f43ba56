"""Where an optimizer's gradients are between two calls: what a graph finds there, leaves there, and writes back to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from booster.interface.optimizer import OptimizerWrapper
from booster.loss_scaler import DeviceScale
from booster.update.backward import JointDecision
from booster.update.gradients import Gradients


class Posture:
    """What the gradients of `optimizers` carry now."""

    def __init__(self, optimizers: Sequence[OptimizerWrapper]) -> None:
        self._all = [optimizer._update.gradients for optimizer in optimizers]
        self._params = [each.parameters.held() for each in self._all]
        self._kept = [each.kept() for each in self._all]
        self._joint = [self._partners(each) for each in self._all]
        self.grads = [[param.grad for param in params] for params in self._params]
        self.unread = not any(each.read for each in self._all)
        """Whether nobody has read the gradients, whose norms a graph would not follow."""

    def key(self) -> tuple[Any, ...]:
        """Return what is equal where a graph that was recorded at one posture can be replayed at another."""
        grads = tuple(
            tuple(None if g is None else (g.dtype, g.shape, g.stride()) for g in grads) for grads in self.grads
        )
        return grads, tuple(tuple(map(_described, kept.values())) for kept in self._kept), tuple(self._joint)

    def tensors(self) -> list[torch.Tensor]:
        """Return the numbers that are carried, without gradients, in an order that the key fixes."""
        values = [value for kept in self._kept for value in kept.values()]
        flat = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
        return [entry for entry in flat if isinstance(entry, torch.Tensor)]

    def take(self) -> None:
        """Have the gradients carry this again, with nothing read of them."""
        for each, kept, joint in zip(self._all, self._kept, self._joint, strict=True):
            if self._partners(each) != joint:
                decision = JointDecision([self._all[index] for index in joint])
                for index in joint:
                    self._all[index].join(decision)
            each.go_on(kept)
        for params, grads in zip(self._params, self.grads, strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad

    def _partners(self, gradients: Gradients) -> tuple[int, ...]:
        """Return whose decision is that of `gradients`, by number."""
        return tuple(index for index, each in enumerate(self._all) if each.joint is gradients.joint)


class Cells:
    """Numbers that optimizers replace in every step, in memory that does not move: loss scales and their counters."""

    def __init__(self, optimizers: Sequence[OptimizerWrapper]) -> None:
        scalers = [optimizer._update.gradients.scaler for optimizer in optimizers]
        self._scalers = [scaler for scaler in scalers if isinstance(scaler, DeviceScale)]
        self._lent = [tuple(value.clone() for value in _numbers(scaler)) for scaler in self._scalers]

    def enter(self) -> None:
        """Bring what the scales are now into that memory."""
        for scaler, lent in zip(self._scalers, self._lent, strict=True):
            for cell, value in zip(lent, _numbers(scaler), strict=True):
                if value is not cell:
                    cell.copy_(value)
            scaler.follow(*lent)
            scaler.lend(None)

    def write_back(self) -> None:
        """Bring what a step made of them into that memory. Of what runs in a graph."""
        for scaler, lent in zip(self._scalers, self._lent, strict=True):
            for cell, value in zip(lent, _numbers(scaler), strict=True):
                if value is not cell:
                    cell.copy_(value)

    def leave(self) -> None:
        """Have the scales read that memory, and give away copies of it alone, since a replay writes it."""
        for scaler, lent in zip(self._scalers, self._lent, strict=True):
            scaler.follow(*lent)
            scaler.lend(lent[0])


def _numbers(scaler: DeviceScale) -> tuple[torch.Tensor, ...]:
    return scaler.tensor, *scaler.trackers


def _described(value: Any) -> Any:
    """Return `value`, with what is told of a tensor in the place of it."""
    if isinstance(value, list):
        return tuple(map(_described, value))
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value
