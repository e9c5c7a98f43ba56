"""Matrices as products read them: filled up, rotated and rounded, along either dimension."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from booster.kernels import matrices
from booster.mixed_precision.low_precision.recipes import Operand, Product, Recipe
from booster.number_formats import E2M1, Scaled, noise_of, scale_to
from booster.number_formats.rotation import rotated


def rounded(x: torch.Tensor, operand: Operand, how: Product, recipe: Recipe) -> Scaled:
    """Return the matrix `x` as `how` reads it, which sums over its columns; row by row, whole numbers in bytes."""
    if _takes_kernels(x, operand, how):
        return _by_kernels(x, operand, how, recipe)[0]
    result = low(laid_out(x, how, recipe), operand)
    values = result.values if operand.format.dtype is None else result.values.to(operand.format.dtype)
    return replace(result, values=values.contiguous())


def turned(x: torch.Tensor, operand: Operand, how: Product, recipe: Recipe, known: Scaled | None = None) -> Scaled:
    """Return `x.t()` as `how` reads it.

    known: what `x` was rounded to for another product, if anything. Where the numbers and scales of `x` and of `x.t()` are the
    same, those are laid out anew, in a copy of one byte a number; otherwise `x` is rounded a second time.
    """
    if not _is_same_turned(x, operand, how, recipe):
        return rounded(x.t(), operand, how, recipe)
    if known is None or known.scaling != operand.scaling or known.values.dtype != operand.format.dtype:
        known = rounded(x, operand, how, recipe)
    values = filled(known.values[:, : x.shape[1]].t(), recipe.multiple)
    return replace(known, values=values.contiguous(), scale=known.scale.t().contiguous())


def both(
    x: torch.Tensor, operand: Operand, how: Product, turned_operand: Operand, turned_how: Product, recipe: Recipe
) -> tuple[Scaled, Scaled]:
    """Return `x` as `how` reads it, and `x.t()` as `turned_how` does; where their bytes are the same, kernels write them in one
    pass."""
    alike = operand.scaling == turned_operand.scaling and operand.format == turned_operand.format
    if alike and _is_same_turned(x, turned_operand, turned_how, recipe) and _takes_kernels(x, operand, how):
        made, other = _by_kernels(x, operand, how, recipe, turned=True)
        assert other is not None
        return made, other
    made = rounded(x, operand, how, recipe)
    return made, turned(x, turned_operand, turned_how, recipe, made)


def low(x: torch.Tensor, operand: Operand) -> Scaled:
    """Return the matrix `x` in the format of `operand`."""
    noise = noise_of(x) if operand.stochastic else None
    if operand.delayed is None:
        return scale_to(x, operand.format, operand.scaling, noise=noise)
    taken, meant = operand.delayed.of(x, operand.format)
    return replace(scale_to(x, operand.format, operand.scaling, scale=taken), scale=meant)


def laid_out(x: torch.Tensor, how: Product, recipe: Recipe) -> torch.Tensor:
    """Return a matrix as it is rounded for a product: filled up with zeros, and rotated, then in float32."""
    x = filled(x, recipe.multiple)
    return rotated(x.float()) if how.hadamard else x


def filled(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return the matrix `x` with columns of zeros until they are a multiple; `x` itself where they are."""
    return F.pad(x, (0, -x.shape[1] % multiple)) if x.shape[1] % multiple else x


# ---------------------------------------------------------------------- inside


def _takes_kernels(x: torch.Tensor, operand: Operand, how: Product) -> bool:
    delayed = operand.delayed is not None
    options = {"rotates": how.hadamard, "stochastic": operand.stochastic, "delayed": delayed}
    return matrices.by_kernels(x, operand.format, operand.scaling, **options)


def _by_kernels(
    x: torch.Tensor, operand: Operand, how: Product, recipe: Recipe, *, turned: bool = False
) -> tuple[Scaled, Scaled | None]:
    if operand.format == E2M1:
        options = {"rotates": how.hadamard, "stochastic": operand.stochastic}
        return matrices.rounded_to_fours(x, operand.scaling, recipe.multiple, **options), None
    delayed = operand.delayed
    return matrices.rounded(
        x,
        operand.format,
        operand.scaling,
        recipe.multiple,
        turned=turned,
        given=None if delayed is None else delayed.scale,
        largest=None if delayed is None else delayed.largest,
    )


def _is_same_turned(x: torch.Tensor, operand: Operand, how: Product, recipe: Recipe) -> bool:
    over = operand.scaling.over
    alike = over == "tensor" or (isinstance(over, tuple) and over[0] == over[1] and not x.shape[0] % recipe.multiple)
    return alike and operand.format.dtype is not None and not (how.hadamard or operand.stochastic)
