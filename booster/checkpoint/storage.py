"""Where `torch.distributed.checkpoint` writes and reads tensors: safetensors files under a manifest.

Its planners decide which rank writes which part of which tensor, and which parts a rank must read for the layout that it
has. The storages that it ships do not serve here: the native one describes itself by a pickle; the one for safetensors
holds a second copy of all that a rank writes, takes one part of a tensor for each file, and reads back no scalars. Neither
knows hashes, nor syncs the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import torch
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
from booster.checkpoint.manifest import CheckpointError, Chunk, File, Manifest, Tensor

# The names of dtypes in the safetensors format.
SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_ALIGNMENT = 8  # bytes, of the header; data follow at once


class ManifestWriter(StorageWriter):
    """Write each rank's tensors to one safetensors file in `staging`, synced; on the coordinator, collect the manifest.

    Tensors are written one after another, and hashed by a second thread meanwhile: a rank holds no copy of what it writes.
    After `torch.distributed.checkpoint.save`, `manifest` is set on the coordinator alone, and not written yet.
    `other_files`, what this rank has written into `staging` by itself, are collected too.
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
        """Write this rank's part of every tensor that the plan gave it."""
        files = dict(self.other_files)
        entries = {_key(item): item for item in plan.items}
        if entries:
            files[plan.storage_data] = write_tensors(
                self.staging / plan.storage_data,
                {key: (_dtype(item), tuple(item.tensor_data.chunk.sizes)) for key, item in entries.items()},  # type: ignore[union-attr]
                lambda key: planner.resolve_data(entries[key]),  # type: ignore[arg-type, return-value]
            )
        sync_folder(self.staging)
        results = [WriteResult(item.index, 0, _Entry(plan.storage_data, key, files)) for key, item in entries.items()]
        # A rank without tensors still tells which files it wrote.
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
    """Read the parts of tensors that a plan asks for from the files of `folder`, as `manifest` describes them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

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
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = {}
        for item in plan.items:
            chunks = self.manifest.tensors[item.storage_index.fqn].chunks
            chunk = next(c for c in chunks if c.offsets == tuple(item.storage_index.offset or ()))
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for name, items in by_file.items():
            with open_tensors(self.folder / name) as file:
                for chunk, item in items:
                    target = planner.resolve_tensor(item).detach()
                    if item.lengths:
                        box = tuple(
                            slice(start, start + length)
                            for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                        )
                        target.copy_(file.get_slice(chunk.key)[box])
                    else:
                        target.copy_(file.get_tensor(chunk.key))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path is one on a file system."""
        return "://" not in str(checkpoint_id)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a chunk lies, and all files that its rank wrote."""

    file: str
    key: str
    files: dict[str, File]


def tensor_file(rank: int) -> str:
    """Return the name of the file that `rank` writes tensors to."""
    return f"tensors-{rank:05d}.safetensors"


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
        start, end = end, end + dtype.itemsize * _numel(shape)
        header[key] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb") as file:
        with closing(_Hash()) as add:
            _write(file, memoryview(len(text).to_bytes(8, "little") + text), add)
            for key in entries:
                tensor = tensor_of(key).detach().cpu().contiguous()
                _write(file, memoryview(tensor.view(-1).view(torch.uint8).numpy()), add)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
        return File(file.tell(), add.hexdigest())


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file for reading; needs the package of that name."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading a checkpoint needs safetensors: pip install 'booster-amp[checkpoint]'") from error
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not the safetensors file that the manifest describes: {error}") from error


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype that a manifest's entry names."""
    dtype = getattr(torch, tensor.dtype, None)
    if dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"the manifest names the dtype {tensor.dtype!r}, which this torch does not have")
    return dtype


class _Hash:
    """A SHA-256 that is computed in a thread of its own, in the order of the calls.

    Not in an executor of the standard library: these take no more work once the interpreter begins to end, which waits for
    a save in the background.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._given: SimpleQueue[tuple[memoryview, Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="booster-checkpoint-hash", daemon=True)
        self._thread.start()

    def __call__(self, data: memoryview) -> Future[None]:
        hashed: Future[None] = Future()
        self._given.put((data, hashed))
        return hashed

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            data, hashed = given
            self._digest.update(data)
            hashed.set_result(None)


def _write(file: IO[bytes], data: memoryview, add: _Hash) -> None:
    hashed = add(data)
    file.write(data)
    hashed.wait()  # the tensor's memory is freed only then


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _key(item: WriteItem) -> str:
    chunk = item.tensor_data.chunk  # type: ignore[union-attr]
    at_origin = not any(chunk.offsets) and chunk.sizes == item.tensor_data.size  # type: ignore[union-attr]
    return item.index.fqn if at_origin else f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"


def _dtype(item: WriteItem) -> torch.dtype:
    return item.tensor_data.properties.dtype  # type: ignore[union-attr]
