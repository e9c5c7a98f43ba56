"""Folders that appear whole or not at all: written under another name, synced to the disk, then renamed into place.

A root holds one folder for each checkpoint, `step-0000000100`. A save writes into `.step-0000000100.writing-NONCE`; when
every file is on the disk, a rename makes it visible. Where a checkpoint of that step is there already, it is first renamed
to `step-0000000100.replaced`, which counts as long as nothing else bears the name, so that at every moment the old or the
new one is found whole. What an interrupted save left behind is cleared away by the next one.

Several jobs may save into one root. `.step-0000000100.writing.lock` says who writes that one, see `Lock`: what a living
writer has is left alone, and nothing gets its name unless it is whole and still its writer's.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from booster.checkpoint.lock import Lock, lock_of, locked_name, read_lock, remove_lock
from booster.checkpoint.manifest import LARGEST_NUMBER, MANIFEST, CheckpointError, problems, read_manifest, read_text
from booster.common.untrusted_files import printable

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
    """Give a finished `staging` folder its name, in place of an older checkpoint of that name."""
    # Every file in it must have been synced.
    replaced = _replaced(final)
    # When this returns, the checkpoint survives a loss of power.
    sync_folder(staging)
    lock.check()
    if missing := missing_of(staging):
        # Raises CheckpointError if something else than a checkpoint bears the name, and if `staging` is not whole or not the
        # writer's.
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
    # The old one gets its name back.
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
    """Return the folder of the newest valid checkpoint in `root`, or None if there is none."""
    for _, path in checkpoints(Path(root)):
        # Every byte is read and compared with its hash.
        bad = damage(path)
        if not bad:
            return path
        # What is damaged is named in a WARNING and passed over.
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
    # Nothing is lost, and the next save tries again.
    except OSError as error:
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
            holder = read_lock(
                lock_of(root / unfinished[1])
            )  # its lock was made before it, but the listing may have missed it
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
