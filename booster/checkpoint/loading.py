"""Loading: everything is read, verified and compared with the job before any object is touched."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch.distributed as dist

from booster.checkpoint import parts
from booster.checkpoint.folder import checkpoints, damage, manifest_now, standing
from booster.checkpoint.manifest import MANIFEST, CheckpointError, agreed, dtype_of, is_first, new_hash
from booster.checkpoint.objects import Loaded, Objects, load_module, named, read_by_torch
from booster.checkpoint.parts.part import LoadContext
from booster.checkpoint.parts.run_objects import extra_of
from booster.checkpoint.saved_checkpoint import SavedCheckpoint
from booster.checkpoint.state_tree import OWN, mark_written
from booster.checkpoint.tensor_file import Headers
from booster.checkpoint.tensor_reader import read_entries
from booster.checkpoint.weight_files import FittedWeights, check_unchanged, half_read, weights_for
from booster.common.arguments import listed
from booster.common.untrusted_files import printable
from booster.interface.model import ModelWrapper
from booster.ranks.agreement import gather, rank_in

_logger = logging.getLogger(__name__)


def load(root: Path, objects: Objects, *, strict: bool, group: dist.ProcessGroup | None) -> Loaded:
    """Load the checkpoint that `root` is, or the newest valid one below it, into `objects`; a collective.

    Files are compared with their hashes as they are read. If it raises, on any rank, it raises on all, and no object has
    changed; but where a file changes after it was verified, weights and states hold parts of it, which the error says.
    """
    new_hash()  # raises on every rank where xxhash is missing
    passed_over: list[str] = []
    while True:
        folder = _candidate(root, passed_over, group)
        # Another job may replace the folder while it is read; a manifest that changed says so.
        # A folder is replaced by renaming, so that its manifest changes with it.
        before = manifest_now(folder)
        try:
            loading = _read(folder, objects, strict=strict, group=group)
            break
        except (OSError, CheckpointError) as error:
            # What the first rank sees counts: another process may be replacing the folder.
            found = damage(folder) if is_first(group) else []
            bad, replaced, named = gather([found, before != manifest_now(folder), folder == standing(root)], group)[0]
            if bad and named:
                raise CheckpointError(f"{folder} is damaged: {'; '.join(bad)}") from error
            if bad:
                if is_first(group):
                    _logger.warning("checkpoint %s is passed over: %s", folder, printable("; ".join(bad)))
                passed_over.append(folder.name)
            elif not replaced:  # by a newer one of this name, while it was read
                raise
    return loading.apply(group)


def check_loads(folder: Path, objects: Objects | None, rank: int) -> None:
    """Raise CheckpointError where no load would take what was just written into `folder`; reads no tensor.

    objects: those that were saved, unless they train on meanwhile.
    """
    try:
        saved = SavedCheckpoint(folder, rehearsed=True)
        # One rank is enough: files are the same for all, and headers are small.
        if rank == 0:
            headers = Headers(folder)
            for tensor in saved.manifest.tensors.values():
                for chunk in tensor.chunks:
                    headers.entry(chunk, dtype_of(tensor))
        # Objects that train on meanwhile are no longer what was written.
        if objects is not None:
            loading = _Loading(saved, objects, rank=rank, strict=True)
            loading.compare()
            loading.prepare()
    except Exception as error:
        raise CheckpointError(
            f"what was written would not load: {type(error).__name__}: {error}. Nothing is put in its place or removed"
        ) from error


def _candidate(root: Path, passed_over: list[str], group: dist.ProcessGroup | None) -> Path:
    """Return the checkpoint to try, the same on every rank; a collective. Raises CheckpointError if none is left."""
    found: str | None = None
    with agreed(group):
        if is_first(group):
            found = str(_next(root, passed_over))
    return Path(gather(found, group)[0])


def _next(root: Path, passed_over: list[str]) -> Path:
    named = standing(root)
    if (named / MANIFEST).exists():
        return named
    below = [path for _, path in checkpoints(named)]
    left = [path for path in below if path.name not in passed_over]
    if not left:
        names = [path.name for path in below]
        raise CheckpointError(
            f"there is no valid checkpoint in {root}: "
            + (f"{names} are damaged (see the warnings)" if names else "it holds no folder `step-...`")
        )
    return left[0]


def _read(folder: Path, objects: Objects, *, strict: bool, group: dist.ProcessGroup | None) -> _Loading:
    """Read and verify a checkpoint, and compare it with the job; touches no object. Raises on all ranks, or on none."""
    found: list[_Loading] = []
    with agreed(group, partial(_unfit, f"{folder} cannot be compared with this job")):
        found.append(_Loading(SavedCheckpoint(folder), objects, rank=rank_in(group), strict=strict))
        found[0].compare()
    (loading,) = found
    loading.saved.read(group)
    with agreed(group, partial(_unfit, f"{folder} does not say what save() writes")):
        loading.prepare()
    return loading


def _unfit(what: str, error: Exception) -> Exception:
    """What is raised where a file or a job is wrong: an OSError as it is, anything else as a CheckpointError."""
    if isinstance(error, (OSError, CheckpointError)):
        return error
    return CheckpointError(f"{what}: {type(error).__name__}: {error}")


def _refused(what: str, error: Exception) -> CheckpointError:
    """What is raised where an object of the user's does not take its state, whatever it raised."""
    return CheckpointError(f"{what}, and nothing was loaded: {error}")


