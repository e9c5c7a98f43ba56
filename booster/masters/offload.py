"""Optimizer states and residual bits in the host's memory, prefetched to the device while buckets are stepped.

Between steps the states and residual bits of a flat bucket are in pinned memory of the host. Two copies run while buckets
are stepped, each in a queue, which is a CUDA stream::

    into the device    fetch 0   fetch 1            fetch 2
    computing                    step 0    step 1             step 2
    out of it                              save 0    save 1             save 2

There are two places on the device, which buckets take in turn. What waits for what, by events, and never the host:

- step i for fetch i;
- save i for step i;
- fetch i + 2 for save i, which reads the same place; the first fetch of a step for the last save of the step before.

The host waits where code reads that memory: `HostMemory.sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from booster.masters.quantized_state import QuantizedState
from booster.shards.base import State

_ALIGNMENT = 256  # bytes, as the allocator's: kernels read several numbers at once


class CudaQueue:
    """Copies and kernels that run one after another: a CUDA stream; None is the one that is current at a call."""

    def __init__(self, stream: torch.cuda.Stream | None, device: torch.device) -> None:
        self._stream, self._device = stream, device

    @property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._stream is None else self._stream

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device; the host goes on at once."""
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        # The allocator may give the memory to others once it is let go of, but not before this copy is done.
        (target if target.is_cuda else source).record_stream(self.stream)

    def wait(self, event: torch.cuda.Event) -> None:
        """Run later operations after `event`."""
        self.stream.wait_event(event)

    def mark(self) -> torch.cuda.Event:
        """Return the point after all operations so far."""
        return self.stream.record_event()


class CudaTransfers:
    """Copies between the host and one device. Tests put another class into `TRANSFERS`, which runs them in any legal order.

    Attributes:
        into, out: queues of the two directions of the bus.
        computing: that of the step, in which nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.into = CudaQueue(torch.cuda.Stream(device), device)
        self.out = CudaQueue(torch.cuda.Stream(device), device)
        self.computing = CudaQueue(None, device)

    def allocate_on_host(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory of the host like `like`: pinned, so that copies do not wait for kernels."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


TRANSFERS: dict[str, Callable[[torch.device], CudaTransfers]] = {"cuda": CudaTransfers}
"""By type of device; of others memory is the host's already, and nothing moves."""


def can_offload(device: torch.device) -> bool:
    """Return whether states of parameters on `device` have another place to be."""
    return device.type in TRANSFERS


class OffloadedBucket(Protocol):
    """The members of a bucket with one flat handle that offloading reads."""

    size: int
    device: torch.device
    handles: list[Any]
    residual: torch.Tensor | None


class HostMemory:
    """The memory of states and residual bits of the buckets of one device between steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.transfers = TRANSFERS[device.type](device)
        self.saved: torch.cuda.Event | None = None  # the end of what was last sent here
        self._on_device_now: set[int] = set()  # ids of buckets with their residual bits on the device

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMemory:
        self.sync()  # the copy reads this memory
        return HostMemory(self._device)

    def sync(self) -> None:
        """Wait until what was sent here has arrived."""
        if self.saved is not None:
            self.saved.synchronize()
            self.saved = None

    def keep_residual(self, bucket: OffloadedBucket) -> None:
        """Move what `bucket` keeps of its masters here, and wait for it."""
        if bucket.residual is not None:
            bucket.residual = self._moved(bucket.residual)

    def keep_states(self, bucket: OffloadedBucket, state: MutableMapping[Any, State]) -> None:
        """Move the entries of `bucket` in the optimizer's `state` here, and wait for it."""
        own = state.get(bucket.handles[0], {})
        for name, value in own.items():
            if is_offloaded(value, bucket.size):
                own[name] = _rebuilt(value, [self._moved(tensor) for tensor in tensors_of(value)])

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.transfers.allocate_on_host(tensor).copy_(tensor)

    def residual_on_device(self, bucket: OffloadedBucket) -> torch.Tensor | None:
        """Return the remainder of `bucket` on its device: what is there while it is stepped, else a copy."""
        if bucket.residual is None or id(bucket) in self._on_device_now:
            return bucket.residual
        self.sync()
        return bucket.residual.to(self._device, copy=True)

    @contextmanager
    def swapped_residual(self, bucket: OffloadedBucket, residual: torch.Tensor | None) -> Iterator[None]:
        """For its length, let `residual` be what `bucket` keeps."""
        home, bucket.residual = bucket.residual, residual
        self._on_device_now.add(id(bucket))
        try:
            yield
        finally:
            bucket.residual = home
            self._on_device_now.discard(id(bucket))


