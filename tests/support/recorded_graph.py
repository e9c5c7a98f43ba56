"""An imitation of a CUDA graph on a CPU: operations are kept while a function runs, and made again without its Python.

As in a graph, what Python computed is as it was in the recording, memory is where it was, nothing that was recorded has run
before the first replay, and whatever a host reads in a recording raises. Memory from before the recording is not the graph's:
where nothing else holds it at a replay, that raises. What torch's compiler has made shows no operations:
each call of it is kept as one.
"""

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from booster.capture.trial import _waits_for_device, written
from booster.common.snapshot import MemorySnapshot
from booster.common.torch_internals.tensor_internals import TorchDispatchMode, storage_key
from booster.tensors.trees import map_tensors, tensors

T = TypeVar("T")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
_ONE = torch.zeros(1)
_ALONE = torch._C._storage_Use_Count(storage_key(_ONE)) - 1  # uses of memory besides those by tensors
_NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class RecordedGraphs:
    """A `b.capture.graph.Recorder` of operations on a CPU. num_recordings, num_replays: so far."""

    def __init__(self) -> None:
        self.num_recordings = self.num_replays = 0

    def warm(self, body: Callable[[], T]) -> T:
        return body()

    def record(self, body: Callable[[], object], generators: Iterable[torch.Generator]) -> Callable[[], None]:
        memory, random = MemorySnapshot(), torch.get_rng_state()
        states = [(generator, generator.get_state()) for generator in generators]
        recording = _Recording(memory)
        try:
            with recording, _launches(recording), _compiled(recording):
                body()
        finally:
            memory.restore()
            torch.set_rng_state(random)
            for generator, state in states:
                generator.set_state(state)
        self.num_recordings += 1

        def replay() -> None:
            self.num_replays += 1
            recording.lent.check()
            with torch.no_grad(), torch.autocast("cpu", enabled=False):  # of what is around a replay nothing is heard
                for operation in recording.operations:
                    operation()

        return replay


class _Lent:
    """Memory that operations read and write and that others have to hold. held: which is the graph's, by a key.

    Operations of a CPU have to hold it, too; what is counted is whether they are alone with it."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self._ours: Counter[int] = Counter()
        self._tensors: dict[int, torch.Tensor] = {}

    def note(self, given: Any, *, launched: bool = False) -> None:
        """Tensors in `given`, of which each is its own object, are held by an operation from now on.

        Tables of addresses are the host's on any machine, except to what is launched on them."""
        for tensor in tensors(given):
            key = storage_key(tensor)
            self._ours[key] += 1
            if launched or tensor.dtype != torch.int64 or tensor.dim() != 2:
                self._tensors.setdefault(key, tensor)

    def check(self) -> None:
        for key, tensor in self._tensors.items():
            if key not in self.held and torch._C._storage_Use_Count(key) <= self._ours[key] + _ALONE:
                raise RuntimeError(
                    f"a graph reads or writes memory that nothing holds any more: {tensor.dtype} {tensor.shape}"
                )


@contextmanager
def _launches(recording: Any) -> Iterator[None]:
    """Inside, what kernels of Triton would do, which are interpreted, is kept in `recording` in the place of being done."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def kept(executor: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            given = map_tensors(torch.Tensor.detach, (args, kwargs))
            recording.lent.note(given, launched=True)
        recording.operations.append(functools.partial(launch, executor, *given[0], **given[1]))

    with mock.patch.object(GridExecutor, "__call__", kept):
        yield


@contextmanager
def _compiled(recording: Any) -> Iterator[None]:
    """Inside, a call of what Inductor has made is kept in `recording`."""
    inductor = sys.modules.get("torch._inductor.output_code")
    if inductor is None:
        yield
        return
    run = inductor.CompiledFxGraph.__call__

    def kept(graph: Any, inputs: list[Any]) -> Any:
        with _disable_current_modes():
            given = map_tensors(torch.Tensor.detach, list(inputs))
            inputs.clear()  # as it does itself
            for tensor in tensors(given):
                recording.memory.keep(tensor)
            made = run(graph, list(given))
            recording.keep(lambda: run(graph, list(given)), given, made)
        return made

    with mock.patch.object(inductor.CompiledFxGraph, "__call__", kept):
        yield


class _Recording(TorchDispatchMode):
    def __init__(self, memory: MemorySnapshot) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self._made: list[torch.Tensor] = []
        self.memory, self.lent = memory, _Lent()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs: in other modes torch runs what it was made from, and its dropout draws other numbers."""
        return True

    def keep(self, run: Callable[[], Any], given: Any, made: Any) -> None:
        """Keep `run`, which made `made` of `given` and holds that, and have a replay write what it makes then to where that
        is."""
        self.lent.note(given)
        memory = {storage_key(tensor) for tensor in tensors(given)}
        fresh = [None if storage_key(each) in memory else each.detach() for each in tensors(made)]

        def again() -> None:
            for old, each in zip(fresh, tensors(run()), strict=True):
                if old is not None:
                    old.copy_(each)

        self.operations.append(again)

    def _own(self, made: Any) -> None:
        """Have the graph hold the memory of `made`, which is new."""
        for tensor in tensors(made):
            if storage_key(tensor) not in self.lent.held:
                self.lent.held.add(storage_key(tensor))
                self._made.append(tensor.detach())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits_for_device(func, args):
            raise RuntimeError(f"a host reads in a recording: {func}")
        changed = list(tensors(list(written(func, args, kwargs))))
        for tensor in changed:
            self.memory.keep(tensor)
        # By their memory of now: a parameter may be given other data later.
        there = map_tensors(torch.Tensor.detach, (args, kwargs))
        made = func(*args, **kwargs)
        shared = {storage_key(tensor) for tensor in tensors((args, kwargs))}
        is_fresh = any(storage_key(each) not in shared for each in tensors(made))
        if func.overloadpacket.__name__ not in _NOTHING and (changed or is_fresh):
            self.keep(lambda: func(*there[0], **there[1]), there, made)
        if func.overloadpacket.__name__ == "lift_fresh":  # of numbers, which a graph has as they are
            self._own(args)
        self._own([each for each in tensors(made) if storage_key(each) not in shared])
        return made  # otherwise a view, or memory of no numbers
