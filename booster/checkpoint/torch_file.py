"""Weights in files of `torch.save`, read without running a pickle, and without torch's reader of such files.

A pickle of weights is a list of few instructions: they make dicts, texts and numbers, and tensors out of storages whose bytes
lie elsewhere in the file. They are followed here, and any other is refused. Torch's own reader calls what makes memory
(`torch.FloatTensor(n)` is n numbers that were in the process before), lets a tensor that reaches beyond its storage have what
was behind it, and believes a pickle how many bytes a record has. Here each storage has just the bytes that the file has for
it, and each tensor lies within one, which is known before memory is taken.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from booster.checkpoint.header import SAFETENSORS_DTYPES, num_bytes, sizes
from booster.checkpoint.manifest import CheckpointError
from booster.checkpoint.tensor_file import bytes_of
from booster.common.torch_internals.tensor_internals import REBUILDERS
from booster.common.untrusted_files import ROOM, open_regular

_ORDERED_DICT = "collections OrderedDict"
_TENSOR, _TENSOR_2, _TENSOR_3, _PARAMETER = REBUILDERS
_CALLED = (_ORDERED_DICT, *REBUILDERS)
_DTYPES = {str(dtype).replace(".", " "): dtype for dtype in (*SAFETENSORS_DTYPES, torch.complex128)}
_STORAGES = {
    "torch BFloat16Storage": torch.bfloat16,
    "torch BoolStorage": torch.bool,
    "torch ByteStorage": torch.uint8,
    "torch CharStorage": torch.int8,
    "torch ComplexDoubleStorage": torch.complex128,
    "torch ComplexFloatStorage": torch.complex64,
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch IntStorage": torch.int32,
    "torch LongStorage": torch.int64,
    "torch ShortStorage": torch.int16,
    "torch.storage UntypedStorage": torch.uint8,
}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NUMBERS_AND_TEXTS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING")
_LONGEST = 2**16  # bytes of a text
# Bytes that what an instruction makes takes where it is more than a number; at most.
_COSTS = {
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "SETITEM", "SETITEMS", "EMPTY_DICT", "EMPTY_LIST", "MARK"), 120),
    **dict.fromkeys(("REDUCE", "BINPERSID"), 512),
}
_COST, _COST_OF_A_BYTE = 48, 4
_PICKLE = "data.pkl"
_UTF_8, _SIZE_BEHIND = (
    0x800,
    8,
)  # flags of records in an archive: how the name is written, and that the size stands behind
_COST_OF_A_BYTE_OF_A_DIRECTORY = 20


def read_torch_file(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the tensors in a file of `torch.save`; they have no more memory than the file has bytes.

    Those of one storage share its memory. Raises CheckpointError for what is no dict of tensors by name, or asks for anything
    but tensors, before the first of them.
    """
    read: dict[str, torch.Tensor] = {}
    try:
        with open_regular(path) as file:
            state, places = _look(file)
            for name, tensor in state.items():
                storage = tensor.storage
                if storage.key not in read:
                    read[storage.key] = _bytes_at(file, places[storage.key], storage.num_bytes)
                yield name, read[storage.key].view(tensor.dtype).as_strided(tensor.shape, tensor.stride, tensor.start)
    except Exception as error:
        raise CheckpointError(f"{path} is not a file of weights: {error}") from error


def _bytes_at(file: IO[bytes], start: int, number: int) -> torch.Tensor:
    found = torch.empty(number, dtype=torch.uint8)
    file.seek(start)
    if file.readinto(bytes_of(found)) != number:  # type: ignore[attr-defined]
        raise ValueError("it ended while it was read")
    return found


class _Name(str):
    """The name of what a pickle asks for, and no text of it."""


class _Ordered(dict[str, Any]):
    """What stands for an OrderedDict, which may get attributes."""


@dataclass(frozen=True)
class _Storage:
    """So many numbers of one dtype, somewhere in the file."""

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, [self.numel])


@dataclass(frozen=True)
class _Tensor:
    """A tensor in a storage: where it begins there, and its strides, in numbers of its dtype."""

    storage: _Storage
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


# ---- where a file has its pickle, and its storages ----


