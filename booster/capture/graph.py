"""What keeps the launches of a function and makes them again: a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class Recorder(Protocol):
    """Makes graphs of one device, whose memory they share; they are replayed one at a time."""

    def warm(self, body: Callable[[], T]) -> T:
        """Return `body()`, run where graphs are recorded, for what its first run alone does."""

    def record(self, body: Callable[[], T], generators: Iterable[torch.Generator]) -> tuple[T, Callable[[], None]]:
        """Return `body()` and what makes its launches again, with the Python of `body` not run again.

        Nothing that `body` launches runs before the first replay: tensors that it returns hold no numbers until then. What
        a replay reads and writes lies where it lay in the recording. generators: that `body` may use besides torch's own.
        """


def recorder_of(device: torch.device) -> Recorder | None:
    """Return what records on `device`; None, with a WARNING, where nothing does."""
    if device.type == "cuda":
        return CudaRecorder(device)
    _logger.warning("capture() makes graphs on a GPU; on %s every call runs the step as it is", device.type)
    return None


class CudaRecorder:
    """Graphs of a CUDA device. Recording waits for the device once.

    cuda: what has the names of `torch.cuda`.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)
        self._graphs: WeakSet[Any] = WeakSet()

    def warm(self, body: Callable[[], T]) -> T:
        current = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._cuda.stream(self._stream):
            result = body()
        current.wait_stream(self._stream)
        return result

    def record(self, body: Callable[[], T], generators: Iterable[torch.Generator]) -> tuple[T, Callable[[], None]]:
        graph = self._cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        if not self._graphs:  # torch aborts in a pool of which no graph is left while a tensor still lies there
            self._pool = self._cuda.graph_pool_handle()
        # Pinned memory is allocated meanwhile, by other threads as those of loaders, and for addresses that kernels read.
        with self._cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"):
            result = body()
        self._graphs.add(graph)
        return result, graph.replay
