"""Matrices as products read them: padded, rotated and rounded, along either dimension; weights once for several passes; and the
products on hardware that has the formats, torch's scaled matrix products, with operands filled up and laid out for them.

On an H100 fp8 and int8 agreed with their emulation. mxfp8 and nvfp4 need another GPU, which they have not met, and fp8 in
blocks has not met its own: their layouts are those that torch's tests and cuBLAS's documentation have. What runs on a CPU is
compared with the emulation there (float8 with scales of tensors and rows, int8).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from booster.common.torch_internals.tensor_internals import int_mm, is_fake_kind, storage_key, version
from booster.kernels import matrices
from booster.mixed_precision.hardware import alone, missing, sums_int8_exactly
from booster.mixed_precision.low_precision.recipes import CastConfig, GemmConfig, HighPrecision, Recipe
from booster.number_formats.number_format import E2M1, encode, noise_of
from booster.number_formats.scaling import ScaledTensor, rotated, scale_to


def quantized(x: torch.Tensor, operand: CastConfig) -> ScaledTensor:
    """Return the matrix `x` as a product reads it that sums over its columns; row by row, whole numbers in bytes."""
    if _has_kernel(x, operand):
        return _by_kernel(x, operand)[0]
    result = quantize(padded_and_rotated(x, operand), operand)
    values = result.values if operand.format.dtype is None else result.values.to(operand.format.dtype)
    return replace(result, values=values.contiguous())


def transposed(x: torch.Tensor, operand: CastConfig, known: ScaledTensor | None = None) -> ScaledTensor:
    """Return `x.t()` as a product reads it.

    known: what `x` was rounded to for another product, if anything.
    """
    # Blocks of 1 x n numbers share other scales along the other dimension, so only whole tensors and square blocks qualify.
    if not _has_same_transpose(x, operand):
        return quantized(x.t(), operand)
    if known is None or known.scaling != operand.scaling or known.values.dtype != operand.format.dtype:
        known = quantized(x, operand)
    # Where the numbers and scales of `x` and of `x.t()` are the same, those are laid out anew, in a copy of one byte a number.
    values = padded(known.values[:, : x.shape[1]].t(), operand.multiple)
    return replace(known, values=values.contiguous(), scale=known.scale.t().contiguous())


def quantize_with_transpose(
    x: torch.Tensor, operand: CastConfig, operand_t: CastConfig
) -> tuple[ScaledTensor, ScaledTensor]:
    """Return `x` as `operand` says, and `x.t()` as `operand_t`; where their bytes are the same, kernels write them in one
    pass."""
    same_scaling = operand.scaling == operand_t.scaling and operand.format == operand_t.format
    same_bytes = same_scaling and _has_same_transpose(x, operand_t)
    if same_bytes and _has_kernel(x, operand):
        made, other = _by_kernel(x, operand, transposed=True)
        assert other is not None
        return made, other
    # Two roundings, of which the second may reuse the bytes of the first.
    made = quantized(x, operand)
    return made, transposed(x, operand_t, made)


def quantize(x: torch.Tensor, operand: CastConfig) -> ScaledTensor:
    """Return the matrix `x` in the format of `operand`."""
    noise = noise_of(x) if operand.stochastic else None
    if operand.delayed is None:
        return scale_to(x, operand.format, operand.scaling, noise=noise)
    taken, meant = operand.delayed.of(x, operand.format)
    return replace(scale_to(x, operand.format, operand.scaling, scale=taken), scale=meant)


def padded_and_rotated(x: torch.Tensor, operand: CastConfig) -> torch.Tensor:
    """Return a matrix as it is rounded for a product: filled up with zeros, and rotated, then in float32."""
    x = padded(x, operand.multiple)
    return rotated(x.float()) if operand.hadamard else x


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
        self._made: dict[
            tuple[CastConfig, bool], ScaledTensor
        ] = {}  # whether transposed; forward and backward may share one

    def is_as_it_was(self) -> bool:
        """Whether the weight has its memory still, and was not written to; writes through `.data` leave no trace."""
        return self._state == _state(self.weight)

    def quantized(self, operand: CastConfig) -> ScaledTensor:
        """Return the weight as a product reads it, see `quantized`."""
        return self._kept(operand, False, lambda: quantized(self.weight, operand))

    def transposed(self, operand: CastConfig) -> ScaledTensor:
        """Return its transpose, see `transposed`."""
        return self._kept(operand, True, lambda: transposed(self.weight, operand, self._made.get((operand, False))))

    def _kept(self, operand: CastConfig, is_transposed: bool, make: Callable[[], ScaledTensor]) -> ScaledTensor:
        if operand.format.dtype is None:
            return make()
        if (operand, is_transposed) not in self._made:
            self._made[operand, is_transposed] = make()
        return self._made[operand, is_transposed]


class GatheredWeight:
    """One weight that a plugin gathered, as products read it: of the bytes that arrived, as long as they are there.

    arrived: see `LinearProxy.arrived`. Without bytes, as where the operand has other scales, the weight is rounded.
    """

    def __init__(self, weight: torch.Tensor, arrived: Callable[[torch.Tensor], ScaledTensor | None]) -> None:
        self.weight = weight
        self._arrived = arrived

    def quantized(self, operand: CastConfig) -> ScaledTensor:
        """Return the weight as a product reads it, see `quantized`."""
        came = self._as_it_came(operand)
        if came is None:
            return quantized(self.weight, operand)
        return replace(came, values=padded(came.values, operand.multiple))

    def transposed(self, operand: CastConfig) -> ScaledTensor:
        """Return its transpose, see `transposed`."""
        return transposed(self.weight, operand, self._as_it_came(operand))

    def _as_it_came(self, operand: CastConfig) -> ScaledTensor | None:
        if operand.hadamard or operand.stochastic or operand.delayed is not None:
            return None
        came = self._arrived(self.weight)
        alike = came is not None and (came.scaling, came.values.dtype) == (operand.scaling, operand.format.dtype)
        return came if alike else None


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


def _has_kernel(x: torch.Tensor, operand: CastConfig) -> bool:
    delayed = operand.delayed is not None
    options = {"rotates": operand.hadamard, "stochastic": operand.stochastic, "delayed": delayed}
    return matrices.by_kernels(x, operand.format, operand.scaling, **options)


def _by_kernel(
    x: torch.Tensor, operand: CastConfig, *, transposed: bool = False
) -> tuple[ScaledTensor, ScaledTensor | None]:
    if operand.format == E2M1:
        options = {"rotates": operand.hadamard, "stochastic": operand.stochastic}
        return matrices.quantized_to_e2m1(x, operand.scaling, operand.multiple, **options), None
    delayed = operand.delayed
    return matrices.quantized(
        x,
        operand.format,
        operand.scaling,
        operand.multiple,
        transposed=transposed,
        given=None if delayed is None else delayed.scale,
        largest=None if delayed is None else delayed.largest,
    )


def _has_same_transpose(x: torch.Tensor, operand: CastConfig) -> bool:
    over = operand.scaling.over
    alike = over == "tensor" or (isinstance(over, tuple) and over[0] == over[1] and not x.shape[0] % operand.multiple)
    return alike and operand.format.dtype is not None and not (operand.hadamard or operand.stochastic)


def _state(weight: torch.Tensor) -> tuple[Any, ...]:
    return version(weight), storage_key(weight), weight.storage_offset(), weight.shape, weight.stride(), weight.dtype


_ROUNDING = 0.01  # of sums to bfloat16, and some more
_ROWS = 32  # a multiple of 16, and more than 16 for int8
_TILE = (128, 4)  # of block scales, see "1D block scaling factors layout" in cuBLAS's documentation

_EXACT = 2**24 // 127**2  # so many products of int8 numbers cannot add up to more than float32 holds exactly: 1,040


def lacks(recipe: Recipe, device: torch.device) -> str:
    """What `device` lacks to run `recipe`, as a sentence; empty where it lacks nothing."""
    if device.type == "cpu" and recipe.on_cpu:
        return ""
    lacking = missing(recipe.name, device, capability=recipe.capability, generations=recipe.generations)
    return lacking or fails(recipe, device)


@functools.cache
def fails(recipe: Recipe, device: torch.device) -> str:
    """What is wrong with the products of `recipe` on the GPU `device`, as a sentence; empty where they are right."""
    # Each is tried once, as a compute capability does not decide it: some products are those of one generation alone, or wait
    # for a version of cuBLAS. 640 numbers are summed over, of which blocks of 128 are no multiple of 4, see `blockwise`.
    wrong = alone(functools.partial(_fails, recipe, device))
    return f"{recipe.name} cannot run on {torch.cuda.get_device_name(device)}, where {wrong}" if wrong else ""


def _fails(recipe: Recipe, device: torch.device) -> str:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 640, generator=draw, dtype=torch.float32).to(device) for rows in (128, 256))
    names = ("the product of the output", "that of the input's gradient", "that of the weight's gradient")
    for what, how in zip(names, recipe.products.values(), strict=True):
        if isinstance(how, HighPrecision):
            continue
        left, right = quantized(a, how.left), quantized(b, how.right)
        meant = [each.dequantize() if each.outer is None else each.dequantize() * each.outer for each in (left, right)]
        expected = meant[0] @ meant[1].t()
        try:
            got = multiply(left, right, how, recipe).float()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return f"{what} is refused: {str(error).strip().splitlines()[0]}"
        if not float((got - expected).norm() / expected.norm()) < _ROUNDING:
            return f"{what} is wrong"
    return ""


def for_device(recipe: Recipe, device: torch.device) -> Recipe:
    """Return `recipe` with the kernel that is right on `device`: that of int8 is another on CPUs where torch's saturates."""
    if recipe.kernel == "int8" and device.type == "cpu" and not sums_int8_exactly():
        return dataclasses.replace(recipe, kernel="int8 in float32")
    return recipe


