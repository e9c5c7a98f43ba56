"""Matrices rounded by Triton kernels, in the place of torch's operations, where a trial of them gives the same bits."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from booster.common.torch_internals.tensor_internals import is_fake_kind
from booster.kernels import switches
from booster.number_formats.number_format import E2M1, E4M3, E5M2, INT8, NumberFormat, noise_of
from booster.number_formats.scaling import SIGNS, ScaledTensor, Scaling, rotated, scale_to

_logger = logging.getLogger(__name__)
TAKEN_ON: tuple[str, ...] = ("cuda",)
"""Types of devices on which matrices are rounded by kernels, outside of compiled graphs."""
_FORMATS = (E4M3, E5M2, INT8)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MOST_PARTS = 1024  # of which every program of the second launch reads the largest magnitudes
_BLOCK = 256
FOURS_TILE, FOURS_WARPS = (32, 64), 8
"""Rows and columns of a tile of numbers in four bits, and by how many warps it is written: 4 put 96 bytes of a thread aside."""


def by_kernels(
    x: torch.Tensor,
    target: NumberFormat,
    scaling: Scaling,
    *,
    rotates: bool = False,
    stochastic: bool = False,
    delayed: bool = False,
) -> bool:
    """Whether the matrix `x` is rounded to `target` under `scaling` by kernels here and now. delayed: under a given scale."""
    return (
        x.device.type in TAKEN_ON
        and not torch.compiler.is_compiling()
        # A subclass, as a DTensor or a fake tensor, has an address that kernels cannot read.
        and type(x) in (torch.Tensor, nn.Parameter)
        and not is_fake_kind(type(x))
        and x.dtype in _DTYPES
        and x.numel() > 0
        and _knows(target, scaling, rotates or stochastic)
        # Tried once in a process: the bytes must be those of torch's operations.
        and _differs(target, scaling, x.device, rotates, stochastic, delayed) is None
    )


def quantized(
    x: torch.Tensor,
    target: NumberFormat,
    scaling: Scaling,
    multiple: int,
    *,
    transposed: bool = False,
    given: torch.Tensor | None = None,
    largest: torch.Tensor | None = None,
) -> tuple[ScaledTensor, ScaledTensor | None]:
    """Return the matrix `x` in `target`, as bytes row by row, with columns of zeros until they are a `multiple`.

    transposed: and its transpose, likewise, under the same scales, which are one for all, or of blocks as high as wide.
    given: one scale for all of it, of shape (), that is taken where it is above 0, and numbers too large are cut off.
    largest: then the largest magnitude is noted there, unless it is not finite.
    Cost: two launches, of blocks one, with `given` three, of which the first reads nothing where the scale is known."""
    from booster.kernels.launch_cache import current
    from booster.kernels.matrix_kernels import BLOCKS, ROW, TENSOR, largest_of, track_largest, write

    if not (x.is_contiguous() or x.t().is_contiguous()):
        x = x.contiguous()
    (rows, columns), over, dtype = x.shape, scaling.over, target.dtype
    assert dtype is not None
    kind = TENSOR if over == "tensor" else ROW if over == "row" else BLOCKS
    down, across = over if isinstance(over, tuple) else (1, 1)
    filled, transposed_filled = columns + -columns % multiple, rows + -rows % multiple
    # Rows or columns alone would be read with strides; a tile reads both in whole cache lines.
    height, width = tile_of(kind, down)
    new: Any = functools.partial(torch.empty, device=x.device)
    values = new(rows, filled, dtype=dtype)
    other = new(columns, transposed_filled, dtype=dtype) if transposed else None
    shape = {TENSOR: (), ROW: (rows, 1), BLOCKS: (-(-rows // down), -(-filled // across))}[kind]
    scale = new(shape, dtype=torch.float32)
    above = -(-rows // height)
    # Few rows are divided among more programs, or a wide matrix would be read by a handful.
    splits = max(1, min(-(-columns // width), _MOST_PARTS // above))
    tiles = -(-max(rows, transposed_filled if transposed else 0) // height) * -(-filled // width)
    # A block finds its largest magnitude in the tile that it rounds, without a launch before it.
    partials = None if kind == BLOCKS else new(above * splits if kind == TENSOR else splits * rows, dtype=torch.int32)
    seen = None if given is None else new(tiles, dtype=torch.int32)
    layout = rows, columns, x.stride(0), x.stride(1)
    sizes = {"DTYPE": _DTYPES[x.dtype], "BM": height, "BN": width, "enable_fp_fusion": False}
    x = x.detach()
    with current(x.device):
        if partials is not None:
            largest_of[(above * splits,)](x, partials, given, *layout, splits, KIND=kind, **sizes)
        bytes_of = values.view(torch.int8), None if other is None else other.view(torch.int8)
        tensors, parts = (x, *bytes_of, scale, partials, given, seen), above * splits if kind == TENSOR else splits
        args = *tensors, rows, columns, filled, transposed_filled, *layout[2:], parts
        form = {"KIND": kind, "POWER": scaling.scale == "power_of_two", "DOWN": down, "ACROSS": across}
        write[(tiles,)](*args, BLOCK=_BLOCK, num_warps=warps_of(kind, down), **form, **form_of(target), **sizes)
        if given is not None:
            track_largest[(1,)](seen, tiles, given, largest, scale, LARGEST=target.largest, BLOCK=_BLOCK)
    made = ScaledTensor(values, scale, None, scaling)
    return made, None if other is None else replace(made, values=other, scale=scale.t().contiguous())


def quantized_to_e2m1(
    x: torch.Tensor, scaling: Scaling, multiple: int, *, rotates: bool = False, stochastic: bool = False
) -> ScaledTensor:
    """Return the matrix `x` in e2m1 under e4m3 scales of blocks, with columns of zeros until they are a `multiple` of 16.

    rotates: after `scaling.rotated`. stochastic: with the noise of what is rounded, see `noise_of`. Numbers are in bfloat16.
    """
    from booster.kernels.launch_cache import current
    from booster.kernels.matrix_kernels import largest_of_rotated, write_fours

    if not (x.is_contiguous() or x.t().is_contiguous()):
        x = x.contiguous()
    (rows, columns), over = x.shape, scaling.over
    assert isinstance(over, tuple)
    down = over[0]
    filled = columns + -columns % multiple
    height, width = FOURS_TILE
    new: Any = functools.partial(torch.empty, device=x.device)
    values = new(rows, filled, dtype=torch.bfloat16)
    scale, outer = new(-(-rows // down), filled // 16, dtype=torch.float32), new((), dtype=torch.float32)
    above = -(-rows // height)
    splits = max(1, min(-(-columns // width), _MOST_PARTS // above))
    parts = above * splits
    partials = new(parts, dtype=torch.int32)
    # Noise is a hash of the numbers, so that a recomputation draws the same.
    sums = torch.empty_like(partials) if stochastic else None
    layout = x.stride(0), x.stride(1)
    sizes = {"DTYPE": _DTYPES[x.dtype], "BM": height, "BN": width, "enable_fp_fusion": False}
    # One bit for each sign of the Hadamard rotation: a constant of the kernel, not a tensor to load.
    sizes["SIGNS"] = sum(1 << place for place, sign in enumerate(SIGNS) if sign < 0) if rotates else -1
    x = x.detach()
    with current(x.device):
        # Two launches, both of which read the matrix.
        largest_of_rotated[(parts,)](x, partials, sums, rows, columns, *layout, splits, **sizes)
        args = x, values, scale, outer, partials, sums, rows, columns, filled, *layout, parts
        write_fours[(above * -(-filled // width),)](*args, DOWN=down, BLOCK=_BLOCK, num_warps=FOURS_WARPS, **sizes)
    return ScaledTensor(values, scale, outer, scaling)


def warps_of(kind: int, down: int) -> int:
    """Return by how many warps `write` is run: by 4 a tile of 64 rows puts 600 bytes of a thread aside."""
    rows, columns = tile_of(kind, down)
    return rows * columns // 1024


def tile_of(kind: int, down: int) -> tuple[int, int]:
    """Rows and columns of a tile; blocks that are as high as wide are one each."""
    from booster.kernels.matrix_kernels import BLOCKS

    return (128, 128) if down > 1 else (32, 128) if kind == BLOCKS else (64, 128)


def form_of(target: NumberFormat) -> dict[str, Any]:
    """A format as constants of kernels."""
    mantissa, bias = target.mantissa_bits if target.exponent_bits else 0, target.bias
    form: dict[str, Any] = {"MANTISSA": mantissa, "OFFSET": ((bias - 127) << 23) + (1 << (22 - mantissa)) - 1}
    form |= {"SUBNORMAL": 2.0 ** (24 - bias - mantissa), "NORMAL": target.smallest_normal, "LARGEST": target.largest}
    return form


def _knows(target: NumberFormat, scaling: Scaling, more: bool = False) -> bool:
    """more: rotated, or stochastic."""
    over = scaling.over
    if target == E2M1 or more:
        return target == E2M1 and scaling.scale == "e4m3" and over in ((1, 16), (16, 16))
    blocks = isinstance(over, tuple) and (over == (128, 128) or (over[0] == 1 and over[1] in (16, 32, 64, 128)))
    return target in _FORMATS and scaling.scale != "e4m3" and (blocks or not isinstance(over, tuple))


@functools.cache
def _differs(
    target: NumberFormat,
    scaling: Scaling,
    device: torch.device,
    rotates: bool = False,
    stochastic: bool = False,
    delayed: bool = False,
) -> str | None:
    """What is not as torch rounds on `device`, tried once; None: nothing. The first time it differs a WARNING says it."""
    if find_spec("triton") is None:
        _logger.info("Triton is not installed: matrices are rounded by torch's operations")
        return "Triton is not installed"
    over = "blocks" if isinstance(scaling.over, tuple) else scaling.over
    off = switches.off(f"matrices {target} {over}", *["matrices delayed"] * delayed)
    if off is not None:
        _logger.info("matrices in %s under %s are rounded by torch's operations: %s", target, scaling, off)
        return off
    try:
        difference = _tried(target, scaling, device, rotates, stochastic, delayed)
    except Exception as error:  # whatever it is, matrices of a user are not to meet it
        from booster.kernels.launch_cache import failure

        difference = failure(error, device)
    if difference is not None:
        said = "matrices in %s under %s are rounded by torch's operations on %s, and not by Triton kernels: %s"
        _logger.warning(said, target, scaling, device, difference)
    return difference


def _tried(
    target: NumberFormat, scaling: Scaling, device: torch.device, rotates: bool, stochastic: bool, delayed: bool
) -> str | None:
    # Kernels write the transpose as well where scales are the same both ways.
    turns = scaling.over == "tensor" or (isinstance(scaling.over, tuple) and scaling.over[0] == scaling.over[1])
    draw = torch.Generator().manual_seed(0)
    for dtype in _DTYPES:
        x = torch.randn(150, 144, generator=draw, device="cpu", dtype=torch.float32)
        x *= torch.logspace(-6, 3, 144, device="cpu", dtype=torch.float32)
        x[40:42] = 0.0
        x[80, 7], x[81, 100] = torch.inf, torch.nan
        x = x.to(device, dtype)
        for what, each in (("", x), (" of a transpose", x.t()), (" of finite numbers", x.nan_to_num(0.0, 3.0))):
            if target == E2M1:
                laid = F.pad(each, (0, -each.shape[1] % 32))
                laid = rotated(laid.float()) if rotates else laid
                expected = scale_to(laid, target, scaling, noise=noise_of(laid) if stochastic else None)
                made = quantized_to_e2m1(each, scaling, 32, rotates=rotates, stochastic=stochastic)
            else:
                expected = scale_to(F.pad(each, (0, -each.shape[1] % 32)), target, scaling)
                made, other = quantized(each, target, scaling, 32, transposed=turns)
                if other is not None and not _is_turned(other, made, each.shape):
                    return f"bytes of a transpose, written with{what}, {dtype}, differ"
            if not same(made, expected, target):
                return f"bytes or scales{what}, {dtype}, differ"
            if delayed and not all(_is_same_under_given(each, target, scaling, start) for start in (0.0, 0.25)):
                return f"bytes, scales or magnitudes under a scale that is given{what}, {dtype}, differ"
    return None


def _is_turned(other: ScaledTensor, plain: ScaledTensor, shape: torch.Size) -> bool:
    """Whether `other` has the bytes of `plain`, a matrix of `shape` before it was filled up, turned, and then zeros."""
    (rows, columns), (transposed, values) = shape, (each.values.view(torch.uint8) for each in (other, plain))
    if not torch.equal(transposed[:, :rows], values[:, :columns].t()):
        return False
    finite = bool(torch.isfinite(other.scale).all())
    return not finite or (torch.equal(other.scale, plain.scale.t()) and not transposed[:, rows:].any())


def _is_same_under_given(x: torch.Tensor, target: NumberFormat, scaling: Scaling, start: float) -> bool:
    given, largest = (torch.full((), value, dtype=torch.float32, device=x.device) for value in (start, 1e-9))
    made, _ = quantized(x, target, scaling, 1, given=given, largest=largest)
    finite = bool(torch.isfinite(x).all())
    expected = scale_to(x, target, scaling, scale=given if start else None)
    noted = x.abs().amax().float() if finite else torch.full_like(largest, 1e-9)
    meant = expected.scale if finite else torch.full_like(given, torch.nan)
    return torch.equal(largest, noted) and same(made, replace(expected, scale=meant), target)


def same(one: ScaledTensor, other: ScaledTensor, target: NumberFormat) -> bool:
    """Whether two matrices in `target` have the same bits, where their scales are finite, and the same scales."""
    wide = [each.values.float() * torch.isfinite(each.scale_of_each()) for each in (one, other)]
    wide = [each + 0.0 if target is INT8 else each for each in wide]  # where a zero of floating numbers has no sign yet
    scales = [each.scale.nan_to_num(-1.0) for each in (one, other)]
    unit = torch.ones((), dtype=torch.float32, device=one.scale.device)
    outer = [unit if each.outer is None else each.outer.nan_to_num(-1.0, -2.0) for each in (one, other)]
    return (
        torch.equal(*scales)
        and torch.equal(*outer)
        and torch.equal(*(each.nan_to_num(0.0).view(torch.int32) for each in wide))
    )
