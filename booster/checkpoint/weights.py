"""Weights alone, in the files that other programs read: safetensors or `torch.save`, whole or in shards with an index.

Reading parts of a safetensors file into memory that is there already.

The package of that name maps the file into memory, and pages that were read count as the process's own until the file is
closed: a second copy of the weights, in the end. Here bytes are read into a buffer, or straight to where they belong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from booster.checkpoint.folder import write_synced
from booster.checkpoint.header import read_header
from booster.checkpoint.layout import can_be_read_into, empty_like_whole, placed_like
from booster.checkpoint.manifest import CheckpointError, Chunk, Manifest, Tensor
from booster.checkpoint.tensor_file import bytes_of, dtype_of, fits, write_tensors
from booster.checkpoint.torch_file import read_torch_file
from booster.common.untrusted_files import ROOM, names_a_regular_file, open_regular, parse_json, read_regular
from booster.interface.model import ModelWrapper
from booster.model.modules import bare, places_of

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
            raise _ended(entry)
        yield torch.frombuffer(view, dtype=entry.dtype)


def _ended(entry: Entry) -> CheckpointError:
    return CheckpointError(f"{entry.file} ended while {entry.name} was read")


def read_entry(opened: IO[bytes], entry: Entry, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return the numbers of `entry`, read into a contiguous tensor of its shape; None makes one of its dtype on the host.

    opened: its file, open for reading in binary.
    """
    whole = torch.empty(entry.shape, dtype=entry.dtype) if into is None else into
    if can_be_read_into(whole, entry.shape, entry.dtype):
        opened.seek(entry.start)
        if opened.readinto(bytes_of(whole)) != whole.nbytes:  # type: ignore[attr-defined]
            raise _ended(entry)
        return whole
    flat, start = whole.view(-1), 0
    for piece in pieces(opened, entry):
        flat[start : start + len(piece)].copy_(piece)
        start += len(piece)
    return whole


def read_box(opened: IO[bytes], entry: Entry, box: Sequence[slice], into: torch.Tensor) -> None:
    """Read the part of `entry` that lies in `box`, a slice for each dimension, into a tensor of its shape: straight into its
    memory where it has whole rows and the same dtype, else some MB at a time.

    opened: its file, open for reading in binary.
    """
    if not box:
        into.copy_(read_entry(opened, entry))
        return
    of_row, within, done = entry.shape[1:], (slice(None), *box[1:]), 0
    row = torch.Size(of_row).numel()
    shape = (box[0].stop - box[0].start, *of_row)
    rows = replace(entry, shape=shape, start=entry.start + box[0].start * row * entry.dtype.itemsize)
    if tuple(into.shape) == shape and into.is_contiguous():
        read_entry(opened, rows, into)
        return
    for piece in pieces(opened, rows, max(1, row)):
        block = piece.view(-1, *of_row)[within]
        into[done : done + len(block)].copy_(block)
        done += len(block)


def entry_of(entries: Mapping[str, Entry], path: Path, chunk: Chunk, dtype: torch.dtype) -> Entry:
    """Return the entry of `path` that holds `chunk`; raises CheckpointError where it is another."""
    entry = entries.get(chunk.key)
    if entry is None or (entry.dtype, entry.shape) != (dtype, chunk.sizes):
        holds = "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise CheckpointError(f"{path} holds {holds} as {chunk.key}, and should hold {dtype} {list(chunk.sizes)}")
    return entry


# (name of one file, ending) as transformers looks for them.
_SAFETENSORS, _TORCH = ("model", ".safetensors"), ("pytorch_model", ".bin")
_MEGABYTE = 2**20


Read = Callable[[str], torch.Tensor]
"""Gives a tensor of a model by its name, whole."""


