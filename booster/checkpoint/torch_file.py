"""Weights in files of `torch.save`, read by `torch.load(weights_only=True)` after a look at what it would be asked to do.

That loader runs no foreign code, but it calls what makes memory: `torch.FloatTensor(n)` is n numbers that were in the process
before, `bytearray(n)` takes n bytes, and a compressed archive grows a thousandfold. A file of weights needs none of them.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from booster.checkpoint.manifest import CheckpointError
from booster.ground.foreign_files import ROOM, open_regular
from booster.ground.torch_internals import REBUILDERS

# What a state dict of tensors is rebuilt by; called, or, of storages, named in the place of one.
_CALLED = {"collections OrderedDict", *REBUILDERS}
_NAMED = {f"torch {name}" for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)} | {
    f"{module} {name}Storage"
    for module, names in (
        ("torch", "BFloat16 Bool Byte Char ComplexDouble ComplexFloat Double Float Half Int Long Short"),
        ("torch.storage", "Untyped"),
    )
    for name in names.split()
}
_ORDERED_DICT = "collections OrderedDict"


class _Name(str):
    """The name of what a pickle asks for, and no text of it."""


_ORDERED = _Name("an OrderedDict")
# Bytes that what an instruction makes takes, here or in torch's own reader, where it is more than a number; at most.
_COSTS = {
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "SETITEM", "SETITEMS", "EMPTY_DICT", "EMPTY_LIST", "MARK"), 120),
    **dict.fromkeys(("REDUCE", "NEWOBJ", "BINPERSID", "EMPTY_SET"), 512),
}
_COST, _COST_OF_A_BYTE = 48, 4


def read_torch_file(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the tensors in a file of `torch.save`; they have no more memory than the file has bytes.

    Raises CheckpointError for what is no dict of tensors by name, or asks for anything but tensors.
    """
    try:
        with open_regular(path) as file:
            _look(file)
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} is not a file of weights: {error}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not weights by name")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise CheckpointError(
                f"{path} is not a file of weights: it holds a {type(value).__name__} {str(name)[:80]!r}"
            )
        yield name, value


def _look(file: IO[bytes]) -> None:
    """Raise ValueError for what would take more memory than the file is large, or the values of memory that was there."""
    size = file.seek(0, 2)
    budget = _Budget(size)
    file.seek(0)
    is_archive = file.read(4) == b"PK\x03\x04"  # as torch tells them apart, whatever stands further on
    file.seek(0)
    if not is_archive:
        for _ in range(3):  # a number, a version, and the system that wrote it
            _stored(file, budget)
        stored = _stored(file, budget)
        unread = stored - set(_listed(file, budget))
        if unread:
            raise ValueError(f"it holds no values of {len(unread)} of its {len(stored)} storages")
        return
    _check_directory(file, size)
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("its archive is compressed, which torch.save does not do")
        if sum(record.file_size for record in records) > size:
            raise ValueError(f"its archive of {size} bytes would have more of them inside")
        for record in records:
            if record.filename.endswith(".pkl"):
                with archive.open(record) as opened:
                    _stored(opened, budget)


def _check_directory(file: IO[bytes], size: int) -> None:
    """Raise ValueError unless the archive's directory lies where every reader looks for it: right before the archive's end.

    Python finds it from the end backwards, torch by the place that is written there. Where the two differ there are two
    directories, and what one reader looks at is not what the other one loads.
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


class _Budget:
    """The bytes of memory that reading a file of `size` bytes may take for what its pickles make beside tensors."""

    def __init__(self, size: int) -> None:
        self._size, self._left = size, size + ROOM

    def spend(self, taken: int) -> None:
        """Count `taken` bytes; raises ValueError where that is more than is left."""
        self._left -= taken
        if self._left < 0:
            raise ValueError(f"its {self._size} bytes would take over {self._size + ROOM} in memory, beside tensors")


def _stored(file: IO[bytes], budget: _Budget) -> set[str]:
    """Read one pickle without doing what it says, and return the keys of the storages that it refers to.

    Raises ValueError where it calls or names what no tensor is made of. What the stack holds is followed as far as calls and
    references need it: texts, tuples, and what was called; anything else is None, and may not be called.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # what the stack was at each mark
    memo: dict[int, Any] = {}
    keys = set()
    argument: Any
    last = 0
    for opcode, argument, place in pickletools.genops(file):
        name = opcode.name
        made: Any = None
        budget.spend(_COSTS.get(name, _COST) + _COST_OF_A_BYTE * ((place or 0) - last))
        last = place or 0
        if name == "MARK":
            below.append(stack)
            stack = []
            continue
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
            continue
        if name == "GLOBAL":
            made = _named(argument)
        elif name.endswith("UNICODE"):
            made = argument
        elif name in ("BINGET", "LONG_BINGET"):
            made = memo[argument]
        elif name in ("REDUCE", "NEWOBJ", "BUILD"):
            made = _called(stack[-2], name)
        elif name == "BINPERSID":
            keys.add(_key(stack[-1]))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            made = tuple(stack[-int(name[-1]) :])
        elif name == "TUPLE":
            made = tuple(stack)
        elif name in ("SETITEM", "SETITEMS", "APPEND", "APPENDS"):
            into = below[-1][-1] if name.endswith("S") else stack[-3 if name == "SETITEM" else -2]
            made = _ORDERED if into is _ORDERED else None
        number = len(opcode.stack_before)
        if pickletools.markobject in opcode.stack_before:
            stack, number = below.pop(), opcode.stack_before.index(pickletools.markobject)
        if number > len(stack):
            raise ValueError(f"it takes more than there is, at byte {place}")
        del stack[len(stack) - number :]
        stack += [made] * len(opcode.stack_after)
    return keys


def _named(what: str) -> _Name:
    if what not in _CALLED and what not in _NAMED:
        raise ValueError(f"it asks for {what.replace(' ', '.')[:80]}, and weights need no such thing")
    return _Name(what)


def _called(what: Any, name: str) -> _Name | None:
    """What a call of `what` makes, by the instruction `name`."""
    if not isinstance(what, _Name) or (what not in _CALLED if name == "REDUCE" else what is not _ORDERED):
        raise ValueError(f"it calls {str(what).replace(' ', '.')[:80]}, and weights need no such thing")
    return _ORDERED if what in (_ORDERED, _ORDERED_DICT) else None


def _key(reference: Any) -> str:
    if not isinstance(reference, tuple) or len(reference) < 3 or type(reference[2]) is not str:
        raise ValueError("it refers to something that is no storage")
    return reference[2]


def _listed(file: IO[bytes], budget: _Budget) -> Iterator[str]:
    """Yield the texts of a pickle that is a list of them and nothing else."""
    last = 0
    for opcode, argument, place in pickletools.genops(file):
        budget.spend(3 * _COST + _COST_OF_A_BYTE * ((place or 0) - last))  # in the list, and in a set here
        last = place or 0
        if opcode.name.endswith("UNICODE"):
            yield str(argument)
        elif opcode.name not in ("PROTO", "EMPTY_LIST", "MARK", "BINPUT", "LONG_BINPUT", "APPEND", "APPENDS", "STOP"):
            raise ValueError("it does not list its storages")
