"""What a checkpoint contains: one JSON file with a hash of each other file, written last. Without it there is no checkpoint.

Damage is found by XXH3-128, which reads memory as fast as it comes, 10 GB/s and more on one core, where SHA-256 takes as long
as writing to a fast disk. It does not protect against people, who can write its hashes too. Source: Y. Collet, xxHash,
https://xxhash.com.

Ranks that save and load together also fail together: what one raises, as a `CheckpointError`, all raise (`agreed`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from booster.common.untrusted_files import (
    TEXT,
    JsonForm,
    check_form,
    json_cost,
    open_regular,
    parse_json,
    printable,
    read_regular,
    whole,
)
from booster.ranks.agreement import gather

HASH = "xxh3_128"
BLOCK = 1 << 19  # bytes hashed and copied at a time: they are still in the processor's cache for the second of the two


def new_hash() -> Any:
    """Return an empty hash, with `update` and `hexdigest` as hashlib's have. Raises ImportError where xxhash is missing."""
    try:
        from xxhash import xxh3_128
    except ImportError as error:
        raise ImportError("the hashes of a checkpoint need xxhash: pip install xxhash") from error
    return xxh3_128()


def hash_of(data: bytes | memoryview) -> str:
    """Return the hexadecimal hash of `data`."""
    digest = new_hash()
    digest.update(data)
    return str(digest.hexdigest())


def hash_of_file(path: Path) -> str:
    """Return the hexadecimal hash of the file at `path`, of which a block is in memory at a time."""
    digest, block = new_hash(), memoryview(bytearray(BLOCK))
    with open_regular(path, buffered=False) as file:
        while num := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:num])
    return str(digest.hexdigest())


MANIFEST, STATE = "manifest.json", "state.json"
FORMAT, VERSION = "booster checkpoint", 2
LARGEST_NUMBER = 2**63 - 1  # that a manifest holds, of a step too
_ROOM = 24 * 2**20  # bytes of memory that a text may take where tensors are few
# Dimensions in which a tensor may be cut: saves cut it in as many as a mesh has, or along one. Its corners are 2 to that power.
_MOST_CUTS = 6

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
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
}
PAIRS = torch.float4_e2m1fn_x2  # of which the format counts numbers, and torch pairs of them
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_DTYPES}

