"""What a checkpoint contains: one JSON file, written last. Without it, or with a wrong one, there is no checkpoint."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from booster.checkpoint.hashing import HASH, hash_of_file
from booster.checkpoint.header import SAFETENSORS_DTYPES, num_bytes, sizes
from booster.common.untrusted_files import json_cost, parse_json, printable, read_regular

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT, VERSION = "booster checkpoint", 2
_VERSION_OF_SHA256 = 1  # is read, and differs in the hashes of files alone
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_DTYPES}
_MOST_DIVIDED = (
    6  # dimensions in which a tensor is cut; what booster writes is cut in as many as a mesh has, or a stretch
)
_ROOM = 24 * 2**20  # bytes of memory that a text may take beside the smallest tensors
LARGEST_NUMBER = 2**63 - 1  # that a manifest holds, of a step too


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, or not for these objects; its `message` says what differs and what to do.

    Names of what a file holds stand in it, so what a terminal would act on is spelled out.
    """

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(printable(line) for line in message.split("\n")))


@dataclass(frozen=True)
class File:
    """One file beside the manifest: its size, the hexadecimal hash of its bytes, and which hash that is."""

    bytes: int
    digest: str
    hash: str = HASH


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: the entry of `file` that holds it, where it begins in the whole tensor, and its shape."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor under its whole name and shape. dtype: torch's name, as "bfloat16". chunks: disjoint, covering it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """step: as given to `save`. world_size: how many processes saved. versions: of booster and torch, for people."""

    step: int
    world_size: int
    versions: Mapping[str, str]
    files: Mapping[str, File]
    tensors: Mapping[str, Tensor]

    def dumps(self) -> bytes:
        """Return the JSON text, which carries a hash of itself. Raises CheckpointError where no reader would take it."""
        text = _canonical(asdict(self))
        check_text(MANIFEST, json_cost(text), self.files)
        seal = hashlib.sha256(text).hexdigest()
        return b'{"format": "%b", "version": %d, "sha256": "%b", "content": %b}\n' % (
            FORMAT.encode(),
            VERSION,
            seal.encode(),
            text,
        )


def room_for_text(of_tensors: int) -> int:
    """Return the bytes of memory that manifest and state may take each, by those of the files of tensors beside them.

    Together with the header of a file of tensors that is no more than all files have, and 64 MiB.
    """
    return _ROOM + of_tensors // 4


def check_text(name: str, takes: int, files: Mapping[str, File]) -> None:
    """Raise CheckpointError where no reader would take the text `name` beside `files`. takes: its `json_cost`."""
    of_tensors = sum(file.bytes for other, file in files.items() if other != STATE)
    if takes > room_for_text(of_tensors):
        raise CheckpointError(
            f"{name} would take {takes} bytes of memory to read, and may take {_ROOM} and a quarter of the {of_tensors} bytes "
            "of tensors beside it; keep numbers in tensors instead of lists"
        )


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of `folder`; raises CheckpointError if there is none, or not one that was written so."""
    path = folder / MANIFEST
    try:
        data = read_text(folder, MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        outer = parse_json(data, room_of(folder))
        del data
        if outer["format"] != FORMAT:
            raise ValueError(f"its format is {outer['format']!r}")
        version = outer["version"]
        if (
            version in (VERSION, _VERSION_OF_SHA256)
            and hashlib.sha256(_canonical(outer["content"])).hexdigest() != outer["sha256"]
        ):
            raise ValueError("its content does not match its hash")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if version not in (VERSION, _VERSION_OF_SHA256):
        raise CheckpointError(
            f"{path} is of version {version!r} of the format; this booster reads versions up to {VERSION}"
        )
    try:
        return _of(outer["content"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} does not say what a manifest says: {error!r}") from error


def read_text(folder: Path, name: str) -> bytes:
    """Return a JSON text of the checkpoint in `folder`; raises OSError where it is no file, or larger than one can be.

    What it may have goes with what lies in the folder.
    """
    return read_regular(folder / name, room_of(folder))


def room_of(folder: Path) -> int:
    """Return the bytes of memory that each text of the checkpoint in `folder` may take, by the files that are there."""
    return room_for_text(sum(path.stat().st_size for path in folder.glob("*.safetensors")))


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError where a file has another size than `manifest` says, by which memory is taken."""
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if size != expected.bytes:
            raise CheckpointError(f"{path} has {size} bytes, and {expected.bytes} were written")


def problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Compare every file of `manifest` with what lies in `folder`, byte for byte by its hash, and yield what is wrong."""
    for name, expected in sorted(manifest.files.items()):
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                yield f"{name} has {size} bytes, and {expected.bytes} were written"
            elif hash_of_file(path, expected.hash) != expected.digest:
                yield f"{name} holds other bytes than were written"
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} cannot be read: {error}"


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _of(content: Mapping[str, Any]) -> Manifest:
    files = {name: _file(entry) for name, entry in content["files"].items()}
    for name in files:
        if not name or Path(name).name != name or name == MANIFEST or "\0" in name:
            raise ValueError(f"{name!r} is not the name of a file of a checkpoint")
    tensors = {name: _tensor(name, entry) for name, entry in content["tensors"].items()}
    claimed: Counter[str] = Counter()
    keys = set()
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if chunk.file not in files:
                raise ValueError(f"{name} lies in {chunk.file!r}, which the manifest does not list")
            if (chunk.file, chunk.key) in keys:
                raise ValueError(f"{chunk.key} of {chunk.file} is part of two tensors, or twice of one")
            keys.add((chunk.file, chunk.key))
            claimed[chunk.file] += num_bytes(_DTYPES[tensor.dtype], chunk.sizes)
    for name, size in claimed.items():
        if size > files[name].bytes:
            raise ValueError(f"{name} has {files[name].bytes} bytes, and its tensors would have {size}")
    versions = {str(name): _text(version) for name, version in content["versions"].items()}
    return Manifest(_whole(content["step"]), _whole(content["world_size"]), versions, files, tensors)


def _file(entry: Mapping[str, Any]) -> File:
    if "sha256" in entry:  # of format 1
        return File(_whole(entry["bytes"]), _text(entry["sha256"]), "sha256")
    if entry["hash"] != HASH:
        raise ValueError(f"{entry['hash']!r} is no hash of this format")
    return File(_whole(entry["bytes"]), _text(entry["digest"]))


def _tensor(name: str, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape = _text(entry["dtype"]), sizes(entry["shape"])
    if dtype not in _DTYPES:
        raise ValueError(f"{name} has the dtype {dtype!r}, which this torch does not have")
    num_bytes(_DTYPES[dtype], shape)
    chunks = [Chunk(_text(c["file"]), _text(c["key"]), sizes(c["offsets"]), sizes(c["sizes"])) for c in entry["chunks"]]
    # What has no elements covers nothing, and would be found in place of a chunk that begins where it does.
    kept = [chunk for chunk in chunks if 0 not in chunk.sizes] if 0 not in shape else _whole_chunk(shape, chunks)
    if not all(len(c.offsets) == len(c.sizes) == len(shape) for c in chunks) or not _are_the_whole(shape, kept):
        raise ValueError(f"the parts of {name} do not make up its shape {shape}, each element once")
    return Tensor(dtype, shape, tuple(kept))


def _whole_chunk(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> list[Chunk]:
    return [chunk for chunk in chunks if chunk.sizes == shape and not any(chunk.offsets)][:1]


def _are_the_whole(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Return whether the boxes `chunks` are disjoint and cover a tensor of `shape`.

    How often each element is covered is a function of place; it is 1 within `shape` and 0 outside just if it jumps at the
    same corners by the same amounts. So the corners of all boxes, counted with their signs, must be those of the whole: a
    sum over the boxes, and no look at each two of them.
    """
    if 0 in shape:
        return True
    whole = Chunk("", "", (0,) * len(shape), shape)
    cut = [dim for dim, size in enumerate(shape) if any(c.offsets[dim] != 0 or c.sizes[dim] != size for c in chunks)]
    if len(cut) > _MOST_DIVIDED:
        raise ValueError(f"a tensor is cut in {len(cut)} dimensions")
    jumps: Counter[tuple[int, ...]] = Counter()
    for chunk, sign in ((whole, -1), *((chunk, 1) for chunk in chunks)):
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(chunk.offsets[dim] + end * chunk.sizes[dim] for dim, end in zip(cut, ends, strict=True))
            jumps[corner] += sign * (-1) ** sum(ends)
    return not any(jumps.values())


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_NUMBER:
        raise ValueError(f"{str(value)[:40]!r} is no number from 0 on")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is no text")
    return value
