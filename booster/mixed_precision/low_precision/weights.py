"""Weights in low formats that are made once for a group of micro-batches, and what their layers multiply with in it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from booster.common.torch_internals.tensor_internals import is_fake_kind, storage_key, version
from booster.mixed_precision.low_precision import operands
from booster.mixed_precision.low_precision.recipes import Operand, Product, Recipe
from booster.number_formats import Scaled


class RoundedWeight:
    """One weight as products read it, rounded when the first of them asks; a byte a number for each dimension summed over.

    Formats that have no byte are rounded anew each time.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self._state = _state(weight)
        self._memory = weight.detach()  # held, so that no other gets its place meanwhile
        self._made: dict[Hashable, Scaled] = {}

    def is_as_it_was(self) -> bool:
        """Whether nobody wrote to the weight, or gave it other memory; writes through `.data` leave no trace."""
        return self._state == _state(self.weight)

    def rounded(self, operand: Operand, how: Product, recipe: Recipe) -> Scaled:
        """Return the weight as `how` reads it, see `operands.rounded`."""
        if operand.format.dtype is None:
            return operands.rounded(self.weight, operand, how, recipe)
        key = operand, how.hadamard
        if key not in self._made:
            self._made[key] = operands.rounded(self.weight, operand, how, recipe)
        return self._made[key]

    def turned(self, operand: Operand, how: Product, recipe: Recipe) -> Scaled:
        """Return its transpose, see `operands.turned`."""
        if operand.format.dtype is None:
            return operands.turned(self.weight, operand, how, recipe)
        key = operand, how.hadamard, "turned"
        if key not in self._made:
            known = self._made.get((operand, how.hadamard))
            self._made[key] = operands.turned(self.weight, operand, how, recipe, known)
        return self._made[key]


class GatheredWeight:
    """One weight that a plugin gathered, as products read it: of the bytes that arrived, as long as they are there.

    arrived: see `LinearProxy.arrived`. Without bytes, as where the operand has other scales, the weight is rounded.
    """

    def __init__(self, weight: torch.Tensor, arrived: Callable[[torch.Tensor], Scaled | None]) -> None:
        self.weight = weight
        self._arrived = arrived

    def rounded(self, operand: Operand, how: Product, recipe: Recipe) -> Scaled:
        """Return the weight as `how` reads it, see `operands.rounded`."""
        came = self._as_it_came(operand, how)
        if came is None:
            return operands.rounded(self.weight, operand, how, recipe)
        return replace(came, values=operands.filled(came.values, recipe.multiple))

    def turned(self, operand: Operand, how: Product, recipe: Recipe) -> Scaled:
        """Return its transpose, see `operands.turned`."""
        return operands.turned(self.weight, operand, how, recipe, self._as_it_came(operand, how))

    def _as_it_came(self, operand: Operand, how: Product) -> Scaled | None:
        if how.hadamard or operand.stochastic or operand.delayed is not None:
            return None
        came = self._arrived(self.weight)
        return came if came is not None and (came.scaling, came.values.dtype) == _form(operand) else None


class RoundedWeights:
    """Rounded weights of the layers of one conversion, from the first forward pass of a group of micro-batches to `forget`."""

    def __init__(self) -> None:
        self._kept: dict[int, RoundedWeight] = {}

    def of(self, weight: torch.Tensor) -> RoundedWeight | None:
        """Return what is made of `weight` in this group; None for what is no parameter that stays, such as a computed one."""
        if not (type(weight) is nn.Parameter or is_fake_kind(type(weight))) or not weight.is_leaf:
            return None
        found = self._kept.get(id(weight))
        if found is None or not found.is_as_it_was():
            found = self._kept[id(weight)] = RoundedWeight(weight)
        return found

    def forget(self) -> None:
        """The group is over: weights may be others from now on, however they are written."""
        self._kept.clear()


def _form(operand: Operand) -> tuple[Any, ...]:
    return operand.scaling, operand.format.dtype


def _state(weight: torch.Tensor) -> tuple[Any, ...]:
    return version(weight), storage_key(weight), weight.storage_offset(), weight.shape, weight.stride(), weight.dtype