def anything_in(root: Path, group: dist.ProcessGroup | None) -> bool:
    """Return whether `root` is a checkpoint or holds any, valid or not; the same on every rank, a collective."""
    there = is_first(group) and ((standing(root) / MANIFEST).exists() or any(True for _ in checkpoints(root)))
    return gather(there, group)[0]


def load_model(model: ModelWrapper, path: Path, *, strict: bool, group: dist.ProcessGroup | None) -> None:
    """Load weights from plain files, or from a checkpoint, into a boosted model; see `Booster.load_model`. A collective."""
    if gather((path / MANIFEST).exists(), group)[0]:
        load(path, named(model, None, None, None, None, None), strict=strict, group=group)
        return
    found = FittedWeights()
    with agreed(group):
        before = check_unchanged(path)
        found = weights_for(model, path, read_by_torch(model), read_entries, strict=strict)
        check_unchanged(path, before)  # up to here nothing was written to the model
    with ExitStack() as undo:
        with agreed(group, partial(_refused, f"{path} does not load into this model")):
            load_module(model, found.state, undo)
        with agreed(group, half_read):
            targets = {name: here for name, (_, here) in found.in_place.items()}
            read_entries({name: entry for name, (entry, _) in found.in_place.items()}, targets)
            mark_written(targets.values())
            check_unchanged(path, before)
        undo.pop_all()
    if found.left_out:
        _logger.warning("%s: %s", path, printable(listed(found.left_out, 8)))


class _Loading:
    """One load on one rank: `compare`, then `saved.read`, `prepare`, and only then `apply`."""

    def __init__(self, saved: SavedCheckpoint, objects: Objects, *, rank: int, strict: bool) -> None:
        self.saved, self._found = saved, LoadContext(saved, rank, strict)
        self._parts = [kind(objects) for kind in parts.PARTS]
        # Buffers and the like of a rank come back to that rank alone, which is there only where as many ranks load.
        own = saved.tree.get(OWN, [])
        if len(own) == self._found.world_size:
            saved.own = own[rank]
        elif any(own):
            saved.notes.append(
                f"buffers, extra or random states of rounding differ between the {len(own)} ranks that saved; those of the "
                "first are given to all"
            )

    def compare(self) -> None:
        """Raise CheckpointError that lists all that differs between the checkpoint and the job; note what is to be read."""
        different: list[str] = []
        for part in self._parts:
            for kind, own in part.named.items():
                there = self.saved.tree.get(kind, {})
                if missing := sorted(own.keys() - there.keys()):
                    different.append(f"{kind}: the checkpoint has {sorted(there)}, not {missing}")
        # Optimizers before models: weights that their masters give are not read for the model.
        said = [list(part.compare(self._found)) for part in reversed(self._parts)]
        different += [text for of_part in reversed(said) for text in of_part]
        if different:
            raise CheckpointError(
                f"{self.saved.folder} does not fit this job:\n  "
                + "\n  ".join(different)
                + "\nBuild model and optimizer as "
                "they were when it was saved"
                + (", or pass strict=False to leave out entries of the model" * self._found.strict)
            )

    def prepare(self) -> None:
        """Make of what was read the state dicts that the objects take."""
        for part in self._parts:
            if part.is_rehearsed or not self.saved.rehearsed:
                part.prepare(self._found)
        self._extra = self.saved.value(extra_of(self._found))

    def apply(self, group: dist.ProcessGroup | None) -> Loaded:
        """Hand every object its state: whatever may refuse it, so that it can be undone; then what only copies."""
        with ExitStack() as undo:
            # Objects that may refuse come first: while nothing was overwritten, taking back is cheap.
            for part in sorted(self._parts, key=lambda part: part.turn):
                for what, hand_over in part.steps():
                    with agreed(group, partial(_refused, f"{self.saved.folder} does not load into {what}")):
                        hand_over(undo)
            # From here on nothing can refuse, so weights and states may be written over.
            self.saved.read_in_place(group)
            undo.pop_all()
        del hand_over
        self.saved.forget()
        for part in self._parts:
            part.finish()
        self.saved.end(group)
        if self.saved.notes:
            _logger.warning("%s: %s", self.saved.folder, printable("; ".join(self.saved.notes)))
        run = self.saved.tree.get("run", {})
        return Loaded(self.saved.manifest.step, self._extra, self.saved.folder, run)
