"""A CUDA graph: recorded and replayed, with the memory of its inputs and results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from booster.capture.graph_inputs import GradientLayout, LRLookahead
from booster.masters.masters import Masters
from booster.tensors.trees import leaves, tensors, with_leaves
from booster.update.decision import StepHistory, StepResult

_logger = logging.getLogger(__name__)
T = TypeVar("T")
_WORD = 8  # bytes, at a multiple of which numbers are packed


class Recorder(Protocol):
    """Makes graphs of one device, which share its memory; they are replayed one at a time."""

    def warm(self, body: Callable[[], T]) -> T:
        """Return `body()`, run where graphs are recorded, for what its first run alone does."""

    def record(self, body: Callable[[], object], generators: Iterable[torch.Generator]) -> Callable[[], None]:
        """Run `body`, and return what makes its launches again, with the Python of `body` not run again.

        Nothing that `body` launches runs before the first replay: tensors that it makes hold no numbers until then. What
        a replay reads and writes is at the addresses of the recording. generators: that `body` may use besides torch's own.
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
        # A graph cannot be recorded on the default stream.
        self._stream = cuda.Stream(device)
        self._graphs: WeakSet[Any] = WeakSet()

    def warm(self, body: Callable[[], T]) -> T:
        current = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._cuda.stream(self._stream):
            result = body()
        current.wait_stream(self._stream)
        return result

    def record(self, body: Callable[[], object], generators: Iterable[torch.Generator]) -> Callable[[], None]:
        graph = self._cuda.CUDAGraph()
        for generator in generators:
            # A replay then goes on with the generator's numbers, instead of repeating those of the recording.
            graph.register_generator_state(generator)
        if not self._graphs:  # torch aborts in a pool of which no graph is left while a tensor is still in it
            self._pool = self._cuda.graph_pool_handle()
        # Pinned memory is allocated meanwhile, by other threads as those of loaders, and for addresses that kernels read.
        with self._cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"):
            body()
        # Weakly: the graph belongs to the step that replays it; here it only says whether the pool is in use.
        self._graphs.add(graph)
        return graph.replay


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A step of an optimizer in a graph.

    Attributes:
        result: of the step.
        deferred: what waits for its outcome, such as a step of a schedule.
        counts: whether the graph counts it, since rates of later steps depend on its outcome, which a device knows first.
    """

    result: StepResult
    deferred: list[Callable[[], None]]
    counts: bool

    @classmethod
    def by(cls, history: StepHistory, lookahead: LRLookahead) -> RecordedStep:
        """The last of `history`, counted in `lookahead`. Of what runs in a graph."""
        result, deferred = history.waiting[-1]
        # Nothing waits for the outcome of a step without a schedule, so it needs no counting.
        decision = result.decision if deferred else True
        if isinstance(decision, torch.Tensor):
            # In the graph itself: the count is a tensor that the next replay reads.
            lookahead.count(decision)
        return cls(result, list(deferred), isinstance(decision, torch.Tensor))


@dataclass(eq=False)
class StepGraph:
    """One graph, the memory that it reads, and what it does on the host.

    Attributes:
        batch, grad_factors, grads: the memory of its inputs: of the call, and of what gradients carry.
        replay: launches it.
        returned: what `train_step` returned.
        steps: of each optimizer; None where it makes none.
        after: the gradients' layout after it.
        passes: backward passes in it of a group of `accumulate`.
        draws: of each optimizer with masters, whether it draws random numbers.
        read: what launches read by address, and others might free.
        packed: all numbers of the results in one tensor.
    """

    batch: list[torch.Tensor]
    grad_factors: list[torch.Tensor]
    grads: list[list[torch.Tensor | None]]
    replay: Callable[[], None] = lambda: None
    returned: Any = None
    steps: list[RecordedStep | None] = field(default_factory=list)
    after: GradientLayout | None = None
    passes: int = 0
    draws: list[bool] = field(default_factory=list)
    read: list[Any] = field(default_factory=list)
    packed: torch.Tensor | None = None
    _places: dict[int, tuple[int, int]] = field(default_factory=dict)
    _held: list[torch.Tensor] = field(default_factory=list)

    @torch.no_grad()
    def copy_in(self, batch: Any, layout: GradientLayout) -> None:
        """Copy the batch of a call, and what waits from calls before, to where the graph reads it."""
        pairs: list[tuple[Any, Any]] = [*zip(self.batch, tensors(batch), strict=True)]
        pairs += zip(self.grad_factors, layout.tensors(), strict=True)
        for own, given in zip(self.grads, layout.grads, strict=True):
            pairs += zip(own, given, strict=True)
        for static, given in pairs:
            if static is not given:  # None is where there is no gradient
                static.copy_(given, non_blocking=True)

    def pack(self) -> None:
        """Bring all numbers of the results into one tensor, so that one copy of it takes them out."""
        bytes_: list[torch.Tensor] = []
        size = 0

        def pack_number(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal size
            if id(tensor) not in self._places:
                # As bytes, since results are of several dtypes.
                own = tensor.detach().reshape(-1).view(torch.uint8)
                self._places[id(tensor)] = (size, own.numel())
                self._held.append(tensor)  # so that no other tensor gets its id
                bytes_.append(nn.functional.pad(own, (0, -own.numel() % _WORD)))
                size += bytes_[-1].numel()
            return tensor

        results = [made.result for made in self.steps if made is not None]
        for result in (result for result in (*results, *leaves(self.returned)) if isinstance(result, StepResult)):
            result.map_tensors(pack_number)
        if bytes_:
            self.packed = torch.cat(bytes_)

    def copies(self) -> tuple[Any, list[StepResult | None]]:
        """Return copies of what `train_step` returned, and of the results."""
        packed = None if self.packed is None else self.packed.clone()
        # A result that `train_step` returned is also one of `steps`: both get the same copy.
        made: dict[int, StepResult] = {}

        def number(tensor: torch.Tensor) -> torch.Tensor:
            assert packed is not None
            start, size = self._places[id(tensor)]
            return packed[start : start + size].view(tensor.dtype).view(tensor.shape)

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.detach().clone()
            if isinstance(value, StepResult):
                if id(value) not in made:
                    made[id(value)] = value.map_tensors(number)
                return made[id(value)]
            return value

        results = [None if made is None else leaf(made.result) for made in self.steps]
        return with_leaves(self.returned, map(leaf, leaves(self.returned))), results


class RoundingDraws:
    """Random numbers for stochastic rounding: the host draws them, and copies them to where graphs read."""

    def __init__(self, masters: Masters, device: torch.device) -> None:
        self._masters, self._rng, self._device = masters, masters.rng, device
        self._lanes: dict[tuple[str, torch.device], torch.Tensor] = {}

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that draw on a device, where graphs go on with them."""
        formats = {id(bucket.format): bucket.format for bucket in self._masters.buckets}
        return [each for form in formats.values() for each in getattr(form, "generators", {}).values()]

    @property
    def count(self) -> int:
        """How many steps have drawn."""
        return self._rng.count

    def next(self) -> None:
        self._rng.next()

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Inside, what has been drawn in steps before is read from memory that does not move."""
        # Drawn on the host, read where the graph runs.
        asked = {(name, device if device.type != "cpu" else self._device) for name, device in self._rng.asked}
        for name, device in asked - self._lanes.keys():
            self._lanes[name, device] = self._rng.draw(name, device).to(device)
        self._rng.fixed = self._lanes
        try:
            yield
        finally:
            self._rng.fixed = {}

    def copy_in(self) -> None:
        """Copy the numbers of this step there, without waiting."""
        for (name, device), lanes in self._lanes.items():
            lanes.copy_(self._rng.draw(name, device), non_blocking=True)
