"""Where `torch.distributed.checkpoint` (DCP) writes and reads tensors: safetensors files under a manifest.

Its planners decide which rank writes which shard of which tensor, and which parts of the files a rank must read for the layout
that it has. Its storages do not serve: the native one describes itself by a pickle; the one for safetensors holds a second copy
of all that a rank writes, takes one shard of a tensor for each file, and reads back no scalars. Neither knows hashes, nor syncs
the folder.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from booster.checkpoint.folder import sync_folder
from booster.checkpoint.manifest import SAFETENSORS_DTYPES, CheckpointError, Chunk, File, Manifest, Tensor, dtype_of
from booster.checkpoint.state_tree import HeldTensor, can_be_read_into
from booster.checkpoint.tensor_file import Entry, entries_of, entry_of, read_box, read_verified, write_tensors
from booster.common.untrusted_files import open_regular
from booster.shards.base import FlatShard


class WholeLoadPlanner(dcp.DefaultLoadPlanner):
    """Torch's planner for tensors under their whole names, some of them `FlatShard`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """As torch's, which also makes real what is on the meta device, and for that takes tensors alone."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """As torch's, which looks for parts in tensors alone."""
        held = self.state_dict[index.fqn]
        return held.box_at(index.offset) if isinstance(held, FlatShard) else super().lookup_tensor(index)


class WholeSavePlanner(dcp.DefaultSavePlanner):
    """Torch's planner for tensors under their whole names, some of them `FlatShard`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """As torch's, which looks for parts in tensors alone."""
        held = self.state_dict[index.fqn]
        return held.box_at(index.offset) if isinstance(held, FlatShard) else super().lookup_object(index)