def _look(file: IO[bytes]) -> tuple[dict[str, _Tensor], dict[str, int]]:
    """Return the tensors of a file by name, and by the key of each storage where its bytes begin.

    Raises ValueError for anything else, and for what would take more memory than the file is large.
    """
    size = file.seek(0, 2)
    budget, storages = _Budget(size), dict[str, _Storage]()
    file.seek(0)
    is_archive = file.read(4) == b"PK\x03\x04"  # as torch tells them apart, whatever stands further on
    state, places = (_in_archive if is_archive else _in_old_form)(file, size, budget, storages)
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {_kind(state)}, not weights by name")
    for name, value in state.items():
        if not isinstance(value, _Tensor):
            raise ValueError(f"it holds a {_kind(value)} {name[:80]!r}")
    return state, places


def _in_archive(
    file: IO[bytes], size: int, budget: _Budget, storages: dict[str, _Storage]
) -> tuple[Any, dict[str, int]]:
    """Return what the pickle in an archive makes, and where each of `storages`, which fill meanwhile, has its record."""
    budget.spend(_COST_OF_A_BYTE_OF_A_DIRECTORY * _length_of_directory(file, size))
    with zipfile.ZipFile(file) as archive:
        found = archive.infolist()
    if any((record.compress_type, record.compress_size) != (zipfile.ZIP_STORED, record.file_size) for record in found):
        raise ValueError("its archive is compressed, which torch.save does not do")
    if any(record.flag_bits & ~(_UTF_8 | _SIZE_BEHIND) for record in found):
        raise ValueError("its archive is encrypted, or in parts, which torch.save does not do")
    if sum(record.file_size for record in found) > size:
        raise ValueError(f"its archive of {size} bytes would have more of them inside")
    folder = found[0].filename.partition("/")[0] if found else ""
    records = {record.filename.removeprefix(f"{folder}/"): record for record in found}
    if len(records) != len(found):
        raise ValueError("its archive has two records of one name")
    begins = {name: _begin_of(file, record) for name, record in records.items()}
    for name in begins:
        if not name.startswith("data/") and name != _PICKLE:
            file.seek(begins[name])
            text = file.read(min(records[name].file_size, 64)).strip()
            if not text.isdigit() and (name, text) != ("byteorder", b"little"):
                raise ValueError(f"its archive has {text!r} as {name[:80]}, which torch.save does not write here")
    if not {_PICKLE, "version"} <= begins.keys():
        raise ValueError(f"its archive has no {_PICKLE} or no version")
    file.seek(begins[_PICKLE])
    state = _made_by(file, budget, storages)
    if file.tell() > begins[_PICKLE] + records[_PICKLE].file_size:
        raise ValueError(f"its {_PICKLE} does not end")
    for key, storage in storages.items():
        has = records[f"data/{key}"].file_size if f"data/{key}" in records else "none"
        if has != storage.num_bytes:
            raise ValueError(f"it has {has} of the {storage.num_bytes} bytes of a storage")
    return state, {key: begins[f"data/{key}"] for key in storages}


def _begin_of(file: IO[bytes], record: zipfile.ZipInfo) -> int:
    """Return where the bytes of a record begin, behind a header of its own, which names it as the directory does."""
    file.seek(record.header_offset)
    signature, flags, name, extra = struct.unpack("<4s2xH18xHH", file.read(30))
    encoding = "utf-8" if flags & _UTF_8 else "cp437"
    if signature != b"PK\x03\x04" or file.read(name).decode(encoding) != record.orig_filename:
        raise ValueError(f"its archive has no record {record.filename[:80]!r} where it says")
    return record.header_offset + 30 + int(name) + int(extra)


def _in_old_form(
    file: IO[bytes], size: int, budget: _Budget, storages: dict[str, _Storage]
) -> tuple[Any, dict[str, int]]:
    """Return what the pickle in a file of the form before archives makes, and where each of `storages`, which fill, begins.

    They lie behind the last pickle, which lists them, each behind its number of elements; nothing lies behind them.
    """
    file.seek(0)
    if [_made_by(file, budget, None) for _ in range(2)] != [MAGIC_NUMBER, PROTOCOL_VERSION]:
        raise ValueError("it does not begin as torch.save begins")
    _made_by(file, budget, None)  # the system that wrote it
    state = _made_by(file, budget, storages, (None,))
    listed = _made_by(file, budget, None)
    if type(listed) is not list or not all(type(key) is str for key in listed):
        raise ValueError("it does not list its storages")
    unread = storages.keys() - set(listed)
    if unread:
        raise ValueError(f"it holds no values of {len(unread)} of its {len(storages)} storages")
    places: dict[str, int] = {}
    end = file.tell()
    for key in listed:
        if key not in storages or key in places:
            raise ValueError("it lists a storage twice, or one that is no tensor's")
        file.seek(end)
        number = file.read(8)
        if number != storages[key].numel.to_bytes(8, "little"):
            told = int.from_bytes(number, "little")
            raise ValueError(f"it has {told} of the {storages[key].numel} numbers of a storage")
        places[key] = end + 8
        end += 8 + storages[key].num_bytes
    if end != size:
        raise ValueError(f"its storages end at byte {end} of {size}")
    return state, places


