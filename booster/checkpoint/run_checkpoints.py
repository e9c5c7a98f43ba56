"""The checkpoints of one Booster: arguments checked, saves that go on in a thread, and requests to stop, as schedulers of
clusters send them some time before they kill.
"""

from __future__ import annotations

import logging
import signal
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.checkpoint.manifest import CheckpointError
from booster.checkpoint.objects import Objects, named
from booster.ranks.agreement import any_rank

_logger = logging.getLogger(__name__)


class BackgroundWriter:
    """One thread that writes, with its own process group, so that its collectives never meet those of training."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._group: dist.ProcessGroup | None = None

    def group(self) -> dist.ProcessGroup:
        """Return the writing thread's process group; a collective the first time."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
            # At exit torch ends all groups, in its own order.
            weakref.finalize(self, _end, self._group).atexit = False
        return self._group

    def start(self, write: Callable[[], object]) -> None:
        """Run `write` in the thread. It is not a daemon: the interpreter waits for it before it ends."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="booster-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for what is being written; raises the CheckpointError of a write that failed since the last call."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:
            # Raised by the next call; logged at once, since there may be none.
            _logger.error("%s", error)
            self._error = error if isinstance(error, CheckpointError) else CheckpointError(f"saving failed: {error!r}")
            self._error.__cause__ = None if self._error is error else error


def _end(group: dist.ProcessGroup) -> None:
    """Free the threads and connections of `group`. A thread that still writes holds the `BackgroundWriter`, so none does."""
    if dist.is_initialized():
        with suppress(ValueError):  # where all groups were destroyed since, and made anew
            dist.destroy_process_group(group)


SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class _SignalHandler:
    """Notes a signal in `requests`, while that is there, and calls the handler from before, less those that note nothing more:
    of a thousand boosters made one after another each would else call the last."""

    def __init__(self, requests: StopRequests, before: Any) -> None:
        self._requests = weakref.ref(requests)
        while isinstance(before, _SignalHandler) and before._requests() is None:
            before = before._before
        self._before: Any = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        requests = self._requests()
        if requests is not None:
            requests.received = True
        if callable(self._before):
            self._before(number, frame)


class StopRequests:
    """Notes SIGTERM and SIGUSR1 instead of dying of them. Ranks agree: a request to one is a request to all."""

    def __init__(self) -> None:
        self.received = False
        self._listens = False

    def listen(self) -> None:
        """Install the handlers, once; a handler of the user's is still called. Raises RuntimeError outside the main thread."""
        if self._listens:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signals can be listened to from the main thread alone; call resume_or_start there")
        for number in SIGNALS:
            signal.signal(number, _SignalHandler(self, signal.getsignal(number)))
        self._listens = True

    def requested(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether any rank was asked to stop; one scalar MAX all-reduce, and a host read."""
        return any_rank(self.received, group)


Given = tuple[Any, Any, Any, Any, Any, Any]
"""Model, optimizer, criterion, dataloader, lr_scheduler and extra, as the methods of Booster take them."""


class RunCheckpoints:
    """What the saves and loads of one `Booster` share.

    Attributes:
        run: what is written down of the job, for people.
        background: the thread that writes what `save(async_save=True)` copied.
        stop_requests: signals that ask to stop.
    """

    def __init__(
        self, run: Mapping[str, Any], error_feedback: Callable[[nn.Module], dict[torch.Tensor, torch.Tensor] | None]
    ) -> None:
        """error_feedback: see `Plugin.error_feedback`."""
        self.run, self._error_feedback = run, error_feedback
        self.background = BackgroundWriter()
        self.stop_requests = StopRequests()

    def set_facts(self, **known: Any) -> None:
        """Write down from now on what is `known` of the run, JSON-like."""
        self.run = {**self.run, **known}

    def objects(self, given: Given) -> Objects:
        """Return what the methods of `Booster` were given, by name. Raises TypeError for what cannot be saved."""
        found = named(*given)
        error_feedback = {name: self._error_feedback(model.module) for name, model in found.models.items()}
        return replace(found, error_feedback={name: own for name, own in error_feedback.items() if own is not None})
