"""Weights in files of `torch.save`, read by `torch.load(weights_only=True)` after a look at what it would be asked to do.

That loader runs no foreign code, but it calls what makes memory: `torch.FloatTensor(n)` is n numbers that were in the process
before, `bytearray(n)` takes n bytes, and a compressed archive grows a thousandfold. A file of weights needs none of them.
"""

from __future__ import annotations

import pickletools
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


_MARK, _ORDERED = _Name("(mark)"), _Name("an OrderedDict")


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
    file.seek(0)
    if not zipfile.is_zipfile(file):
        file.seek(0)
        for _ in range(3):  # a number, a version, and the system that wrote it
            _stored(file)
        stored = _stored(file)
        unread = stored - set(_listed(file))
        if unread:
            raise ValueError(f"it holds no values of {len(unread)} of its {len(stored)} storages")
        return
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("its archive is compressed, which torch.save does not do")
        if sum(record.file_size for record in records) > size:
            raise ValueError(f"its archive of {size} bytes would have more of them inside")
        for record in records:
            if record.filename.endswith(".pkl"):
                if 16 * record.file_size > size + ROOM:
                    raise ValueError(f"its names take {record.file_size} bytes")
                with archive.open(record) as opened:
                    _stored(opened)


def _stored(file: IO[bytes]) -> set[str]:
    """Read one pickle without doing what it says, and return the keys of the storages that it refers to.

    Raises ValueError where it calls or names what no tensor is made of. What the stack holds is followed as far as calls and
    references need it: texts, tuples, and what was called; anything else is None, and may not be called.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    keys = set()
    argument: Any
    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        made: Any = None
        if name == "GLOBAL":
            if argument not in _CALLED and argument not in _NAMED:
                raise ValueError(f"it asks for {str(argument).replace(' ', '.')[:80]}, and weights need no such thing")
            made = _Name(argument)
        elif name == "MARK":
            made = _MARK
        elif name.endswith("UNICODE"):
            made = argument
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
            continue
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
            continue
        elif name in ("BINGET", "LONG_BINGET"):
            made = memo[argument]
        elif name in ("REDUCE", "NEWOBJ", "BUILD"):
            called = stack[-2]
            if not isinstance(called, _Name) or (called not in _CALLED if name == "REDUCE" else called is not _ORDERED):
                raise ValueError(f"it calls {str(called).replace(' ', '.')[:80]}, and weights need no such thing")
            made = _ORDERED if called in (_ORDERED, _ORDERED_DICT) else None
        elif name == "BINPERSID":
            if not isinstance(stack[-1], tuple) or len(stack[-1]) < 3 or type(stack[-1][2]) is not str:
                raise ValueError("it refers to something that is no storage")
            keys.add(stack[-1][2])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            made = tuple(stack[-int(name[-1]) :])
        elif name == "TUPLE":
            made = tuple(stack[len(stack) - stack[::-1].index(_MARK) :])
        elif name in ("SETITEM", "SETITEMS", "APPEND", "APPENDS"):
            made = _ORDERED if _below(stack, name) is _ORDERED else None
        for before in reversed(opcode.stack_before):
            if before is pickletools.stackslice:
                while stack[-1] is not _MARK:
                    stack.pop()
            else:
                stack.pop()
        stack += [made] * len(opcode.stack_after)
    return keys


def _listed(file: IO[bytes]) -> Iterator[str]:
    """Yield the texts of a pickle that is a list of them and nothing else."""
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name.endswith("UNICODE"):
            yield str(argument)
        elif opcode.name not in ("PROTO", "EMPTY_LIST", "MARK", "BINPUT", "LONG_BINPUT", "APPEND", "APPENDS", "STOP"):
            raise ValueError("it does not list its storages")


def _below(stack: list[Any], name: str) -> Any:
    """What items are put into that are on the stack."""
    if name == "SETITEM":
        return stack[-3]
    return stack[-2] if name == "APPEND" else stack[len(stack) - 2 - stack[::-1].index(_MARK)]
