"""Folders that appear whole or not at all: written beside, synced to the disk, then renamed into place.

A root holds one folder for each checkpoint, `step-0000000100`. A save writes into `.step-0000000100.writing-NONCE`; when
every file is on the disk, a rename makes it visible. Where a checkpoint of that step stands already, it is first renamed
to `step-0000000100.replaced`, which counts as long as nothing else bears the name, so that at every moment the old or the
new one is found whole. What an interrupted save left behind is cleared away by the next one.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from booster.checkpoint.manifest import CheckpointError, problems, read_manifest

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{10,})(\.replaced)?")
_WRITING = re.compile(r"\.step-\d{10,}\.writing-[0-9a-f]+")


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint of `step`; names sort as steps do."""
    return f"step-{step:010d}"


def staging_folder(root: Path, step: int) -> Path:
    """Make the folder that a save of `step` writes into, after clearing what earlier saves left unfinished."""
    root.mkdir(parents=True, exist_ok=True)
    clear_unfinished(root)
    staging = root / f".{name_of(step)}.writing-{secrets.token_hex(6)}"
    staging.mkdir()
    return staging


def publish(staging: Path, root: Path, step: int) -> Path:
    """Give a finished `staging` folder its name, in place of a checkpoint of the same step; returns its new path.

    Every file in it must have been synced. When this returns, the checkpoint survives a loss of power.
    """
    final, replaced = root / name_of(step), root / f"{name_of(step)}.replaced"
    sync_folder(staging)
    if final.exists():
        if replaced.exists():  # an earlier save ended between its two renames and its clean-up
            shutil.rmtree(replaced)
        final.rename(replaced)
    staging.rename(final)
    sync_folder(root)
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


def checkpoints(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, folder) of everything in `root` that bears a checkpoint's name, newest step first."""
    if not root.is_dir():
        return
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()):  # "step-N" comes before "step-N.replaced"
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.setdefault(int(match[1]), path)
    yield from sorted(found.items(), reverse=True)


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the newest valid checkpoint in `root`, or None if there is none.

    Every byte is read and compared with its hash. What is damaged is named in a WARNING and passed over.
    """
    for _, path in checkpoints(Path(root)):
        bad = damage(path)
        if not bad:
            return path
        _logger.warning("checkpoint %s is passed over: %s", path, "; ".join(bad))
    return None


def damage(folder: Path) -> list[str]:
    """Return what is wrong with the checkpoint in `folder`; empty if every byte is as it was written."""
    try:
        return list(problems(folder, read_manifest(folder)))
    except CheckpointError as error:
        return [str(error)]


def prune(root: Path, keep_last: int) -> None:
    """Remove all checkpoints but the newest `keep_last`. Each is renamed first, so that none is ever seen half removed."""
    for step, path in list(checkpoints(root))[keep_last:]:
        doomed = root / f".{name_of(step)}.writing-{secrets.token_hex(6)}"
        path.rename(doomed)
        shutil.rmtree(doomed)


def clear_unfinished(root: Path) -> None:
    """Remove what interrupted saves left in `root`, and checkpoints whose replacement is complete."""
    for path in root.iterdir():
        superseded = path.name.endswith(".replaced") and (root / path.name.removesuffix(".replaced")).exists()
        if path.is_dir() and (_WRITING.fullmatch(path.name) or (_NAME.fullmatch(path.name) and superseded)):
            shutil.rmtree(path)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the entries of `folder`: the names in it, not what they hold."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
