"""What stands for a CUDA graph on a CPU: operations are kept while a function runs, and made again without its Python.

As in a graph, what Python computed is as it was in the recording, memory lies where it lay, nothing that was recorded has run
before the first replay, and whatever a host reads in a recording raises.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar
from unittest import mock

import torch

from booster.capture.reads import _waits, written
from booster.ground.torch_internals import TorchDispatchMode, storage_key
from booster.numerics.diagnosis.replay import Memory
from booster.tensors.trees import map_tensors, tensors

T = TypeVar("T")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
_NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class RecordedGraphs:
    """A `b.capture.graph.Recorder` of operations on a CPU. num_recordings, num_replays: so far."""

    def __init__(self) -> None:
        self.num_recordings = self.num_replays = 0

    def warm(self, body: Callable[[], T]) -> T:
        return body()

    def record(self, body: Callable[[], T], generators: Iterable[torch.Generator]) -> tuple[T, Callable[[], None]]:
        memory, random = Memory(), torch.get_rng_state()
        states = [(generator, generator.get_state()) for generator in generators]
        recording = _Recording(memory)
        try:
            with recording, _launches(recording.operations):
                result = body()
        finally:
            memory.write_back()
            torch.set_rng_state(random)
            for generator, state in states:
                generator.set_state(state)
        self.num_recordings += 1

        def replay() -> None:
            self.num_replays += 1
            with torch.no_grad(), torch.autocast("cpu", enabled=False):  # of what is around a replay nothing is heard
                for operation in recording.operations:
                    operation()

        return result, replay


@contextmanager
def _launches(operations: list[Callable[[], None]]) -> Iterator[None]:
    """Inside, what kernels of Triton would do, which are interpreted, is added to `operations` in the place of being done."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def kept(executor: Any, *args: Any, **kwargs: Any) -> None:
        operations.append(functools.partial(launch, executor, *args, **kwargs))

    with mock.patch.object(GridExecutor, "__call__", kept):
        yield


class _Recording(TorchDispatchMode):
    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args):
            raise RuntimeError(f"a host reads in a recording: {func}")
        changed = list(tensors(list(written(func, args, kwargs))))
        for tensor in changed:
            self._memory.keep(tensor)
        # By their memory of now: a parameter may be given other data later.
        there = map_tensors(torch.Tensor.detach, (args, kwargs))
        made = func(*args, **kwargs)
        memory = {storage_key(tensor) for tensor in tensors((args, kwargs))}
        fresh = [None if storage_key(each) in memory else each.detach() for each in tensors(made)]
        if func.overloadpacket.__name__ in _NOTHING or not (changed or any(each is not None for each in fresh)):
            return made  # a view, or memory of no numbers

        def again() -> None:
            new = func(*there[0], **there[1])
            for old, each in zip(fresh, tensors(new), strict=True):
                if old is not None:
                    old.copy_(each)

        self.operations.append(again)
        return made
