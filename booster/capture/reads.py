"""What a host reads of a device while a function runs, and on which line of the user's."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from booster.common.snapshot import StateSnapshot
from booster.common.torch_internals.tensor_internals import TorchDispatchMode, storage_key, written_values
from booster.tensors.trees import tensors

_HERE = os.path.dirname(__file__)
_OURS = os.path.dirname(_HERE)
_TORCH = os.path.dirname(torch.__file__)
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))  # of any environment
_KERNELS = f"{os.sep}triton{os.sep}"  # which only reads where it interprets

# Calls that read and show no operation.
_SILENT = {"cpu", "numpy", "tolist", "__repr__", "__array__"}
_TO_CPU = re.compile(r"""\.to\((device=)?(torch\.device\()?["']cpu["']""")
_COPIES = {"tensor", "as_tensor", "new_tensor"}
_SAID = {
    "item": ".item() of a tensor",
    "tolist": ".tolist() of a tensor",
    "numpy": ".numpy() of a tensor",
    "cpu": ".cpu() of a tensor",
    "__array__": "a tensor as an array",
    "__float__": "float() of a tensor",
    "__int__": "int() of a tensor",
    "__complex__": "complex() of a tensor",
    "__bool__": "whether a tensor is true, as an `if` does",
    "__contains__": "whether a value is in a tensor",
    "__index__": "a tensor as an index or a count",
    "__repr__": "a tensor as text, as print() does",
    "__format__": "a tensor as text, as print() does",
    "__getitem__": "an index by a tensor, which picks so many elements as its numbers say",
    "__setitem__": "an index by a tensor, which picks so many elements as its numbers say",
}


class Reads:
    """Notes in `found`, inside `watched`, what waits for a device, or would if the tensors here lay on one.

    Where `device` is a CPU, tensors are taken for ones of a GPU; but for those that are made from numbers without a device
    being named, which are on the host on every machine, and `on_host`. snapshot: keeps what is written, and generators.
    origin: file and line where nothing else is known of the user's.
    """

    def __init__(
        self,
        snapshot: StateSnapshot,
        origin: tuple[str, int],
        device: torch.device,
        on_host: Sequence[torch.Tensor] = (),
    ) -> None:
        self.found: dict[str, None] = {}
        self.on = False
        self._snapshot = snapshot
        self._origin = origin
        self._device = device
        # With the storage itself, so that no other one gets its address meanwhile.
        self._host = {storage_key(tensor): tensor.untyped_storage() for tensor in on_host}

    @contextmanager
    def watched(self) -> Iterator[None]:
        with _Calls(self) as calls, _Operations(self, self._snapshot, calls):
            yield

    def add(self, what: str) -> None:
        if not self.on:
            return
        user, reader = _who()
        if reader is not None and _KERNELS in _path(reader) and _is_installed(_path(reader)):
            return
        path, line = self._origin if user is None else (_path(user), _statement(user))
        where = "" if reader is user or reader is None else f", in {_shown(_path(reader))}:{reader.f_lineno}"
        self.found[f"{_shown(path)}:{line}: {what}{where}"] = None

    def note_written(self, option: str, group: int, *, by_ours: bool) -> None:
        """Somebody writes an option of a group of parameters. by_ours: what boosted schedules write counts."""
        reader = _who()[1]
        if not _of_ours(sys._getframe(2)) and (by_ours or not _of_ours(reader)):
            self.add(f"{option!r} of group {group} is written by Python, and a graph would read it as it was")

    def lies_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != self._device.type or (_plain(tensor) and storage_key(tensor) in self._host)

    def lie_on_host(self, made: Any) -> None:
        for tensor in tensors(made):
            if _plain(tensor):
                self._host[storage_key(tensor)] = tensor.untyped_storage()


class _Calls(TorchFunctionMode):
    """Knows the call of torch that is under way, by its name."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads
        self.name = ""
        self.names_device = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            if getattr(func.__self__, "__name__", "") == "is_cpu" and _of_ours(sys._getframe(1)):
                return False  # what is read only where it costs nothing is not read
            return func(*args, **kwargs)
        given = list(tensors((args, kwargs)))
        there = bool(given) and not all(map(self._reads.lies_on_host, given))
        # On a GPU the same call makes a tensor there, and without a device one of the host.
        names_device = kwargs.get("device") is not None or name == "new_tensor"
        if name in _SILENT and there:
            self._reads.add(_SAID[name])
        elif name == "to" and there and _is_to_cpu(_who()[0]):
            self._reads.add("to() of a tensor, which copies it to the host")
        elif name in _COPIES and not isinstance(data := _data(name, args, kwargs), torch.Tensor):
            if not all(map(self._reads.lies_on_host, tensors(data))):  # which no operation shows
                self._reads.add(f"{name}() of tensors, of which a host reads each")
            elif names_device:
                self._reads.add("a number is copied to the device, which a graph would copy again as it was")
        before = self.name, self.names_device
        self.name, self.names_device = name, names_device or name == "__deepcopy__"
        try:
            made = func(*args, **kwargs)
        finally:
            self.name, self.names_device = before
        if not given and not names_device and isinstance(made, torch.Tensor):
            self._reads.lie_on_host(made)
        return made


class _Operations(TorchDispatchMode):
    """Sees every operation, those of a backward pass too."""

    def __init__(self, reads: Reads, snapshot: StateSnapshot, calls: _Calls) -> None:
        super().__init__()
        self._reads, self._snapshot, self._calls = reads, snapshot, calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Before it runs: what it writes is put back after the trial.
        for tensor in tensors(list(written(func, args, kwargs))):
            if _plain(tensor):
                self._snapshot.memory.keep(tensor)
        generator = kwargs.get("generator")
        if generator is not None:
            self._snapshot.keep_generator(generator)
        given = list(tensors((args, kwargs)))
        there = bool(given) and not all(map(self._reads.lies_on_host, given))
        if there and _waits(func, args):
            name = self._calls.name
            self._reads.add(
                _SAID.get(name, f"{name or func.overloadpacket.__name__}(), of which a host reads a result")
            )
        made = func(*args, **kwargs)
        if there and func.overloadpacket.__name__ in _MOVES and self._reads.lies_on_host(made):
            name = self._calls.name
            self._reads.add(_SAID[name] if name in _SILENT else f"{name}() of a tensor, which copies it to the host")
        if not there and (given or not self._calls.names_device):
            self._reads.lie_on_host(made)
        return made


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments of an operation that it writes to."""
    if "batch_norm" in func.overloadpacket.__name__:  # writes running statistics, of which its schema says nothing
        yield from args
    yield from written_values(func, args, kwargs)


_WAITING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_MOVES = {"copy_", "_to_copy"}
_BY_MASKS = {"index", "index_put", "index_put_", "_index_put_impl_"}  # wait for masks, and not for numbers


def _waits(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a host waits for the result of an operation, or for its size."""
    name = func.overloadpacket.__name__
    if name in _BY_MASKS:
        # How many elements a mask picks is known on the device alone.
        masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masks and (name == "index" or args[2].numel() != 1)  # of one number: a masked fill
    return name == "_linalg_check_errors" or not _WAITING.isdisjoint(func.tags)


def _data(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a tensor is made from, by one of `_COPIES`."""
    rest = args[1:] if name == "new_tensor" else args
    return rest[0] if rest else kwargs.get("data")


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _of_ours(frame: Any) -> bool:
    return _path(frame).startswith(_OURS + os.sep)


def _path(frame: Any) -> str:
    return str(frame.f_code.co_filename)


def _who() -> tuple[Any, Any]:
    """Return the frames of the user's innermost call, and of the innermost one that is neither torch's nor from here."""
    frame: Any = sys._getframe(2)
    reader: Any = None
    generated: Any = None  # as dataclasses write it: the user's where no file is
    while frame is not None:
        path = _path(frame)
        if not path.startswith((_TORCH + os.sep, _HERE + os.sep, "<frozen")):
            reader = reader or frame
            # The user's are all files but those of this library, torch, Python and what is installed.
            if not _is_installed(path) and not path.startswith(_OURS + os.sep):
                if not path.startswith("<") or linecache.getlines(path):
                    return frame, frame if reader is generated else reader
                generated = generated or frame
        frame = frame.f_back
    return generated, reader


def _is_installed(path: str) -> bool:
    return path.startswith(_INSTALLED) or any(map(path.__contains__, _PACKAGES))


def _shown(path: str) -> str:
    here = os.getcwd() + os.sep
    return path.removeprefix(here)


def _statement(frame: Any) -> int:
    """Return the line on which the statement begins that `frame` is in; of a lambda at most its own first."""
    line: int = frame.f_lineno
    begins = [first for first, last in _statements(_path(frame)) if first <= line <= last]
    return max(begins, default=line) if frame.f_code.co_name != "<lambda>" else frame.f_code.co_firstlineno


def _is_to_cpu(frame: Any) -> bool:
    """Return whether the user's line spells to("cpu"): what to(device) does on a GPU cannot be seen on a CPU."""
    return frame is not None and _TO_CPU.search(linecache.getline(_path(frame), frame.f_lineno)) is not None


@functools.cache
def _statements(path: str) -> list[tuple[int, int]]:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:  # as of a notebook's magic
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
            found.append((node.lineno, max(node.lineno, last or node.lineno)))
    return found


def origin_of(function: Callable[..., Any]) -> tuple[str, int]:
    """Return file and line of `function`, or those of what it was made of."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = getattr(inner, "__func__", inner)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return (type(function).__name__, 1) if code is None else (code.co_filename, code.co_firstlineno)
