"""Matrices as products read them: padded, rotated and rounded, along either dimension; weights once for several passes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from booster.common.torch_internals.tensor_internals import is_fake_kind, storage_key, version
from booster.kernels import matrices
from booster.mixed_precision.low_precision.recipes import CastConfig, GemmConfig, Recipe
from booster.number_formats.number_format import E2M1, noise_of
from booster.number_formats.scaling import ScaledTensor, rotated, scale_to


def quantized(x: torch.Tensor, operand: CastConfig, how: GemmConfig, recipe: Recipe) -> ScaledTensor:
    """Return the matrix `x` as `how` reads it, which sums over its columns; row by row, whole numbers in bytes."""
    if _takes_kernels(x, operand, how):
        return _by_kernels(x, operand, how, recipe)[0]
    result = low(padded_and_rotated(x, how, recipe), operand)
    values = result.values if operand.format.dtype is None else result.values.to(operand.format.dtype)
    return replace(result, values=values.contiguous())


def transposed(
    x: torch.Tensor, operand: CastConfig, how: GemmConfig, recipe: Recipe, known: ScaledTensor | None = None
) -> ScaledTensor:
    """Return `x.t()` as `how` reads it.

    known: what `x` was rounded to for another product, if anything.
    """
    # Blocks of 1 x n numbers share other scales along the other dimension, so only whole tensors and square blocks qualify.
    if not _has_same_transpose(x, operand, how, recipe):
        return quantized(x.t(), operand, how, recipe)
    if known is None or known.scaling != operand.scaling or known.values.dtype != operand.format.dtype:
        known = quantized(x, operand, how, recipe)
    # Where the numbers and scales of `x` and of `x.t()` are the same, those are laid out anew, in a copy of one byte a number.
    values = padded(known.values[:, : x.shape[1]].t(), recipe.multiple)
    return replace(known, values=values.contiguous(), scale=known.scale.t().contiguous())


def both(
    x: torch.Tensor, operand: CastConfig, how: GemmConfig, operand_t: CastConfig, how_t: GemmConfig, recipe: Recipe
) -> tuple[ScaledTensor, ScaledTensor]:
    """Return `x` as `how` reads it, and `x.t()` as `how_t` does; where their bytes are the same, kernels write them in one
    pass."""
    same_scaling = operand.scaling == operand_t.scaling and operand.format == operand_t.format
    same_bytes = same_scaling and _has_same_transpose(x, operand_t, how_t, recipe)
    if same_bytes and _takes_kernels(x, operand, how):
        made, other = _by_kernels(x, operand, how, recipe, transposed=True)
        assert other is not None
        return made, other
    # Two roundings, of which the second may reuse the bytes of the first.
    made = quantized(x, operand, how, recipe)
    return made, transposed(x, operand_t, how_t, recipe, made)


def low(x: torch.Tensor, operand: CastConfig) -> ScaledTensor:
    """Return the matrix `x` in the format of `operand`."""
    noise = noise_of(x) if operand.stochastic else None
    if operand.delayed is None:
        return scale_to(x, operand.format, operand.scaling, noise=noise)
    taken, meant = operand.delayed.of(x, operand.format)
    return replace(scale_to(x, operand.format, operand.scaling, scale=taken), scale=meant)


def padded_and_rotated(x: torch.Tensor, how: GemmConfig, recipe: Recipe) -> torch.Tensor:
    """Return a matrix as it is rounded for a product: filled up with zeros, and rotated, then in float32."""
    x = padded(x, recipe.multiple)
    return rotated(x.float()) if how.hadamard else x


def padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return the matrix `x` with columns of zeros until they are a multiple; `x` itself where they are."""
    return F.pad(x, (0, -x.shape[1] % multiple)) if x.shape[1] % multiple else x


