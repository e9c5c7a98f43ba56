"""Saving while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch.distributed as dist

from booster.checkpoint.manifest import CheckpointError

_logger = logging.getLogger(__name__)


class Background:
    """One thread that writes, with a process group of its own, so that its collectives never meet those of training."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._group: dist.ProcessGroup | None = None

    def group(self) -> dist.ProcessGroup:
        """Return the writing thread's process group; a collective the first time."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
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
        except CheckpointError as error:
            # Raised by the next call; logged at once, since there may be none.
            _logger.error("%s", error)
            self._error = error
