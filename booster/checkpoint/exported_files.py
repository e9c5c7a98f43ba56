"""Weights written for other programs: safetensors or `torch.save`, whole or in shards with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from booster.checkpoint.folder import write_synced
from booster.checkpoint.manifest import Manifest, Tensor, dtype_of
from booster.checkpoint.tensor_file import Entry, entries_of, entry_of, read_entry, write_tensors
from booster.checkpoint.weight_files import SAFETENSORS, TORCH
from booster.common.untrusted_files import open_regular

_MEGABYTE = 2**20

Read = Callable[[str], torch.Tensor]
"""Gives a tensor of a model by its name, whole."""


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor that is to be written: its dtype and shape, and what makes it of tensors of a model."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[Read], torch.Tensor]

    @staticmethod
    def as_stored(name: str, tensor: Tensor) -> ExportedTensor:
        """Return what is written of `tensor`, which is called `name` in its checkpoint: the same."""
        return ExportedTensor(dtype_of(tensor), tensor.shape, lambda read: read(name))

    @property
    def is_wide(self) -> bool:
        """Whether these are floating numbers of 16 bits or more."""
        return self.dtype.is_floating_point and self.dtype.itemsize > 1

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class FileOptions:
    """Which files weights are written to, as `Booster.save_model` takes it.

    Attributes:
        shard: into several, with an index.
        prefix: before their names; None for none.
        size_per_shard: the most MB in one of several.
        use_safetensors: else `torch.save`.
    """

    shard: bool = False
    prefix: str | None = None
    size_per_shard: int = 1024
    use_safetensors: bool = True


class CheckpointTensors:
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
    entries: Mapping[str, ExportedTensor],
    target: Path,
    files: FileOptions,
) -> None:
    """Write tensors of the checkpoint in `folder` as plain files, one tensor at a time (all of a file for `torch.save`).

    entries: what is written, by its names in the new files. target: the file, or the folder of several.
    """
    stored = CheckpointTensors(folder, manifest.tensors)

    def write_file(path: Path, names: Iterable[str]) -> None:
        own = {name: entries[name] for name in names}
        if files.use_safetensors:
            forms = {name: (entry.dtype, entry.shape) for name, entry in own.items()}
            write_tensors(path, forms, lambda name: own[name].make(stored.whole))
            return
        # A file appears whole or not at all.
        with path.open("xb") as file:
            torch.save({name: entry.make(stored.whole) for name, entry in own.items()}, file)
            file.flush()
            # The file gets its name only after the disk has it.
            os.fsync(file.fileno())

    if not files.shard:
        target.parent.mkdir(parents=True, exist_ok=True)
        replaced(target, lambda path: write_file(path, entries))
        return
    target.mkdir(parents=True, exist_ok=True)
    stem, ending = SAFETENSORS if files.use_safetensors else TORCH
    stem = stem if files.prefix is None else f"{files.prefix}.{stem}"
    shards: list[list[str]] = [[]]
    size = total = 0
    for name, entry in entries.items():
        if shards[-1] and size + entry.num_bytes > files.size_per_shard * _MEGABYTE:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + entry.num_bytes, total + entry.num_bytes
    where: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        name = f"{stem}-{index:05d}-of-{len(shards):05d}{ending}"
        replaced(target / name, partial(write_file, names=names))
        where |= dict.fromkeys(names, name)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True)
    replaced(target / f"{stem}{ending}.index.json", lambda path: write_synced(path, text.encode()))


def replaced(target: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file `target`, which appears whole or not at all."""
    unfinished = target.with_name(f".{target.name}.writing")
    unfinished.unlink(missing_ok=True)
    try:
        write(unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
