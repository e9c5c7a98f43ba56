"""The device that a Booster runs on; clocks of it, and copies to the host that nothing waits for before they are read."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from booster.common import arguments


def resolve_device(device: str | torch.device | None) -> torch.device:
    """`device` with an index where it has one; None is the current CUDA device if the process group can use it, or "cpu".

    Raises ValueError for a device that torch does not know, that booster does not support or that is not there.
    """
    if device is None:
        usable = torch.cuda.is_available()
        if usable and dist.is_initialized():
            usable = "nccl" in dist.get_backend()
        device = "cuda" if usable else "cpu"
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"device must be 'cpu', 'cuda', 'cuda:N', a torch.device or None, got {arguments.described(device)}"
        )
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device; choose 'cpu', 'cuda' or 'cuda:N'") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(resolved)!r} is not supported; booster runs on 'cpu' and 'cuda'")
    if resolved.type == "cpu":
        return resolved
    if not torch.cuda.is_available():
        raise ValueError(f"device={str(resolved)!r} was asked for, but torch {torch.__version__} sees no CUDA device")
    if resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if resolved.index >= torch.cuda.device_count():
        raise ValueError(
            f"device={str(resolved)!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices, from cuda:0"
        )
    return resolved


def clock(device: torch.device) -> float:
    """Seconds that steps are timed by, once `device` has finished what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # On a CPU with one thread they are those that the processor spent on it, which other programs do not lengthen.
    return time.thread_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


class DeviceCopies:
    """Copies from the host to a device that the host does not wait for, and what else launches read by address.

    A graph reads all of it again in every replay, from where it lay: what it is to hold is put into `held` while that is a
    list.
    """

    def __init__(self) -> None:
        self.held: list[Any] | None = None

    def __call__(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        values = values.pin_memory() if device.type == "cuda" else values
        copy = values.to(device, non_blocking=True)
        self.hold(values, copy)
        return copy

    def hold(self, *read: Any) -> None:
        """Have the graph that is recorded, if any is, hold what its launches read."""
        if self.held is not None:
            self.held += read


class HostCopy:
    """A tensor on its way to the host; reading it waits for that copy, not for what was queued later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            self._host = tensor  # of a graph, where this one is never read: see `StepResult.copied`
        elif tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))  # which need not be the current device
        else:
            self._host = tensor.clone()

    def __call__(self) -> bool:
        """Return the only element, as a bool."""
        return bool(self.tensor())

    def tensor(self) -> torch.Tensor:
        """Return the copy, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def ready(self) -> bool:
        """Return whether reading it would not wait."""
        return self._event is None or self._event.query()