@dataclass(frozen=True)
class Written:
    """A tensor that is to be written: its dtype and shape, and what makes it of tensors of a model."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[Read], torch.Tensor]

    @staticmethod
    def as_stored(name: str, tensor: Tensor) -> Written:
        """Return what is written of `tensor`, which is called `name` in its checkpoint: the same."""
        return Written(dtype_of(tensor), tensor.shape, lambda read: read(name))

    @property
    def is_wide(self) -> bool:
        """Whether these are floating numbers of 16 bits or more."""
        return self.dtype.is_floating_point and self.dtype.itemsize > 1

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Stored:
    """The tensors of the checkpoint in `folder`, one at a time, whole, in host memory. The header of a file is read once."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self._folder, self._tensors = folder, tensors
        self._entries: dict[str, dict[str, Entry]] = {}

    def whole(self, name: str) -> torch.Tensor:
        """Return one tensor, put together from its chunks. Raises CheckpointError where a file holds another one."""
        tensor = self._tensors[name]
        whole = torch.empty(tensor.shape, dtype=dtype_of(tensor))
        for chunk in tensor.chunks:
            path = self._folder / chunk.file
            if chunk.file not in self._entries:
                self._entries[chunk.file] = entries_of(path)
            entry = entry_of(self._entries[chunk.file], path, chunk, whole.dtype)
            box = tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))
            with open_regular(path) as opened:
                if entry.shape == tensor.shape:
                    read_entry(opened, entry, whole)
                else:
                    whole[box].copy_(read_entry(opened, entry))
        return whole


def export(
    folder: Path,
    manifest: Manifest,
    entries: Mapping[str, Written],
    target: Path,
    *,
    shard: bool,
    prefix: str | None,
    size_per_shard: int,
    use_safetensors: bool,
) -> None:
    """Write tensors of the checkpoint in `folder` as plain files, one tensor at a time (all of a file for `torch.save`).

    entries: what is written, by its names in the new files. shard: write files of at most `size_per_shard` MB and an
    index into the folder `target`; else `target` is the file. A file appears whole or not at all.
    """
    stored = Stored(folder, manifest.tensors)
    if not shard:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_file(target, stored, entries, use_safetensors=use_safetensors)
        return
    target.mkdir(parents=True, exist_ok=True)
    stem, ending = _SAFETENSORS if use_safetensors else _TORCH
    stem = stem if prefix is None else f"{prefix}.{stem}"
    shards = _shards(entries, size_per_shard * _MEGABYTE)
    where: dict[str, str] = {}
    for index, shard_names in enumerate(shards, start=1):
        name = f"{stem}-{index:05d}-of-{len(shards):05d}{ending}"
        own = {key: entries[key] for key in shard_names}
        _write_file(target / name, stored, own, use_safetensors=use_safetensors)
        where |= dict.fromkeys(shard_names, name)
    total = sum(entry.num_bytes for entry in entries.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)
    replaced(target / f"{stem}{ending}.index.json", lambda path: write_synced(path, text.encode()))


