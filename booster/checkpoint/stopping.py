"""Requests to stop, as schedulers of clusters send them some time before they kill."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from booster.communicate import communication_device

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """Notes SIGTERM and SIGUSR1 instead of dying of them. Ranks agree: a request to one is a request to all."""

    def __init__(self) -> None:
        self._received = False
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Install the handlers, once; a handler of the user's is still called. Raises RuntimeError outside the main thread."""
        if self._before:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signals can be listened to from the main thread alone; call resume_or_start there")
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)

    def requested(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether any rank was asked to stop; one scalar MAX all-reduce, and a host read."""
        if group is None:
            return self._received
        device = communication_device(torch.device("cpu"), group)
        flag = torch.tensor(float(self._received), dtype=torch.float32, device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
