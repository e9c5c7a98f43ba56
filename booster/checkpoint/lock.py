"""The right to write one checkpoint, among jobs that share a folder: a file beside it, whose age is a heartbeat."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
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
_AS_IT_IS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)  # a named pipe would wait
BEAT, DEAD = 5.0, 60.0  # seconds between signs of life, and without one until a writer counts as dead


@dataclass(frozen=True)
class Holder:
    """Who holds the lock `path`. changed: when it gave its last sign of life, by the clock of the file system.

    space: where its pid means something; began: when the process started, since pids come again.
    """

    path: Path
    changed: float
    nonce: str = ""
    host: str = "a host that it has not named yet"
    pid: int = 0
    space: str = ""
    began: str = ""

    @property
    def age(self) -> float:
        """Seconds since its last sign of life."""
        return max(0.0, _now(self.path.parent) - self.changed)

    @property
    def is_here(self) -> bool:
        """Whether its pid means here what it means there."""
        return self.space != "" and self.space == _pid_space()

    @property
    def lives(self) -> bool:
        """Whether it writes still: by its heartbeat, and where its pid says that it has ended, by that."""
        return not (self.is_here and _began(self.pid) != self.began) and self.age < DEAD

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, whose last sign of life is {self.age:.0f} seconds old"


class Lock:
    """The right to write `final`, from its making to `release`, with a sign of life every few seconds from a thread.

    The file is made by an exclusive open, which network file systems have too, and its age is that of its last change by the
    file system's clock, which hosts need not share. A process of the same machine that has ended is seen at once; any other
    one is dead after a minute without a sign, for which this waits, or for its next sign. Raises CheckpointError, which
    names host and pid, where another one that lives writes `final`.
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
            if holder is not None and _ends(holder):
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
        """Let others write. What cannot be removed is made old, and a WARNING."""
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
        pid = os.getpid()
        told = {
            "nonce": self.nonce,
            "host": socket.gethostname(),
            "pid": pid,
            "space": _pid_space(),
            "began": _began(pid),
        }
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        text = json.dumps(told).encode()
        try:
            while text:  # a disk that is nearly full takes a part
                text = text[os.write(descriptor, text) :]
        except OSError:
            self._path.unlink()
            raise
        finally:
            os.close(descriptor)
        return True

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                os.utime(self._path, follow_symlinks=False)
            except OSError as error:  # the file system comes back, or `check` says who has taken over
                _logger.debug("%s: %s", self._path, error)


def _ends(holder: Holder) -> bool:
    """Whether `holder` is dead. One of another machine or container is waited for, until it gives a sign or never will."""
    until = time.monotonic() + DEAD  # its last sign may lie in the future, where the server's clock was set back
    while holder.lives and (holder.is_here or time.monotonic() < until):
        if holder.is_here:
            return False
        time.sleep(min(1.0, BEAT))
        later = read_lock(holder.path)
        if later is not None and (later.nonce, later.changed) != (holder.nonce, holder.changed):
            return False
        if later is None:
            return True
    return True


def lock_of(final: Path) -> Path:
    """Return the file that says who writes the checkpoint `final`."""
    return final.with_name(f".{final.name}{LOCK}")


def locked_name(path: Path) -> str | None:
    """Return the name of the checkpoint that the lock `path` is for; None for any other file."""
    return path.name[1 : -len(LOCK)] if path.name.startswith(".") and path.name.endswith(LOCK) else None


def read_lock(path: Path) -> Holder | None:
    """Return who holds the lock `path`; None where nobody does. Raises OSError for a link, which no writer makes."""
    try:
        # Opened, since a network file system looks again at what is opened, and not at what is asked for.
        descriptor = os.open(path, os.O_RDONLY | _AS_IT_IS)
    except FileNotFoundError:
        return None
    try:
        text, changed = os.read(descriptor, 4096), os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
    try:
        told: Any = parse_json(text)
        pid, words = int(told["pid"]), [str(told[key]) for key in ("nonce", "host", "space", "began")]
    except (ValueError, KeyError, TypeError, OverflowError):  # not written yet, or by something else
        return Holder(path, changed)
    return Holder(path, changed, words[0], words[1], pid, words[2], words[3])


def remove_lock(dead: Holder) -> None:
    """Remove the lock of `dead`, if it still holds it."""
    aside = dead.path.with_name(f"{dead.path.name}-{secrets.token_hex(6)}")
    try:
        dead.path.rename(aside)  # of several who do this one succeeds
    except FileNotFoundError:
        return
    found = read_lock(aside)
    if found is not None and found.nonce != dead.nonce:  # of one who took over since
        os.link(aside, dead.path)
    aside.unlink()


def _now(folder: Path) -> float:
    """The time by the clock of the file system that `folder` is on."""
    probe = folder / f".clock{LOCK}-{secrets.token_hex(6)}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        probe.unlink()


def _pid_space() -> str:
    """What tells apart machines, boots of one, and containers with pids of their own; empty where nobody tells."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(pid: int) -> str:
    """When a process of this space started, in ticks since the machine did; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = text[text.rindex(")") + 2 :].split()
    return "" if state in "ZX" else rest[18]  # one that has ended, and whose parent has not noticed
