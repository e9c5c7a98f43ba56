"""The header of a safetensors file, read as strictly as the package of that name does.

Tensors lie one behind the other, with nothing between or behind them, so no two share bytes and no byte is unnamed; offsets
are whole numbers; no name stands twice. Source of the format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

import torch

from booster.common.untrusted_files import parse_json

# The names of dtypes in the safetensors format.
SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
}
PAIRS = torch.float4_e2m1fn_x2  # of which the format counts numbers, and torch pairs of them
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_LARGEST = 100_000_000  # bytes, as the package allows
_ROOM = 16 * 2**20  # bytes of memory that a header may take, and half of those that its file has
_MOST_BYTES = 2**63 - 1


class Extent(NamedTuple):
    """One tensor of the file: its dtype and shape, and where its bytes begin and end in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def header_length(first: bytes, size: int) -> int:
    """Return how many bytes the header has of a file of `size` bytes that begins with the 8 bytes `first`.

    Raises ValueError where it would not fit into the file, or be too large for what is in it.
    """
    length = int.from_bytes(first, "little")
    if len(first) != 8 or length > min(_LARGEST, size - 8) or length > _ROOM + size // 2:
        raise ValueError(f"a header of {length} bytes, in a file of {size}")
    return length


def read_header(file: IO[bytes]) -> dict[str, Extent]:
    """Return what the file, open at its beginning, holds, by name. Raises ValueError where its header is none."""
    size = os.fstat(file.fileno()).st_size
    return places_of(file.read(header_length(file.read(8), size)), size)


def places_of(text: bytes, size: int) -> dict[str, Extent]:
    """Return what the header `text` of a file of `size` bytes says. Raises ValueError where it is none."""
    if text[:1] != b"{":
        raise ValueError("its header is no JSON object")
    header = parse_json(text, _ROOM + size // 2)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is not of texts alone")
    for name in (*header, *metadata, *metadata.values()):
        name.encode()  # a UnicodeEncodeError, which is a ValueError, where it is half a character
    begin = 8 + len(text)
    places = {name: _place(name, entry, begin) for name, entry in header.items()}
    end = begin
    for name, place in sorted(places.items(), key=lambda item: item[1][2:]):
        if place.start != end:
            raise ValueError(
                f"{name} begins at byte {place.start - begin}, and what is before it ends at {end - begin}"
            )
        end = place.stop
    if end != size:
        raise ValueError(f"its tensors end at byte {end} of {size}")
    return places


def num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor; raises ValueError where no machine can address them."""
    taken = math.prod(shape) * dtype.itemsize
    if taken > _MOST_BYTES:
        raise ValueError(f"a tensor of shape {tuple(shape)}")
    return taken


def entry_for(dtype: torch.dtype, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    """Return what a header says of a tensor whose bytes lie from `start` to `stop` behind it."""
    told = [*shape[:-1], 2 * shape[-1]] if dtype == PAIRS and shape else [*shape]
    return {"dtype": SAFETENSORS_DTYPES[dtype], "shape": told, "data_offsets": [start, stop]}


def sizes(given: Any) -> tuple[int, ...]:
    """Return a shape or offsets as a tuple; raises ValueError for anything but a list of whole numbers from 0 on."""
    if not isinstance(given, list) or not all(type(size) is int and 0 <= size <= _MOST_BYTES for size in given):
        raise ValueError(f"{str(given)[:80]} are no sizes")
    if len(given) > 64:  # torch has no tensor of more dimensions
        raise ValueError(f"{len(given)} dimensions")
    return tuple(given)


def _place(name: str, entry: Any, begin: int) -> Extent:
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} has no dtype, shape and data_offsets")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{name} has the dtype {str(entry['dtype'])[:40]!r}, which booster does not read")
    shape, offsets = sizes(entry["shape"]), sizes(entry["data_offsets"])
    if dtype == PAIRS and shape:
        if shape[-1] % 2:
            raise ValueError(f"{name} has rows of {shape[-1]} numbers of 4 bits, which are no whole bytes")
        shape = (*shape[:-1], shape[-1] // 2)
    if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes(dtype, shape):
        raise ValueError(f"{name} lies at {list(offsets)}, and its {entry['dtype']} {list(shape)} take other bytes")
    return Extent(dtype, shape, begin + offsets[0], begin + offsets[1])
