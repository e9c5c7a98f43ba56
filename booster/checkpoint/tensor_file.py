"""Safetensors files: what one holds, its tensors read in parts or whole and verified, and new ones written.

The `safetensors` package checks headers: each byte of the data belongs to one tensor. Bytes are read and written here instead:

- The package maps a file into memory. Pages that were read count as the process's until the file is closed, in the end a second
  copy of the weights; and a file that another process cuts short meanwhile ends this one.
- It writes tensors that are all in memory at once.
- It cannot hash what it reads, so `b.load` would read every file once more.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from booster.checkpoint.manifest import (
    BLOCK,
    PAIRS,
    SAFETENSORS_DTYPES,
    CheckpointError,
    Chunk,
    File,
    new_hash,
    num_bytes,
)
from booster.checkpoint.state_tree import can_be_read_into
from booster.common.untrusted_files import open_regular, parse_json

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_LARGEST = 100_000_000  # bytes of a header, as the package allows
_ROOM = 16 * 2**20  # bytes of memory that a header may take, and half of those that its file has
_BUFFER = 2**22  # bytes of a tensor in memory at a time, where it is read in pieces
_ALIGNMENT = 8  # bytes, of the header; data follow at once


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Attributes:
        file: the safetensors file.
        name: its key there.
        dtype: torch's.
        shape: in elements of `dtype`.
        start: where its bytes begin, from the beginning of the file.
    """

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def need_safetensors() -> None:
    """Raise ImportError, with the line that installs it, where the package that checks headers is missing."""
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "files of weights and checkpoints need safetensors: pip install 'safetensors>=0.8'"
        ) from error