class QuantizedWeight:
    """One weight as products read it, rounded when the first of them asks; a byte a number for each dimension summed over.

    Formats that have no byte are rounded anew each time.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self._state = _state(weight)
        self._memory = weight.detach()  # held, so that no other gets its place meanwhile
        self._made: dict[Hashable, ScaledTensor] = {}

    def is_as_it_was(self) -> bool:
        """Whether the weight has its memory still, and was not written to; writes through `.data` leave no trace."""
        return self._state == _state(self.weight)

    def quantized(self, operand: CastConfig, how: GemmConfig, recipe: Recipe) -> ScaledTensor:
        """Return the weight as `how` reads it, see `quantized`."""
        if operand.format.dtype is None:
            return quantized(self.weight, operand, how, recipe)
        # Forward and backward may read the same bytes: the key says all that decides them.
        key = operand, how.hadamard
        if key not in self._made:
            self._made[key] = quantized(self.weight, operand, how, recipe)
        return self._made[key]

    def transposed(self, operand: CastConfig, how: GemmConfig, recipe: Recipe) -> ScaledTensor:
        """Return its transpose, see `transposed`."""
        if operand.format.dtype is None:
            return transposed(self.weight, operand, how, recipe)
        key = operand, how.hadamard, "transposed"
        if key not in self._made:
            known = self._made.get((operand, how.hadamard))
            self._made[key] = transposed(self.weight, operand, how, recipe, known)
        return self._made[key]


class GatheredWeight:
    """One weight that a plugin gathered, as products read it: of the bytes that arrived, as long as they are there.

    arrived: see `LinearProxy.arrived`. Without bytes, as where the operand has other scales, the weight is rounded.
    """

    def __init__(self, weight: torch.Tensor, arrived: Callable[[torch.Tensor], ScaledTensor | None]) -> None:
        self.weight = weight
        self._arrived = arrived

    def quantized(self, operand: CastConfig, how: GemmConfig, recipe: Recipe) -> ScaledTensor:
        """Return the weight as `how` reads it, see `quantized`."""
        came = self._as_it_came(operand, how)
        if came is None:
            return quantized(self.weight, operand, how, recipe)
        return replace(came, values=padded(came.values, recipe.multiple))

    def transposed(self, operand: CastConfig, how: GemmConfig, recipe: Recipe) -> ScaledTensor:
        """Return its transpose, see `transposed`."""
        return transposed(self.weight, operand, how, recipe, self._as_it_came(operand, how))

    def _as_it_came(self, operand: CastConfig, how: GemmConfig) -> ScaledTensor | None:
        if how.hadamard or operand.stochastic or operand.delayed is not None:
            return None
        came = self._arrived(self.weight)
        return (
            came
            if came is not None and (came.scaling, came.values.dtype) == (operand.scaling, operand.format.dtype)
            else None
        )


class QuantizedWeights:
    """Rounded weights of the layers of one conversion, from the first forward pass of a group of micro-batches to `forget`."""

    def __init__(self) -> None:
        self._kept: dict[int, QuantizedWeight] = {}

    def of(self, weight: torch.Tensor) -> QuantizedWeight | None:
        """Return what is made of `weight` in this group; None for what is no parameter that stays, such as a computed one."""
        if not (type(weight) is nn.Parameter or is_fake_kind(type(weight))) or not weight.is_leaf:
            return None
        found = self._kept.get(id(weight))
        if found is None or not found.is_as_it_was():
            found = self._kept[id(weight)] = QuantizedWeight(weight)
        return found

    def forget(self) -> None:
        """The group is over: weights may be others from now on, however they are written."""
        self._kept.clear()


# ---------------------------------------------------------------------- inside


def _takes_kernels(x: torch.Tensor, operand: CastConfig, how: GemmConfig) -> bool:
    delayed = operand.delayed is not None
    options = {"rotates": how.hadamard, "stochastic": operand.stochastic, "delayed": delayed}
    return matrices.by_kernels(x, operand.format, operand.scaling, **options)


def _by_kernels(
    x: torch.Tensor, operand: CastConfig, how: GemmConfig, recipe: Recipe, *, transposed: bool = False
) -> tuple[ScaledTensor, ScaledTensor | None]:
    if operand.format == E2M1:
        options = {"rotates": how.hadamard, "stochastic": operand.stochastic}
        return matrices.quantized_to_e2m1(x, operand.scaling, recipe.multiple, **options), None
    delayed = operand.delayed
    return matrices.quantized(
        x,
        operand.format,
        operand.scaling,
        recipe.multiple,
        transposed=transposed,
        given=None if delayed is None else delayed.scale,
        largest=None if delayed is None else delayed.largest,
    )


def _has_same_transpose(x: torch.Tensor, operand: CastConfig, how: GemmConfig, recipe: Recipe) -> bool:
    over = operand.scaling.over
    alike = over == "tensor" or (isinstance(over, tuple) and over[0] == over[1] and not x.shape[0] % recipe.multiple)
    return alike and operand.format.dtype is not None and not (how.hadamard or operand.stochastic)


def _state(weight: torch.Tensor) -> tuple[Any, ...]:
    return version(weight), storage_key(weight), weight.storage_offset(), weight.shape, weight.stride(), weight.dtype
