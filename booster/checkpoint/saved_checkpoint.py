"""What a checkpoint says: its tree of names, and the tensors behind them that a load wants and reads.

Buckets that keep tensors in another form than the file read theirs last, a stretch at a time (`LateReads`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from booster.checkpoint.manifest import CheckpointError, Tensor, agreed, check_sizes, dtype_of, read_manifest
from booster.checkpoint.state_tree import (
    HeldTensor,
    can_be_read_into,
    decode,
    empty_like_whole,
    is_boxes,
    mark_written,
    read_tree,
    reference,
    references,
)
from booster.checkpoint.tensor_file import Entry, Headers, bytes_of, fill_from, read_box
from booster.checkpoint.tensor_reader import TensorReader, overlaps
from booster.common.untrusted_files import open_regular
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.model.params import dtensor_around, is_dtensor, local_shard
from booster.ranks.agreement import gather
from booster.shards.base import FlatShard, ShardedStateView
from booster.update.context import Fill
from booster.update.state_dict import STATE_KEY
from booster.update.state_loading import holds_nan


class _Late(NamedTuple):
    """One tensor, the state `key` of `param` or, None, its master.

    Attributes:
        held: what this rank has of it, as a stretch of a box.
        origin: where in the whole tensor that box begins.
    """

    optimizer: OptimizerWrapper
    param: torch.Tensor
    key: str | None
    held: FlatShard
    origin: tuple[int, ...]


class LateReads:
    """What is read of the tensors of a checkpoint in the end, so that nothing of it is in memory twice.

    Attributes:
        problems: why something could not be read, where it had been read before; then numbers are missing.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self._headers = tensors, Headers(folder)
        self._wanted: dict[str, _Late] = {}
        # By parameter and dtype: states of a parameter are laid out alike, and a DTensor takes long to make.
        self._layouts: dict[Any, tuple[HeldTensor, FlatShard, tuple[int, ...]]] = {}
        self._runs: dict[str, list[tuple[int, int, Path, int]] | None] = {}  # see `_find_runs`
        self.problems: list[str] = []

    def request(
        self, name: str, param: torch.Tensor, optimizer: OptimizerWrapper, key: str | None
    ) -> HeldTensor | None:
        """Return a placeholder on the meta device for what this rank has of the tensor `name`; None if it cannot wait."""
        update, tensor = update_of(optimizer), self._tensors[name]
        if tensor.shape != tuple(param.shape) or not update.optimizer_state.can_be_filled(param):
            return None
        if (param, tensor.dtype) not in self._layouts:
            dtype, meta = dtype_of(tensor), torch.device("meta")
            flat, local = update.shards.states.empty_shard(param, dtype, meta), local_shard(param)
            like = torch.empty(local.shape, dtype=dtype, device=meta)
            origin = (0,) * param.dim()
            if is_dtensor(param):
                if not is_boxes(param):  # as those of a fused projection
                    return None
                origin = tuple(param.__create_chunk_list__()[0].offsets)  # type: ignore[attr-defined]
            held = flat or FlatShard(like.view(-1), 0, local.shape, local.stride())
            if flat is None and not held.values.numel():
                return None
            self._layouts[param, tensor.dtype] = flat or dtensor_around(like, param), held, origin
        placeholder, held, origin = self._layouts[param, tensor.dtype]
        self._wanted[name] = _Late(optimizer, param, key, held, origin)
        return placeholder

    def __contains__(self, name: object) -> bool:
        return name in self._wanted

    def drop(self, name: str) -> None:
        """Have `name` read with all else: its numbers are wanted before."""
        self._wanted.pop(name, None)

    def fills(self, param: torch.Tensor, name: str | None) -> bool:
        """Return whether the tensor `name` becomes the master of `param`, which then gives the weight."""
        late = self._wanted.get(str(name))
        return late is not None and late.key is None and late.param is param

    def fill(self, optimizer: OptimizerWrapper) -> Fill | None:
        """Return what reads the states and masters of `optimizer`; None where none of them is late."""
        names = {
            (update_of(optimizer).shards.shard_of(late.param), late.key): name
            for name, late in self._wanted.items()
            if late.optimizer is optimizer
        }

        def read(shard: torch.Tensor, key: str | None, start: int, into: torch.Tensor) -> None:
            name = names[shard, key]
            try:
                self._read(name, start, into)
            except Exception as error:  # other ranks read on, and learn of it in the end
                self.problems.append(f"{name} cannot be read any more: {error}")
                into.zero_()

        return Fill(read) if names else None

    def masters_with_nan(self) -> Iterator[str]:
        """Yield the names of parameters' masters that hold NaN; reads them, some numbers at a time."""
        for name, late in self._wanted.items():
            size = late.held.values.numel() if late.key is None else 0
            self._read(name, 0, late.held.values)  # on the meta device: whether the files hold it
            # One piece of memory for all reads: masters may take as much as is free.
            some = torch.empty(min(size, 2**19), dtype=late.held.dtype)
            if any(holds_nan(self._read(name, at, some[: size - at])) for at in range(0, size, 2**19)):
                yield name

    def _read(self, name: str, start: int, into: torch.Tensor) -> torch.Tensor:
        """Read what this rank has of a tensor, from `start` on, into 1-dim memory, and return it; into meta memory nothing."""
        dtype = self._wanted[name].held.dtype
        if name not in self._runs:
            self._runs[name] = self._find_runs(name)
        if into.is_meta:
            return into
        straight = into.is_cpu and into.dtype == dtype and into.is_contiguous()
        values = into if straight else torch.empty(into.shape, dtype=dtype)
        runs, memory, width = self._runs[name], bytes_of(values), dtype.itemsize
        for place, numel, path, begin in runs or ():
            first, stop = max(place, start), min(place + numel, start + values.numel())
            if first < stop:
                with open_regular(path) as file:
                    file.seek(begin + (first - place) * width)
                    fill_from(file, memory[(first - start) * width : (stop - start) * width], path, name)
        for entry, inside, here in self._parts(name, start, values) if runs is None else ():
            with open_regular(entry.file) as file:
                read_box(file, entry, inside, here)
        return into if straight else into.copy_(values)

    def _find_runs(self, name: str) -> list[tuple[int, int, Path, int]] | None:
        """Return elements that follow each other here and in a file, as (the first here, how many, the file, its first byte).

        None where some do not. To cut boxes for each bucket anew takes longer than to read them. Compares every header.
        """
        found, in_runs = [], True
        for entry, inside, here in self._parts(name, 0, self._wanted[name].held.values):
            there = torch.empty(entry.shape, dtype=entry.dtype, device="meta")[inside]
            in_runs &= there.is_contiguous() and here.is_contiguous()
            begin = entry.start + int(there.storage_offset()) * entry.dtype.itemsize
            found.append((int(here.storage_offset()), here.numel(), entry.file, begin))
        return found if in_runs else None

    def _parts(
        self, name: str, start: int, values: torch.Tensor
    ) -> Iterator[tuple[Entry, tuple[slice, ...], torch.Tensor]]:
        """Yield entries of files, their box, and the view of `values` that takes it: what this rank has from `start` on."""
        (*_, held, origin), tensor = self._wanted[name], self._tensors[name]
        for begin, _, view in FlatShard(values, held.start + start, held.shape, held.stride).boxes():
            offsets = [o + b for o, b in zip(origin, begin, strict=True)]
            for chunk, inside, here in overlaps(tensor, offsets, view):
                yield self._headers.entry(chunk, held.dtype), inside, here

    def end(self) -> bool:
        """Return whether anything was late. Raises CheckpointError for what could not be read."""
        wanted, self._wanted = bool(self._wanted), {}
        if self.problems:
            raise CheckpointError(self.problems[0])
        return wanted


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
        rehearsed: nothing is read, and tensors are on the meta device.

    Raises OSError or CheckpointError if it cannot be opened.
    """

    def __init__(self, folder: Path, *, rehearsed: bool = False) -> None:
        self.folder, self.rehearsed = folder, rehearsed
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
        entry, held = self.entry(name), self._targets.get(str(name))
        if name is None or entry is None:
            return
        if held is None or name in self._in_place or name in self.late or isinstance(held, FlatShard):
            self._in_place.pop(name, None)  # somebody else wants its numbers before, or all of them
            self.late.drop(name)
            if self.rehearsed:
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
        if name is None or entry is None or held is None or name in self._targets or self.rehearsed:
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
        entry = None if self.rehearsed else self.entry(name)
        if state is not None and entry is not None:
            held = _local_state(optimizer, param, state, None)
            if self.request_in_place(name, held, partial(_local_state, optimizer, param, state, held)):  # type: ignore[arg-type]
                return
        if name is not None and entry is not None and name not in self._targets and entry.shape == tuple(param.shape):
            update = update_of(optimizer)
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
        if name is None or self.entry(name) is None or name in self._targets or self.rehearsed:
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
        """Read what was wanted, and compare every file with its hash; a collective. Nothing of the user's is touched.

        Raises CheckpointError on every rank if any of them finds damage, or cannot read.
        """
        targets = {n: held for n, held in self._targets.items() if n not in self._in_place and n not in self.late}
        self._files = self._stats()
        try:
            self._read(targets, None, group)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; nothing was loaded") from error

    def read_in_place(self, group: dist.ProcessGroup | None) -> None:
        """Read what was wanted in place, and compare the files that have it with their hashes once more; a collective.

        Raises CheckpointError on every rank if a file changed since `read`, or cannot be read any more.
        """
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
        # Each rank verifies some of the files, and what it read counts only if all of them are whole.
        with agreed(group, self._unread):
            TensorReader(self.folder, self.manifest, rank, num_ranks, files).read(targets)

    def _unread(self, error: Exception) -> Exception:
        if isinstance(error, CheckpointError):
            return error
        return CheckpointError(f"reading {self.folder} failed: {type(error).__name__}: {error}")

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


def _local_state(
    optimizer: OptimizerWrapper, param: torch.Tensor, key: str, before: HeldTensor | None
) -> HeldTensor | None:
    """Return what this rank holds of a state of `param`, where a load makes what it is given the state, as it is; else None.

    before: what this gave before, which it gives again while that is still the memory of the state.
    """
    update = update_of(optimizer)
    if not update.optimizer_state.loads_without_copy(param):
        return None
    # To make DTensors takes longer than to read what they hold.
    own = update.optimizer_state.optimizer.state.get(update.shards.shard_of(param), {}).get(key)
    if is_dtensor(before) and isinstance(own, torch.Tensor):
        known = local_shard(before)  # type: ignore[arg-type]
        if (own.data_ptr(), own.shape, own.dtype) == (known.data_ptr(), known.shape, known.dtype):
            return before
    states = update.optimizer_state.state
    held = states.entry(param, key) if isinstance(states, ShardedStateView) else states.get(param, {}).get(key)
    if not isinstance(held, torch.Tensor):
        return None
    part = update.shards.states.empty_shard(param, held.dtype)
    if part is None or not held.is_contiguous() or held.numel() != part.values.numel():
        return held if part is None else None
    return part.with_values(held.view(-1))