def _length_of_directory(file: IO[bytes], size: int) -> int:
    """Return how many bytes the archive's directory has, which lies right before the archive's end.

    Python finds it from the end backwards, torch by the place that is written there. Raises ValueError where the two differ:
    there are two directories, and a file holds one thing for one reader, and another for another.
    """
    file.seek(max(0, size - 98))
    tail = file.read(98)
    end = tail[-22:]
    length, start = struct.unpack("<LL", end[12:20]) if len(end) == 22 else (0, 0)
    before = size - 22
    if tail[-42:-38] == b"PK\x06\x07":  # of a large archive, as torch writes them all
        (place,) = struct.unpack("<Q", tail[-34:-26])
        before = size - 98
        length, start = struct.unpack("<QQ", tail[40:56])
        if place != before or tail[:4] != b"PK\x06\x06":
            raise ValueError("its archive has two ends")
    if end[:4] != b"PK\x05\x06" or end[20:] != b"\0\0" or start + length != before:
        raise ValueError("its archive does not end with its directory")
    return int(length)


# ---- what a pickle makes ----


class _Budget:
    """The bytes of memory that reading a file of `size` bytes may take for what its pickles make beside tensors."""

    def __init__(self, size: int) -> None:
        self._size, self._left = size, size + ROOM

    def spend(self, taken: int) -> None:
        """Count `taken` bytes; raises ValueError where that is more than is left."""
        self._left -= taken
        if self._left < 0:
            raise ValueError(f"its {self._size} bytes would take over {self._size + ROOM} in memory, beside tensors")


