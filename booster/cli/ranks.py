"""The processes of one attempt, as the launcher sees them: when they died, and what signals they are told."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["PIDS_VARIABLE", "Ranks", "kill_groups"]

PIDS_VARIABLE = "BOOSTER_RUN_PIDS"  # read by worker.py, which imports nothing of this package
_INTERVAL = 0.01  # seconds


class Ranks:
    """The ranks that have left their pid as a file in the folder `pids`, which they do when they start.

    deaths: when ranks died, by pid in ns, noted while they are left for torchrun's agent to find some time later. asked:
    the last signal that this attempt was told to pass on. grace_seconds: what ranks get between SIGTERM and SIGKILL.
    """

    def __init__(self, pids: Path, grace_seconds: float) -> None:
        self.deaths: dict[int, int] = {}
        self.asked: signal.Signals | None = None
        self._pids = pids
        self._grace_seconds = grace_seconds
        self._to_tell: list[signal.Signals] = []
        self._told: set[tuple[int, int]] = set()
        self._deadline: float | None = None

    def tell(self, number: int, frame: object = None) -> None:
        """Pass a signal on to every rank, those too that have yet to start; a handler of signals.

        To the ranks alone and not to what they have started: torch's data workers die of SIGTERM, and their rank of that.
        """
        self.asked = signal.Signals(number)
        if self.asked not in self._to_tell:
            self._to_tell.append(self.asked)
        if number == signal.SIGTERM and self._deadline is None:
            self._deadline = time.monotonic() + self._grace_seconds

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look after the ranks in a thread, as long as the context is entered."""
        done = threading.Event()
        self._pids.mkdir()
        os.environ[PIDS_VARIABLE] = str(self._pids)

        def watch() -> None:
            while not done.is_set():
                self._look()
                done.wait(_INTERVAL)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            del os.environ[PIDS_VARIABLE]

    def _look(self) -> None:
        # A wait for any child would tell of one dead alone.
        alive = [pid for path in self._pids.iterdir() if (pid := int(path.name)) not in self.deaths]
        dead = [pid for pid in alive if _is_dead(pid)]
        for pid in dead:  # later its number may be that of another's process
            (self._pids / str(pid)).unlink()
        self.deaths.update(dict.fromkeys(dead, time.time_ns()))
        alive = [pid for pid in alive if pid not in self.deaths]
        for number in self._to_tell:
            for pid in alive:
                if (pid, number) not in self._told:
                    self._told.add((pid, number))
                    os.kill(pid, number)  # not reaped yet, or a moment ago: the pid is no other's
        if self._deadline is not None and time.monotonic() > self._deadline:
            kill_groups(alive)


def kill_groups(pids: Iterable[int]) -> None:
    """Kill ranks with all that is left in their sessions (data workers, subprocesses)."""
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _is_dead(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the agent was faster
        return True