def multiply(a: ScaledTensor, b: ScaledTensor, how: GemmConfig, recipe: Recipe) -> torch.Tensor:
    """Return `a @ b.t()`, rounded as `how` says, by the kernel of `recipe`; float32 for int8, else bfloat16."""
    if recipe.kernel == "fp8":
        return scaled(a, b, fast_accumulation=how.fast_accumulation)
    run = {
        "fp8 blocks": blockwise,
        "mxfp8": microscaled,
        "nvfp4": microscaled,
        "int8": whole_numbers,
        "int8 in float32": whole_numbers_in_float32,
    }[recipe.kernel]
    rows, columns = len(a.values), len(b.values)
    return run(padded_rows(a), padded_rows(b))[:rows, :columns]


def padded_rows(x: ScaledTensor) -> ScaledTensor:
    """Return `x` with rows of zeros until they are a multiple of 32, which only the kernels of fp8 do without."""
    # Rows of zeros change no other row, and are cut off the result.
    missing = -len(x.values) % _ROWS
    if not missing:
        return x
    down = x.block[0] if x.block else 1
    blocks = -(-(len(x.values) + missing) // down) - len(x.scale)
    values, scale = F.pad(x.values, (0, 0, 0, missing)), F.pad(x.scale, (0, 0, 0, blocks), value=1.0)
    return dataclasses.replace(x, values=values, scale=scale)


def scaled(a: ScaledTensor, b: ScaledTensor, *, fast_accumulation: bool = False) -> torch.Tensor:
    """Return `a @ b.t()`, bfloat16, of float8 matrices with scales of tensors or rows; see `GemmConfig`."""
    kind = F.ScalingType.TensorWise
    left, right = a.scale, b.scale
    if left.dim() or right.dim():  # one kind for both
        kind = F.ScalingType.RowWise
        left = left.expand(a.values.shape[0], 1).contiguous()
        right = right.expand(b.values.shape[0], 1).contiguous().t()
    options = {"output_dtype": torch.bfloat16, "use_fast_accum": fast_accumulation}
    return F.scaled_mm(a.values, b.values.t(), left, kind, right, kind, **options)  # type: ignore[arg-type]


def blockwise(a: ScaledTensor, b: ScaledTensor) -> torch.Tensor:
    """Return `a @ b.t()`, bfloat16, of float8 matrices with a scale for 1 x 128 numbers, or on the right for 128 x 128."""
    left, right = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise1x128
    if b.block == (128, 128):
        right = F.ScalingType.BlockWise128x128
    options = {"output_dtype": torch.bfloat16}
    return F.scaled_mm(a.values, b.values.t(), column_major(a), left, column_major(b), right, **options)  # type: ignore[arg-type]


def column_major(x: ScaledTensor) -> torch.Tensor:
    """Return scales of blocks of 128 as cuBLAS reads them.

    Of 1 x 128 numbers: rows x blocks, rows next to each other in memory. Of 128 x 128: blocks along what is summed over x
    blocks of rows, the first next to each other and padded to a multiple of 4. Source: "Scaling factors layouts" in cuBLAS's
    documentation.
    """
    if x.block == (1, 128):
        return x.scale.t().contiguous().t()
    # Without a multiple of 4, products of other lengths are silently wrong.
    return F.pad(x.scale, (0, -x.scale.shape[1] % 4)).t()


def microscaled(a: ScaledTensor, b: ScaledTensor) -> torch.Tensor:
    """Return `a @ b.t()`, bfloat16, of matrices with scales of blocks: mxfp8, or packed fp4 where there is an `outer` one."""
    swizzle = F.SwizzleType.SWIZZLE_32_4_4
    if a.outer is None or b.outer is None:
        kind = F.ScalingType.BlockWise1x32
        scales = [tiled(each.scale).to(torch.float8_e8m0fnu) for each in (a, b)]
        return F.scaled_mm(a.values, b.values.t(), scales[0], kind, scales[1], kind, swizzle, swizzle)
    kinds, swizzles = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise], [swizzle, F.SwizzleType.NO_SWIZZLE]
    left, right = ([tiled(_of_rows(each)).to(torch.float8_e4m3fn), each.outer] for each in (a, b))
    return F.scaled_mm(packed(a.values), packed(b.values).t(), left, kinds, right, kinds, swizzles, swizzles)  # type: ignore[arg-type]