class ManifestWriter(StorageWriter):
    """Write each rank's tensors to one safetensors file in `staging`, synced; on the coordinator, collect the manifest.

    Tensors are hashed and written block by block, from where they are: a rank holds no copy of what it writes.

    Attributes:
        staging: the folder.
        manifest: what was written, after `dcp.save`, on the coordinator alone; not written yet.
        other_files: what this rank has written into `staging` by itself, which is collected too.
    """

    def __init__(
        self,
        staging: Path,
        *,
        make_manifest: Callable[[dict[str, File], dict[str, Tensor]], Manifest],
    ) -> None:
        self.staging = staging
        self.manifest: Manifest | None = None
        self._make_manifest = make_manifest
        self.other_files: dict[str, File] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next: a writer serves one."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the folder exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what safetensors cannot hold, before anything is written."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
                raise TypeError(f"{item.index.fqn} is not a tensor; a checkpoint holds tensors and JSON-like values")
            if item.tensor_data.properties.dtype not in SAFETENSORS_DTYPES:
                raise TypeError(
                    f"{item.index.fqn} has dtype {item.tensor_data.properties.dtype}, which safetensors does not know"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name each rank's file."""
        return [dataclasses.replace(plan, storage_data=tensor_file(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard of every tensor that the plan gave it."""
        files = dict(self.other_files)
        entries: dict[str, WriteItem] = {}
        forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for item in plan.items:
            data: Any = item.tensor_data
            is_whole = not any(data.chunk.offsets) and data.chunk.sizes == data.size
            key = item.index.fqn if is_whole else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"
            entries[key], forms[key] = item, (data.properties.dtype, tuple(data.chunk.sizes))
        if entries:
            path = self.staging / plan.storage_data
            resolve: Any = planner.resolve_data
            files[plan.storage_data] = write_tensors(path, forms, lambda key: resolve(entries[key]))
        # On a network file system each host syncs the names that it made.
        sync_folder(self.staging)
        results = [WriteResult(item.index, 0, _Entry(plan.storage_data, key, files)) for key, item in entries.items()]
        # A rank without tensors still reports which files it wrote.
        results = results or [WriteResult(MetadataIndex(""), 0, _Entry("", "", files))]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: put together what all ranks wrote."""
        files: dict[str, File] = {}
        where: dict[MetadataIndex, _Entry] = {}
        for result in (result for of_rank in results for result in of_rank):
            files.update(result.storage_data.files)
            where[result.index] = result.storage_data
        tensors = {}
        for name, data in metadata.state_dict_metadata.items():
            assert isinstance(data, TensorStorageMetadata)  # prepare_local_plan lets nothing else pass
            chunks = []
            for index, chunk in enumerate(data.chunks):
                entry = where[MetadataIndex(name, chunk.offsets, index)]
                chunks.append(Chunk(entry.file, entry.key, tuple(chunk.offsets), tuple(chunk.sizes)))
            tensors[name] = Tensor(str(data.properties.dtype).removeprefix("torch."), tuple(data.size), tuple(chunks))
        self.manifest = self._make_manifest(files, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path is one on a file system."""
        return "://" not in str(checkpoint_id)


class ManifestReader(StorageReader):
    """Read the parts of tensors that a plan asks for from the files of `folder`, as `manifest` describes them.

    Every file is compared with its hash by one of the `world_size` ranks, in the same pass in which that rank reads its own
    part of it. files: those that are compared; None for all.

    Attributes:
        damage: what `rank` found wrong. What was read counts for nothing until it is known that no rank has any.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1, files: Collection[str] | None = None
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.damage: list[str] = []
        # Ranks read mostly what they have written themselves, where the layout is the same.
        of_tensors = {chunk.file for tensor in manifest.tensors.values() for chunk in tensor.chunks}
        names = sorted(
            (name for name in manifest.files if files is None or name in files),
            key=lambda name: (name not in of_tensors, name),
        )
        # Dealt in turn: rank r verifies file r where as many ranks load as saved, which is the file that it reads anyway.
        self._verified_here = names[rank::world_size]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one load to the next: a reader serves one folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest's tensors in the planners' terms."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=dtype_of(tensor)),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks],
                )
                for name, tensor in self.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the manifest is here."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, file by file."""
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = {name: [] for name in self._verified_here}
        for item in plan.items:
            chunks = self.manifest.tensors[item.storage_index.fqn].chunks
            chunk = next(c for c in chunks if c.offsets == tuple(item.storage_index.offset or ()))
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for name, items in by_file.items():
            if name in self._verified_here:
                items = self._read_verified(name, items, planner)
            if items and not self.damage:
                self._read(name, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_verified(
        self, name: str, items: list[tuple[Chunk, ReadItem]], planner: LoadPlanner
    ) -> list[tuple[Chunk, ReadItem]]:
        """Compare a file with its hash, reading what is requested whole into its place; return what is still to be read."""
        direct: dict[str, tuple[ReadItem, torch.Tensor]] = {}
        rest = []
        for chunk, item in items:
            target = planner.resolve_tensor(item).detach()
            dtype = dtype_of(self.manifest.tensors[item.storage_index.fqn])
            if chunk.key not in direct and can_be_read_into(target, chunk.sizes, dtype):
                direct[chunk.key] = item, target
            else:
                rest.append((chunk, item))
        targets = {key: target for key, (_, target) in direct.items()}
        try:
            problem = read_verified(self.folder / name, self.manifest.files[name], targets)
        except OSError as error:
            problem = f"{name} cannot be read: {error}"
        if problem is not None:
            self.damage.append(problem)
        for item, target in direct.values():
            planner.commit_tensor(item, target)
        return rest

    def _read(self, name: str, items: list[tuple[Chunk, ReadItem]], planner: LoadPlanner) -> None:
        path = self.folder / name
        entries = entries_of(path)
        with open_regular(path) as file:
            for chunk, item in items:
                target = planner.resolve_tensor(item).detach()
                entry = entry_of(entries, path, chunk, dtype_of(self.manifest.tensors[item.storage_index.fqn]))
                box = zip(item.storage_offsets, item.lengths, strict=True)
                read_box(file, entry, [slice(start, start + length) for start, length in box], target)
                planner.commit_tensor(item, target)

    validate_checkpoint_id = ManifestWriter.validate_checkpoint_id


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
        load_into(dict(targets), ManifestReader(Path(), Manifest(0, 1, {}, {}, tensors)), None)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise CheckpointError(str(cause)) from error


def load_into(targets: dict[str, HeldTensor], reader: ManifestReader, group: dist.ProcessGroup | None) -> None:
    """Read `targets`, by name, as `reader` finds them; a collective of `group`, which fails on all with torch's exception."""
    with warnings.catch_warnings():
        # no_dist=True is meant here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(
            targets,
            storage_reader=reader,
            planner=WholeLoadPlanner(),
            process_group=group,
            no_dist=group is None,
        )


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a chunk is, and all files that its rank wrote."""

    file: str
    key: str
    files: dict[str, File]


def tensor_file(rank: int) -> str:
    """Return the name of the file that `rank` writes tensors to."""
    return f"tensors-{rank:05d}.safetensors"