class Prefetch:
    """Has each of `buckets`, which are stepped in this order, on the device while it is stepped.

    state: the optimizer's. The buckets are those of one `HostMemory`. Takes memory on the device for the two largest.
    """

    def __init__(self, host: HostMemory, buckets: Sequence[OffloadedBucket], state: MutableMapping[Any, State]) -> None:
        self._host, self._transfers = host, host.transfers
        self._buckets, self._state = list(buckets), state
        self._place = {id(bucket): index for index, bucket in enumerate(self._buckets)}
        self._fetched: dict[int, tuple[dict[str, Any], torch.Tensor | None, torch.cuda.Event]] = {}
        self._free: list[torch.cuda.Event | None] = [None, None]
        offloaded = [self._offloaded_entries(bucket).values() for bucket in self._buckets]
        largest = max(
            (sum(_aligned_bytes(t) for value in values for t in tensors_of(value)) for values in offloaded), default=0
        )
        device = self._buckets[0].device
        # Two: one is stepped while the next arrives and the last one leaves.
        count = min(len(self._buckets), 2)
        self._memory = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(count)]
        into = self._transfers.into
        # Kernels before may still use this memory, and what is fetched may still be on its way here.
        into.wait(self._transfers.computing.mark())
        if host.saved is not None:
            into.wait(host.saved)
        self._fetch(0)

    @contextmanager
    def on_device(self, bucket: OffloadedBucket) -> Iterator[None]:
        """For its length, have what `bucket` keeps, and its states, on the device; afterwards they are on their way back."""
        index = self._place[id(bucket)]
        # The next bucket travels while this one is stepped.
        if index + 1 < len(self._buckets):
            self._fetch(index + 1)
        states, residual, arrived = self._fetched.pop(index)
        self._transfers.computing.wait(arrived)
        own = self._state.get(bucket.handles[0], {})
        homes = {name: own[name] for name in states}
        own.update(states)
        try:
            with self._host.swapped_residual(bucket, residual):
                yield
        except BaseException:
            # Where it is left by an exception, they are what they were.
            own.update(homes)
            raise
        self._save(index, bucket, homes, residual)

    def _offloaded_entries(self, bucket: OffloadedBucket) -> dict[str | None, Any]:
        """Return what travels, by name of a state; the remainder has None."""
        residual: dict[str | None, Any] = {} if bucket.residual is None else {None: bucket.residual}
        own = self._state.get(bucket.handles[0], {})
        return {**residual, **{name: value for name, value in own.items() if is_offloaded(value, bucket.size)}}

    def _fetch(self, index: int) -> None:
        bucket, into = self._buckets[index], self._transfers.into
        memory, free = self._memory[index % 2], self._free[index % 2]
        if free is not None:
            into.wait(free)
        states: dict[str | None, Any] = {}
        begin = 0
        for name, value in self._offloaded_entries(bucket).items():
            copies = []
            for tensor in tensors_of(value):
                copies.append(memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
                into.copy(copies[-1], tensor)
                begin += _aligned_bytes(tensor)
            states[name] = _rebuilt(value, copies)
        residual = states.pop(None, None)
        self._fetched[index] = states, residual, into.mark()  # type: ignore[assignment]

    def _save(self, index: int, bucket: OffloadedBucket, homes: dict[str, Any], residual: torch.Tensor | None) -> None:
        out = self._transfers.out
        out.wait(self._transfers.computing.mark())
        if residual is not None:
            out.copy(bucket.residual, residual)  # type: ignore[arg-type]
        own = self._state.get(bucket.handles[0], {})
        for name, value in own.items():
            if not is_offloaded(value, bucket.size):
                continue
            home = homes.get(name)
            # New in this step, or of another dtype than before.
            if home is None or not _alike(home, value):
                home = _rebuilt(value, [self._transfers.allocate_on_host(tensor) for tensor in tensors_of(value)])
            for target, source in zip(tensors_of(home), tensors_of(value), strict=True):
                out.copy(target, source)
            own[name] = home
        self._free[index % 2] = self._host.saved = out.mark()


def is_offloaded(value: Any, size: int) -> bool:
    """Return whether an entry of the state of a flat bucket of `size` elements is in the host's memory between steps."""
    return isinstance(value, QuantizedState) or (isinstance(value, torch.Tensor) and value.shape == (size,))


def tensors_of(value: torch.Tensor | QuantizedState) -> list[torch.Tensor]:
    """Return the tensors that an entry consists of."""
    return value.tensors if isinstance(value, QuantizedState) else [value]


def _rebuilt(value: torch.Tensor | QuantizedState, tensors: Sequence[torch.Tensor]) -> Any:
    return QuantizedState.of(value.encoding, *tensors) if isinstance(value, QuantizedState) else tensors[0]


def _alike(home: Any, value: Any) -> bool:
    if getattr(home, "encoding", None) != getattr(value, "encoding", None):
        return False
    return all(a.dtype == b.dtype for a, b in zip(tensors_of(home), tensors_of(value), strict=True))


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