class _Pickle:
    """A pickle as `pickletools` reads it, of which no text is long: a text takes its memory before it can be counted."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.tell = file.tell

    def read(self, number: int) -> bytes:
        if number > _LONGEST:
            raise ValueError(f"it has a text of {number} bytes")
        return self._file.read(number)

    def readline(self) -> bytes:
        return self._file.readline(_LONGEST)


def _made_by(
    file: IO[bytes], budget: _Budget, storages: dict[str, _Storage] | None, views: tuple[None, ...] = ()
) -> Any:
    """Follow one pickle, and return what it makes. Raises ValueError at what no tensor is made of.

    storages: gets those that it refers to; None where it may refer to none. views: what each reference ends with.
    """
    last = 0
    try:
        stack: list[Any] = []
        below: list[list[Any]] = []  # what the stack was at each mark
        memo: dict[int, Any] = {}
        argument: Any
        for opcode, argument, place in pickletools.genops(_Pickle(file)):  # type: ignore[arg-type]
            name = opcode.name
            budget.spend(_COSTS.get(name, _COST) + _COST_OF_A_BYTE * ((place or 0) - last))
            last = place or 0
            if name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in _NUMBERS_AND_TEXTS:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name == "EMPTY_DICT":
                stack.append({})
            elif name == "EMPTY_LIST":
                stack.append([])
            elif name == "GLOBAL":
                stack.append(_named(argument))
            elif name == "MARK":
                below.append(stack)
                stack = []
            elif name == "TUPLE":
                items, stack = stack, below.pop()
                stack.append(tuple(items))
            elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                stack.append(tuple([stack.pop() for _ in range(int(name[-1]))][::-1]))
            elif name in ("APPEND", "SETITEM"):
                items = [stack.pop() for _ in range(1 if name == "APPEND" else 2)][::-1]
                _put(stack[-1], items, name)
            elif name in ("APPENDS", "SETITEMS"):
                items, stack = stack, below.pop()
                _put(stack[-1], items, name)
            elif name == "REDUCE":
                arguments = stack.pop()
                stack[-1] = _called(stack[-1], arguments, budget)
            elif name == "BUILD":
                stack.pop()  # attributes of a dict, which no tensor needs
                if not isinstance(stack[-1], _Ordered):
                    raise ValueError(f"it gives attributes to a {_kind(stack[-1])}, and weights need no such thing")
            elif name == "BINPERSID":
                stack[-1] = _referred(stack[-1], storages, views)
            elif name not in ("PROTO", "STOP"):
                raise ValueError(f"it has the instruction {name}, and weights need no such thing")
        return stack.pop()
    except (IndexError, KeyError):  # of stack, marks, memo and dtypes
        raise ValueError(f"it takes more than there is, at byte {last}") from None


def _named(what: str) -> _Name:
    if what not in (*_CALLED, *_STORAGES, *_DTYPES):
        raise ValueError(f"it asks for {what.replace(' ', '.')[:80]}, and weights need no such thing")
    return _Name(what)


def _put(into: Any, items: list[Any], name: str) -> None:
    """Do as an instruction says that puts `items` into a list, or keys and values in turn into a dict."""
    if name.startswith("APPEND"):
        if type(into) is not list:
            raise ValueError(f"it appends to a {_kind(into)}")
        into += items
        return
    if not isinstance(into, dict) or len(items) % 2:
        raise ValueError(f"it puts names into a {_kind(into)}, or one without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) is not str or key in into:
            raise ValueError(f"it has a name that is a {_kind(key)}, or one twice")
        into[key] = value


def _called(what: Any, given: Any, budget: _Budget) -> Any:
    """Return what a call makes that a pickle asks for."""
    if not isinstance(what, _Name) or what not in _CALLED:
        called = what.replace(" ", ".")[:80] if isinstance(what, str) else f"a {_kind(what)}"
        raise ValueError(f"it calls {called}, and weights need no such thing")
    if type(given) is not tuple:
        raise ValueError("it calls something with no arguments")
    if what == _ORDERED_DICT:
        made, pairs = _Ordered(), given[0] if given else []  # Python 2 wrote all pairs as an argument
        budget.spend(_COSTS["SETITEM"] * sum(map(len, pairs)))
        for pair in pairs:
            _put(made, [*pair], "SETITEMS")
        return made
    if what == _PARAMETER:
        if len(given) != 3 or not isinstance(given[0], _Tensor):
            raise ValueError("it has a parameter that is no tensor")
        return given[0]
    return _tensor(what, given)


def _tensor(what: str, given: tuple[Any, ...]) -> _Tensor:
    """Return the tensor that one of the three `_rebuild_tensor` makes of its arguments; raises ValueError for other ones."""
    storage, start, shape, stride, *more = given
    if not isinstance(storage, _Storage) or type(shape) is not tuple or type(stride) is not tuple:
        raise ValueError("it has a tensor of no storage, shape and strides")
    dtype = storage.dtype if what != _TENSOR_3 else _DTYPES[more.pop(2)]
    if len(more) not in ((0,) if what == _TENSOR else (2, 3)) or any(more[1:]) or (more and type(more[0]) is not bool):
        raise ValueError(
            "it has a tensor that is more than its numbers, as hooks, or is kept as its conjugate or negative"
        )
    (start,), shape, stride = sizes([start]), sizes([*shape]), sizes([*stride])
    if len(shape) != len(stride):
        raise ValueError(f"it has a tensor of shape {shape} and strides {stride}")
    num_bytes(dtype, shape)
    stop = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    if 0 not in shape and stop * dtype.itemsize > storage.num_bytes:
        raise ValueError(
            f"it has a tensor up to byte {stop * dtype.itemsize} of the {storage.num_bytes} of its storage"
        )
    return _Tensor(storage, dtype, start, shape, stride)


def _referred(reference: Any, storages: dict[str, _Storage] | None, views: tuple[None, ...]) -> _Storage:
    """Return the storage that `reference` names, and put it into `storages`; one key means one storage."""
    if storages is None or type(reference) is not tuple or len(reference) < 5 or reference[5:] != views:
        raise ValueError("it refers to something that is no storage")
    kind, of, key, where, numel = reference[:5]
    dtype = _STORAGES.get(of) if isinstance(of, _Name) else None
    if (kind, type(key), type(where)) != ("storage", str, str) or dtype is None:
        raise ValueError("it refers to something that is no storage")
    storage = _Storage(key, dtype, *sizes([numel]))
    if storages.setdefault(key, storage) != storage:
        raise ValueError(f"it has two storages under the key {key[:80]!r}")
    return storage


def _kind(value: Any) -> str:
    return type(value).__name__.strip("_")
