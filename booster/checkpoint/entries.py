"""Reading parts of a safetensors file into memory that is there already.

The package of that name maps the file into memory, and pages that were read count as the process's own until the file is
closed: a second copy of the weights, in the end. Here bytes are read into a buffer, or straight to where they belong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from booster.checkpoint.header import read_header
from booster.checkpoint.manifest import CheckpointError
from booster.foreign_files import open_regular

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
    if sys.byteorder != "little":
        raise CheckpointError(f"the numbers of {file} are little-endian, and this machine is not")
    try:
        with open_regular(file) as opened:
            places = read_header(opened)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error
    return {name: Entry(file, name, place.dtype, place.shape, place.start) for name, place in places.items()}


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


def read_entry(opened: IO[bytes], entry: Entry, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return the numbers of `entry`, read into a contiguous tensor of its shape; None makes one of its dtype on the host.

    opened: its file, open for reading in binary.
    """
    whole = torch.empty(entry.shape, dtype=entry.dtype) if into is None else into
    flat, start = whole.view(-1), 0
    for piece in pieces(opened, entry):
        flat[start : start + len(piece)].copy_(piece)
        start += len(piece)
    return whole
