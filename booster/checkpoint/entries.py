"""Reading parts of a safetensors file into memory that is there already.

The package of that name maps the file into memory, and pages that were read count as the process's own until the file is
closed: a second copy of the weights, in the end. Here bytes are read into a buffer, or straight to where they belong.
Source of the format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from booster.checkpoint.manifest import CheckpointError
from booster.checkpoint.tensor_file import SAFETENSORS_DTYPES

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # bytes, as the package allows
_BUFFER = 2**22  # bytes


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its dtype and shape, and where its bytes begin."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def entries_of(file: Path) -> dict[str, Entry]:
    """Return what the safetensors file `file` holds, by name; raises CheckpointError where its header is none, or wrong."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(_LARGEST_HEADER, file.stat().st_size):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        size = file.stat().st_size - 8 - length
        header.pop("__metadata__", None)
        return {name: _entry(file, name, given, 8 + length, size) for name, given in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


def pieces(opened: IO[bytes], entry: Entry, unit: int = 1) -> Iterator[torch.Tensor]:
    """Yield the numbers of `entry`, 1-dim, in pieces of a few MB that are overwritten by the next; multiples of `unit`.

    opened: its file, open for reading in binary. unit: as many numbers as belong together, such as those of a row.
    """
    width = entry.dtype.itemsize
    step = max(1, _BUFFER // (width * unit)) * unit
    buffer = bytearray(min(step, entry.numel) * width)
    opened.seek(entry.start)
    for start in range(0, entry.numel, step):
        view = memoryview(buffer)[: min(step, entry.numel - start) * width]
        if opened.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise CheckpointError(f"{entry.file} ended while {entry.name} was read")
        yield torch.frombuffer(view, dtype=entry.dtype)


def _entry(file: Path, name: str, given: Any, offset: int, size: int) -> Entry:
    start, stop = given["data_offsets"]
    entry = Entry(file, name, _DTYPES[given["dtype"]], tuple(given["shape"]), offset + start)
    if not 0 <= start <= stop <= size or stop - start != entry.numel * entry.dtype.itemsize:
        raise ValueError(f"{name} lies at {start} to {stop} of {size} bytes")
    if sys.byteorder != "little":
        raise ValueError("its numbers are little-endian, and this machine is not")
    return entry