def whole_numbers(a: ScaledTensor, b: ScaledTensor) -> torch.Tensor:
    """Return `a @ b.t()`, float32, of int8 matrices with scales of rows; sums are exact."""
    return int_mm(a.values.to(torch.int8), b.values.to(torch.int8).t()).float() * a.scale * b.scale.t()


def whole_numbers_in_float32(a: ScaledTensor, b: ScaledTensor) -> torch.Tensor:
    """Return the same, to the bit, by products of float32: so many at a time that each sum is one float32 holds exactly."""
    # oneDNN without VNNI saturates sums of int8 pairs in 16 bits; float32 holds so many of them exactly.
    parts = zip(a.values.float().split(_EXACT, 1), b.values.float().split(_EXACT, 1), strict=True)
    sums = [left @ right.t() for left, right in parts]
    if len(sums) > 1:
        sums = [functools.reduce(torch.add, (each.to(torch.int32) for each in sums)).float()]
    return sums[0] * a.scale * b.scale.t()


def packed(values: torch.Tensor) -> torch.Tensor:
    """Return e2m1 numbers as torch has them, two in a byte, the first in the low half."""
    codes = encode(values, E2M1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.float4_e2m1fn_x2)


def tiled(scale: torch.Tensor) -> torch.Tensor:
    """Return scales of rows x blocks as the kernel reads them: tiles of 128 x 4, and in these row i next to rows i + 32 * n."""
    rows, columns = _TILE
    padded = F.pad(scale, (0, -scale.shape[1] % columns, 0, -scale.shape[0] % rows))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // columns, columns)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def _of_rows(x: ScaledTensor) -> torch.Tensor:
    """The scales of blocks of one row each; blocks of several rows are repeated."""
    down = x.block[0] if x.block else 1
    return x.scale.repeat_interleave(down, 0)[: x.values.shape[0]]
