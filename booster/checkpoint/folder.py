"""Folders that appear whole or not at all: written under another name, synced to the disk, then renamed into place.

A root holds one folder for each checkpoint, `step-0000000100`. A save writes into `.step-0000000100.writing-NONCE`; when
every file is on the disk, a rename makes it visible. Where a checkpoint of that step is there already, it is first renamed
to `step-0000000100.replaced`, which counts as long as nothing else bears the name, so that at every moment the old or the
new one is found whole. What an interrupted save left behind is cleared away by the next one.

Several jobs may save into one root. The right to write one checkpoint is a `Lock`, the file `.step-0000000100.writing.lock`
with a heartbeat: what a living writer has is left alone, and nothing gets its name unless it is whole and still its writer's.
A save that finds no lock makes one, by an exclusive open, which network file systems have too. One that finds a lock asks
whether its holder is alive: of the same machine and container by its pid, of another one by the time of the file's last
change, which the holder renews every few seconds. The clock is the file system's, since hosts need not share one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from booster.checkpoint.manifest import LARGEST_NUMBER, MANIFEST, CheckpointError, problems, read_manifest, read_text
from booster.common.untrusted_files import parse_json, printable

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
    def is_local(self) -> bool:
        """Whether its pid means here what it means there."""
        return self.space != "" and self.space == _pid_space()

    @property
    def is_alive(self) -> bool:
        # Of a pid that was given to another process since, the heartbeat still says that its holder is gone.
        return (not self.is_local or _runs(self.pid)) and self.age < DEAD

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
        if holder.is_local:
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


_logger = logging.getLogger(__name__)
_WRITING, _REPLACED = ".writing-", ".replaced"
_NAME = re.compile(r"step-([0-9]{10,19})(\.replaced)?")
_LEFT = "%s, which an interrupted save left, could not be removed: %s"
_UNFINISHED = re.compile(r"\.(.+)\.writing-([0-9a-f]{12})")


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint of `step`; names sort as steps do."""
    return f"step-{step:010d}"


def staging_folder(final: Path, lock: Lock) -> Path:
    """Make the folder that a save into `final` writes, after clearing what dead writers left unfinished there."""
    clear_unfinished(final.parent, lock.nonce)
    staging = final.parent / f".{final.name}{_WRITING}{lock.nonce}"
    staging.mkdir()
    return staging


def publish(staging: Path, final: Path, lock: Lock) -> None:
    """Give a finished `staging` folder, of which every file was synced, its name, in place of an older checkpoint of that name.

    When this returns, the checkpoint survives a loss of power. Raises CheckpointError if something else than a checkpoint bears
    the name, and if `staging` is not whole or not the writer's; the old one then has its name.
    """
    replaced = _replaced(final)
    sync_folder(staging)
    lock.check()
    if missing := missing_of(staging):
        raise CheckpointError(f"{staging} lacks what was written of {missing}: something else has changed it")
    if final.exists():
        if not (final / MANIFEST).exists() and final.exists():
            raise CheckpointError(f"{final} exists and is not a checkpoint; it is left alone")
        if replaced.exists():  # an earlier save ended before its clean-up
            remove(replaced)
        # Aside, not away: between the two renames `standing` finds the old one under this name.
        with suppress(FileNotFoundError):  # another job has removed the old one since
            final.rename(replaced)
    try:
        staging.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    # The rename is on the disk once the folder that has the names is.
    sync_folder(final.parent)
    if replaced.exists():
        remove(replaced)


def standing(path: Path) -> Path:
    """Return the folder of the checkpoint called `path`: the older one where a save was cut off between its renames."""
    if path.exists():
        return path
    replaced = _replaced(path)
    return replaced if replaced.exists() else path


def checkpoints(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, folder) of everything in `root` that bears a checkpoint's name, newest step first."""
    if not root.is_dir():
        return
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()):  # "step-N" comes before "step-N.replaced"
        step = _step_of(path.name)
        if step is not None and path.is_dir():
            found.setdefault(step, path)
    yield from sorted(found.items(), reverse=True)


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the newest valid checkpoint in `root`, or None if there is none.

    Every byte is read and compared with its hash; what is damaged is named in a WARNING and passed over.
    """
    for _, path in checkpoints(Path(root)):
        bad = damage(path)
        if not bad:
            return path
        _logger.warning("checkpoint %s is passed over: %s", path, printable("; ".join(bad)))
    return None


def damage(folder: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with the checkpoint in `folder`; empty if every byte is as it was written."""
    folder = Path(folder)
    while True:
        before = manifest_now(folder)
        try:
            found = list(problems(folder, read_manifest(folder)))
        except CheckpointError as error:
            found = [str(error)]
        if not found or before == manifest_now(folder):
            return found
        # Another process has put a newer checkpoint of this name in its place meanwhile.


