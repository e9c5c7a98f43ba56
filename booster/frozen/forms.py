"""The forms in which a frozen matrix is stored: codes of 4 or 8 bits, and a float32 scale for each block of a row.

A row is one record of bytes: its codes, then its scales. So a weight is one uint8 tensor with rows that are whole in
themselves: plugins divide it along the rows, and what casts floating tensors leaves it alone, scales included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from booster.number_formats.formats import E4M3, INT8, decode_nf4, encode_nf4
from booster.number_formats.scaling import Scaling, largest_under, scale_to

_AT_ONCE = 2**18  # numbers that are wide at one time while a matrix is packed or unpacked
_TINY = 2.0**-126
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Form:
    """A form. bits: of a code. block: how many numbers of a row, one after another, share a scale; the last may be fewer.

    "int8" and "fp8" are whole numbers and e4m3 numbers times the scale, "nf4" is one of sixteen levels times the largest
    magnitude of the block.
    """

    name: Literal["int8", "fp8", "nf4"]
    bits: int
    block: int

    def row_bytes(self, columns: int) -> int:
        """Return how many bytes a row of `columns` numbers takes, with its scales."""
        return self._code_bytes(columns) + -(-columns // self.block) * _SCALE_BYTES

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the floating matrix `rows`, (m, n), as uint8 of shape (m, row_bytes(n)).

        Raises ValueError for inf or NaN, which have no code. Cost: a few float32 copies of 2**18 numbers at a time.
        """
        packed = rows.new_empty(rows.shape[0], self.row_bytes(rows.shape[1]), dtype=torch.uint8)
        for start, stop in self._pieces(*rows.shape):
            packed[start:stop] = self._pack(rows[start:stop].float())
        return packed

    def unpack(self, packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix of `columns` columns that `pack` made `packed` of, in `dtype`; codes times scales in float32.

        Cost: a few float32 copies of 2**18 numbers at a time.
        """
        if packed.shape[0] * columns <= _AT_ONCE:
            return self._unpack(packed, columns).to(dtype)
        rows = packed.new_empty(packed.shape[0], columns, dtype=dtype)
        for start, stop in self._pieces(packed.shape[0], columns):
            rows[start:stop] = self._unpack(packed[start:stop], columns)
        return rows

    def __str__(self) -> str:
        return self.name

    # ---------------------------------------------------------------------- inside

    def _pack(self, wide: torch.Tensor) -> torch.Tensor:
        if self.name == "nf4":
            scale = largest_under(wide, (1, self.block)).clamp(min=_TINY)
            codes = encode_nf4(wide / self._of_each(scale, wide.shape[1]))
        else:
            scaled = scale_to(wide, E4M3 if self.name == "fp8" else INT8, Scaling((1, self.block)))
            scale = scaled.scale
            codes = scaled.values.to(torch.float8_e4m3fn if self.name == "fp8" else torch.int8).view(torch.uint8)
        if not bool(torch.isfinite(scale).all()):
            raise ValueError(f"{self.name} has no code for inf or NaN, and there is one among these weights")
        return torch.cat([codes, scale.contiguous().view(torch.uint8)], 1)

    def _unpack(self, packed: torch.Tensor, columns: int) -> torch.Tensor:
        split = self._code_bytes(columns)
        codes = packed[:, :split]
        # Copied, because a view of wider numbers wants them to begin at a multiple of their size.
        scale = packed[:, split:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        if self.name == "nf4":
            values = decode_nf4(codes, columns)
        else:
            values = codes.view(torch.float8_e4m3fn if self.name == "fp8" else torch.int8).float()
        return values * self._of_each(scale, columns)

    def _of_each(self, scale: torch.Tensor, columns: int) -> torch.Tensor:
        return scale.repeat_interleave(self.block, 1)[:, :columns]

    def _code_bytes(self, columns: int) -> int:
        return -(-columns * self.bits // 8)

    def _pieces(self, rows: int, columns: int) -> Iterator[tuple[int, int]]:
        step = max(1, _AT_ONCE // max(1, columns))
        for start in range(0, rows, step):
            yield start, min(start + step, rows)


FORMS = {form.name: form for form in (Form("int8", 8, 128), Form("fp8", 8, 128), Form("nf4", 4, 64))}
