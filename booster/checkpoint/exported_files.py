"""Weights written for other programs: safetensors or `torch.save`, whole or in shards with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    stored = CheckpointTensors(folder, manifest.tensors)
    if not shard:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_file(target, stored, entries, use_safetensors=use_safetensors)
        return
    target.mkdir(parents=True, exist_ok=True)
    stem, ending = SAFETENSORS if use_safetensors else TORCH
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


def _write_file(
    target: Path, stored: CheckpointTensors, entries: Mapping[str, ExportedTensor], *, use_safetensors: bool
) -> None:
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


def replaced(target: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file `target`, which appears whole or not at all."""
    unfinished = target.with_name(f".{target.name}.writing")
    unfinished.unlink(missing_ok=True)
    try:
        write(unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _shards(entries: Mapping[str, ExportedTensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, entry in entries.items():
        if shards[-1] and size + entry.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += entry.num_bytes
    return shards
