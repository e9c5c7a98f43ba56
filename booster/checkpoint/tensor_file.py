"""Files of tensors in the safetensors format: written, and read and verified in one pass."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from booster.checkpoint.hashing import BLOCK, Hash, new_hash
from booster.checkpoint.header import PAIRS, SAFETENSORS_DTYPES, entry_for, header_length, num_bytes, places_of
from booster.checkpoint.manifest import CheckpointError, File, Tensor
from booster.common.untrusted_files import open_regular

_ALIGNMENT = 8  # bytes, of the header; data follow at once


def write_tensors(
    path: Path,
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    tensor_of: Callable[[str], torch.Tensor],
) -> File:
    """Write a new safetensors file and wait until the disk has it; returns its size and hash.

    tensor_of: called once for each key of `entries`, in order, for a tensor of that dtype and shape on any device.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, (dtype, shape) in entries.items():
        start, end = end, end + num_bytes(dtype, shape)
        header[key] = entry_for(dtype, shape, start, end)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb") as file:
        digest = new_hash()
        _write(file, memoryview(len(text).to_bytes(8, "little") + text), digest)
        for key in entries:
            tensor = tensor_of(key).detach().cpu().resolve_conj().resolve_neg().contiguous()
            _write(file, bytes_of(tensor), digest)
        file.flush()
        os.fsync(file.fileno())
        return File(file.tell(), digest.hexdigest())


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype that a manifest's entry names."""
    dtype = getattr(torch, tensor.dtype, None)
    if dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"the manifest names the dtype {tensor.dtype!r}, which this torch does not have")
    return dtype


def fits(saved: torch.dtype, own: torch.dtype) -> bool:
    """Return whether numbers of dtype `saved` may be loaded into `own`: as they are, or rounded to another precision."""
    return saved == own or (saved.is_floating_point and own.is_floating_point and PAIRS not in (saved, own))


def read_tensors(path: Path, expected: File, targets: Mapping[str, torch.Tensor]) -> str | None:
    """Read whole tensors of a safetensors file into `targets`, comparing every byte of the file with its hash meanwhile.

    targets: by their keys in the file, contiguous and in host memory; they hold anything where the file is damaged. Returns
    what is wrong with the file, or None. The file is read once, a block at a time.
    """
    with open_regular(path, buffered=False) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            return f"{path.name} has {size} bytes, and {expected.bytes} were written"
        stream = _Stream(file, new_hash(expected.hash))
        try:
            for start, end, key in _places(stream, size, targets):
                stream.skip_to(start)
                stream.read_into(bytes_of(targets[key]))
                if stream.position != end:
                    raise ValueError(f"{key} has {end - start} bytes")
            stream.skip_to(size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{path.name} is not the file that was written: {error!r}"
    return None if stream.digest.hexdigest() == expected.digest else f"{path.name} holds other bytes than were written"


class _Stream:
    """A file that is hashed as it is read, from its beginning."""

    def __init__(self, file: IO[bytes], digest: Hash) -> None:
        self._file = file
        self.digest = digest
        self.position = 0
        self._scratch: memoryview | None = None

    def read(self, num: int) -> bytes:
        data = bytearray(num)
        self.read_into(memoryview(data))
        return bytes(data)

    def skip_to(self, position: int) -> None:
        if position < self.position:
            raise ValueError("two tensors share bytes")
        if position > self.position and self._scratch is None:
            self._scratch = memoryview(bytearray(BLOCK))
        while position > self.position:
            assert self._scratch is not None
            self.read_into(self._scratch[: min(BLOCK, position - self.position)])

    def read_into(self, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            num = self._file.readinto(memory[done : done + BLOCK])  # type: ignore[attr-defined]
            if not num:
                raise ValueError("it ends early")
            self.digest.update(memory[done : done + num])
            done += num
        self.position += done


def _places(stream: _Stream, size: int, targets: Mapping[str, torch.Tensor]) -> list[tuple[int, int, str]]:
    """Return where the bytes of `targets` begin and end in the file, in order, from the header that `stream` is at.

    The header is not verified yet, so nothing in it is believed but what fits.
    """
    if not targets:  # then it may be a file of another kind
        return []
    length = header_length(stream.read(min(8, size)), size)
    there = places_of(stream.read(length), size)
    places = []
    for key, tensor in targets.items():
        place = there[key]
        if (place.dtype, place.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise ValueError(f"{key} is {place.dtype} {list(place.shape)}")
        places.append((place.start, place.stop, key))
    return sorted(places)


def _write(file: IO[bytes], data: memoryview, digest: Hash) -> None:
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        digest.update(block)
        file.write(block)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, which the view keeps. Not through numpy: torch runs without it."""
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