def entries_of(file: Path) -> dict[str, Entry]:
    """Return what the safetensors file `file` holds, by name; raises CheckpointError where its header is none, or wrong."""
    need_safetensors()
    from safetensors import SafetensorError, safe_open

    if sys.byteorder != "little":
        raise CheckpointError(f"the numbers of {file} are little-endian, and this machine is not")
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size - 8, _LARGEST):
                raise ValueError(f"its header of {length} bytes does not fit into {size}")
            # Read once more here, since the package bounds no memory and takes the last of two tensors of one name.
            header = parse_json(opened.read(length), _ROOM + size // 2)
        with safe_open(str(file), "pt"):
            header.pop("__metadata__", None)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error
    return {name: _entry(file, name, said, 8 + length) for name, said in header.items()}


def _entry(file: Path, name: str, said: Mapping[str, Any], begin: int) -> Entry:
    """Return one tensor of a header that the package has taken."""
    if said["dtype"] not in _DTYPES:
        raise CheckpointError(f"{file}: {name} has the dtype {said['dtype'][:40]!r}, which booster does not read")
    dtype, shape = _DTYPES[said["dtype"]], said["shape"]
    if dtype == PAIRS and shape:  # the format counts numbers of 4 bits, torch pairs of them
        shape = [*shape[:-1], shape[-1] // 2]
    return Entry(file, name, dtype, tuple(shape), begin + said["data_offsets"][0])


class Headers:
    """The headers of the safetensors files in `folder`, each read when it is first asked for, and once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, dict[str, Entry]] = {}

    def entry(self, chunk: Chunk, dtype: torch.dtype) -> Entry:
        """Return the entry that holds `chunk`; raises CheckpointError where its file holds another."""
        path = self._folder / chunk.file
        if chunk.file not in self._read:
            self._read[chunk.file] = entries_of(path)
        entry = self._read[chunk.file].get(chunk.key)
        if entry is None or (entry.dtype, entry.shape) != (dtype, chunk.sizes):
            holds = "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise CheckpointError(f"{path} holds {holds} as {chunk.key}, and should hold {dtype} {list(chunk.sizes)}")
        return entry


# ---- reading ----


def pieces(opened: IO[bytes], entry: Entry, unit: int = 1) -> Iterator[torch.Tensor]:
    """Yield the numbers of `entry`, 1-dim, in pieces of a few MB that are overwritten by the next; multiples of `unit`.

    opened: its file, open for reading in binary. unit: as many numbers as belong together, such as those of a row.
    """
    width = entry.dtype.itemsize
    step = max(1, _BUFFER // (width * unit)) * unit
    buffer = bytearray(min(step, entry.numel) * width)
    opened.seek(entry.start)
    for start in range(0, entry.numel, step):
        # One buffer for all pieces: a file may be larger than memory.
        view = memoryview(buffer)[: min(step, entry.numel - start) * width]
        fill_from(opened, view, entry.file, entry.name)
        yield torch.frombuffer(view, dtype=entry.dtype)


def fill_from(opened: IO[bytes], memory: memoryview, file: Path, name: str) -> None:
    """Read bytes of the tensor `name` from where `opened` is; raises CheckpointError where `file` ends before."""
    if opened.readinto(memory) != len(memory):  # type: ignore[attr-defined]
        raise CheckpointError(f"{file} ended while {name} was read")


def read_entry(opened: IO[bytes], entry: Entry, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return the numbers of `entry`, read from `opened` into a contiguous tensor of its shape; None makes one on the host."""
    whole = torch.empty(entry.shape, dtype=entry.dtype) if into is None else into
    if can_be_read_into(whole, entry.shape, entry.dtype):
        opened.seek(entry.start)
        fill_from(opened, bytes_of(whole), entry.file, entry.name)
        return whole
    flat, start = whole.view(-1), 0
    for piece in pieces(opened, entry):
        flat[start : start + len(piece)].copy_(piece)
        start += len(piece)
    return whole


def read_box(opened: IO[bytes], entry: Entry, box: Sequence[slice], into: torch.Tensor) -> None:
    """Read a box of `entry`, a slice for each dimension, into a tensor of its shape; `opened` is its file."""
    if not box:
        into.copy_(read_entry(opened, entry))
        return
    of_row, within, done = entry.shape[1:], (slice(None), *box[1:]), 0
    row = torch.Size(of_row).numel()
    shape = (box[0].stop - box[0].start, *of_row)
    rows = replace(entry, shape=shape, start=entry.start + box[0].start * row * entry.dtype.itemsize)
    # Straight into its memory where the box has whole rows and the same dtype, else some MB at a time.
    if tuple(into.shape) == shape and into.is_contiguous():
        read_entry(opened, rows, into)
        return
    for piece in pieces(opened, rows, max(1, row)):
        block = piece.view(-1, *of_row)[within]
        into[done : done + len(block)].copy_(block)
        done += len(block)


def read_verified(path: Path, expected: File, targets: Mapping[str, torch.Tensor]) -> str | None:
    """Read whole tensors of a file into `targets`, comparing every byte of the file with its hash meanwhile.

    targets: by their keys in the file, contiguous and in host memory; they hold anything where the file is damaged. Returns
    what is wrong with the file, or None. A file without targets may be of any kind.
    """
    with open_regular(path, buffered=False) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            return f"{path.name} has {size} bytes, and {expected.bytes} were written"
        # The file is read once, a block at a time.
        digest, scratch, position = new_hash(), memoryview(bytearray(BLOCK)), 0

        def read_into(memory: memoryview) -> None:
            done = 0
            while done < len(memory):
                # A block is hashed while it is still in the processor's cache.
                num = file.readinto(memory[done : done + BLOCK])  # type: ignore[attr-defined]
                if not num:
                    raise ValueError("it ends early")
                digest.update(memory[done : done + num])
                done += num

        def skip(number: int) -> None:
            for done in range(0, number, BLOCK):
                read_into(scratch[: min(BLOCK, number - done)])

        try:
            entries = entries_of(path) if targets else {}
            for entry in sorted((entries[key] for key in targets), key=lambda entry: (entry.start, entry.numel)):
                target = targets[entry.name]
                if (entry.dtype, entry.shape) != (target.dtype, tuple(target.shape)):
                    raise ValueError(f"{entry.name} is {entry.dtype} {list(entry.shape)}")
                skip(entry.start - position)
                read_into(bytes_of(target))
                position = entry.start + entry.num_bytes
            skip(size - position)
        except (ValueError, KeyError, CheckpointError) as error:
            return f"{path.name} is not the file that was written: {error!r}"
    return None if digest.hexdigest() == expected.digest else f"{path.name} holds other bytes than were written"


# ---- writing ----


def write_tensors(
    path: Path, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensor_of: Callable[[str], torch.Tensor]
) -> File:
    """Write a new safetensors file, wait until the disk has it, and return its size and hash. tensor_of: called in order of
    `entries`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, (dtype, shape) in entries.items():
        start, end = end, end + num_bytes(dtype, shape)
        counted = [*shape[:-1], 2 * shape[-1]] if dtype == PAIRS and shape else [*shape]
        header[key] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": counted, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Numbers begin at a multiple of the alignment, so that they can be mapped.
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb") as file:
        digest = new_hash()

        def write(data: memoryview) -> None:
            for start in range(0, len(data), BLOCK):
                digest.update(data[start : start + BLOCK])
                file.write(data[start : start + BLOCK])

        write(memoryview(len(text).to_bytes(8, "little") + text))
        for key in entries:
            write(bytes_of(tensor_of(key).detach().cpu().resolve_conj().resolve_neg().contiguous()))
        file.flush()
        os.fsync(file.fileno())
        return File(file.tell(), digest.hexdigest())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, which the view keeps. Not through numpy: torch runs without it."""
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