def manifest_now(folder: Path) -> bytes | None:
    """Return what the manifest in `folder` holds now, read or not; None without one."""
    try:
        return read_text(folder, MANIFEST)
    except OSError:
        return None


def prune(root: Path, keep_last: int, written: Path) -> None:
    """Remove all checkpoints but the newest `keep_last` and `written`, which was just saved, whatever its number is."""
    kept = 0
    for _, path in list(checkpoints(root)):
        if kept >= keep_last and path != written:
            # Each is renamed first, so that none is ever seen half removed.
            remove(path)
        # One with a file missing or of another size is not kept in another's place.
        with suppress(CheckpointError, OSError):
            kept += path == written or not missing_of(path)


def missing_of(folder: Path) -> list[str]:
    """Return the files of a checkpoint that are not there in their sizes. Raises CheckpointError without a manifest."""
    return [
        name
        for name, file in read_manifest(folder).files.items()
        if not (folder / name).is_file() or (folder / name).stat().st_size != file.bytes
    ]


def remove(folder: Path) -> None:
    """Remove a checkpoint, renaming it first, so that it is never seen half removed."""
    doomed = folder.parent / f".{folder.name}{_WRITING}{secrets.token_hex(6)}"
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return  # another job was first
    except OSError as error:  # nothing is lost, and the next save tries again
        _logger.warning("the old checkpoint %s could not be removed: %s", folder, error)
        return
    _remove_tree(doomed, "the old checkpoint %s could not be removed: %s", folder)


def clear_unfinished(root: Path, own: str) -> None:
    """Remove what dead writers left in `root`, and checkpoints that were replaced. own: the nonce of this writer."""
    paths, alive = list(root.iterdir()), {own}
    for path in paths:
        if locked_name(path) is None or path.is_dir():
            continue
        try:
            holder = read_lock(path)
            if holder is not None and (holder.nonce == own or holder.is_alive):
                alive.add(holder.nonce)
            elif holder is not None:
                remove_lock(holder)
        except OSError as error:
            # It is in no save's way.
            _logger.warning(_LEFT, path, error)
    for path in paths:
        unfinished = _UNFINISHED.fullmatch(path.name)
        if unfinished is not None and unfinished[2] not in alive:
            # Its lock was made before it, but the listing may have missed it.
            holder = read_lock(lock_of(root / unfinished[1]))
            if holder is None or holder.nonce != unfinished[2]:
                _remove_tree(path, _LEFT, path)
        elif path.name.endswith(_REPLACED):
            newer = path.with_name(path.name.removesuffix(_REPLACED))
            if (path / MANIFEST).exists() and (newer / MANIFEST).exists():
                _remove_tree(path, _LEFT, path)


def writing(root: Path) -> list[int]:
    """Return the steps of the checkpoints that are being written in `root`."""
    names = [locked_name(path) for path in root.iterdir()] if root.is_dir() else []
    return [step for name in names if name is not None and (step := _step_of(name)) is not None]


def _step_of(name: str) -> int | None:
    """Return the step of the checkpoint called `name`; None for what no save calls one."""
    match = _NAME.fullmatch(name)
    if match is None or (step := int(match[1])) > LARGEST_NUMBER or not name.startswith(name_of(step)):
        return None
    return step


def _remove_tree(path: Path, message: str, named: Path) -> None:
    while path.exists():
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()  # a file: a lock that was being removed
        except FileNotFoundError:  # another job is removing it, too
            continue
        except OSError as error:
            _logger.warning(message, named, error)
            return


def make_folder(folder: Path) -> None:
    """Make `folder` and those above it that are missing, and wait until the disk has their names."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_beside(folder: Path, write: Callable[[Path], object]) -> None:
    """Have `write` put files into a new folder, and move them into `folder`: through no link that has the name of one."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing.") as unfinished:
        write(Path(unfinished))
        for path in Path(unfinished).iterdir():
            path.replace(folder / path.name)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the entries of `folder`: the names in it, not what they hold."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replaced(final: Path) -> Path:
    return final.with_name(final.name + _REPLACED)