_NUMBER = whole(0, LARGEST_NUMBER)
_SIZES = JsonForm(  # torch has no tensor of more than 64 dimensions
    lambda value: isinstance(value, list) and len(value) <= 64 and all(map(_NUMBER.holds, value)), "a list of sizes"
)
_NAME = JsonForm(lambda name: Path(name).name == name not in ("", MANIFEST) and "\0" not in name, "a file's name")
_DTYPE = JsonForm(lambda name: isinstance(name, str) and name in _DTYPES, "a dtype that this torch has")
_CHUNK = {"file": TEXT, "key": TEXT, "offsets": _SIZES, "sizes": _SIZES}
_CONTENT = {
    "step": _NUMBER,
    "world_size": _NUMBER,
    "versions": {"*": TEXT},
    "files": {"*": {"bytes": _NUMBER, "digest": TEXT, "hash": JsonForm(lambda kind: kind == HASH, repr(HASH))}},
    "tensors": {"*": {"dtype": _DTYPE, "shape": _SIZES, "chunks": [_CHUNK]}},
}


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, or not for these objects; its `message` says what differs and what to do.

    Names of what a file holds stand in it, so what a terminal would act on is spelled out.
    """

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(printable(line) for line in message.split("\n")))


@dataclass(frozen=True)
class File:
    """One file of the checkpoint, other than the manifest.

    Attributes:
        bytes: its size.
        digest: the hash of its bytes, in hexadecimal digits.
        hash: which hash that is.
    """

    bytes: int
    digest: str
    hash: str = HASH


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor.

    Attributes:
        file: which holds it.
        key: its name there.
        offsets: where it begins in the whole tensor, by dimension.
        sizes: its shape.
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor under its whole name and shape.

    Attributes:
        dtype: torch's name, as "bfloat16".
        shape: of the whole.
        chunks: disjoint, covering it.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """What the file says.

    Attributes:
        step: as given to `save`.
        world_size: how many processes saved.
        versions: of booster and torch, for people.
        files: by name, all but this one.
        tensors: by whole name.
    """

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
    """Return the bytes of memory that manifest and state may take each, by those of the files of tensors."""
    # Together with the header of a file of tensors that is no more than all files have, and 64 MiB.
    return _ROOM + of_tensors // 4


def check_text(name: str, takes: int, files: Mapping[str, File]) -> None:
    """Raise CheckpointError where no reader would take the text `name` of a checkpoint of `files`. takes: its `json_cost`."""
    of_tensors = sum(file.bytes for other, file in files.items() if other != STATE)
    if takes > room_for_text(of_tensors):
        raise CheckpointError(
            f"{name} would take {takes} bytes of memory to read, and may take {_ROOM} and a quarter of the {of_tensors} bytes "
            "of its tensors; keep numbers in tensors instead of lists"
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
        if version == VERSION and hashlib.sha256(_canonical(outer["content"])).hexdigest() != outer["sha256"]:
            raise ValueError("its content does not match its hash")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if version != VERSION:
        raise CheckpointError(f"{path} is of version {version!r} of the format; this booster reads version {VERSION}")
    try:
        return _of(outer["content"])
    except ValueError as error:
        raise CheckpointError(f"{path} does not say what a manifest says: {error}") from error


def read_text(folder: Path, name: str) -> bytes:
    """Return a JSON text of the checkpoint in `folder`; raises OSError where it is no file, or larger than one can be."""
    # What it may have goes with the files in the folder.
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
    """Compare every file of `manifest` with what is in `folder`, byte for byte by its hash, and yield what is wrong."""
    for name, expected in sorted(manifest.files.items()):
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                yield f"{name} has {size} bytes, and {expected.bytes} were written"
            elif hash_of_file(path) != expected.digest:
                yield f"{name} holds other bytes than were written"
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} cannot be read: {error}"


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _of(content: Any) -> Manifest:
    """Return what `content` says. Raises ValueError where it has another form, or claims what cannot be."""
    check_form("it", content, _CONTENT)
    files = {name: File(entry["bytes"], entry["digest"]) for name, entry in content["files"].items()}
    for name in files:
        check_form("a file", name, _NAME)
    tensors = {name: _tensor(name, entry) for name, entry in content["tensors"].items()}
    claimed: Counter[str] = Counter()
    keys = set()
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if chunk.file not in files:
                raise ValueError(f"{name} is in {chunk.file!r}, which the manifest does not list")
            if (chunk.file, chunk.key) in keys:
                raise ValueError(f"{chunk.key} of {chunk.file} is part of two tensors, or twice of one")
            keys.add((chunk.file, chunk.key))
            claimed[chunk.file] += num_bytes(_DTYPES[tensor.dtype], chunk.sizes)
    for name, size in claimed.items():
        if size > files[name].bytes:
            raise ValueError(f"{name} has {files[name].bytes} bytes, and its tensors would have {size}")
    return Manifest(content["step"], content["world_size"], content["versions"], files, tensors)


def _tensor(name: str, entry: Mapping[str, Any]) -> Tensor:
    shape = tuple(entry["shape"])
    num_bytes(_DTYPES[entry["dtype"]], shape)
    chunks = [Chunk(c["file"], c["key"], tuple(c["offsets"]), tuple(c["sizes"])) for c in entry["chunks"]]
    # What has no elements covers nothing, and would be found in place of a chunk that begins where it does.
    kept = [chunk for chunk in chunks if 0 not in chunk.sizes]
    if 0 in shape:
        kept = [chunk for chunk in chunks if chunk.sizes == shape and not any(chunk.offsets)][:1]
    if not all(len(c.offsets) == len(c.sizes) == len(shape) for c in chunks) or not _are_the_whole(shape, kept):
        raise ValueError(f"the parts of {name} do not make up its shape {shape}, each element once")
    return Tensor(entry["dtype"], shape, tuple(kept))


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype that a manifest's entry names."""
    return _DTYPES[tensor.dtype]


def num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor; raises ValueError where no machine can address them."""
    taken = math.prod(shape) * dtype.itemsize
    if taken > LARGEST_NUMBER:
        raise ValueError(f"a tensor of shape {tuple(shape)}")
    return taken


def _are_the_whole(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Return whether the boxes `chunks` are disjoint and cover a tensor of `shape`."""
    if 0 in shape:
        return True
    whole = Chunk("", "", (0,) * len(shape), shape)
    cut = [dim for dim, size in enumerate(shape) if any(c.offsets[dim] != 0 or c.sizes[dim] != size for c in chunks)]
    if len(cut) > _MOST_CUTS:
        raise ValueError(f"a tensor is cut in {len(cut)} dimensions")
    # How often each element is covered is a function of place.
    jumps: Counter[tuple[int, ...]] = Counter()
    # So the corners of all boxes, counted with their signs, must be those of the whole: a sum over the boxes, and no look at
    # each two of them.
    for chunk, sign in ((whole, -1), *((chunk, 1) for chunk in chunks)):
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(chunk.offsets[dim] + end * chunk.sizes[dim] for dim, end in zip(cut, ends, strict=True))
            jumps[corner] += sign * (-1) ** sum(ends)
    return not any(jumps.values())


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Return whether this process is the one that does what one process does for all."""
    return group is None or dist.get_rank(group) == 0


def agree_on_success(problem: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if any rank has a `problem`: its own where it has one, else CheckpointError with the first other."""
    texts = gather(None if problem is None else f"{type(problem).__name__}: {problem}", group)
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text is not None:
            raise CheckpointError(f"on rank {rank}: {text}")


@contextmanager
def agreed(
    group: dist.ProcessGroup | None, instead: Callable[[Exception], Exception] = lambda error: error
) -> Iterator[None]:
    """If the body raises on one rank, raise on all, as `agree_on_success`. instead: what is raised for what it raised."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = instead(error)  # raised once the others know
        if problem is not error:
            problem.__cause__ = error
    agree_on_success(problem, group)


def first_failure(error: Any) -> str:
    """Return where and how a checkpoint of `torch.distributed.checkpoint` failed first, in words."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"on rank {rank}: {type(cause).__name__}: {cause}"
