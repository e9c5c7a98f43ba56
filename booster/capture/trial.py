"""What keeps a step out of a graph: by the names of what it is made with (`check`), and by a trial of it (`reads_of`).

A graph knows no host. The trial runs the step twice where it is, as a device's update would decide it, while `Reads` watches
for reads of tensors, and notes on which line of the user's they are; afterwards all is as it was.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode

from booster.common.snapshot import StateSnapshot
from booster.common.torch_internals.autograd_internals import uncompiled
from booster.common.torch_internals.tensor_internals import TorchDispatchMode, storage_key, written_values
from booster.interface.optimizer import OptimizerWrapper
from booster.interface.scheduler import LRSchedulerWrapper
from booster.loss_scaler import HostRule
from booster.masters.update import MasterApplication
from booster.tensors.trees import tensors
from booster.update.application import decides_on_device, honours_grad_scale
from booster.update.choice import UpdateFactories, on_device, update_on_device
from booster.update.context import UpdateContext, UpdateOptions
from booster.update.device import DeviceDecision
from booster.update.gradients import Gradients
from booster.update.host import HostDecision
from booster.update.update import Update

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
    """Notes in `found`, inside `recording`, what waits for a device, or would if the tensors here lay on one.

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
    def recording(self) -> Iterator[None]:
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

    def report_write(self, option: str, group: int, *, by_ours: bool) -> None:
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
        if there and _waits_for_device(func, args):
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


def _waits_for_device(func: Any, args: Sequence[Any]) -> bool:
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
    folder = os.getcwd() + os.sep
    return path.removeprefix(folder)


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
    spans = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
            spans.append((node.lineno, max(node.lineno, last or node.lineno)))
    return spans


def origin_of(function: Callable[..., Any]) -> tuple[str, int]:
    """Return file and line of `function`, or those of what it was made of."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = getattr(inner, "__func__", inner)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return (type(function).__name__, 1) if code is None else (code.co_filename, code.co_firstlineno)


def check(optimizers: Sequence[OptimizerWrapper], *, plugin: str, several_ranks: bool) -> None:
    """Raise RuntimeError, by name, for what a graph cannot follow, whatever the step does."""
    if several_ranks:
        raise RuntimeError(
            f"capture() makes graphs of steps on one device, and {plugin} has several ranks: what sends their gradients keeps "
            "nodes of autograd on the stream that boost() ran on, which the stream of a graph may not wait for, and gloo sends "
            "from the host; call the step as it is"
        )
    check_optimizers(optimizers)


def check_optimizers(optimizers: Sequence[OptimizerWrapper]) -> None:
    """Raise RuntimeError, by name, for optimizers with steps that no graph follows."""
    for optimizer in optimizers:
        reason = _refusal(optimizer)
        if reason is not None:
            raise RuntimeError(
                f"capture() makes no graph of steps of this {type(optimizer.unwrap()).__name__}: {reason}"
            )


def _refusal(optimizer: OptimizerWrapper) -> str | None:
    update = optimizer._update
    gradients, application = update.gradients, update.decision.application
    if update.shards.sharded:
        return "this rank holds shards of its parameters, which hooks gather"
    if gradients.in_backward is not None:
        return (
            f"release_gradients={gradients.in_backward.mode!r} steps within backward, as the host says; leave it False"
        )
    if optimizer._after_step is not None:
        return "its precision follows each step on the host"
    if isinstance(gradients.scaler, HostRule):
        return f"the rule of its loss scale, {type(gradients.scaler.host).__name__}, runs on the host; use DynamicScale"
    if not isinstance(update.decision, DeviceDecision):
        if decides_on_device(update.optimizer):
            return "the host decides on its steps, as under fused_optimizer='compile', apex's levels, and what reports on them"
        return (
            "it has no fused kernel, so the host decides on its steps and counts them; build it with capturable=True where its "
            "class takes that, or use Adam, AdamW, SGD or Adagrad, and leave fused_optimizer True"
        )
    if len({param.device for group in update.optimizer.param_groups for param in group["params"]}) > 1:
        return "its parameters lie on several devices, and a graph is of one"
    if isinstance(application, MasterApplication) and (
        application.masters.hosts or application.masters.options.offload
    ):
        return "its states lie in the host's memory; leave offload_states False"
    return None


# ---------------------------------------------------------------------- by trial


def reads_of(
    train_step: Callable[..., Any],
    batch: Sequence[Any],
    *,
    roots: Sequence[Any],
    optimizers: Sequence[OptimizerWrapper],
    device: torch.device,
) -> list[str]:
    """Run `train_step(*batch)` as on a device, and return what it reads of one, as `path:line: what`; nothing in `roots`
    changes."""
    for optimizer in optimizers:
        optimizer.sync()
        optimizer.wait_for_weights()
    # It runs twice, since a first step may read what later ones do not, and a later one what is only then there.
    snapshot = StateSnapshot([*roots, *optimizers, *_schedules_of(optimizers)])
    origin = origin_of(train_step)
    reads = Reads(snapshot, origin, device, _counts_on_host(optimizers))
    try:
        for optimizer in optimizers:
            _prepare(optimizer)
        with uncompiled(), reads.recording(), _writes_reported(optimizers, reads):
            train_step(*batch)
            for optimizer in optimizers:
                optimizer.sync()
            reads.on = True
            try:
                train_step(*batch)
            finally:
                reads.on = False
    finally:
        snapshot.restore()
    return list(reads.found)


def _prepare(optimizer: OptimizerWrapper) -> None:
    """Have `optimizer` decide where a device's would, as before any pass, without listeners."""
    update = decided_on_device(optimizer._update)
    optimizer._update = update
    update.gradients.listeners.clear()
    update.gradients.reset(None)
    for param in (param for group in optimizer.unwrap().param_groups for param in group["params"]):
        param.grad = None


