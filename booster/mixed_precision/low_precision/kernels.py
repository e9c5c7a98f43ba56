"""Products on hardware that has the formats: torch's scaled matrix products, with operands filled up and laid out for them.

On an H100 fp8 and int8 agreed with their emulation. mxfp8 and nvfp4 need another GPU, which they have not met, and fp8 in
blocks has not met its own: their layouts are those that torch's tests and cuBLAS's documentation have. What runs on a CPU is
compared with the emulation there (float8 with scales of tensors and rows, int8).
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F

from booster.common.torch_internals.tensor_internals import int_mm
from booster.mixed_precision.hardware import alone, missing, sums_int8_exactly
from booster.mixed_precision.low_precision.operands import quantized
from booster.mixed_precision.low_precision.recipes import GemmConfig, HighPrecision, Recipe
from booster.number_formats.number_format import E2M1, encode
from booster.number_formats.scaling import ScaledTensor

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
    products = {"output": recipe.output, "input": recipe.input_gradient, "weight": recipe.weight_gradient}
    for name, how in products.items():
        if isinstance(how, HighPrecision):
            continue
        what = "the product of the output" if name == "output" else f"that of the {name}'s gradient"
        left, right = quantized(a, how.left, how, recipe), quantized(b, how.right, how, recipe)
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
