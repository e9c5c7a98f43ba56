"""What a checkpoint contains: one JSON file, written last. Without it, or with a wrong one, there is no checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from booster.checkpoint.hashing import HASH, hash_of_file

MANIFEST = "manifest.json"
FORMAT, VERSION = "booster checkpoint", 2
_VERSION_OF_SHA256 = 1  # is read, and differs in the hashes of files alone


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, or not for these objects; says what differs and what to do."""


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
        """Return the JSON text, which carries a hash of itself."""
        text = _canonical(asdict(self))
        seal = hashlib.sha256(text).hexdigest()
        return b'{"format": "%b", "version": %d, "sha256": "%b", "content": %b}\n' % (
            FORMAT.encode(),
            VERSION,
            seal.encode(),
            text,
        )


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of `folder`; raises CheckpointError if there is none, or not one that was written so."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        outer = json.loads(data)
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
    tensors = {name: _tensor(name, entry) for name, entry in content["tensors"].items()}
    files = {name: _file(entry) for name, entry in content["files"].items()}
    for name in files:
        if not name or Path(name).name != name or name == MANIFEST:
            raise ValueError(f"{name!r} is not the name of a file of a checkpoint")
    for name, tensor in tensors.items():
        if unknown := {chunk.file for chunk in tensor.chunks} - files.keys():
            raise ValueError(f"{name} lies in {sorted(unknown)}, which the manifest does not list")
    return Manifest(int(content["step"]), int(content["world_size"]), dict(content["versions"]), files, tensors)


def _file(entry: Mapping[str, Any]) -> File:
    if "sha256" in entry:  # of format 1
        return File(int(entry["bytes"]), str(entry["sha256"]), "sha256")
    if entry["hash"] != HASH:
        raise ValueError(f"{entry['hash']!r} is no hash of this format")
    return File(int(entry["bytes"]), str(entry["digest"]))


def _tensor(name: str, entry: Mapping[str, Any]) -> Tensor:
    shape = tuple(int(size) for size in entry["shape"])
    chunks = tuple(
        Chunk(str(c["file"]), str(c["key"]), tuple(map(int, c["offsets"])), tuple(map(int, c["sizes"])))
        for c in entry["chunks"]
    )
    inside = all(
        len(chunk.offsets) == len(chunk.sizes) == len(shape)
        and all(o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True))
        for chunk in chunks
    )
    if not inside or sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the parts of {name} do not make up its shape {shape}")
    return Tensor(str(entry["dtype"]), shape, chunks)
