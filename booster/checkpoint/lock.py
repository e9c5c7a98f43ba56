"""The right to write one checkpoint, among jobs that share a folder: a lock file next to it, with a heartbeat.

A save that finds no lock makes one, by an exclusive open, which network file systems have too. One that finds a lock asks
whether its holder is alive: of the same machine and container by its pid, of another one by the time of the file's last
change, which the holder renews every few seconds. The clock is the file system's, since hosts need not share one.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from booster.checkpoint.manifest import CheckpointError
from booster.common.untrusted_files import parse_json

_logger = logging.getLogger(__name__)
LOCK = ".writing.lock"
_NO_LINK = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)  # and no named pipe, which would wait
BEAT, DEAD = 5.0, 60.0  # seconds between heartbeats, and without one until a holder counts as dead


@dataclass(frozen=True)
class LockHolder:
    """Who holds a lock.

    Attributes:
        path: of the lock.
        changed: when its last heartbeat was, by the clock of the file system.
        nonce: of the save that made it; empty where the file does not say.
        host: the name of its machine.
        pid: of its process.
        space: of its pid, see `_pid_space`.
    """

    path: Path
    changed: float
    nonce: str = ""
    host: str = "a host that it has not named yet"
    pid: int = 0
    space: str = ""

    @property
    def age(self) -> float:
        """Seconds since its last heartbeat."""
        # Not this host's clock: ages are compared with times that the server of a network file system wrote.
        with tempfile.TemporaryFile(dir=self.path.parent) as probe:  # has the file system's time, and mostly no name
            return max(0.0, os.fstat(probe.fileno()).st_mtime - self.changed)

    @property
    def is_here(self) -> bool:
        """Whether its pid means here what it means there."""
        return self.space != "" and self.space == _pid_space()

    @property
    def is_alive(self) -> bool:
        # Of a pid that was given to another process since, the heartbeat still says that its holder is gone.
        return (not self.is_here or _runs(self.pid)) and self.age < DEAD

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, which gave its last sign of life {self.age:.0f} seconds ago"


class Lock:
    """The right to write `final`, from its making to `release`, with heartbeats from a thread.

    Waits for a holder of another machine to give a heartbeat or be dead. Raises CheckpointError, which names host and pid,
    where another process that is alive writes `final`.
    """

    def __init__(self, final: Path) -> None:
        self.nonce = secrets.token_hex(6)
        self._final, self._path = final, lock_of(final)
        while not self._made():
            try:
                holder = read_lock(self._path)
            except OSError as error:
                raise CheckpointError(
                    f"{self._path} should say who writes {final}, and cannot be read: {error}. Remove it if no job made it"
                ) from error
            # The lock may go between the failed open and this read: then the loop tries again.
            if holder is not None and _is_or_falls_dead(holder):
                remove_lock(holder)
            elif holder is not None:
                raise CheckpointError(
                    f"{final} is being written by {holder}. Save under another step, or into another folder, or end that "
                    "process"
                )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="booster-checkpoint-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError if another process has taken over, as from one that was stopped for a while."""
        with suppress(FileNotFoundError):
            os.utime(self._path, follow_symlinks=False)
        holder = read_lock(self._path)
        if holder is None or holder.nonce != self.nonce:
            raise CheckpointError(
                f"{self._final} was taken over by {holder or 'another process'}, after this one gave no sign of life for "
                f"{DEAD:.0f} seconds"
            )

    def release(self) -> None:
        """Let others write. A lock that cannot be removed is made old, and a WARNING."""
        # First, so that no heartbeat makes the lock young again while it is removed.
        self._ended.set()
        self._thread.join()
        try:
            holder = read_lock(self._path)
            if holder is not None and holder.nonce == self.nonce:
                self._path.unlink()
        except OSError as error:
            _logger.warning("%s could not be removed: %s", self._path, error)
            with suppress(OSError):
                os.utime(self._path, (0, 0), follow_symlinks=False)

    def _made(self) -> bool:
        said = {"nonce": self.nonce, "host": socket.gethostname(), "pid": os.getpid(), "space": _pid_space()}
        try:
            with self._path.open("x") as file:
                file.write(json.dumps(said))
        except FileExistsError:
            return False
        except OSError:  # a disk that is full
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                os.utime(self._path, follow_symlinks=False)
            except OSError as error:  # the file system comes back, or `check` says who has taken over
                _logger.debug("%s: %s", self._path, error)


def _is_or_falls_dead(holder: LockHolder) -> bool:
    """Whether `holder` is dead. Where its heartbeat alone can say, wait for the next one, or until there was none for long."""
    until = time.monotonic() + DEAD  # its last heartbeat may be in the future, where the server's clock was set back
    while holder.is_alive and time.monotonic() < until:
        if holder.is_here:
            return False
        time.sleep(min(1.0, BEAT))
        now = read_lock(holder.path)
        if now is None or (now.nonce, now.changed) != (holder.nonce, holder.changed):
            return now is None
    return True


def lock_of(final: Path) -> Path:
    """Return the file that says who writes the checkpoint `final`."""
    return final.with_name(f".{final.name}{LOCK}")


def locked_name(path: Path) -> str | None:
    """Return the name of the checkpoint that the lock `path` is for; None for any other file."""
    return path.name[1 : -len(LOCK)] if path.name.startswith(".") and path.name.endswith(LOCK) else None


def read_lock(path: Path) -> LockHolder | None:
    """Return who holds the lock `path`; None where there is none. Raises OSError for a link, which no writer makes."""
    try:
        # Opened, since a network file system looks again at what is opened, and not at what is asked for.
        descriptor = os.open(path, os.O_RDONLY | _NO_LINK)
    except FileNotFoundError:
        return None
    try:
        text, changed = os.read(descriptor, 4096), os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
    try:
        said: Any = parse_json(text)
        return LockHolder(path, changed, str(said["nonce"]), str(said["host"]), int(said["pid"]), str(said["space"]))
    except (ValueError, KeyError, TypeError, OverflowError):  # not written yet, or by something else
        return LockHolder(path, changed)


def remove_lock(dead: LockHolder) -> None:
    """Remove the lock of `dead`, if it still holds it."""
    # Renamed first: between a look at the lock and its removal another process may have taken it over.
    aside = dead.path.with_name(f"{dead.path.name.removesuffix('.lock')}-{secrets.token_hex(6)}")
    try:
        dead.path.rename(aside)  # of several who do this one succeeds
    except FileNotFoundError:
        return
    found = read_lock(aside)
    if found is not None and found.nonce != dead.nonce:  # of one who took over since
        # A link fails where somebody has made the next lock meanwhile, in place of writing over it.
        os.link(aside, dead.path)
    aside.unlink(missing_ok=True)


def _pid_space() -> str:
    """Return what differs between machines, boots of one, and containers with pids of their own; empty where nothing says."""
    try:
        # A pid says something only within one boot of one machine and one namespace of pids.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    """Whether a process of this space runs: there is one, and it has not ended unnoticed by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