def decided_on_device(update: Update) -> Update:
    """Return the update that an optimizer of parameters on a GPU would have in the place of `update`, on the same masters."""
    optimizer, gradients, application = update.optimizer, update.gradients, update.decision.application
    devices = {param.device for group in optimizer.param_groups for param in group["params"]}
    fits = decides_on_device(optimizer) and len(devices) == 1 and gradients.in_backward is None
    if not fits or application.compiled or (type(gradients), type(update.decision)) != (Gradients, HostDecision):
        return update
    context = UpdateContext(
        optimizer=optimizer,
        scaler=gradients.scaler,
        names=gradients.parameters.names,
        group=gradients.group,
        shards=gradients.shards,
        options=UpdateOptions(skip_nonfinite=gradients.skip_nonfinite),
    )
    return update_on_device(
        on_device(context, next(iter(devices))),
        UpdateFactories(lambda _: application, lambda _: update.optimizer_state),
    )


def _counts_on_host(optimizers: Sequence[OptimizerWrapper]) -> list[torch.Tensor]:
    """Return states that are on the host on every machine: step counts of optimizers that read them there."""
    counts = []
    for optimizer in map(OptimizerWrapper.unwrap, optimizers):
        if not honours_grad_scale(optimizer) and not any(group.get("capturable") for group in optimizer.param_groups):
            states = [value for own in optimizer.state.values() for value in own.values()]
            counts += [value for value in states if isinstance(value, torch.Tensor) and value.dim() == 0]
    return counts


class _Group(dict[str, Any]):
    """A group of parameters that tells who writes an option of it."""

    def __init__(self, group: dict[str, Any], index: int, reads: Reads, *, by_ours: bool) -> None:
        super().__init__(group)
        self._index, self._reads, self._by_ours = index, reads, by_ours

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "params" and self.get(key) is not value:
            self._reads.report_write(key, self._index, by_ours=self._by_ours)
        super().__setitem__(key, value)


@contextmanager
def _writes_reported(optimizers: Sequence[OptimizerWrapper], reads: Reads) -> Iterator[None]:
    """Inside, options that are written in groups of `optimizers` are noted: a graph would read them as they were."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            groups = optimizer.param_groups
            before = list(groups)
            # A boosted schedule waits until such a step is over, unless it is stepped before the optimizer.
            late = optimizer._update.decision.on_device
            groups[:] = [_Group(group, index, reads, by_ours=late) for index, group in enumerate(groups)]
            stack.callback(groups.__setitem__, slice(None), before)
        yield


def _schedules_of(optimizers: Iterable[OptimizerWrapper]) -> list[Any]:
    """Return the schedulers of `optimizers` in this process, boosted and others, which no other list has."""
    theirs = {id(each) for wrapper in optimizers for each in (wrapper, wrapper.unwrap())}
    schedules: list[Any] = []
    for each in gc.get_objects():
        if issubclass(type(each), LRSchedulerWrapper):
            schedules += [each, vars(each).get("scheduler")]
        elif issubclass(type(each), LRScheduler) and id(vars(each).get("optimizer")) in theirs:
            schedules.append(each)
    return schedules
