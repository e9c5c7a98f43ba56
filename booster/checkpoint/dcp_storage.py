"""Where `torch.distributed.checkpoint` (DCP) writes tensors: safetensors files under a manifest.

Its planner decides which rank writes which shard of which tensor. Its storages do not serve: the native one describes itself by
a pickle; the one for safetensors holds a second copy of all that a rank writes, and takes one shard of a tensor for each file.
Neither knows hashes, nor syncs the folder. What is written is read by a `TensorReader`.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from booster.checkpoint.folder import sync_folder
from booster.checkpoint.manifest import SAFETENSORS_DTYPES, Chunk, File, Tensor
from booster.checkpoint.tensor_file import write_tensors
from booster.shards.base import FlatShard


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
        files: what this rank has written into `staging`; after `dcp.save`, on the coordinator, what all ranks have.
        tensors: after `dcp.save`, on the coordinator, where each is.
    """

    def __init__(self, staging: Path) -> None:
        self.staging = staging
        self.files: dict[str, File] = {}
        self.tensors: dict[str, Tensor] = {}

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
            self.files[plan.storage_data] = write_tensors(path, forms, lambda key: resolve(entries[key]))
        # On a network file system each host syncs the names that it made.
        sync_folder(self.staging)
        results = [
            WriteResult(item.index, 0, _Entry(plan.storage_data, key, self.files)) for key, item in entries.items()
        ]
        # A rank without tensors still reports which files it wrote.
        results = results or [WriteResult(MetadataIndex(""), 0, _Entry("", "", self.files))]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: put together what all ranks wrote."""
        where: dict[MetadataIndex, _Entry] = {}
        for result in (result for of_rank in results for result in of_rank):
            self.files |= result.storage_data.files
            where[result.index] = result.storage_data
        for name, data in metadata.state_dict_metadata.items():
            assert isinstance(data, TensorStorageMetadata)  # prepare_local_plan lets nothing else pass
            chunks = []
            for index, chunk in enumerate(data.chunks):
                entry = where[MetadataIndex(name, chunk.offsets, index)]
                chunks.append(Chunk(entry.file, entry.key, tuple(chunk.offsets), tuple(chunk.sizes)))
            dtype = str(data.properties.dtype).removeprefix("torch.")
            self.tensors[name] = Tensor(dtype, tuple(data.size), tuple(chunks))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path is one on a file system."""
        return "://" not in str(checkpoint_id)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a chunk is, and all files that its rank wrote."""

    file: str
    key: str
    files: dict[str, File]


def tensor_file(rank: int) -> str:
    """Return the name of the file that `rank` writes tensors to."""
    return f"tensors-{rank:05d}.safetensors"
