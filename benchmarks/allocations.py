"""Bytes that tensors hold, and what the allocator gave and took back while something ran."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch._subclasses import FakeTensor
from torch.profiler import ProfilerActivity, profile


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of the storages of `tensors`; a tensor made of tensors counts through them."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            sizes |= storages(part for part in parts if isinstance(part, torch.Tensor))
        elif not isinstance(tensor, FakeTensor) and tensor.device.type != "meta":  # those have shapes, but no bytes
            storage = tensor.untyped_storage()
            try:
                sizes[storage.data_ptr()] = storage.nbytes()
            except RuntimeError:  # of a tensor that a trace left behind, whose storage was never given memory
                continue
    return sizes


def alive() -> dict[int, int]:
    """The storages of every tensor that Python knows of, whoever holds it."""
    gc.collect()
    return storages(entry for entry in gc.get_objects() if issubclass(type(entry), torch.Tensor))


def high_water(run: Callable[[], object], device: str) -> tuple[int, int]:
    """Bytes by which memory was higher than before, at the highest and at the end of `run`."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = run()  # noqa: F841  (alive until memory was read)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    events, _ = allocations(run)
    level = highest = 0
    for _, _, nbytes in events:
        level += nbytes
        highest = max(highest, level)
    return highest, level


def allocations(run: Callable[[], object]) -> tuple[list[tuple[int, int, int]], object]:
    """(time, address, bytes) of what the allocator for CPUs gave this thread, or took back, while `run` ran; and its result."""
    with ExitStack() as stack:
        with warnings.catch_warnings():  # torch 2.11 says that a next cycle forgets this one; there is none
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            recorded = stack.enter_context(profile(activities=[ProfilerActivity.CPU], profile_memory=True))
        kept = run()
    found: list[tuple[int, int, int]] = []
    waiting = list(recorded.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(found), kept
