"""Numbers as bytes to be sent: e4m3 under one scale, decoded to numbers of which the same scale and bytes are made again."""

from __future__ import annotations

import torch

from booster.number_formats.formats import E4M3
from booster.number_formats.scaling import scale_of


def encode_tensorwise(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return `x` in e4m3, as `scale_to(..., E4M3, Scaling("tensor"))` rounds a tensor whose largest magnitude is `largest`.

    x: any shape, maybe a part of that tensor. largest: float32, of shape (); where it is inf or NaN all becomes NaN.
    """
    return (x.float() / scale_of(largest / E4M3.largest)).clamp(E4M3.lowest, E4M3.largest).to(torch.float8_e4m3fn)


def decode_tensorwise(values: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return in `dtype` the numbers that `encode_tensorwise` made `values` of; of these it makes the same again.

    That is: `scale_to` of the result has the scale and the bytes of `scale_to` of the original, bit for bit. For a number a
    and its scale s, a / 448 rounded, 448 s rounded and divided gives s again: it would not where 7 s lies half-way between two
    numbers, but such an s is no quotient by 448.
    dtype: float32, or bfloat16 where it holds `largest`; `largest` above 2**-110, below which products with a scale underflow.
    """
    return values.float().mul_(scale_of(largest / E4M3.largest)).to(dtype)