@dataclass
class Fitting:
    """What files of weights have for a module. state: what it must be given, read, and divided as it is there. in_place: where
    an entry's numbers are to be read to, with the tensor. left_out: names that one side alone has, in words."""

    state: dict[str, torch.Tensor] = field(default_factory=dict)
    in_place: dict[str, tuple[Entry, torch.Tensor]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def weights_for(
    module: nn.Module,
    path: Path,
    own: Mapping[str, torch.Tensor],
    read: Callable[[Mapping[str, Entry], Mapping[str, torch.Tensor]], None],
    *,
    strict: bool,
) -> Fitting:
    """Return what the files of weights in `path` have for this rank of `module`, of which nothing is written to yet.

    own: tensors of `module`, by name, that may be read into. read: reads entries into new tensors. Raises CheckpointError that
    lists all names and shapes that differ.
    """
    current = module.state_dict()
    partial = getattr(getattr(module, "module", None), "is_partial", False)
    found, unread = Fitting(), dict[str, Entry]()
    different, unknown, seen = [], [], set()
    for name, value in named_in(path):
        here = current.get(name)
        if name in seen:
            different.append(f"{name} is in two files")
        seen.add(name)
        if here is None:
            unknown.append(name)
        elif tuple(here.shape) != tuple(value.shape):
            different.append(f"{name} has shape {tuple(value.shape)} in the file and {tuple(here.shape)} in the model")
        elif not fits(value.dtype, here.dtype):
            different.append(f"{name} has dtype {value.dtype} in the file and {here.dtype} in the model")
        elif isinstance(value, torch.Tensor):
            found.state[name] = placed_like(value.to(here.device), here)
        elif name in own and _memory(own[name]) == _memory(here):
            found.in_place[name] = value, here
        else:
            unread[name] = value
            found.state[name] = empty_like_whole(value.shape, value.dtype, here)
    read(unread, {name: found.state[name] for name in unread})
    found.state |= {name: placed_like(found.state[name], current[name]) for name in unread}
    different += ties_that_differ(module, found.state)
    # Files of other programs hold a tied weight once.
    names = found.state.keys() | found.in_place.keys()
    held = {id(current[name]) for name in names} | {_memory(current[name]) for name in names}
    missing = [
        name
        for name, here in current.items()
        if name not in names and isinstance(here, torch.Tensor) and _memory(here) not in held
    ]
    found.left_out = [f"{name} is not in the file" for name in missing]
    found.left_out += [] if partial else [f"{name} is not in the model" for name in unknown]
    if different or (strict and found.left_out):
        raise CheckpointError(f"{path} does not fit this model:\n  " + "\n  ".join(different + found.left_out))
    return found


def named_in(path: Path) -> Iterator[tuple[str, Entry | torch.Tensor]]:
    """Yield every tensor in files of weights by its name: where it lies in a safetensors file; of `torch.save`, read."""
    for file in weight_files(path):
        yield from entries_of(file).items() if is_safetensors(file) else read_torch_file(file)


def half_read(error: Exception) -> CheckpointError:
    """What is raised where a file that fits cannot be read to its end, and weights of a model were read from it already."""
    return CheckpointError(
        f"{error}. Another process changed the file, or it cannot be read: weights of this model hold parts of it; load a "
        "whole one before you go on"
    )


def ties_that_differ(module: nn.Module, state: Mapping[str, Any]) -> Iterator[str]:
    """Say which names of one tensor of `module` have not the same numbers in `state`: of these a load would keep the last."""
    inner = bare(module.module) if isinstance(module, ModelWrapper) else module
    for places in places_of(inner, buffers=True).values():
        names = [place.name for place in places if place.name in state]
        for name in names[1:]:
            if not _same_bits(state[name], state[names[0]]):
                yield f"{name} and {names[0]} are one tensor in the model, and differ in the file"


def is_safetensors(file: Path) -> bool:
    """Return whether a file is one of safetensors, by its name or how it begins."""
    with open_regular(file) as opened:
        return file.suffix == ".safetensors" or opened.read(9)[8:] == b"{"  # the header's length, and its JSON


def weight_files(path: Path) -> list[Path]:
    """Return the files of weights that `path` means: itself, or those of a folder, by its index where it has one."""
    if names_a_regular_file(path):
        return [path]
    indices = sorted(path.glob("*.index.json")) if path.is_dir() else []
    if len(indices) == 1:
        try:
            most = sum(_size(file) for file in path.iterdir() if file != indices[0]) // 2 + ROOM
            names = sorted(set(parse_json(read_regular(indices[0], most), most)["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{indices[0]} is no index of weights: {error!r}") from error
        if not all(isinstance(name, str) and name and Path(name).name == name for name in names):
            raise CheckpointError(f"{indices[0]} names files outside its folder")
        missing = [name for name in names if not names_a_regular_file(path / name)]
        if missing:
            raise CheckpointError(f"{path} lacks {missing}, which {indices[0].name} names")
        return [path / name for name in names]
    single = [path / "".join(kind) for kind in (_SAFETENSORS, _TORCH) if names_a_regular_file(path / "".join(kind))]
    if not single:
        raise CheckpointError(
            f"{path} is neither a file of weights nor a folder with an index or {''.join(_SAFETENSORS)}"
        )
    return single[:1]


def _write_file(target: Path, stored: Stored, entries: Mapping[str, Written], *, use_safetensors: bool) -> None:
    def write(path: Path) -> None:
        if use_safetensors:
            shapes = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
            write_tensors(path, shapes, lambda name: entries[name].make(stored.whole))
        else:
            with path.open("xb") as file:
                torch.save({name: entry.make(stored.whole) for name, entry in entries.items()}, file)
                file.flush()
                os.fsync(file.fileno())

    replaced(target, write)


def _size(path: Path) -> int:
    return path.stat().st_size if names_a_regular_file(path) else 0


def replaced(target: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file `target`, which appears whole or not at all."""
    beside = target.with_name(f".{target.name}.writing")
    beside.unlink(missing_ok=True)
    try:
        write(beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _shards(entries: Mapping[str, Written], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, entry in entries.items():
        if shards[-1] and size + entry.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += entry.num_bytes
    return shards


def _memory(tensor: torch.Tensor) -> Any:
    return local.data_ptr() if (local := _local(tensor)).numel() else id(tensor)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    one, other = (_local(tensor).contiguous().view(-1) for tensor in (a, b))
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
