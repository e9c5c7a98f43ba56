"""What a checkpoint says: its tree of names, and the tensors behind them that a load wants and reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from booster.checkpoint.agree import agree_on_success, agreed, first_failure
from booster.checkpoint.dcp_storage import ManifestReader, load_into
from booster.checkpoint.late_reads import LateReads
from booster.checkpoint.manifest import CheckpointError, Tensor, check_sizes, dtype_of, read_manifest
from booster.checkpoint.state_tree import decode, read_tree, reference, references
from booster.checkpoint.tensor_layout import HeldTensor, can_be_read_into, empty_like_whole, mark_written
from booster.interface.optimizer import OptimizerWrapper, updates_of
from booster.ranks.agreement import gather
from booster.shards.flat_shard import FlatShard
from booster.update.state_dict import STATE_KEY


class SavedCheckpoint:
    """A checkpoint, opened, and what a load requests of it.

    Tensors are requested (`request`, `request_shard`, `request_all`), `read` reads all of them at once, and `value` and
    `tensor` give them. What is requested in place (`request_in_place`) is compared with its hash by `read`, and read by
    `read_in_place` once nothing else can refuse. What buckets of masters take over (`request_late`) is read as they do.

    Attributes:
        folder: of the checkpoint.
        manifest: what it says of files and tensors.
        tree: what is no tensor, by kind of object and name, with a reference in each tensor's place.
        own: names of tensors that the loading rank has for itself, by the names that they stand for.
        notes: sentences for the user, logged if the load succeeds.
        late: what is read as buckets take it over.

    rehearsed: nothing is read, and tensors are on the meta device. Raises OSError or CheckpointError if it cannot be opened.
    """

    def __init__(self, folder: Path, *, rehearsed: bool = False) -> None:
        self.folder, self._rehearsed = folder, rehearsed
        self.manifest = read_manifest(folder)
        check_sizes(folder, self.manifest)
        self.tree: dict[str, Any] = read_tree(folder, self.manifest)
        self.own: Mapping[str, str] = {}
        self.notes: list[str] = []
        self._targets: dict[str, HeldTensor] = {}
        self._in_place: dict[str, Callable[[], HeldTensor]] = {}
        self.late = LateReads(folder, self.manifest.tensors)
        self._files: object = None

    # ------------------------------------------------------------------ what there is

    def entry(self, name: str | None) -> Tensor | None:
        """Return shape and dtype of a tensor of the checkpoint; None where it has none."""
        return self.manifest.tensors.get(name) if name is not None else None

    def masters(self, optimizer: str) -> dict[str, Any]:
        """Return what was kept of the masters of an optimizer: "weights" by parameter, "rounding"."""
        return self.tree["optimizers"][optimizer][STATE_KEY].get("masters") or {}

    def masters_behind(self, kind: str, module: str) -> dict[str, str]:
        """Return the tensors with the float32 numbers behind half weights of a module, by the weights' names in it."""
        prefix = f"{kind}/{module}/"
        return {w.removeprefix(prefix): master for w, master in self.tree["masters"].items() if w.startswith(prefix)}

    def widest_source(self, param: str, optimizer: str, home: tuple[str, str, bool] | None) -> str | None:
        """Return where the widest numbers of a parameter are: its master's, else those of its weight.

        home: the model of the job that has it, its name there, and whether that model takes numbers as they are saved: else it
        alone knows the weight. Where none of them has it, the only model that has the name.
        """
        master = reference(self.masters(optimizer).get("weights", {}).get(param))
        if master is not None:
            return master
        if home is not None and home[0] in self.tree["models"]:
            model, key, as_saved = home
            weight = self.tree["models"][model].get(key) if as_saved else None
            return self.masters_behind("models", model).get(key) or reference(weight)
        holders = [tree[param] for tree in self.tree["models"].values() if param in tree]
        return reference(holders[0]) if len(holders) == 1 else None

    # ------------------------------------------------------------------ what is wanted of it, and read

    def request(self, name: str | None, like: torch.Tensor | None) -> None:
        """Read the tensor `name`, where there is one, in the layout of `like`; whole where that is None."""
        name = self._own(name)
        entry = self.entry(name)
        known = self._targets.get(str(name))
        if (
            name is not None
            and entry is not None
            and (known is None or name in self._in_place or name in self.late or isinstance(known, FlatShard))
        ):
            self._in_place.pop(name, None)  # somebody else wants its numbers before, or all of them
            self.late.drop(name)
            if self._rehearsed:
                self._targets[name] = torch.empty(entry.shape, dtype=dtype_of(entry), device="meta")
            else:
                self._targets[name] = empty_like_whole(entry.shape, dtype_of(entry), like)

    def _own(self, name: str | None) -> str | None:
        return None if name is None else self.own.get(name, name)

    def request_in_place(self, name: str | None, held: HeldTensor | None, where: Callable[[], HeldTensor]) -> bool:
        """Read the tensor `name` in the end, into what `where` gives then; returns False where that cannot be.

        held: what is there now, a placeholder until then.
        """
        name = self._own(name)
        entry = self.entry(name)
        if name is None or entry is None or held is None or name in self._targets or self._rehearsed:
            return False
        # A flat shard is a stretch of the whole, which files have as several boxes.
        parts = [view for *_, view in held.boxes()] if isinstance(held, FlatShard) else [held]
        shape = tuple(held.shape) if isinstance(held, torch.Tensor) else entry.shape
        fits = all(
            can_be_read_into(part, shape if part is held else tuple(part.shape), dtype_of(entry)) for part in parts
        )
        if not fits or not parts or shape != entry.shape:
            return False
        self._targets[name], self._in_place[name] = held, where
        return True

    def is_in_place(self, name: str | None) -> bool:
        """Return whether a tensor is read in the end, into what holds it here."""
        return self._own(name) in self._in_place

    def request_shard(
        self, name: str | None, param: torch.Tensor, optimizer: OptimizerWrapper, state: str | None = None
    ) -> None:
        """Read what this rank steps of a state of `param`; all of it where it has another shape.

        state: what the optimizer calls it, where that may be read in place.
        """
        entry = None if self._rehearsed else self.entry(name)
        if state is not None and entry is not None:
            where = partial(_state_here, optimizer, param, state)
            if self.request_in_place(name, where(), where):  # type: ignore[arg-type]
                return
        if name is not None and entry is not None and name not in self._targets and entry.shape == tuple(param.shape):
            (update,) = updates_of([optimizer])
            # Only this rank's stretch is read: the whole state may not fit.
            part = update.shards.states.empty_shard(param, dtype_of(entry))
            if part is not None:
                self._targets[name] = part
        if name is not None and (name not in self._targets or name in self.late):
            self.request(name, param)

    def request_late(
        self, name: str | None, param: torch.Tensor, optimizer: OptimizerWrapper, state: str | None
    ) -> bool:
        """Read the tensor `name` as the update takes it over; False where it cannot. state: its name, None for the master."""
        if name is None or self.entry(name) is None or name in self._targets or self._rehearsed:
            return False
        held = self.late.request(name, param, optimizer, state)
        if held is not None:
            self._targets[name] = held
        return held is not None

    def request_all(self, tree: Any) -> None:
        """Read, whole, every tensor that a part of the tree refers to."""
        for name in references(tree):
            self.request(name, None)

    def read(self, group: dist.ProcessGroup | None) -> None:
        """Read what was wanted, and compare every file with its hash; a collective."""
        targets = {n: held for n, held in self._targets.items() if n not in self._in_place and n not in self.late}
        self._files = self._stats()
        try:
            # Nothing of the user's is touched.
            self._read(targets, None, group)
        except CheckpointError as error:
            # Raises CheckpointError on every rank if any of them finds damage, or cannot read.
            raise CheckpointError(f"{error}; nothing was loaded") from error

    def read_in_place(self, group: dist.ProcessGroup | None) -> None:
        """Read what was wanted in place, and compare the files that have it with their hashes once more; a collective."""
        with agreed(group):
            targets = {name: where() for name, where in self._in_place.items()}
        files = {chunk.file for name in targets for chunk in self.manifest.tensors[name].chunks}
        # Every rank compares the same files, so that all raise alike.
        files = {file for of_rank in gather(sorted(files), group) for file in of_rank}
        if not files:
            return
        try:
            self._read(targets, files, group)
        except CheckpointError as error:
            # Raises CheckpointError on every rank if a file changed since `read`, or cannot be read any more.
            raise CheckpointError(_CHANGED.format(error, ", and all else is as it was")) from error
        mark_written(held.values if isinstance(held, FlatShard) else held for held in targets.values())

    def end(self, group: dist.ProcessGroup | None) -> None:
        """Let go of what was read late; a collective. Raises CheckpointError on every rank if a file changed since `read`."""
        with agreed(group, lambda error: CheckpointError(_CHANGED.format(error, ""))):
            if self.late.end() and self._stats() != self._files:
                raise CheckpointError(f"files of {self.folder} were replaced or written to while they were read")

    def _stats(self) -> object:
        stats = [(self.folder / name).stat() for name in self.manifest.files]
        return [(each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in stats]

    def _read(self, targets: dict[str, HeldTensor], files: set[str] | None, group: dist.ProcessGroup | None) -> None:
        """Read `targets`, and compare `files`, or all where that is None, with their hashes."""
        rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        reader = ManifestReader(self.folder, self.manifest, rank, num_ranks, files)
        try:
            load_into(targets, reader, group)
        except CheckpointException as error:
            raise CheckpointError(f"reading {self.folder} failed {first_failure(error)}") from error
        # Each rank verified some of the files, and what it read counts only if all of them are whole.
        agree_on_success(CheckpointError("; ".join(reader.damage)) if reader.damage else None, group)

    def tensor(self, name: str | None) -> HeldTensor:
        """Return a tensor that was read."""
        return self._targets[str(self._own(name))]

    def forget(self) -> None:
        """Let go of what was read: the objects have it."""
        self._targets, self._in_place = {}, {}

    def value(self, tree: Any) -> Any:
        """Return what a part of the tree says, with the tensors that were read."""
        targets = self._targets
        if self.own:
            targets = targets | {name: targets[own] for name, own in self.own.items() if own in targets}
        return decode(tree, targets)


_CHANGED = (
    "{}. It was whole when it was read first, and another process changed it meanwhile: weights and optimizer states of this "
    "job hold parts of it{}; load a checkpoint before you go on"
)


def _state_here(optimizer: OptimizerWrapper, param: torch.Tensor, key: str) -> HeldTensor | None:
    """Return what this rank holds of a state of `param`, where a load makes what it is given the state, as it is; else None."""
    (update,) = updates_of([optimizer])
    if not update.optimizer_state.loads_without_copy(param):
        return None
    held = update.optimizer_state.state.get(param, {}).get(key)
    if not isinstance(held, torch.Tensor):
        return None
    part = update.shards.states.empty_shard(param, held.dtype)
    if part is None or not held.is_contiguous() or held.numel() != part.values.numel():
        return held if part is None else None
    return part.with_values(held.view(-1))
