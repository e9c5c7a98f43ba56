"""Reads what a rank holds of tensors from the files of a checkpoint, of which each is verified by one rank.

Boxes that a rank holds and boxes in the manifest say what is to be read, so no rank asks another: the planners of
`torch.distributed.checkpoint` exchange plans of all ranks, and take longer than the reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from booster.checkpoint.manifest import CheckpointError, Chunk, Manifest, Tensor, dtype_of
from booster.checkpoint.state_tree import HeldTensor, can_be_read_into
from booster.checkpoint.tensor_file import Entry, Headers, read_box, read_verified
from booster.common.untrusted_files import open_regular
from booster.model.params import is_dtensor, local_shard
from booster.shards.base import FlatShard


class _Part(NamedTuple):
    """A box of `chunk`, of `dtype` in its file, which goes into `here`, a view of what this rank holds."""

    chunk: Chunk
    dtype: torch.dtype
    box: tuple[slice, ...]
    here: torch.Tensor


class TensorReader:
    """Read the parts of tensors that this rank holds from the files of `folder`, as `manifest` describes them.

    Every file is compared with its hash by one of the `world_size` ranks, in the same pass in which that rank reads its own
    part of it. files: those that are compared; None for all.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1, files: Collection[str] | None = None
    ) -> None:
        self._folder, self._manifest, self._headers = folder, manifest, Headers(folder)
        # Ranks read mostly what they have written themselves, where the layout is the same.
        of_tensors = {chunk.file for tensor in manifest.tensors.values() for chunk in tensor.chunks}
        names = sorted(
            (name for name in manifest.files if files is None or name in files),
            key=lambda name: (name not in of_tensors, name),
        )
        # Dealt in turn: rank r verifies file r where as many ranks load as saved, which is the file that it reads anyway.
        self._verified_here = names[rank::world_size]

    def read(self, targets: Mapping[str, HeldTensor]) -> None:
        """Fill `targets`, by name, file by file; no communication.

        Raises OSError, or CheckpointError for what is damaged. What was read counts for nothing until no rank raises.
        """
        damage: list[str] = []
        by_file: dict[str, list[_Part]] = {name: [] for name in self._verified_here}
        for part in self._parts(targets):
            by_file.setdefault(part.chunk.file, []).append(part)
        for name, parts in by_file.items():
            left = self._read_verified(name, parts, damage) if name in self._verified_here else parts
            if left and not damage:
                self._read(name, left)
        if damage:
            raise CheckpointError("; ".join(damage))

    def _parts(self, targets: Mapping[str, HeldTensor]) -> Iterator[_Part]:
        # By layout: weights and states of many layers are divided alike, and to ask a DTensor takes long.
        origins: dict[Any, tuple[int, ...]] = {}
        for name, held in targets.items():
            tensor = self._manifest.tensors[name]
            if tuple(held.shape) != tensor.shape:
                raise CheckpointError(f"{name} has shape {tensor.shape} in the files and {tuple(held.shape)} here")
            boxes: Iterable[tuple[Sequence[int], torch.Tensor]]
            if isinstance(held, FlatShard):
                boxes = ((offsets, view) for offsets, _, view in held.boxes())
            elif is_dtensor(held):
                divided: Any = held
                layout = divided.device_mesh, divided.placements, tensor.shape
                if layout not in origins:
                    origins[layout] = tuple(divided.__create_chunk_list__()[0].offsets)
                boxes = [(origins[layout], local_shard(held))]
            else:
                boxes = [((0,) * held.dim(), held.detach())]
            for offsets, view in boxes:
                for chunk, box, here in overlaps(tensor, offsets, view):
                    yield _Part(chunk, dtype_of(tensor), box, here)

    def _read_verified(self, name: str, parts: list[_Part], damage: list[str]) -> list[_Part]:
        """Compare a file with its hash, reading what is requested whole into its place; return what is still to be read."""
        whole: dict[str, torch.Tensor] = {}
        rest = []
        for part in parts:
            if part.chunk.key not in whole and can_be_read_into(part.here, part.chunk.sizes, part.dtype):
                whole[part.chunk.key] = part.here
            else:
                rest.append(part)
        try:
            problem = read_verified(self._folder / name, self._manifest.files[name], whole)
        except OSError as error:
            problem = f"{name} cannot be read: {error}"
        if problem is not None:
            damage.append(problem)
        return rest

    def _read(self, name: str, parts: list[_Part]) -> None:
        entries = [self._headers.entry(part.chunk, part.dtype) for part in parts]
        with open_regular(self._folder / name) as file:
            for entry, part in zip(entries, parts, strict=True):
                read_box(file, entry, part.box, part.here)


def overlaps(
    tensor: Tensor, offsets: Sequence[int], view: torch.Tensor
) -> Iterator[tuple[Chunk, tuple[slice, ...], torch.Tensor]]:
    """Yield the chunks that share numbers with a box of `tensor`: each, the box of it that is shared, and the view of that.

    offsets: where in the whole tensor the box begins. view: what holds it.
    """
    for chunk in tensor.chunks:
        first = [max(own, there) for own, there in zip(offsets, chunk.offsets, strict=True)]
        ends = zip(offsets, view.shape, chunk.offsets, chunk.sizes, strict=True)
        stop = [min(own + n, there + m) for own, n, there, m in ends]
        if all(a < b for a, b in zip(first, stop, strict=True)):
            box = tuple(slice(a - o, b - o) for a, b, o in zip(first, stop, chunk.offsets, strict=True))
            yield chunk, box, view[tuple(slice(a - o, b - o) for a, b, o in zip(first, stop, offsets, strict=True))]


def read_entries(entries: Mapping[str, Entry], targets: Mapping[str, torch.Tensor]) -> None:
    """Read entries of plain files into `targets`, by name, of which this rank may hold parts; no communication.

    Raises CheckpointError where a file holds something else now, or cannot be read.
    """
    tensors = {
        name: Tensor(
            str(entry.dtype).removeprefix("torch."),
            entry.shape,
            (Chunk(str(entry.file.absolute()), entry.name, (0,) * len(entry.shape), entry.shape),),
        )
        for name, entry in entries.items()
    }
    try:
        # `targets` hold anything where this raises.
        TensorReader(Path(), Manifest(0, 1, {}, {}, tensors)).read(targets)
    except OSError as error:
        raise CheckpointError(str(error)) from error
